"""Whether a payload fits what its topic declares, and a result what its operation declares, by JSON Schema.

Services that publish need none of the workflow's code: the schema is in the database.
"""

import json
import re
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

from pydantic import (
    UUID1,
    UUID3,
    UUID4,
    UUID5,
    AnyUrl,
    BaseModel,
    Field,
    IPvAnyAddress,
    IPvAnyInterface,
    IPvAnyNetwork,
    PydanticUserError,
    TypeAdapter,
)
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import DecimalSchema

from pipeline.domain.errors import PayloadError

if TYPE_CHECKING:  # it takes as long to import as all of pydantic, and only topics with a schema need it
    from jsonschema import FormatChecker

#: What a text of a format must be readable as. Pydantic reads it, so that nothing is refused that a model would take.
_FORMATS: dict[str, Any] = {
    "date-time": datetime,
    "date": date,
    "time": time,
    "duration": timedelta,
    "decimal": Annotated[Decimal, Field(allow_inf_nan=True)],
    "uuid": UUID,
    "uuid1": UUID1,
    "uuid3": UUID3,
    "uuid4": UUID4,
    "uuid5": UUID5,
    "uri": AnyUrl,
    "email": Annotated[str, Field(pattern="@")],
    "ipv4": IPv4Address,
    "ipv6": IPv6Address,
    "ipvanyaddress": IPvAnyAddress,
    "ipv4network": IPv4Network,
    "ipv6network": IPv6Network,
    "ipvanynetwork": IPvAnyNetwork,
    "ipv4interface": IPv4Interface,
    "ipv6interface": IPv6Interface,
    "ipvanyinterface": IPvAnyInterface,
    "regex": re.Pattern,
}


def json_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The schema by which payloads of a model are checked. What validators add to it is in no schema."""
    return model.model_json_schema(schema_generator=_SchemaGenerator)


def params_schema(model: type[BaseModel]) -> dict[str, Any] | None:
    """The schema of the parameters of an operation. None: a type among them has none."""
    try:
        return json_schema(model)
    except PydanticUserError:
        return None


def result_schema(result_type: Any) -> dict[str, Any] | None:
    """The schema of a result, by the type that its operation returns. None: nothing is declared.

    Of a type that pydantic cannot read only this is known: there is a result.
    """
    if result_type is Any:
        return None
    try:
        return _known_schema(result_type)
    except TypeError:  # the type is made of something that cannot be kept as a key, such as a list
        return _schema_of(result_type)


def _schema_of(result_type: Any) -> dict[str, Any]:
    try:
        return TypeAdapter(result_type).json_schema(mode="serialization", schema_generator=_SchemaGenerator)
    except (PydanticUserError, TypeError):
        return {"not": {"type": "null"}}


_known_schema = lru_cache(maxsize=1000)(_schema_of)


def validator_of(schema: Any) -> Any:
    """What checks payloads against a schema. To make it once for many payloads saves most of the time."""
    return _validator(schema if isinstance(schema, str) else json.dumps(schema, sort_keys=True))  # some drivers: text


def check_payload(validator: Any, payload: Any, *, what: str, topic: str) -> None:
    """Raise with the first thing that does not fit. What was given is not repeated: it may be private."""
    _check(validator, payload, what, f"topic {topic!r}")


def check_result(schema: Any, result: Any, *, what: str, operation: str) -> None:
    """Raise with the first thing of a result that does not fit what its operation declares."""
    _check(validator_of(schema), result, what, operation)


def _check(validator: Any, payload: Any, what: str, declared_by: str) -> None:
    if not validator.is_valid(payload):
        from jsonschema.exceptions import best_match

        problem = best_match(validator.iter_errors(payload))
        assert problem is not None
        if problem.validator == "required":
            missing = next(name for name in problem.validator_value if name not in problem.instance)
            raise PayloadError(what, f"{problem.json_path}.{missing} is missing", f"it, as {declared_by} declares")
        rule = f"{problem.validator} {json.dumps(problem.validator_value)[:120]}"
        raise PayloadError(what, f"{problem.json_path} does not fit", f"{rule}, as {declared_by} declares")


@lru_cache(maxsize=1000)
def _validator(schema: str) -> Any:
    return _validator_class()(json.loads(schema), format_checker=_checker())


@lru_cache(maxsize=1)
def _validator_class() -> Any:
    """The validator of the newest draft. A tuple is stored as an array, so it counts as one."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend

    arrays = Draft202012Validator.TYPE_CHECKER.redefine("array", lambda _, value: isinstance(value, list | tuple))
    return extend(Draft202012Validator, type_checker=arrays)  # type: ignore[no-untyped-call]


@lru_cache(maxsize=1)
def _checker() -> "FormatChecker":
    """Knows the formats above, and takes a text of any other."""
    from jsonschema import FormatChecker

    checker = FormatChecker(formats=())
    for name, kind in _FORMATS.items():
        checker.checks(name, raises=ValueError)(_FormatCheck(kind))
    return checker


class _FormatCheck:
    """Whether a text can be read as something of a kind. What is no text has no format."""

    def __init__(self, kind: Any) -> None:
        self.read = TypeAdapter(kind).validate_python

    def __call__(self, value: Any) -> bool:
        if isinstance(value, str):
            self.read(value)
        return True


class _SchemaGenerator(GenerateJsonSchema):
    """As pydantic writes schemas, which say nothing about the text of a decimal."""

    def decimal_schema(self, schema: DecimalSchema) -> JsonSchemaValue:
        written = super().decimal_schema(schema)
        for choice in written.get("anyOf", ()):
            if choice.get("type") == "string":
                choice.setdefault("format", "decimal")
        return written


def pattern_problem(schema: Any) -> str | None:
    """The first pattern of a schema by which payloads cannot be checked, and why not."""
    for pattern in _patterns(schema):
        try:
            re.compile(pattern)
        except re.error as error:
            return f"{pattern!r}: {error}"
    return None


def _patterns(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("pattern"), str):
            yield schema["pattern"]
        for value in schema.values():
            yield from _patterns(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _patterns(value)
