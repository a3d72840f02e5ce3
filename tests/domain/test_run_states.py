"""Phases and statuses of a run: the tables of moves are closed, and lead where they should."""

import pytest

from pipeline.domain.states import (
    CONSUMER_TASKS,
    INITIAL_PHASES,
    PHASE_TASKS,
    PHASE_TRANSITIONS,
    PHASES,
    RUN_STATUS_TRANSITIONS,
    MutationOutcome,
    Phase,
    PhaseTask,
    RunStatus,
    chained_tasks,
)

MOVES = sorted((source, target) for source, targets in PHASE_TRANSITIONS.items() for target in targets)


def reachable_from(*starts: Phase) -> set[Phase]:
    seen, open_ = set(starts), list(starts)
    while open_:
        for target in PHASE_TRANSITIONS[open_.pop()] - seen:
            seen.add(target)
            open_.append(target)
    return seen


def test_phases_stand_in_the_order_a_run_passes_through_them() -> None:
    names = ["pending", "preparing", "prepared", "mutating", "mutated", "emitting", "committed"]
    assert list(PHASES) == names
    assert [phase.rank for phase in PHASES] == list(range(7))


def test_every_phase_has_a_row_in_the_transition_table() -> None:
    assert set(PHASE_TRANSITIONS) == set(Phase)


@pytest.mark.parametrize(("source", "target"), MOVES)
def test_a_phase_only_grows(source: Phase, target: Phase) -> None:
    assert target.rank > source.rank


def test_the_transitions_are_exactly_these() -> None:
    assert {(source.value, target.value) for source, target in MOVES} == {
        ("pending", "preparing"),
        ("preparing", "prepared"),
        ("preparing", "committed"),
        ("prepared", "mutating"),
        ("prepared", "mutated"),
        ("prepared", "emitting"),
        ("mutating", "mutated"),
        ("mutated", "emitting"),
        ("emitting", "committed"),
    }


def test_every_phase_is_reached_from_a_fresh_run() -> None:
    assert reachable_from(Phase.PENDING) == set(Phase)


@pytest.mark.parametrize("phase", Phase)
def test_every_phase_leads_to_committed(phase: Phase) -> None:
    assert Phase.COMMITTED in reachable_from(phase)


def test_only_committed_has_no_exit() -> None:
    assert [phase for phase in Phase if not PHASE_TRANSITIONS[phase]] == [Phase.COMMITTED]


def test_no_phase_skips_the_ledger_when_it_leaves_mutating() -> None:
    assert PHASE_TRANSITIONS[Phase.MUTATING] == {Phase.MUTATED}


def test_a_run_begins_fresh_at_the_mutation_or_behind_it() -> None:
    assert set(INITIAL_PHASES) == {Phase.PENDING, Phase.PREPARED, Phase.EMITTING}


def test_every_status_has_a_row_and_every_target_is_a_status() -> None:
    assert set(RUN_STATUS_TRANSITIONS) == set(RunStatus)
    assert frozenset().union(*RUN_STATUS_TRANSITIONS.values()) == set(RunStatus)


def test_statuses_are_exactly_the_agreed_ones() -> None:
    assert [status.value for status in RunStatus] == [
        "active",
        "paused:transient",
        "paused:approval",
        "paused:reconciliation",
        "failed:logic",
        "failed:internal",
        "committed",
        "crashed",
    ]


def test_no_status_leads_to_itself() -> None:
    assert [status for status, targets in RUN_STATUS_TRANSITIONS.items() if status in targets] == []


def test_a_stopped_run_stays_stopped_unless_its_approval_was_granted() -> None:
    exits = {
        status: targets
        for status, targets in RUN_STATUS_TRANSITIONS.items()
        if status is not RunStatus.ACTIVE and targets
    }
    assert exits == {RunStatus.PAUSED_APPROVAL: {RunStatus.ACTIVE}}


def test_an_active_run_may_get_every_stopped_status() -> None:
    assert RUN_STATUS_TRANSITIONS[RunStatus.ACTIVE] == set(RunStatus) - {RunStatus.ACTIVE}


def test_no_outcome_is_written_as_nothing() -> None:
    assert [outcome.value for outcome in MutationOutcome] == ["", "success", "failure", "skipped"]


def test_tasks_stand_in_the_order_of_the_phases() -> None:
    assert set(PHASE_TASKS) == set(Phase) - {Phase.COMMITTED}
    assert [PHASE_TASKS[phase] for phase in PHASES if phase in PHASE_TASKS] == [
        task for task in CONSUMER_TASKS for _ in range(2)
    ]
    assert [task.method for task in PhaseTask] == ["prepare", "mutate", "next", "produce"]


def test_a_chain_is_a_task_and_those_after_it() -> None:
    assert chained_tasks(PhaseTask.PREPARE) == CONSUMER_TASKS == tuple(PhaseTask)[:3]
    assert chained_tasks(PhaseTask.NEXT) == (PhaseTask.NEXT,)
    assert chained_tasks(PhaseTask.PRODUCE) == (PhaseTask.PRODUCE,)
