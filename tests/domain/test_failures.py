"""What a failure means for a run: every kind, side, policy and budget."""

import itertools
from dataclasses import replace
from datetime import timedelta
from typing import cast

import pytest

from pipeline.domain.boundary import InputAction, Side
from pipeline.domain.failures import Failure, FailureKind, RunFacts, StopDecision, decide
from pipeline.domain.policies import Backoff, FailurePolicy
from pipeline.domain.states import UNRESOLVED, MutationOutcome, MutationStatus, Phase, RunStatus
from pipeline.domain.workflows import AfterFailedMutation, BlockKind, OnExhausted, OnLogicError, OnUncertain

BEFORE = RunFacts(
    phase=Phase.PREPARED,
    outcome=MutationOutcome.NONE,
    mutation=None,
    can_reconcile=True,
    blamed_events=1,
    earlier_failures=0,
    after_failed=AfterFailedMutation.PREPARE,
    on_uncertain=OnUncertain.PAUSE,
    on_logic_error=OnLogicError.MAINTENANCE,
    on_exhausted=OnExhausted.BLOCK,
)
AFTER = replace(BEFORE, phase=Phase.EMITTING, outcome=MutationOutcome.SUCCESS, mutation=MutationStatus.APPLIED)
UNKNOWN = replace(BEFORE, phase=Phase.MUTATING, mutation=MutationStatus.IN_FLIGHT)
POLICY = FailurePolicy(
    max_failures=4,
    quarantine_after=2,
    backoff=Backoff(base=timedelta(seconds=1), multiplier=2, cap=timedelta(seconds=3), jitter=0.5),
)


def seconds(number: float) -> timedelta:
    return timedelta(seconds=number)


def decided(kind: FailureKind, standing: RunFacts, *, chance: float = 0.0) -> StopDecision:
    return decide(Failure(kind=kind, message="it broke"), standing, POLICY, jitter=chance)


@pytest.mark.parametrize("earlier", [0, 3, 50])
@pytest.mark.parametrize("on_logic_error", OnLogicError)
@pytest.mark.parametrize("mutation", sorted(UNRESOLVED))
@pytest.mark.parametrize("kind", FailureKind)
def test_an_unresolved_mutation_outranks_every_kind_of_failure(
    kind: FailureKind, mutation: MutationStatus, on_logic_error: OnLogicError, earlier: int
) -> None:
    standing = replace(UNKNOWN, mutation=mutation, on_logic_error=on_logic_error, earlier_failures=earlier)
    found = decided(kind, standing, chance=0.5)
    assert found.status is RunStatus.PAUSED_RECONCILIATION
    assert found.disposition.side is Side.UNKNOWN
    assert found.disposition.inputs is InputAction.KEEP
    assert found.block is BlockKind.RECONCILIATION
    assert (found.maintenance, found.quarantine, found.delay) == (False, False, timedelta(0))


@pytest.mark.parametrize(
    ("mutation", "can_reconcile", "doubt"),
    [
        (MutationStatus.IN_FLIGHT, True, MutationStatus.NEEDS_RECONCILE),
        (MutationStatus.IN_FLIGHT, False, MutationStatus.INDETERMINATE),
        (MutationStatus.NEEDS_RECONCILE, True, None),
        (MutationStatus.NEEDS_RECONCILE, False, None),
        (MutationStatus.INDETERMINATE, True, None),
        (MutationStatus.INDETERMINATE, False, None),
    ],
)
def test_only_a_mutation_in_flight_changes_and_is_indeterminate_without_a_reconcile(
    mutation: MutationStatus, can_reconcile: bool, doubt: MutationStatus | None
) -> None:
    standing = replace(UNKNOWN, mutation=mutation, can_reconcile=can_reconcile)
    assert decided(FailureKind.CRASH, standing).doubt is doubt


def test_a_contained_unknown_outcome_does_not_block_the_workflow() -> None:
    found = decided(FailureKind.TRANSIENT, replace(UNKNOWN, on_uncertain=OnUncertain.CONTAIN))
    assert found.block is None
    assert found.disposition.inputs is InputAction.KEEP


@pytest.mark.parametrize(("standing", "inputs"), [(BEFORE, InputAction.RELEASE), (AFTER, InputAction.KEEP)])
@pytest.mark.parametrize(("earlier", "delay"), [(0, 1.0), (1, 2.0), (2, 3.0)])
def test_a_transient_failure_pauses_longer_each_time_until_the_cap(
    standing: RunFacts, inputs: InputAction, earlier: int, delay: float
) -> None:
    found = decided(FailureKind.TRANSIENT, replace(standing, earlier_failures=earlier))
    assert found.status is RunStatus.PAUSED_TRANSIENT
    assert found.disposition.inputs is inputs
    assert found.delay == seconds(delay)
    assert (found.block, found.maintenance, found.quarantine, found.doubt) == (None, False, False, None)


@pytest.mark.parametrize(("earlier", "delay"), [(0, 0.0), (1, 1.0), (2, 2.0)])
def test_a_first_crash_is_followed_at_once_and_later_ones_pause(earlier: int, delay: float) -> None:
    found = decided(FailureKind.CRASH, replace(BEFORE, earlier_failures=earlier))
    assert found.status is RunStatus.CRASHED
    assert found.delay == seconds(delay)


@pytest.mark.parametrize("earlier", [0, 3, 50])
@pytest.mark.parametrize("on_logic_error", OnLogicError)
def test_a_void_approval_counts_no_failure_and_a_fresh_run_requests_again_at_once(
    on_logic_error: OnLogicError, earlier: int
) -> None:
    found = decided(FailureKind.VOID, replace(BEFORE, earlier_failures=earlier, on_logic_error=on_logic_error))
    assert (found.status, found.disposition.inputs) == (RunStatus.PAUSED_TRANSIENT, InputAction.RELEASE)
    assert (found.block, found.maintenance, found.quarantine, found.delay) == (None, False, False, timedelta(0))


@pytest.mark.parametrize("kind", [FailureKind.TRANSIENT, FailureKind.CRASH])
@pytest.mark.parametrize("earlier", [3, 4, 1000])
def test_the_last_allowed_failure_blocks_until_an_operator_resumes(kind: FailureKind, earlier: int) -> None:
    found = decided(kind, replace(BEFORE, earlier_failures=earlier))
    assert found.status is RunStatus.FAILED_INTERNAL
    assert found.block is BlockKind.INTERNAL
    assert found.delay == timedelta(0)


@pytest.mark.parametrize(("standing", "inputs"), [(BEFORE, InputAction.RELEASE), (AFTER, InputAction.KEEP)])
def test_bad_credentials_block_the_workflow_until_an_operator_resumes(standing: RunFacts, inputs: InputAction) -> None:
    found = decided(FailureKind.AUTH, standing)
    assert (found.status, found.block) == (RunStatus.PAUSED_APPROVAL, BlockKind.APPROVAL)
    assert found.disposition.inputs is inputs
    assert (found.maintenance, found.delay) == (False, timedelta(0))


@pytest.mark.parametrize(("standing", "inputs"), [(BEFORE, InputAction.RELEASE), (AFTER, InputAction.KEEP)])
def test_a_failure_of_the_host_blocks_the_workflow_at_once(standing: RunFacts, inputs: InputAction) -> None:
    found = decided(FailureKind.INTERNAL, standing)
    assert (found.status, found.block) == (RunStatus.FAILED_INTERNAL, BlockKind.INTERNAL)
    assert found.disposition.inputs is inputs


@pytest.mark.parametrize("earlier", [0, 10])
@pytest.mark.parametrize(("standing", "inputs"), [(BEFORE, InputAction.RELEASE), (AFTER, InputAction.KEEP)])
def test_wrong_code_stops_the_workflow_until_it_changes(standing: RunFacts, inputs: InputAction, earlier: int) -> None:
    found = decided(FailureKind.LOGIC, replace(standing, earlier_failures=earlier))
    assert found.status is RunStatus.FAILED_LOGIC
    assert found.maintenance
    assert found.disposition.inputs is inputs
    assert (found.block, found.quarantine, found.delay) == (None, False, timedelta(0))


def test_wrong_code_without_inputs_stops_the_workflow_even_with_quarantine() -> None:
    standing = replace(BEFORE, on_logic_error=OnLogicError.QUARANTINE, blamed_events=0)
    found = decided(FailureKind.LOGIC, standing)
    assert found.maintenance
    assert not found.quarantine


@pytest.mark.parametrize(
    ("earlier", "quarantine", "delay"),
    [(0, False, 1.0), (1, True, 0.0), (2, True, 0.0)],
    ids=["first", "at the limit", "past the limit"],
)
def test_inputs_that_failed_often_enough_are_quarantined_and_the_others_continue(
    earlier: int, quarantine: bool, delay: float
) -> None:
    standing = replace(BEFORE, on_logic_error=OnLogicError.QUARANTINE, earlier_failures=earlier)
    found = decided(FailureKind.LOGIC, standing)
    assert (found.status, found.quarantine, found.delay) == (RunStatus.FAILED_LOGIC, quarantine, seconds(delay))
    assert (found.block, found.maintenance) == (None, False)


@pytest.mark.parametrize(
    ("earlier", "block", "delay"),
    [(0, None, 1.0), (1, None, 2.0), (2, None, 3.0), (3, BlockKind.INTERNAL, 0.0), (9, BlockKind.INTERNAL, 0.0)],
)
def test_inputs_of_a_run_past_its_mutation_are_never_quarantined(
    earlier: int, block: BlockKind | None, delay: float
) -> None:
    standing = replace(AFTER, on_logic_error=OnLogicError.QUARANTINE, earlier_failures=earlier)
    found = decided(FailureKind.LOGIC, standing)
    assert not found.quarantine
    assert (found.block, found.delay) == (block, seconds(delay))
    assert found.disposition.inputs is InputAction.KEEP


@pytest.mark.parametrize(
    ("kind", "standing"),
    [
        (FailureKind.TRANSIENT, BEFORE),
        (FailureKind.CRASH, replace(BEFORE, earlier_failures=1)),
        (FailureKind.LOGIC, replace(BEFORE, on_logic_error=OnLogicError.QUARANTINE)),
    ],
)
def test_chance_spreads_the_pause(kind: FailureKind, standing: RunFacts) -> None:
    assert decided(kind, standing).delay == seconds(1)
    assert decided(kind, standing, chance=0.5).delay == seconds(1.25)


def test_a_failed_mutation_whose_plan_is_tried_again_keeps_its_inputs_and_pauses() -> None:
    failed = replace(BEFORE, phase=Phase.MUTATED, outcome=MutationOutcome.FAILURE, mutation=MutationStatus.FAILED)
    fresh = decided(FailureKind.TRANSIENT, failed)
    again = decided(FailureKind.TRANSIENT, replace(failed, after_failed=AfterFailedMutation.MUTATE))
    assert (fresh.disposition.inputs, fresh.disposition.retry_pending) == (InputAction.RELEASE, False)
    assert (again.disposition.inputs, again.disposition.retry_pending) == (InputAction.KEEP, True)
    assert fresh.delay == again.delay == seconds(1)


def test_an_undecided_kind_of_failure_raises() -> None:
    with pytest.raises(AssertionError):
        decided(cast("FailureKind", "a new kind"), BEFORE)


def test_every_combination_has_a_consequence_that_leaves_active() -> None:
    for kind, phase, outcome, mutation, on_logic_error, after_failed, has_inputs, earlier in itertools.product(
        FailureKind,
        Phase,
        MutationOutcome,
        [None, *MutationStatus],
        OnLogicError,
        AfterFailedMutation,
        [True, False],
        [0, 9],
    ):
        standing = replace(
            BEFORE,
            phase=phase,
            outcome=outcome,
            mutation=mutation,
            on_logic_error=on_logic_error,
            after_failed=after_failed,
            blamed_events=has_inputs,
            earlier_failures=earlier,
        )
        found = decided(kind, standing)
        assert found.status not in (RunStatus.ACTIVE, RunStatus.COMMITTED)
        assert not (found.quarantine and found.disposition.inputs is InputAction.KEEP)
        assert (found.doubt is not None) == (mutation is MutationStatus.IN_FLIGHT)
        assert found.delay >= timedelta(0)
