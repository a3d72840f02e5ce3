"""The ledger's table of moves, and the instant from which absence is evidence."""

from datetime import UTC, datetime, timedelta

import pytest

from pipeline.domain.states import MUTATION_TRANSITIONS, RESOLVED, UNRESOLVED, MutationStatus, quiet_until

PAIRS = [(source.value, target.value) for source, targets in MUTATION_TRANSITIONS.items() for target in targets]


def reachable_from(start: MutationStatus) -> set[MutationStatus]:
    seen, open_ = {start}, [start]
    while open_:
        for target in MUTATION_TRANSITIONS[open_.pop()] - seen:
            seen.add(target)
            open_.append(target)
    return seen


def test_every_status_has_a_row_in_the_transition_table() -> None:
    assert set(MUTATION_TRANSITIONS) == set(MutationStatus)


def test_the_transitions_are_exactly_these() -> None:
    assert set(PAIRS) == {
        ("pending", "in_flight"),
        ("pending", "failed"),
        ("in_flight", "applied"),
        ("in_flight", "failed"),
        ("in_flight", "needs_reconcile"),
        ("in_flight", "indeterminate"),
        ("needs_reconcile", "applied"),
        ("needs_reconcile", "failed"),
        ("needs_reconcile", "indeterminate"),
        ("indeterminate", "applied"),
        ("indeterminate", "failed"),
        ("indeterminate", "needs_reconcile"),
    }


def test_a_resolved_mutation_has_no_exit_and_every_other_has_one() -> None:
    assert {status for status in MutationStatus if not MUTATION_TRANSITIONS[status]} == RESOLVED


def test_a_sent_mutation_never_becomes_unsent() -> None:
    assert all(target not in ("pending", "in_flight") for source, target in PAIRS if source != "pending")


@pytest.mark.parametrize("status", MutationStatus)
def test_every_mutation_can_be_resolved(status: MutationStatus) -> None:
    assert reachable_from(status) & RESOLVED


def test_every_status_is_reached_from_a_request_that_waits_for_approval() -> None:
    assert reachable_from(MutationStatus.PENDING) == set(MutationStatus)


def test_a_status_is_unresolved_resolved_or_not_yet_sent_and_never_two_of_them() -> None:
    assert UNRESOLVED.isdisjoint(RESOLVED)
    assert UNRESOLVED | RESOLVED | {MutationStatus.PENDING} == set(MutationStatus)


def test_a_mutation_that_was_never_sent_is_not_unresolved() -> None:
    assert MutationStatus.PENDING not in UNRESOLVED


def test_absence_is_evidence_after_the_send_deadline_and_the_settle_window() -> None:
    deadline = datetime(2030, 1, 1, tzinfo=UTC)
    assert quiet_until(deadline, timedelta(0)) == deadline
    assert quiet_until(deadline, timedelta(minutes=2)) == deadline + timedelta(minutes=2)
