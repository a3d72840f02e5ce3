"""What counts as a cost, and that sums of costs are exact."""

import decimal
from decimal import Decimal
from typing import Any

import pytest

from pipeline.domain.errors import LogicError
from pipeline.domain.values import checked_cost, session_cost, total_cost

LARGEST = Decimal("999999999999.999999999999")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (0, "0"),
        (7, "7"),
        (Decimal("0.10"), "0.10"),
        (Decimal("-0"), "0"),
        (10**12 - 1, "999999999999"),
        (LARGEST, str(LARGEST)),
    ],
)
def test_a_decimal_or_an_int_that_is_not_negative_is_a_cost(given: Any, kept: str) -> None:
    assert str(checked_cost(given)) == kept


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (0.1, "a float"),
        ("1", "a str"),
        (None, "a NoneType"),
        (True, "a bool"),
        (-1, "negative or not finite"),
        (Decimal("-0.01"), "negative or not finite"),
        (Decimal("NaN"), "negative or not finite"),
        (Decimal("sNaN"), "negative or not finite"),
        (Decimal("Infinity"), "negative or not finite"),
        (10**12, "too many digits before the point"),
        (Decimal("1E+999999"), "too many digits before the point"),
        (Decimal("1E-13"), "too many digits after the point"),
    ],
)
def test_anything_else_is_a_logic_error_that_says_what_was_given_and_what_is_expected(given: Any, problem: str) -> None:
    with pytest.raises(LogicError, match=f"add_cost was given .*{problem}.*; expected a Decimal or an int"):
        checked_cost(given)


def test_a_sum_is_exact_whatever_precision_the_thread_has_set() -> None:
    with decimal.localcontext() as context:
        context.prec = 2
        assert total_cost([checked_cost(LARGEST), None, checked_cost(LARGEST)]) == Decimal("1999999999999.999999999998")


def test_nothing_reported_is_no_cost_and_zero_is_one() -> None:
    assert total_cost([]) is None
    assert total_cost([None, None]) is None
    assert total_cost([None, Decimal(0)]) == 0


def test_a_session_that_is_open_adds_what_retention_deleted_to_what_is_there() -> None:
    assert session_cost(Decimal(2), Decimal(3), is_over=False) == 5
    assert session_cost(None, None, is_over=False) is None


def test_a_session_that_is_over_has_cost_at_least_what_it_kept_and_what_its_runs_say() -> None:
    assert session_cost(Decimal(2), Decimal(3), is_over=True) == 3
    assert session_cost(Decimal(2), None, is_over=True) == 2
    assert session_cost(None, None, is_over=True) is None
