"""Forms and filters that are made from data: results by their schema, and words of the ledger's filter."""

from datetime import timedelta
from typing import Any

import pytest

from pipeline.api import rendering
from pipeline.api.console import svg
from pipeline.api.console.mutations import ledger_filter, parsed_words
from pipeline.api.console.page import own_path
from pipeline.api.console.result_form import result_question, typed_result
from pipeline.domain.errors import InvalidInputError
from pipeline.domain.operations import DeclaredResult
from pipeline.domain.states import MutationStatus

SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "cents": {"type": "integer"},
        "kind": {"enum": ["card", "cash"]},
        "paid": {"type": "boolean"},
        "lines": {"type": "array", "items": {"$ref": "#/$defs/Line"}},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["id", "cents", "note"],
    "$defs": {"Line": {"type": "object"}},
}


def test_a_field_of_the_form_is_made_for_each_property() -> None:
    found = result_question(DeclaredResult(schema=SCHEMA))
    assert [(field.key, field.kind, field.is_required) for field in found.fields] == [
        ("id", "text", True),
        ("cents", "integer", True),
        ("kind", "choice", False),
        ("paid", "boolean", False),
        ("lines", "json", False),
        ("note", "text", False),
    ]


def test_typed_texts_become_values_of_their_types() -> None:
    texts = {
        "result.id": "ch_1",
        "result.cents": "9901",
        "result.kind": '"card"',
        "result.paid": "true",
        "result.lines": '[{"n": 1}]',
        "result.note": "",
    }
    found = typed_result(result_question(DeclaredResult(schema=SCHEMA)), texts)
    assert found == {"id": "ch_1", "cents": 9901, "kind": "card", "paid": True, "lines": [{"n": 1}]}


@pytest.mark.parametrize("texts", [{}, {"result.id": "x"}, {"result.id": "x", "result.cents": "9.5"}])
def test_a_missing_or_wrong_field_is_named(texts: dict[str, str]) -> None:
    with pytest.raises(InvalidInputError, match=r"The field '(id|cents)' of the result"):
        typed_result(result_question(DeclaredResult(schema=SCHEMA)), texts)


@pytest.mark.parametrize(
    ("schema", "text", "value"), [({"type": "string"}, "x", "x"), ({"type": "array"}, "[1]", [1]), (None, "[1]", [1])]
)
def test_a_result_that_is_no_object_has_one_field(schema: Any, text: str, value: object) -> None:
    texts = {"result.": text, "result_json": text}
    assert typed_result(result_question(DeclaredResult(schema=schema)), texts) == value


def test_a_line_of_words_filters_the_ledger() -> None:
    only = ledger_filter(parsed_words("status:indeterminate operation:pay.charge age:>2h error:TimeoutError"))
    assert (only.connector, only.operation, only.error_type) == ("pay", "charge", "TimeoutError")
    assert (only.statuses, only.older_than) == ((MutationStatus.INDETERMINATE,), timedelta(hours=2))


@pytest.mark.parametrize("line", ["color:red", "status:", "age:tomorrow", "status:lost"])
def test_a_wrong_word_is_refused_with_what_is_expected(line: str) -> None:
    with pytest.raises(InvalidInputError, match="expected"):
        ledger_filter(parsed_words(line))


@pytest.mark.parametrize("given", ["https://evil.example", "//evil.example", "/\\evil.example", "/a\nb", ""])
def test_a_form_leads_only_to_pages_of_the_console(given: str) -> None:
    assert own_path(given, "/w") == "/w"


def test_control_and_bidi_characters_are_shown_by_their_codes() -> None:
    assert rendering.cleaned("pay\u202egnp.exe\x1b[2J\x00 déjà vu") == r"pay\u202egnp.exe\x1b[2J\x00 déjà vu"


def test_a_graph_with_a_circle_is_drawn_and_its_names_are_escaped() -> None:
    nodes = [svg.DrawnNode(key=key, name=f"<{key}>", note="", kind="topic") for key in "abc"]
    drawn = svg.graph(nodes, [("a", "b"), ("b", "c"), ("c", "a"), ("a", "a")], "A graph")
    assert drawn.count("<rect") == 3
    assert "&lt;a&gt;" in drawn
    assert "<a>" not in drawn
