"""The mutation boundary: what a stopped run does to its inputs.

The hardest rule of the system as a function of a few enums. *Before* the boundary nothing reached
the outside system and the inputs go back; *after* it the run waits for a retry and keeps them; when
the outcome is *unknown* it keeps them too, until the mutation is resolved.
"""

from dataclasses import dataclass
from enum import StrEnum

from pipeline.domain.states import UNRESOLVED, MutationOutcome, MutationStatus, Phase
from pipeline.domain.workflows import AfterFailedMutation


class Side(StrEnum):
    """Where a run stands relative to its mutation."""

    BEFORE = "before"
    UNKNOWN = "unknown"
    AFTER = "after"


class InputAction(StrEnum):
    """What happens to the reserved events of a stopped run."""

    RELEASE = "release"  #: pending again, any run may take them
    KEEP = "keep"  #: stay reserved until the run is retried


@dataclass(frozen=True, slots=True, kw_only=True)
class Disposition:
    """What a stopped run leaves behind for its inputs and for the run that follows it."""

    side: Side
    inputs: InputAction

    @property
    def retry_pending(self) -> bool:
        """A run that keeps its inputs waits for a retry."""
        return self.inputs is InputAction.KEEP


def side_of(phase: Phase, outcome: MutationOutcome, mutation: MutationStatus | None) -> Side:
    """Which side of its mutation a run stands on.

    The ledger speaks first: while its row is unresolved no phase can make the outcome known, and
    what it says was applied was applied. A failed mutation puts the run back before the boundary.
    """
    if mutation in UNRESOLVED:
        return Side.UNKNOWN
    if mutation is MutationStatus.APPLIED:
        return Side.AFTER
    if outcome is MutationOutcome.FAILURE or phase.rank < Phase.MUTATED.rank:
        return Side.BEFORE
    return Side.AFTER


def disposition_of(side: Side, outcome: MutationOutcome, after_failed: AfterFailedMutation) -> Disposition:
    """What a run that stops on this side leaves behind.

    The one exception before the boundary: a consumer that wants the same plan tried again keeps
    its inputs once the mutation is known to have failed.
    """
    tries_again = outcome is MutationOutcome.FAILURE and after_failed is AfterFailedMutation.MUTATE
    keeps = side is not Side.BEFORE or tries_again
    return Disposition(side=side, inputs=InputAction.KEEP if keeps else InputAction.RELEASE)
