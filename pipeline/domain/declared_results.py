"""What an operation declares about its result, and how an operator gives that result. Pure: no I/O.

The declaration is plain data. It is read from the code of the operation, and can as well be read from a database.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

_MAX_DEPTH = 4  #: of objects inside objects that a template shows


class ResultForm(StrEnum):
    """How an operator gives the result of a mutation that happened."""

    EXTERNAL_ID = "external id"  #: the connector fetches it by the outside system's id
    RESULT = "result"  #: as JSON
    NO_RESULT = "no result"
    UNKNOWN = "unknown"  #: what the operation declares is not known here


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredResult:
    """What an operation declares about its result."""

    schema: Mapping[str, Any] | None = None  #: JSON Schema; None: nothing is declared
    can_fetch: bool = False  #: the connector can fetch it by the outside system's id


def result_form(declared: DeclaredResult | None) -> ResultForm:
    """Return how the result is given. None: what the operation declares is not known here."""
    if declared is None:
        return ResultForm.UNKNOWN
    if declared.can_fetch:
        return ResultForm.EXTERNAL_ID
    if declared.schema is not None and declared.schema.get("type") == "null":
        return ResultForm.NO_RESULT
    return ResultForm.RESULT


def result_options(declared: DeclaredResult | None) -> str:
    """Return the options of ``pipeline resolve happened`` that give the result.

    What an operator must fill in stands in angle brackets. It is no JSON, so a command that was copied without filling
    it in is refused.
    """
    match result_form(declared):
        case ResultForm.EXTERNAL_ID:
            return "--external-id '<id>'"
        case ResultForm.NO_RESULT:
            return "--no-result"
        case ResultForm.RESULT:
            assert declared is not None
            return f"--result {shlex.quote(result_template(declared.schema or {}))}"
        case _:
            return "--result '<JSON>' --unchecked"


def result_template(schema: Mapping[str, Any]) -> str:
    """Return the shape of a result as JSON with ``<type>`` for each value."""
    return _template(schema, schema.get("$defs", {}), _MAX_DEPTH)


def _template(schema: Mapping[str, Any], definitions: Mapping[str, Any], depth: int) -> str:
    schema = _dereferenced(schema, definitions)
    if "const" in schema:
        return json.dumps(schema["const"])
    properties = schema.get("properties")
    if properties and depth:
        required = schema.get("required", ())
        shown = {name: inner for name, inner in properties.items() if name in required} or properties
        fields = (f"{json.dumps(name)}: {_template(inner, definitions, depth - 1)}" for name, inner in shown.items())
        return f"{{{', '.join(fields)}}}"
    if schema.get("type") == "array" and depth:
        return f"[{_template(schema.get('items', {}), definitions, depth - 1)}]"
    return f"<{_type_name(schema, definitions)}>"


def _dereferenced(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = definitions.get(str(schema.get("$ref", "")).rpartition("/")[2], schema)
    return found


def _type_name(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    schema = _dereferenced(schema, definitions)
    if "enum" in schema:
        return "|".join(json.dumps(each) for each in schema["enum"])
    if "anyOf" in schema:
        return "|".join(_type_name(each, definitions) for each in schema["anyOf"])
    return str(schema.get("format") or schema.get("type") or "JSON")
