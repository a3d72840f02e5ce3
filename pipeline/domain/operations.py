"""Describe an operation and its result as plain data. Pure: no I/O.

A process without the code of the operation can then show and resolve its mutations.
"""

import contextlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from string import Formatter
from typing import Any
from urllib.parse import quote

from pipeline.domain.payloads import storable_text
from pipeline.domain.redaction import Redaction

_MAX_DEPTH = 4  #: of objects inside objects that a template shows


class Grade(StrEnum):
    """How well the outcome of an operation can be known.

    A key belongs to one request for the same inputs. If the outside system honours keys, all requests with one key
    have one effect. So with grades A and C it is safe to repeat a mutation that may have happened, for as long as the
    outside system keeps the key. With grades B and D it is not.
    """

    A = "A"  #: the connector can reconcile, and the key is honoured
    B = "B"  #: the connector can reconcile
    C = "C"  #: the key is honoured; an operator resolves unknown outcomes
    D = "D"  #: an operator resolves unknown outcomes

    @classmethod
    def of(cls, *, keyed: bool, can_reconcile: bool) -> "Grade":
        """Return the grade of an operation."""
        return {(True, True): cls.A, (False, True): cls.B, (True, False): cls.C, (False, False): cls.D}[
            keyed, can_reconcile
        ]


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


MAX_HEADLINE_LENGTH = 200
MAX_MESSAGE_IDS = 20  #: of the inputs of a mutation, kept in the ledger
KEY_FIELD = "key"  #: of a look-up link: the idempotency key


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationSpec:
    """What the code of a connector declares about one operation."""

    connector: str
    operation: str
    is_mutation: bool = True
    params_schema: Any = None  #: JSON Schema of the parameters; null: it cannot be described
    result_schema: Any = None  #: JSON Schema of the result; null: nothing is declared
    redact: tuple[str, ...] = ()  #: names of fields that are never shown
    shown: tuple[str, ...] = ()  #: names that look like secrets and may be shown
    shows: str = ""  #: the template of the headline
    look_up: str = ""  #: the template of the link under which the effect is found in the outside system
    keyed: bool = False  #: the outside system honours the idempotency key
    key_lifetime: timedelta | None = None
    can_reconcile: bool = False
    can_fetch: bool = False
    timeout: timedelta
    settle: timedelta
    value: str = ""  #: the parameter with the value of a request
    four_eyes_above: Decimal | None = None  #: above this value two people must decide

    @property
    def name(self) -> str:
        return f"{self.connector}.{self.operation}"

    @property
    def redaction(self) -> Redaction:
        """Return which fields of this operation are hidden."""
        return Redaction(hidden=frozenset(self.redact), shown=frozenset(self.shown))

    @property
    def declared_result(self) -> DeclaredResult:
        """Return what the operation declares about its result."""
        return DeclaredResult(schema=self.result_schema, can_fetch=self.can_fetch)

    def look_up_link(self, key: str, params: Mapping[str, Any]) -> str:
        """Return the link to the effect in the outside system; empty if there is none."""
        return look_up_link(self.look_up, key, params)


def headline(
    template: str,
    params: Mapping[str, Any],
    redaction: Redaction,
    *,
    title: Any = None,
    message_ids: Sequence[str] = (),
) -> str:
    """Describe in one line what a request does: by the template, else by the title, else by its message ids."""
    text = ""
    with contextlib.suppress(ValueError, LookupError, AttributeError):  # a bad template must not stop a request
        names = template_fields(template)
        text = template.format_map({name: display_text(redaction.field(name, params.get(name, ""))) for name in names})
    if not text.strip() and isinstance(title, str):
        text = redaction.text(title, params)
    return text if text.strip() else listed_ids(message_ids, len(message_ids))


def bounded_line(text: str) -> str:
    """Return a text as one line of bounded length that can be stored."""
    line = storable_text(" ".join(text.split()))
    return line if len(line) <= MAX_HEADLINE_LENGTH else f"{line[: MAX_HEADLINE_LENGTH - 1]}…"


def listed_ids(message_ids: Sequence[str], count: int) -> str:
    """List message ids, the first few of them, and how many more there are."""
    first = message_ids[:3]
    rest = count - len(first)
    return ", ".join(first) + (f" and {rest} more" if rest > 0 else "")


def display_text(value: Any) -> str:
    """Return a value as text for one line; a list as its members."""
    return ", ".join(str(item) for item in value) if isinstance(value, list | tuple) else str(value)


def four_eyes_value(name: str, above: Decimal | int | None, params: Mapping[str, Any]) -> Decimal | None:
    """Return the value of a request that two people must decide about; None: one person is enough.

    ``name`` is a parameter, or a field inside one, as in ``json.cents``.
    """
    if above is None:
        return None
    found: Any = params
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    try:
        value = Decimal(str(found))
    except InvalidOperation:
        return None
    return value if value.is_finite() and value > above else None


def look_up_link(template: str, key: str, params: Mapping[str, Any]) -> str:
    """Fill the template of a link. Every value is quoted. Empty if there is no template, or a value is missing."""
    values = {name: params.get(name) for name in template_fields(template)} | {KEY_FIELD: key}
    if not template or any(value is None for value in values.values()):
        return ""
    return template.format_map({name: quote(display_text(value), safe="") for name, value in values.items()})


def template_fields(template: str) -> list[str]:
    """Return the names in braces of a template."""
    return [field for _, field, _, _ in Formatter().parse(template) if field is not None]
