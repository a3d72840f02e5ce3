"""Faults of a chaos run and their shares, drawn from a seed.

The fault of a request depends on the seed, the order, and the number of earlier requests of that order.
A run with the same seed therefore meets the same faults, in whatever order its workers proceed.
"""

import hashlib
from collections.abc import Mapping
from datetime import timedelta
from enum import StrEnum
from typing import TypeVar

K = TypeVar("K")

PROVIDER_VARIABLE = "CHAOS_PROVIDER"  #: the variable with the address of the provider
RETENTION_VARIABLE = "CHAOS_RETENTION_DAYS"  #: the variable with how long the past is kept; unset: for ever

#: How long one call may take, and how long the provider may take to carry out a request.
TIMEOUT = timedelta(seconds=1)
SETTLE = timedelta(seconds=3)

#: Operations of the provider, with their share of the orders.
OPERATIONS: Mapping[str, int] = {"charge": 25, "ship": 35, "refund": 25, "text": 15}
#: Operations that honour the idempotency key.
KEYED = frozenset({"charge", "refund"})
#: Operations that have a search. An unknown outcome of the others is for a person.
RECONCILABLE = frozenset({"charge", "ship", "refund"})
#: How long the search of an operation lags behind its effects. That of ``ship`` is within the settle window. That of
#: ``refund`` is not, against its declaration: an effect is "not found" when absence counts as evidence already.
SEARCH_LAGS: Mapping[str, timedelta] = {
    "ship": timedelta(milliseconds=500),
    "refund": TIMEOUT + SETTLE + timedelta(seconds=15),
}


class RequestFault(StrEnum):
    """What the provider does with one request."""

    NONE = "done and answered"
    TWICE = "arrived twice, done and answered"  #: only for keyed operations, where it counts once
    TIMEOUT_BEFORE = "not done, no answer"
    TIMEOUT_AFTER = "done, no answer"
    RESET_BEFORE = "not done, connection reset"
    RESET_AFTER = "done, connection reset"
    ERROR_BEFORE = "not done, answered 5xx"
    ERROR_AFTER = "done, answered 5xx"
    SLOW = "done late, no answer"  #: after the caller's timeout, within the settle window
    BUSY = "not done, answered 429"


class ReconcileFault(StrEnum):
    """What the provider does with a reconcile request. Its answer is true, as far as its search has come."""

    NONE = "answered"
    ERROR = "answered 5xx"
    SLOW = "no answer"


#: Percent of all requests, and of all reconcile requests.
SHARES: Mapping[RequestFault, int] = {
    RequestFault.NONE: 45,
    RequestFault.TWICE: 4,
    RequestFault.TIMEOUT_BEFORE: 8,
    RequestFault.TIMEOUT_AFTER: 8,
    RequestFault.RESET_BEFORE: 6,
    RequestFault.RESET_AFTER: 6,
    RequestFault.ERROR_BEFORE: 6,
    RequestFault.ERROR_AFTER: 6,
    RequestFault.SLOW: 6,
    RequestFault.BUSY: 5,
}
RECONCILE_SHARES: Mapping[ReconcileFault, int] = {
    ReconcileFault.NONE: 80,
    ReconcileFault.ERROR: 12,
    ReconcileFault.SLOW: 8,
}


def scaled_shares(shares: Mapping[K, int], percent: int | None) -> Mapping[K, int]:
    """Return the shares so that the provider misbehaves in this percentage of its calls. None: as they are.

    The first kind is no fault. The others keep their proportions.
    """
    if percent is None:
        return shares
    first, *faults = shares
    total = sum(shares[kind] for kind in faults)
    return {first: (100 - percent) * total, **{kind: shares[kind] * percent for kind in faults}}


def random_fraction(seed: int, *parts: object) -> float:
    """Return a number in [0, 1) that depends only on the seed and the parts."""
    text = ":".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64


def request_fault(seed: int, operation: str, order: str, nth: int, percent: int | None = None) -> RequestFault:
    """Return the fault of the nth request of an order."""
    drawn = _pick(scaled_shares(SHARES, percent), random_fraction(seed, "fault", operation, order, nth))
    return RequestFault.NONE if drawn is RequestFault.TWICE and operation not in KEYED else drawn


def reconcile_fault(seed: int, key: str, nth: int, percent: int | None = None) -> ReconcileFault:
    """Return the fault of the nth reconcile request of a key."""
    return _pick(scaled_shares(RECONCILE_SHARES, percent), random_fraction(seed, "look", key, nth))


def operation_of(seed: int, order: str) -> str:
    """Return the operation of an order."""
    return _pick(OPERATIONS, random_fraction(seed, "operation", order))


def _pick(shares: Mapping[K, int], at: float) -> K:
    left = at * sum(shares.values())
    for kind, share in shares.items():
        left -= share
        if left < 0:
            return kind
    return kind
