"""Headlines, links and values of an operation, from plain data."""

from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from pipeline.domain.operations import (
    MAX_HEADLINE_LENGTH,
    OperationSpec,
    bounded_line,
    four_eyes_value,
    headline,
    listed_ids,
)
from pipeline.domain.redaction import BY_NAME, Redaction

CHARGE = OperationSpec(
    connector="pay",
    operation="charge",
    result_schema={"type": "null"},
    redact=("note",),
    shown=("pin",),
    look_up="https://pay.example/search?query={key}&order={order}",
    can_fetch=True,
    timeout=timedelta(seconds=1),
    settle=timedelta(0),
)
PARAMS = {"order": "o 1/2", "cents": 9901, "card": "4242", "note": "private", "lines": ["a", "b"]}


def test_a_headline_is_formatted_with_redacted_parameters() -> None:
    text = headline("Charge {cents} for {order}, {card}, {note}, {lines}{gone}", PARAMS, CHARGE.redaction)
    assert text == "Charge 9901 for o 1/2, •••, •••, a, b"


@pytest.mark.parametrize("template", ["", "  ", "{cents:d}", "{", "{cents.real.x}"])
def test_without_a_usable_template_the_title_of_the_plan_is_the_headline_without_hidden_values(template: str) -> None:
    assert headline(template, PARAMS, BY_NAME, title="Order with card 4242", message_ids=["m1"]) == (
        "Order with card •••"
    )


@pytest.mark.parametrize("title", [None, "", 7])
def test_without_template_and_title_the_message_ids_are_the_headline(title: Any) -> None:
    assert headline("", PARAMS, Redaction(), title=title, message_ids=["m1", "m2"]) == "m1, m2"


def test_many_message_ids_are_counted() -> None:
    assert listed_ids(["a", "b", "c", "d"], 100) == "a, b, c and 97 more"
    assert listed_ids([], 0) == ""


def test_a_headline_is_one_line_of_bounded_length() -> None:
    assert bounded_line(" a\n b\x00 ") == "a b�"
    long = bounded_line("x" * 1_000)
    assert (len(long), long[-1]) == (MAX_HEADLINE_LENGTH, "…")


def test_every_value_of_a_link_is_quoted_and_a_missing_one_leaves_no_link() -> None:
    assert CHARGE.look_up_link("k:0", PARAMS) == "https://pay.example/search?query=k%3A0&order=o%201%2F2"
    assert CHARGE.look_up_link("k:0", {}) == ""


def test_an_operation_without_a_link_has_none() -> None:
    plain = OperationSpec(connector="pay", operation="void", timeout=timedelta(1), settle=timedelta(0))
    assert (plain.look_up_link("k", {}), plain.name) == ("", "pay.void")


def test_an_operation_says_what_it_declares() -> None:
    assert (CHARGE.declared_result.schema, CHARGE.declared_result.can_fetch) == ({"type": "null"}, True)
    assert CHARGE.redaction.value({"note": 1, "pin": 2, "cvv": 3}) == {"note": "•••", "pin": 2, "cvv": "•••"}


@pytest.mark.parametrize(
    ("name", "above", "params", "expected"),
    [
        ("cents", None, {"cents": 900}, None),
        ("cents", 500, {"cents": 900}, Decimal(900)),
        ("cents", 500, {"cents": 500}, None),
        ("cents", Decimal("9.5"), {"cents": "9.75"}, Decimal("9.75")),
        ("json.total", 5, {"json": {"total": 6.5}}, Decimal("6.5")),
        ("json.total", 5, {"json": "text"}, None),
        ("cents", 5, {"cents": None}, None),
        ("cents", 5, {"cents": "NaN"}, None),
        ("cents", 5, {}, None),
    ],
)
def test_two_people_decide_above_the_declared_value(
    name: str, above: Any, params: dict[str, Any], expected: Decimal | None
) -> None:
    assert four_eyes_value(name, above, params) == expected
