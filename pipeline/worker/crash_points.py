"""Named points that a phase passes through. In production passing one does nothing.

A test sets ``on_reach`` to crash, block or count at a point: what recovery has to survive is then a
list, and a new point without a test is noticed.
"""

from collections.abc import Callable
from enum import StrEnum


class CrashPoint(StrEnum):
    """Where a worker can die, named by what is already true there."""

    PREPARE_CLAIMED = "prepare claimed"
    PREPARE_RAN = "prepare ran"
    PREPARE_SAVED = "prepare saved"
    MUTATE_CLAIMED = "mutate claimed"
    IN_FLIGHT = "in flight"
    CALLED = "called"
    OUTCOME_SAVED = "outcome saved"
    NEXT_CLAIMED = "next claimed"
    NEXT_RAN = "next ran"
    COMMITTED = "committed"
    PRODUCE_CLAIMED = "produce claimed"
    PRODUCED = "produced"
    STARTED = "started"  #: runs exist, their message was not sent


on_reach: Callable[[CrashPoint], None] | None = None


def reach(point: CrashPoint) -> None:
    """Pass through a point."""
    if on_reach is not None:
        on_reach(point)
