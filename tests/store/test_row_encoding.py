"""A cohort as one parameter: what its rows look like when they reach the database."""

import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from types import MappingProxyType
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.domain.states import Phase
from pipeline.store.database import encode_rows


def row(value: Any) -> Any:
    """The value as it comes out on the other side."""
    (decoded,) = json.loads(encode_rows([{"value": value}]))
    return decoded["value"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (UUID(int=7), "00000000-0000-0000-0000-000000000007"),
        (Phase.PREPARED, "prepared"),
        (timedelta(seconds=90), "0 hours 90 seconds 0 microseconds"),
        (timedelta(seconds=-1.5), "-0 hours -1 seconds -500000 microseconds"),
        (timedelta(days=2, milliseconds=7), "48 hours 0 seconds 7000 microseconds"),
        (datetime(2030, 1, 1, 12, tzinfo=UTC), "2030-01-01T12:00:00+00:00"),
        (Decimal("0.10"), "0.10"),
    ],
)
def test_a_value_without_a_json_type_is_stored_as_text_that_postgres_reads(value: Any, text: str) -> None:
    assert row(value) == text


@pytest.mark.parametrize("value", [None, True, 1, 0.5, "ü\n", [1, [2]], {"a": {"b": None}}])
def test_a_json_value_is_stored_unchanged(value: Any) -> None:
    assert row(value) == value


def test_a_cohort_keeps_its_order_and_a_row_may_be_any_mapping() -> None:
    rows = [MappingProxyType({"n": n}) for n in range(100)]
    assert json.loads(encode_rows(rows)) == [{"n": n} for n in range(100)]


def test_no_rows_are_an_empty_list() -> None:
    assert encode_rows([]) == "[]"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [float("-inf")]])
def test_a_number_that_json_lacks_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode_rows([{"value": value}])


@given(st.timedeltas(timedelta(days=-36_500), timedelta(days=36_500)))
def test_a_span_of_time_is_stored_exactly(span: timedelta) -> None:
    hours, _, seconds, _, microseconds, _ = row(span).split()
    assert timedelta(hours=int(hours), seconds=int(seconds), microseconds=int(microseconds)) == span
    assert abs(int(hours)) < 2**31, "Postgres 14 takes no field above 2**31 - 1"


class Unknown:
    """Nothing the database could read."""


@pytest.mark.parametrize("value", [Unknown(), {1, 2}, b"x"], ids=["object", "set", "bytes"])
def test_a_value_without_a_form_in_the_database_is_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        encode_rows([{"value": value}])


def test_a_member_of_any_text_enum_is_stored_as_its_value() -> None:
    class Colour(StrEnum):
        RED = "red"

    assert row(Colour.RED) == "red"
