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

#: How long one call may take, and how long the provider may take to carry out a request.
TIMEOUT = timedelta(seconds=1)
SETTLE = timedelta(seconds=3)

#: Operations of the provider, with their share of the orders.
OPERATIONS: Mapping[str, int] = {"charge": 40, "ship": 40, "text": 20}
#: Operations that honour the idempotency key.
KEYED = frozenset({"charge"})


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
    """What the provider does with a reconcile request. Its answer is always true."""

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


def random_fraction(seed: int, *parts: object) -> float:
    """Return a number in [0, 1) that depends only on the seed and the parts."""
    text = ":".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64


def request_fault(seed: int, operation: str, order: str, nth: int) -> RequestFault:
    """Return the fault of the nth request of an order."""
    drawn = _pick(SHARES, random_fraction(seed, "fault", operation, order, nth))
    return RequestFault.NONE if drawn is RequestFault.TWICE and operation not in KEYED else drawn


def reconcile_fault(seed: int, key: str, nth: int) -> ReconcileFault:
    """Return the fault of the nth reconcile request of a key."""
    return _pick(RECONCILE_SHARES, random_fraction(seed, "look", key, nth))


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
