"""What became of a run that stopped, from the columns of its row and of its mutation."""

import itertools

import pytest

from pipeline.domain.states import MutationOutcome, MutationStatus, RunStatus, Sequel, sequel_of

STOPPED = RunStatus.PAUSED_RECONCILIATION
NONE, SUCCESS, FAILURE, SKIPPED = MutationOutcome


def of(
    outcome: MutationOutcome = NONE,
    mutation: MutationStatus | None = None,
    *,
    status: RunStatus = STOPPED,
    has_inputs: bool = True,
    is_retry_pending: bool = False,
    is_retried: bool = False,
) -> Sequel:
    return sequel_of(
        status, outcome, mutation, has_inputs=has_inputs, is_retry_pending=is_retry_pending, is_retried=is_retried
    )


@pytest.mark.parametrize("status", [RunStatus.ACTIVE, RunStatus.COMMITTED])
def test_a_run_that_moves_or_is_committed_has_no_sequel(status: RunStatus) -> None:
    assert of(status=status, is_retried=True) is Sequel.NONE


@pytest.mark.parametrize(
    ("mutation", "sequel"),
    [
        (MutationStatus.PENDING, Sequel.WAITS_FOR_APPROVAL),
        (MutationStatus.IN_FLIGHT, Sequel.WAITS_FOR_RECONCILE),
        (MutationStatus.NEEDS_RECONCILE, Sequel.WAITS_FOR_RECONCILE),
        (MutationStatus.INDETERMINATE, Sequel.WAITS_FOR_OPERATOR),
        (MutationStatus.APPLIED, Sequel.WAITS_FOR_RETRY),
        (MutationStatus.FAILED, Sequel.WAITS_FOR_RETRY),
        (None, Sequel.WAITS_FOR_RETRY),
    ],
)
def test_a_run_that_keeps_its_inputs_waits_for_its_mutation_first(
    mutation: MutationStatus | None, sequel: Sequel
) -> None:
    assert of(mutation=mutation, is_retry_pending=True) is sequel


@pytest.mark.parametrize("outcome", MutationOutcome)
def test_a_run_with_a_retry_is_carried_forward_whatever_its_outcome(outcome: MutationOutcome) -> None:
    assert of(outcome, is_retried=True) is Sequel.RETRIED


def test_a_run_whose_mutation_did_not_happen_or_was_never_asked_for_has_released_its_inputs() -> None:
    assert of(FAILURE, MutationStatus.FAILED) is Sequel.RELEASED
    assert of(NONE) is Sequel.RELEASED


@pytest.mark.parametrize(("outcome", "has_inputs"), [(NONE, False), (FAILURE, False), (SUCCESS, True), (SKIPPED, True)])
def test_a_run_without_inputs_or_with_settled_ones_has_ended(outcome: MutationOutcome, has_inputs: bool) -> None:
    assert of(outcome, has_inputs=has_inputs) is Sequel.ENDED


def test_only_a_run_that_is_neither_retried_nor_over_waits() -> None:
    """``pipeline runs --waiting`` asks for these columns."""
    for mutation, pending in itertools.product((None, *MutationStatus), (False, True)):
        is_unresolved = mutation not in (None, MutationStatus.APPLIED, MutationStatus.FAILED)
        waits = of(mutation=mutation, is_retry_pending=pending).startswith("waits")
        assert waits is (pending or is_unresolved)
