"""Who is to blame for a failure that repeats: truth tables of narrowing down and of exhausted failures."""

from dataclasses import replace
from datetime import timedelta

import pytest

from pipeline.domain.boundary import Disposition, InputAction, Side
from pipeline.domain.failures import (
    Failure,
    FailureKind,
    RunFacts,
    StopDecision,
    decide,
    is_own_trouble,
    narrowed_limit,
)
from pipeline.domain.policies import Backoff, FailurePolicy
from pipeline.domain.states import MutationOutcome, MutationStatus, Phase, RunStatus
from pipeline.domain.workflows import (
    AfterFailedMutation,
    BlockKind,
    OnExhausted,
    OnLogicError,
    OnUncertain,
    default_on_exhausted,
)

BEFORE = RunFacts(
    phase=Phase.PREPARED,
    outcome=MutationOutcome.NONE,
    mutation=None,
    can_reconcile=True,
    blamed_events=1,
    earlier_failures=0,
    after_failed=AfterFailedMutation.PREPARE,
    on_uncertain=OnUncertain.PAUSE,
    on_logic_error=OnLogicError.QUARANTINE,
    on_exhausted=OnExhausted.QUARANTINE,
)
AFTER = replace(BEFORE, phase=Phase.EMITTING, outcome=MutationOutcome.SUCCESS, mutation=MutationStatus.APPLIED)
REFUSED = replace(BEFORE, phase=Phase.MUTATED, outcome=MutationOutcome.FAILURE, mutation=MutationStatus.FAILED)
SAME_PLAN = replace(REFUSED, after_failed=AfterFailedMutation.MUTATE)
POLICY = FailurePolicy(max_failures=4, quarantine_after=2, backoff=Backoff(base=timedelta(seconds=1), jitter=0))
RELEASE = Disposition(side=Side.BEFORE, inputs=InputAction.RELEASE)
KEEP = Disposition(side=Side.BEFORE, inputs=InputAction.KEEP)
REPEATING = [FailureKind.TRANSIENT, FailureKind.CRASH, FailureKind.INTERNAL]


def decided(kind: FailureKind, facts: RunFacts) -> StopDecision:
    return decide(Failure(kind=kind, message="it broke"), facts, POLICY)


@pytest.mark.parametrize(
    ("on_logic_error", "expected"),
    [(OnLogicError.MAINTENANCE, OnExhausted.BLOCK), (OnLogicError.QUARANTINE, OnExhausted.QUARANTINE)],
)
def test_exhausted_failures_reach_as_far_as_wrong_code_unless_the_author_chooses(
    on_logic_error: OnLogicError, expected: OnExhausted
) -> None:
    assert default_on_exhausted(on_logic_error) is expected


@pytest.mark.parametrize(
    ("has_later_commit", "has_other_failures", "own"),
    [(False, False, True), (False, True, False), (True, False, True), (True, True, True)],
)
def test_events_fail_by_themselves_if_others_succeed_or_if_all_failures_are_theirs(
    has_later_commit: bool, has_other_failures: bool, own: bool
) -> None:
    facts = replace(BEFORE, has_later_commit=has_later_commit, has_other_failures=has_other_failures)
    assert is_own_trouble(facts) is own


@pytest.mark.parametrize(
    ("kind", "blamed", "limit", "disposition", "expected"),
    [
        (FailureKind.TRANSIENT, 20, None, RELEASE, 10),
        (FailureKind.LOGIC, 5, 10, RELEASE, 3),
        (FailureKind.TRANSIENT, 2, 3, RELEASE, 1),
        (FailureKind.CRASH, 20, None, RELEASE, 1),
        (FailureKind.TRANSIENT, 1, None, RELEASE, None),
        (FailureKind.CRASH, 1, None, RELEASE, None),
        (FailureKind.TRANSIENT, 0, None, RELEASE, None),
        (FailureKind.TRANSIENT, 2, 1, RELEASE, None),
        (FailureKind.CRASH, 2, 1, RELEASE, None),
        (FailureKind.TRANSIENT, 20, None, KEEP, None),
    ],
    ids=[
        "halves",
        "rounded up",
        "pairs",
        "one by one after a crash",
        "alone",
        "alone after a crash",
        "no event",
        "together in spite of the limit",
        "together again after a crash",
        "kept",
    ],
)
def test_several_inputs_that_go_back_are_narrowed_down_as_long_as_the_slice_shrinks(
    kind: FailureKind, blamed: int, limit: int | None, disposition: Disposition, expected: int | None
) -> None:
    facts = replace(BEFORE, blamed_events=blamed, slice_limit=limit)
    assert narrowed_limit(Failure(kind=kind, message=""), facts, disposition) == expected


@pytest.mark.parametrize("size", [2, 20])
@pytest.mark.parametrize("kind", [FailureKind.TRANSIENT, FailureKind.CRASH])
@pytest.mark.parametrize("limit", [None, 100])
def test_inputs_that_stay_together_or_were_declined_apart_are_never_narrowed_down(
    kind: FailureKind, size: int, limit: int | None
) -> None:
    facts = replace(BEFORE, blamed_events=size, slice_limit=limit, can_be_narrowed=False)
    assert narrowed_limit(Failure(kind=kind, message=""), facts, RELEASE) is None


def test_a_slice_is_narrowed_down_to_one_event_in_a_logarithm_of_rounds() -> None:
    size, limit, rounds = 100_000, None, 0
    while (
        found := narrowed_limit(
            Failure(kind=FailureKind.TRANSIENT, message=""),
            replace(BEFORE, blamed_events=size, slice_limit=limit),
            RELEASE,
        )
    ) is not None:
        size = limit = found
        rounds += 1
    assert (size, rounds) == (1, 17)


@pytest.mark.parametrize("earlier", [0, 99])
@pytest.mark.parametrize("on_exhausted", OnExhausted)
@pytest.mark.parametrize(
    ("kind", "status", "limit", "delay"),
    [
        (FailureKind.TRANSIENT, RunStatus.PAUSED_TRANSIENT, 10, 1),
        (FailureKind.CRASH, RunStatus.CRASHED, 1, 0),
        (FailureKind.LOGIC, RunStatus.FAILED_LOGIC, 10, 1),
    ],
)
def test_a_failure_of_several_events_is_narrowed_down_before_anything_else_follows(
    kind: FailureKind, status: RunStatus, limit: int, delay: int, on_exhausted: OnExhausted, earlier: int
) -> None:
    found = decided(
        kind,
        replace(
            BEFORE, blamed_events=20, earlier_failures=earlier, handler_failures=earlier, on_exhausted=on_exhausted
        ),
    )
    assert (found.status, found.slice_limit, found.delay) == (status, limit, timedelta(seconds=delay))
    assert (found.block, found.maintenance, found.quarantine) == (None, False, False)


def test_wrong_code_with_maintenance_is_not_narrowed_down() -> None:
    found = decided(FailureKind.LOGIC, replace(BEFORE, blamed_events=20, on_logic_error=OnLogicError.MAINTENANCE))
    assert (found.maintenance, found.slice_limit) == (True, None)


@pytest.mark.parametrize("kind", REPEATING)
@pytest.mark.parametrize(
    ("facts", "quarantine", "block"),
    [
        (BEFORE, True, None),
        (replace(BEFORE, has_other_failures=True), False, BlockKind.INTERNAL),
        (replace(BEFORE, has_other_failures=True, has_later_commit=True), True, None),
        (replace(BEFORE, on_exhausted=OnExhausted.BLOCK, has_later_commit=True), False, BlockKind.INTERNAL),
        (replace(BEFORE, blamed_events=0), False, BlockKind.INTERNAL),
        (replace(BEFORE, blamed_events=2, slice_limit=1), True, None),
        (AFTER, False, BlockKind.INTERNAL),
        (REFUSED, True, None),
        (SAME_PLAN, True, None),
    ],
    ids=[
        "only these fail",
        "everything fails",
        "others succeed",
        "the author wants a block",
        "no event to set aside",
        "cannot be told apart",
        "after the mutation",
        "refused",
        "refused and tried again",
    ],
)
def test_exhausted_failures_set_the_event_aside_or_block(
    kind: FailureKind, facts: RunFacts, quarantine: bool, block: BlockKind | None
) -> None:
    found = decided(kind, replace(facts, earlier_failures=3))
    assert (found.status, found.quarantine, found.block) == (RunStatus.FAILED_INTERNAL, quarantine, block)
    assert (found.disposition.inputs is InputAction.RELEASE) or facts is AFTER
    assert (found.slice_limit, found.delay) == (None, timedelta(0))


@pytest.mark.parametrize("kind", REPEATING)
def test_an_event_may_fail_as_often_as_the_policy_allows_with_growing_pauses(kind: FailureKind) -> None:
    found = [decided(kind, replace(BEFORE, earlier_failures=earlier)) for earlier in range(3)]
    assert not any(each.quarantine or each.block for each in found)
    assert [each.delay for each in found] == sorted(each.delay for each in found)


@pytest.mark.parametrize(
    ("facts", "block"),
    [
        (replace(BEFORE, has_other_failures=True), BlockKind.INTERNAL),
        (BEFORE, None),
        (replace(BEFORE, has_other_failures=True, has_later_commit=True), None),
        (replace(BEFORE, blamed_events=0), BlockKind.INTERNAL),
        (replace(BEFORE, on_exhausted=OnExhausted.BLOCK), BlockKind.INTERNAL),
    ],
    ids=["nothing in common", "all of this event", "others succeed", "no event", "the author wants a block"],
)
def test_a_handler_that_runs_alone_blocks_after_failures_in_a_row_that_have_nothing_in_common(
    facts: RunFacts, block: BlockKind | None
) -> None:
    found = decided(FailureKind.TRANSIENT, replace(facts, handler_failures=3))
    assert (found.block, found.quarantine) == (block, False)


@pytest.mark.parametrize("kind", [FailureKind.TRANSIENT, FailureKind.LOGIC])
def test_several_inputs_of_a_plan_that_was_tried_again_in_vain_are_released_in_halves(kind: FailureKind) -> None:
    found = decided(kind, replace(SAME_PLAN, blamed_events=6, earlier_failures=3))
    assert (found.disposition.inputs, found.slice_limit, found.quarantine) == (InputAction.RELEASE, 3, False)


def test_wrong_code_sets_the_input_of_a_plan_aside_that_was_tried_again_in_vain() -> None:
    found = decided(FailureKind.LOGIC, replace(SAME_PLAN, earlier_failures=3))
    assert (found.disposition.inputs, found.quarantine, found.block) == (InputAction.RELEASE, True, None)


@pytest.mark.parametrize(("on_exhausted", "blocks"), [(OnExhausted.BLOCK, True), (OnExhausted.QUARANTINE, False)])
def test_a_failure_of_the_host_is_counted_like_others_where_exhausted_events_are_set_aside(
    on_exhausted: OnExhausted, blocks: bool
) -> None:
    found = decided(FailureKind.INTERNAL, replace(BEFORE, on_exhausted=on_exhausted))
    assert (found.block is BlockKind.INTERNAL) is blocks
