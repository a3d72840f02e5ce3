"""Tables that show the pure rules at work: each row is what the rule answers, not what somebody wrote."""

from collections.abc import Iterator

from pipeline.domain.boundary import InputAction, Side, disposition_of, side_of
from pipeline.domain.failures import Failure, FailureKind, RunFacts, StopDecision, decide
from pipeline.domain.policies import FailurePolicy
from pipeline.domain.states import RESOLVED, MutationOutcome, MutationStatus, Phase
from pipeline.domain.workflows import (
    AfterFailedMutation,
    BlockKind,
    DesiredStatus,
    OnExhausted,
    OnLogicError,
    OnUncertain,
    workflow_status,
)

_STATES_BY_SIDE = {
    Side.BEFORE: (Phase.PREPARED, MutationOutcome.NONE, None),
    Side.UNKNOWN: (Phase.MUTATING, MutationOutcome.NONE, MutationStatus.IN_FLIGHT),
    Side.AFTER: (Phase.EMITTING, MutationOutcome.SUCCESS, MutationStatus.APPLIED),
}
_INPUTS = {InputAction.RELEASE: "released", InputAction.KEEP: "kept"}


def status_rows() -> Iterator[tuple[str, str, str]]:
    """The status people see, for every combination that makes a difference."""
    for desired in DesiredStatus:
        for blocks in ((), *((kind,) for kind in BlockKind), tuple(BlockKind)):
            yield desired, ", ".join(blocks) or "none", workflow_status(desired, blocks)


def boundary_rows() -> Iterator[tuple[str, str, str, str, str]]:
    """Side and inputs for every phase and outcome a run can stop with."""
    for phase in Phase:
        for outcome, ledger in _possible(phase):
            side = side_of(phase, outcome, ledger)
            kept = disposition_of(side, outcome, AfterFailedMutation.PREPARE).inputs
            yield phase, outcome or "none", ledger or "no mutation", side, _INPUTS[kept]


def failure_rows() -> Iterator[tuple[str, str, str, str, str]]:
    """What follows each kind of failure on each side."""
    for side, (phase, outcome, ledger) in _STATES_BY_SIDE.items():
        for kind in FailureKind:
            follows = decide(Failure(kind=kind, message=""), _run_facts(phase, outcome, ledger), FailurePolicy())
            yield kind, side, follows.status, _INPUTS[follows.disposition.inputs], _what_follows(follows)


def _possible(phase: Phase) -> Iterator[tuple[MutationOutcome, MutationStatus | None]]:
    if phase is Phase.COMMITTED:
        return
    if phase is Phase.MUTATING:
        yield from ((MutationOutcome.NONE, ledger) for ledger in MutationStatus if ledger not in RESOLVED)
        return
    yield MutationOutcome.NONE, None
    if phase.rank > Phase.MUTATING.rank:
        yield MutationOutcome.SUCCESS, MutationStatus.APPLIED
        yield MutationOutcome.SKIPPED, MutationStatus.FAILED
    if phase is Phase.MUTATED:
        yield MutationOutcome.FAILURE, MutationStatus.FAILED


def _run_facts(phase: Phase, outcome: MutationOutcome, ledger: MutationStatus | None) -> RunFacts:
    return RunFacts(
        phase=phase,
        outcome=outcome,
        mutation=ledger,
        can_reconcile=True,
        blamed_events=1,
        earlier_failures=0,
        after_failed=AfterFailedMutation.PREPARE,
        on_uncertain=OnUncertain.PAUSE,
        on_logic_error=OnLogicError.MAINTENANCE,
        on_exhausted=OnExhausted.BLOCK,
    )


def _what_follows(follows: StopDecision) -> str:
    said = [
        f"the mutation is {follows.doubt}" if follows.doubt else "",
        f"the workflow is blocked ({follows.block})" if follows.block else "",
        "the workflow enters maintenance" if follows.maintenance else "",
        f"a pause of {follows.delay.total_seconds():g} s" if follows.delay else "",
    ]
    follower = "a retry carries it forward" if follows.disposition.retry_pending else "a fresh run selects again"
    return "; ".join([*(each for each in said if each), follower])
