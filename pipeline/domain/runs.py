"""How far a run got, whether it is moving, and which moves exist.

Phase and status are two columns that never speak for each other: the phase only grows, a failure
changes the status alone. ``ADVANCES`` is the one table of phase moves; the guards, the trigger in
the database, the diagrams in the docs and the model in the tests all follow it.
"""

from collections.abc import Mapping
from enum import StrEnum


class Phase(StrEnum):
    """How far a run got. Members stand in the order a run passes through them."""

    PENDING = "pending"  #: created by the scheduler, nobody has begun
    PREPARING = "preparing"  #: a worker is selecting inputs (or, for a producer, producing)
    PREPARED = "prepared"  #: inputs are reserved and the plan is saved; nothing was asked of the world
    MUTATING = "mutating"  #: the ledger holds the mutation; the world may have seen it
    MUTATED = "mutated"  #: the mutate phase is over and its outcome is known
    EMITTING = "emitting"  #: downstream events and state are being made
    COMMITTED = "committed"  #: inputs consumed, outputs published, state saved, in one transaction

    @property
    def rank(self) -> int:
        """Position in the only direction there is."""
        return PHASES.index(self)


PHASES: tuple[Phase, ...] = tuple(Phase)

ADVANCES: Mapping[Phase, frozenset[Phase]] = {
    Phase.PENDING: frozenset({Phase.PREPARING}),
    Phase.PREPARING: frozenset({Phase.PREPARED, Phase.COMMITTED}),  # a producer commits from here
    Phase.PREPARED: frozenset({Phase.MUTATING, Phase.MUTATED, Phase.EMITTING}),
    Phase.MUTATING: frozenset({Phase.MUTATED}),
    Phase.MUTATED: frozenset({Phase.EMITTING}),
    Phase.EMITTING: frozenset({Phase.COMMITTED}),
    Phase.COMMITTED: frozenset(),
}

#: Where a run may come into being: fresh, or carrying a stopped run forward.
BIRTHS: frozenset[Phase] = frozenset({Phase.PENDING, Phase.PREPARED, Phase.EMITTING})


class RunStatus(StrEnum):
    """Whether a run is moving, and why not."""

    ACTIVE = "active"  #: a worker holds it, or the scheduler will send it to one
    PAUSED_TRANSIENT = "paused:transient"  #: the world failed for now; another run follows after a delay
    PAUSED_APPROVAL = "paused:approval"  #: a person must allow something, or mend credentials
    PAUSED_RECONCILIATION = "paused:reconciliation"  #: nobody knows yet whether the mutation happened
    FAILED_LOGIC = "failed:logic"  #: the workflow's code is wrong; the same code would fail again
    FAILED_INTERNAL = "failed:internal"  #: retries are exhausted, or the host itself failed
    COMMITTED = "committed"  #: done
    CRASHED = "crashed"  #: its worker vanished; recovery has put its inputs where they belong


class Outcome(StrEnum):
    """What became of the run's mutation, as the run remembers it."""

    NONE = ""  #: no mutation was asked for, or none is decided yet
    SUCCESS = "success"  #: it happened
    FAILURE = "failure"  #: it did not happen
    SKIPPED = "skipped"  #: a person chose to go on without it


#: A status leaves ``active`` once. The way back exists only for a run whose approval was granted.
STATUS_MOVES: Mapping[RunStatus, frozenset[RunStatus]] = {
    RunStatus.ACTIVE: frozenset(RunStatus) - {RunStatus.ACTIVE},
    RunStatus.PAUSED_APPROVAL: frozenset({RunStatus.ACTIVE}),
    **{status: frozenset() for status in RunStatus if status not in (RunStatus.ACTIVE, RunStatus.PAUSED_APPROVAL)},
}
