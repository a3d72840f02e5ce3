"""What goes wrong in a chaos run, and how often: drawn from a seed, the same for the same seed.

Every request of an order gets its fault from the seed, the order and how often the order was asked for
before. So a run with the same seed meets the same faults, in whatever order its workers come around.
"""

import hashlib
from collections.abc import Mapping
from datetime import timedelta
from enum import StrEnum
from typing import TypeVar

K = TypeVar("K")

#: How long one call may take, and how long the world may take to carry out what reached it.
TIMEOUT = timedelta(seconds=1)
SETTLE = timedelta(seconds=3)

#: Operations of the world, with their share of the orders.
OPERATIONS: Mapping[str, int] = {"charge": 40, "ship": 40, "text": 20}
#: Where the provider honours the idempotency key.
KEYED = frozenset({"charge"})


class RequestFault(StrEnum):
    """What the world does with one request."""

    NONE = "done and answered"
    TWICE = "arrived twice, done and answered"  #: only where the key is honoured: it counts as one
    TIMEOUT_BEFORE = "not done, no answer"
    TIMEOUT_AFTER = "done, no answer"
    RESET_BEFORE = "not done, connection reset"
    RESET_AFTER = "done, connection reset"
    ERROR_BEFORE = "not done, answered 5xx"
    ERROR_AFTER = "done, answered 5xx"
    SLOW = "done late, no answer"  #: after the caller has given up, within the settle window
    BUSY = "not done, answered 429"


class ReconcileFault(StrEnum):
    """What the world does when it is asked what became of a request. What it answers is always true."""

    NONE = "answered"
    ERROR = "answered 5xx"
    SLOW = "no answer"


#: Percent of all requests, and of all questions.
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
    """A number in [0, 1) that depends on the seed and the parts, and on nothing else."""
    text = ":".join(str(word) for word in (seed, *parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64


def request_fault(seed: int, operation: str, order: str, nth: int) -> RequestFault:
    """What becomes of the nth request of an order."""
    drawn = _pick(SHARES, random_fraction(seed, "fault", operation, order, nth))
    return RequestFault.NONE if drawn is RequestFault.TWICE and operation not in KEYED else drawn


def reconcile_fault(seed: int, key: str, nth: int) -> ReconcileFault:
    """What becomes of the nth question about a key."""
    return _pick(RECONCILE_SHARES, random_fraction(seed, "look", key, nth))


def operation_of(seed: int, order: str) -> str:
    """What an order asks for."""
    return _pick(OPERATIONS, random_fraction(seed, "operation", order))


def _pick(shares: Mapping[K, int], at: float) -> K:
    left = at * sum(shares.values())
    for kind, share in shares.items():
        left -= share
        if left < 0:
            return kind
    return kind
