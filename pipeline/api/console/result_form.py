"""Build the form for a result from the JSON Schema that an operation declares, and read it back. Pure: no I/O."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.domain.errors import InvalidInputError
from pipeline.domain.operations import DeclaredResult, ResultForm, result_form, result_template

_PREFIX = "result."
_TEXT_TYPES = {"string": "text", "integer": "integer", "number": "number", "boolean": "boolean"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultField:
    """One field of the form."""

    name: str  #: of the form field
    key: str  #: of the result; empty if the result is no object
    label: str
    kind: str  #: text, integer, number, boolean, choice or json
    is_required: bool
    choices: tuple[str, ...] = ()  #: as JSON
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultQuestion:
    """What the form asks about the result of a mutation that happened."""

    form: ResultForm
    fields: tuple[ResultField, ...]
    template: str  #: the shape of the result as JSON; empty if nothing is declared
    can_fetch: bool
    is_known: bool  #: the operation's declaration is known here


def result_question(declared: DeclaredResult | None) -> ResultQuestion:
    """Return what the form asks for."""
    schema = declared.schema if declared is not None else None
    return ResultQuestion(
        form=result_form(declared),
        fields=tuple(_fields(schema)) if schema else (),
        template=result_template(schema) if schema else "",
        can_fetch=declared is not None and declared.can_fetch,
        is_known=declared is not None,
    )


def typed_result(question: ResultQuestion, values: Mapping[str, str]) -> Any:
    """Return the result as the form's texts give it. Its check against the schema comes later."""
    if not question.fields:
        return parsed_json(values.get("result_json", ""))
    found: dict[str, Any] = {}
    for field in question.fields:
        text = values.get(field.name, "").strip()
        if not text and not field.is_required:
            continue
        value = _value(field, text)
        if not field.key:
            return value
        found[field.key] = value
    return found


def _fields(schema: Mapping[str, Any]) -> Iterator[ResultField]:
    definitions = schema.get("$defs", {})
    top = _resolved(schema, definitions)
    if top.get("type") == "null":
        return
    properties = top.get("properties")
    if not properties:
        yield _field("", "Result", top, definitions, is_required=True)
        return
    required = set(top.get("required", ()))
    for key, inner in properties.items():
        yield _field(key, inner.get("title") or key, inner, definitions, is_required=key in required)


def _field(
    key: str, label: str, schema: Mapping[str, Any], definitions: Mapping[str, Any], *, is_required: bool
) -> ResultField:
    inner, is_nullable = _without_null(_resolved(schema, definitions), definitions)
    choices = inner.get("enum", [inner["const"]] if "const" in inner else ())
    kind = "choice" if choices else _TEXT_TYPES.get(str(inner.get("type")), "json")
    hint = str(inner.get("description") or inner.get("format") or "")
    return ResultField(
        name=_PREFIX + key,
        key=key,
        label=label,
        kind=kind,
        is_required=is_required and not is_nullable,
        choices=tuple(json.dumps(each) for each in choices),
        hint=hint or ("JSON" if kind == "json" else ""),
    )


def _without_null(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """Return the schema of the value, and whether null is allowed instead."""
    ways = [_resolved(each, definitions) for each in schema.get("anyOf", ())]
    others = [each for each in ways if each.get("type") != "null"]
    if len(others) == 1:
        return others[0], len(ways) > 1
    return schema, len(others) < len(ways)


def _resolved(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = definitions.get(str(schema.get("$ref", "")).rpartition("/")[2], schema)
    return found


def _value(field: ResultField, text: str) -> Any:
    if not text:
        raise InvalidInputError(f"The field {field.label!r} of the result is empty; expected a value.")
    match field.kind:
        case "text":
            return text
        case "boolean":
            return text == "true"
        case "integer" if not text.lstrip("-").isdecimal():
            raise InvalidInputError(f"The field {field.label!r} of the result is {text!r}; expected a whole number.")
        case _:
            return parsed_json(text, f"The field {field.label!r} of the result")


def parsed_json(text: str, what: str = "The result") -> Any:
    """Return the value of a JSON text that an operator typed."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidInputError(f"{what} is no JSON: {error}.") from None
