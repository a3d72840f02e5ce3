"""Tables that show the pure rules at work: each row is what the rule answers, not what somebody wrote."""

from collections.abc import Iterator

from pipeline.domain.boundary import Inputs, Side, dispose, side_of
from pipeline.domain.failures import Consequence, Failure, FailureKind, Standing, decide
from pipeline.domain.policies import FailurePolicy
from pipeline.domain.states import SETTLED, MutationStatus, Outcome, Phase
from pipeline.domain.workflows import (
    AfterFailedMutation,
    BlockKind,
    Desired,
    OnLogicError,
    OnUncertain,
    shown_status,
)

_STANDINGS = {
    Side.BEFORE: (Phase.PREPARED, Outcome.NONE, None),
    Side.UNKNOWN: (Phase.MUTATING, Outcome.NONE, MutationStatus.IN_FLIGHT),
    Side.AFTER: (Phase.EMITTING, Outcome.SUCCESS, MutationStatus.APPLIED),
}
_INPUTS = {Inputs.RELEASE: "released", Inputs.KEEP: "kept"}


def shown() -> Iterator[tuple[str, str, str]]:
    """The status people see, for every combination that makes a difference."""
    for desired in Desired:
        for blocks in ((), *((kind,) for kind in BlockKind), tuple(BlockKind)):
            yield desired, ", ".join(blocks) or "none", shown_status(desired, blocks)


def boundary() -> Iterator[tuple[str, str, str, str, str]]:
    """Side and inputs for every phase and outcome a run can stop with."""
    for phase in Phase:
        for outcome, ledger in _possible(phase):
            side = side_of(phase, outcome, ledger)
            kept = dispose(side, outcome, AfterFailedMutation.PREPARE).inputs
            yield phase, outcome or "none", ledger or "no mutation", side, _INPUTS[kept]


def consequences() -> Iterator[tuple[str, str, str, str, str]]:
    """What follows each kind of failure on each side."""
    for side, (phase, outcome, ledger) in _STANDINGS.items():
        for kind in FailureKind:
            follows = decide(Failure(kind=kind, message=""), _standing(phase, outcome, ledger), FailurePolicy())
            yield kind, side, follows.status, _INPUTS[follows.disposition.inputs], _then(follows)


def _possible(phase: Phase) -> Iterator[tuple[Outcome, MutationStatus | None]]:
    if phase is Phase.COMMITTED:
        return
    if phase is Phase.MUTATING:
        yield from ((Outcome.NONE, ledger) for ledger in MutationStatus if ledger not in SETTLED)
        return
    yield Outcome.NONE, None
    if phase.rank > Phase.MUTATING.rank:
        yield Outcome.SUCCESS, MutationStatus.APPLIED
        yield Outcome.SKIPPED, MutationStatus.FAILED
    if phase is Phase.MUTATED:
        yield Outcome.FAILURE, MutationStatus.FAILED


def _standing(phase: Phase, outcome: Outcome, ledger: MutationStatus | None) -> Standing:
    return Standing(
        phase=phase,
        outcome=outcome,
        mutation=ledger,
        can_reconcile=True,
        has_inputs=True,
        earlier_failures=0,
        after_failed=AfterFailedMutation.PREPARE,
        on_uncertain=OnUncertain.PAUSE,
        on_logic_error=OnLogicError.MAINTENANCE,
    )


def _then(follows: Consequence) -> str:
    said = [
        f"the mutation is {follows.doubt}" if follows.doubt else "",
        f"the workflow is blocked ({follows.block})" if follows.block else "",
        "the workflow enters maintenance" if follows.maintenance else "",
        f"a pause of {follows.delay.total_seconds():g} s" if follows.delay else "",
    ]
    follower = "a retry carries it forward" if follows.disposition.retry_pending else "a fresh run selects again"
    return "; ".join([*(each for each in said if each), follower])
