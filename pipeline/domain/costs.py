"""Check and add up what handlers and connectors report as the cost of their work. Pure: no I/O.

The unit is the author's. Costs are decimal numbers, so that a sum of them is exact.
"""

from collections.abc import Iterable
from decimal import Context, Decimal
from typing import Any

from pipeline.domain.errors import LogicError

DIGITS_BEFORE_POINT = 12
DIGITS_AFTER_POINT = 12

_EXACT = Context(prec=60)  #: of our own: a handler may have set another precision for its thread


def checked_cost(amount: Any) -> Decimal:
    """Return an amount as it is stored. Raise ``LogicError`` if it is not a cost."""
    if problem := _problem(amount):
        raise LogicError(
            f"add_cost was given {problem}; expected a Decimal or an int that is not negative, with at most "
            f"{DIGITS_BEFORE_POINT} digits before the point and {DIGITS_AFTER_POINT} after it"
        )
    return Decimal(amount).copy_abs()  # without the sign of a negative zero


def total_cost(amounts: Iterable[Decimal | None]) -> Decimal | None:
    """Return the exact sum; None if nothing was reported."""
    total: Decimal | None = None
    for amount in amounts:
        if amount is not None:
            total = amount if total is None else _EXACT.add(total, amount)
    return total


def session_cost(kept: Decimal | None, of_runs: Decimal | None, *, is_over: bool) -> Decimal | None:
    """Return the cost of a session from its own row and from its runs that are still there.

    The row of an open session has the cost of the runs that retention has deleted. The row of a session that is over
    has what its runs had reported until then; some may have reported more since, others may be deleted.
    """
    if is_over:
        return max((cost for cost in (kept, of_runs) if cost is not None), default=None)
    return total_cost([kept, of_runs])


def _problem(amount: Any) -> str:
    if isinstance(amount, bool) or not isinstance(amount, int | Decimal):
        return f"a {type(amount).__name__}"
    number = Decimal(amount)
    if not number.is_finite() or number < 0:
        return "a number that is negative or not finite"
    if number.adjusted() >= DIGITS_BEFORE_POINT:
        return "a number with too many digits before the point"
    if -int(number.as_tuple().exponent) > DIGITS_AFTER_POINT:
        return "a number with too many digits after the point"
    return ""
