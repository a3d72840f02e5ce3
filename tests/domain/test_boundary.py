"""The mutation boundary: the whole truth table, written out by hand beside the function."""

import itertools

import pytest

from pipeline.domain.boundary import Disposition, InputAction, Side, disposition_of, side_of
from pipeline.domain.states import MutationOutcome, MutationStatus, Phase
from pipeline.domain.workflows import AfterFailedMutation

#: One letter per phase, in their order, from pending to committed: before, unknown, after. A cross is
#: a contradiction that the ledger's verbs cannot write: applied, and yet the run does not know of it.
TRUTH: dict[tuple[str, str | None], str] = {
    ("", None): "BBBBAAA",
    ("success", None): "BBBBAAA",
    ("failure", None): "BBBBBBB",
    ("skipped", None): "BBBBAAA",
    ("", "pending"): "BBBBAAA",
    ("success", "pending"): "BBBBAAA",
    ("failure", "pending"): "BBBBBBB",
    ("skipped", "pending"): "BBBBAAA",
    ("", "in_flight"): "UUUUUUU",
    ("success", "in_flight"): "UUUUUUU",
    ("failure", "in_flight"): "UUUUUUU",
    ("skipped", "in_flight"): "UUUUUUU",
    ("", "needs_reconcile"): "UUUUUUU",
    ("success", "needs_reconcile"): "UUUUUUU",
    ("failure", "needs_reconcile"): "UUUUUUU",
    ("skipped", "needs_reconcile"): "UUUUUUU",
    ("", "indeterminate"): "UUUUUUU",
    ("success", "indeterminate"): "UUUUUUU",
    ("failure", "indeterminate"): "UUUUUUU",
    ("skipped", "indeterminate"): "UUUUUUU",
    ("", "applied"): "xxxxAAA",
    ("success", "applied"): "xxxxAAA",
    ("failure", "applied"): "xxxxxxx",
    ("skipped", "applied"): "xxxxAAA",
    ("", "failed"): "BBBBAAA",
    ("success", "failed"): "BBBBAAA",
    ("failure", "failed"): "BBBBBBB",
    ("skipped", "failed"): "BBBBAAA",
}
LETTERS = {"B": Side.BEFORE, "U": Side.UNKNOWN, "A": Side.AFTER}

Cell = tuple[Phase, MutationOutcome, MutationStatus | None]


def cells(*letters: str) -> list[Cell]:
    return [
        (Phase(phase), MutationOutcome(outcome), MutationStatus(mutation) if mutation else None)
        for (outcome, mutation), row in TRUTH.items()
        for phase, letter in zip(Phase, row, strict=True)
        if letter in letters
    ]


def test_the_table_covers_every_phase_outcome_and_mutation_status() -> None:
    everything = itertools.product(Phase, MutationOutcome, [None, *MutationStatus])
    assert sorted(cells("B", "U", "A", "x"), key=str) == sorted(everything, key=str)


@pytest.mark.parametrize(("phase", "outcome", "mutation"), cells("B", "U", "A"))
def test_a_run_is_on_the_side_that_the_table_lists(
    phase: Phase, outcome: MutationOutcome, mutation: MutationStatus | None
) -> None:
    letter = TRUTH[outcome, mutation][list(Phase).index(phase)]
    assert side_of(phase, outcome, mutation) is LETTERS[letter]


def test_a_run_whose_mutation_the_ledger_calls_applied_is_never_before_the_boundary() -> None:
    assert [cell for cell in cells("x") if side_of(*cell) is Side.BEFORE] == []


@pytest.mark.parametrize("after_failed", AfterFailedMutation)
@pytest.mark.parametrize("outcome", MutationOutcome)
@pytest.mark.parametrize("side", [Side.UNKNOWN, Side.AFTER])
def test_a_run_whose_mutation_may_have_happened_keeps_its_inputs(
    side: Side, outcome: MutationOutcome, after_failed: AfterFailedMutation
) -> None:
    assert disposition_of(side, outcome, after_failed) == Disposition(side=side, inputs=InputAction.KEEP)


@pytest.mark.parametrize("after_failed", AfterFailedMutation)
@pytest.mark.parametrize("outcome", [MutationOutcome.NONE, MutationOutcome.SUCCESS, MutationOutcome.SKIPPED])
def test_a_run_that_sent_nothing_releases_its_inputs(
    outcome: MutationOutcome, after_failed: AfterFailedMutation
) -> None:
    assert disposition_of(Side.BEFORE, outcome, after_failed) == Disposition(
        side=Side.BEFORE, inputs=InputAction.RELEASE
    )


def test_a_failed_mutation_hands_the_inputs_back_so_that_a_fresh_run_selects_again() -> None:
    left = disposition_of(Side.BEFORE, MutationOutcome.FAILURE, AfterFailedMutation.PREPARE)
    assert left == Disposition(side=Side.BEFORE, inputs=InputAction.RELEASE)


def test_a_consumer_that_wants_the_same_plan_again_keeps_its_inputs_after_a_failed_mutation() -> None:
    left = disposition_of(Side.BEFORE, MutationOutcome.FAILURE, AfterFailedMutation.MUTATE)
    assert left == Disposition(side=Side.BEFORE, inputs=InputAction.KEEP)


@pytest.mark.parametrize(("inputs", "pending"), [(InputAction.KEEP, True), (InputAction.RELEASE, False)])
@pytest.mark.parametrize("side", Side)
def test_a_run_waits_for_its_retry_exactly_when_it_keeps_its_inputs(
    side: Side, inputs: InputAction, pending: bool
) -> None:
    assert Disposition(side=side, inputs=inputs).retry_pending is pending
