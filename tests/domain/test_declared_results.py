"""How an operator gives the result that an operation declares."""

import json
import shlex
from typing import Any

import pytest

from pipeline.domain.operations import (
    DeclaredResult,
    ResultForm,
    result_form,
    result_options,
    result_template,
)

CHARGE = {
    "type": "object",
    "properties": {"id": {"type": "string"}, "cents": {"type": "integer"}, "note": {"type": "string"}},
    "required": ["id", "cents"],
}


@pytest.mark.parametrize(
    ("declared", "form", "options"),
    [
        (None, ResultForm.UNKNOWN, "--result '<JSON>' --unchecked"),
        (DeclaredResult(), ResultForm.RESULT, "--result '<JSON>'"),
        (DeclaredResult(schema={"type": "null"}), ResultForm.NO_RESULT, "--no-result"),
        (DeclaredResult(schema=CHARGE), ResultForm.RESULT, """--result '{"id": <string>, "cents": <integer>}'"""),
        (DeclaredResult(schema=CHARGE, can_fetch=True), ResultForm.EXTERNAL_ID, "--external-id '<id>'"),
    ],
)
def test_the_form_follows_from_what_the_operation_declares(
    declared: DeclaredResult | None, form: ResultForm, options: str
) -> None:
    assert result_form(declared) is form
    assert result_options(declared) == options
    assert len(shlex.split(options)) in (1, 2, 3)


@pytest.mark.parametrize(
    ("schema", "template"),
    [
        ({}, "<JSON>"),
        ({"type": "string", "format": "date-time"}, "<date-time>"),
        ({"enum": ["a", 1]}, '<"a"|1>'),
        ({"const": 7}, "7"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "<string|null>"),
        ({"type": "array", "items": {"type": "integer"}}, "[<integer>]"),
        ({"type": "array"}, "[<JSON>]"),
        ({"type": "object"}, "<object>"),
        ({"properties": {"a": {"type": "integer"}}}, '{"a": <integer>}'),
        ({"$ref": "#/$defs/Charge", "$defs": {"Charge": CHARGE}}, '{"id": <string>, "cents": <integer>}'),
        ({"anyOf": [{"$ref": "#/$defs/Charge"}, {"type": "null"}], "$defs": {"Charge": CHARGE}}, "<object|null>"),
    ],
)
def test_a_template_has_the_shape_of_the_result(schema: dict[str, Any], template: str) -> None:
    assert result_template(schema) == template


def test_a_template_of_a_type_that_contains_itself_ends() -> None:
    tree = {"type": "object", "properties": {"left": {"$ref": "#/$defs/Tree"}}, "required": ["left"]}
    text = result_template({"$ref": "#/$defs/Tree", "$defs": {"Tree": tree}})
    assert text == '{"left": {"left": {"left": {"left": <object>}}}}'


def test_a_template_that_was_not_filled_in_is_no_json() -> None:
    with pytest.raises(ValueError, match="Expecting value"):
        json.loads(result_template(CHARGE))
