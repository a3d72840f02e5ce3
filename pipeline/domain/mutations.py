"""The ledger's vocabulary: where a mutation stands, who settled it, and on what evidence.

A mutation is in the ledger before the world can see it and leaves it only as applied, failed, or
a question on a person's desk. ``MOVES`` is the one table of its transitions.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import StrEnum


class MutationStatus(StrEnum):
    """Where one external effect stands."""

    PENDING = "pending"  #: recorded with its exact request, waiting for a person's approval
    IN_FLIGHT = "in_flight"  #: committed to the ledger right before it was sent
    APPLIED = "applied"  #: it happened
    FAILED = "failed"  #: it did not happen, or a person decided to go on without it
    NEEDS_RECONCILE = "needs_reconcile"  #: nobody knows; the background is asking the outside system
    INDETERMINATE = "indeterminate"  #: nobody can know; a person must settle it


MOVES: Mapping[MutationStatus, frozenset[MutationStatus]] = {
    MutationStatus.PENDING: frozenset({MutationStatus.IN_FLIGHT, MutationStatus.FAILED}),
    MutationStatus.IN_FLIGHT: frozenset(
        {
            MutationStatus.APPLIED,
            MutationStatus.FAILED,
            MutationStatus.NEEDS_RECONCILE,
            MutationStatus.INDETERMINATE,
        }
    ),
    MutationStatus.NEEDS_RECONCILE: frozenset(
        {MutationStatus.APPLIED, MutationStatus.FAILED, MutationStatus.INDETERMINATE}
    ),
    MutationStatus.INDETERMINATE: frozenset(
        {MutationStatus.APPLIED, MutationStatus.FAILED, MutationStatus.NEEDS_RECONCILE}
    ),
    MutationStatus.APPLIED: frozenset(),
    MutationStatus.FAILED: frozenset(),
}

#: The world may or may not have seen it.
UNRESOLVED: frozenset[MutationStatus] = frozenset(
    {MutationStatus.IN_FLIGHT, MutationStatus.NEEDS_RECONCILE, MutationStatus.INDETERMINATE}
)

#: Nothing more will happen to it.
SETTLED: frozenset[MutationStatus] = frozenset({MutationStatus.APPLIED, MutationStatus.FAILED})


class Resolver(StrEnum):
    """Who settled a mutation."""

    CALL = "call"  #: the outside system answered the call itself
    RECONCILE = "reconcile"  #: the outside system was asked afterwards
    PERSON = "person"  #: somebody said what happened
    PERSON_SKIP = "person_skip"  #: somebody decided to go on without it
    VOID = "void"  #: it was approved, but its run stopped before it was sent


class Evidence(StrEnum):
    """What a claim that the mutation did not happen rests on."""

    DEFINITE = "definite"  #: the outside system refused it: it cannot arrive any more
    ABSENCE = "absence"  #: it was looked for and not found: it may still be travelling


def quiet_until(send_deadline: datetime, settle: timedelta) -> datetime:
    """The instant from which absence is evidence: the request can no longer leave, and has settled."""
    return send_deadline + settle
