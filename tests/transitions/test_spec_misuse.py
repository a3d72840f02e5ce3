"""EXECUTION's table of dangerous calls, and LIFECYCLE's replay rows: the wrong call fails or does not exist."""

import inspect

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from pipeline.background import rescuer
from pipeline.domain.errors import IllegalTransitionError, StaleWriteError
from pipeline.domain.failures import FailureKind
from pipeline.domain.states import Phase, PhaseTask
from pipeline.domain.values import NewEvent, PreparedRun, Reservation, RunOutput
from pipeline.store.database import Database
from pipeline.transitions import events, mutations, resolution, runs, starts
from tests.factories import (
    IN,
    LEASE,
    OUT,
    SOMEBODY,
    TIMEOUT,
    a_request,
    a_run,
    a_workflow,
    carried_forward,
    claimed_next,
    event_status,
    held,
    some_events,
    stopped,
    the_run,
)
from tests.support.rule import rule
from tests.support.table_reads import rows


@rule("X-M1")
def test_no_transition_takes_a_phase_so_committed_is_reached_only_by_commit(db: Database) -> None:
    for _, verb in inspect.getmembers(runs, inspect.isfunction):
        if verb.__module__ == runs.__name__ and not verb.__name__.startswith("_"):
            assert "phase" not in inspect.signature(verb).parameters
    a_workflow(db)
    some_events(db, "m1")
    for phase in (Phase.PREPARING, Phase.PREPARED, Phase.MUTATING):
        run = a_run(db, phase)
        with pytest.raises(IllegalTransitionError, match="emitting"), db.transaction() as tx:
            runs.commit(tx, [RunOutput(lease=held(run))]).only()
        assert the_run(db, run.id).phase == phase
        stopped(db, run, FailureKind.CRASH)


@rule("X-M2")
def test_no_verdict_takes_an_outcome_so_skipped_is_reached_only_by_skip() -> None:
    for verb in (mutations.apply, mutations.fail, resolution.happened, resolution.did_not_happen):
        assert "outcome" not in inspect.signature(verb).parameters
        assert "status" not in inspect.signature(verb).parameters


@rule("X-M6")
@pytest.mark.parametrize("phase", [Phase.PREPARING, Phase.PREPARED])
def test_a_run_before_its_mutation_cannot_be_retried(db: Database, phase: Phase) -> None:
    a_workflow(db)
    some_events(db, "m1")
    run = stopped(db, a_run(db, phase), FailureKind.TRANSIENT)
    db.advance_clock(LEASE)
    with pytest.raises(IllegalTransitionError, match="before its mutation"), db.transaction() as tx:
        starts.retry(tx, [run.id])
    assert rows(db, "SELECT id FROM pipeline.runs WHERE retry_of IS NOT NULL") == []


@rule("X-M8", "X-A1")
@pytest.mark.parametrize(
    ("change", "constraint"),
    [
        ("phase = 'preparing'", "the phase of a run only grows"),
        ("status = 'committed'", "runs_committed_together"),
        ("phase = 'committed'", "runs_committed_together"),
        ("status = 'failed:logic'", "runs_finished_unless_moving"),
    ],
)
def test_a_status_or_phase_written_without_a_transition_is_refused_by_the_database(
    db: Database, change: str, constraint: str
) -> None:
    a_workflow(db)
    some_events(db, "m1")
    run = a_run(db, Phase.PREPARED)
    with pytest.raises(IntegrityError, match=constraint), db.transaction() as tx:
        tx.execute(text(f"UPDATE pipeline.runs SET {change} WHERE id = :id"), id=run.id)


@rule("X-M9")
def test_an_event_released_without_a_transition_is_refused_by_the_database(db: Database) -> None:
    a_workflow(db)
    some_events(db, "m1")
    run = a_run(db, Phase.MUTATED)
    with pytest.raises(IntegrityError, match="stays reserved"), db.transaction() as tx:
        tx.execute(
            text("UPDATE pipeline.deliveries SET status = 'pending', run_id = NULL WHERE run_id = :id"), id=run.id
        )


@rule("L-R1", "X-A3")
def test_prepare_can_be_relaunched_freely_and_computes_afresh(db: Database) -> None:
    a_workflow(db)
    first, second = some_events(db, "m1", "m2")
    crashed = a_run(db, Phase.PREPARING)
    db.advance_clock(LEASE + TIMEOUT)
    rescuer.recover_crashed_runs(db)
    again = a_run(db, Phase.PREPARING)
    with db.transaction() as tx:
        choice = PreparedRun(lease=held(again), reservations=(Reservation(topic=IN, ids=(second,)),), data={"try": 2})
        runs.finish_prepare(tx, [choice]).only()
    assert the_run(db, crashed.id).prepare_result is None
    assert the_run(db, again.id).prepare_result["data"] == {"try": 2}
    assert (event_status(db, first), event_status(db, second)) == ("pending", "reserved")


@rule("L-R2")
def test_mutate_is_relaunched_only_after_its_mutation_definitely_failed(db: Database) -> None:
    a_workflow(db, after_failed_mutation="mutate")
    (event,) = some_events(db, "m1")
    run = a_run(db, Phase.MUTATING)
    db.advance_clock(LEASE + TIMEOUT)
    rescuer.recover_crashed_runs(db)
    with db.transaction() as tx:
        assert starts.retry(tx, [run.id]).runs == (), "the outcome is unknown"
        assert runs.claim(tx, PhaseTask.MUTATE, [run.id], lease_duration=LEASE, worker="w2").claimed == ()
    with db.transaction() as tx:
        resolution.did_not_happen(tx, run.mutation_id, SOMEBODY)
    retry = carried_forward(db, the_run(db, run.id))
    assert (retry.phase, retry.prepare_result, retry.event_ids) == ("prepared", run.prepare_result, [event])
    assert (retry.mutation_id, retry.mutation_outcome) == (None, "")
    with db.transaction() as tx:
        (claimed,) = runs.claim(tx, PhaseTask.MUTATE, [retry.id], lease_duration=LEASE, worker="w2").claimed
        mutations.begin_mutation(tx, [a_request(claimed)]).only()
    assert event_status(db, event) == "reserved"


@rule("L-R2")
def test_mutate_is_never_relaunched_after_its_mutation_happened(db: Database) -> None:
    a_workflow(db, after_failed_mutation="mutate")
    some_events(db, "m1")
    run = a_run(db, Phase.MUTATING)
    db.advance_clock(LEASE + TIMEOUT)
    rescuer.recover_crashed_runs(db)
    with db.transaction() as tx:
        resolution.happened(tx, run.mutation_id, SOMEBODY)
    retry = carried_forward(db, the_run(db, run.id))
    assert (retry.phase, retry.mutation_id) == ("emitting", run.mutation_id)
    for known in (run, retry):
        with db.transaction() as tx:
            assert runs.claim(tx, PhaseTask.MUTATE, [known.id], lease_duration=LEASE, worker="w2").claimed == ()
    claimed = claimed_next(db, retry)
    with pytest.raises(IllegalTransitionError), db.transaction() as tx:
        mutations.begin_mutation(tx, [a_request(claimed)]).only()


@rule("L-R3")
def test_next_can_be_relaunched_and_publishes_each_message_once(db: Database) -> None:
    a_workflow(db)
    some_events(db, "m1")
    output = NewEvent(topic=OUT, message_id="receipt:1", payload={})
    run = a_run(db, Phase.EMITTING)
    with db.transaction() as tx:
        events.publish(tx, "billing", [output])
    db.advance_clock(LEASE)
    rescuer.recover_crashed_runs(db)
    retry = claimed_next(db, carried_forward(db, the_run(db, run.id)))
    with db.transaction() as tx:
        runs.commit(tx, [RunOutput(lease=held(retry), events=(output, output))]).only()
    with pytest.raises(StaleWriteError), db.transaction() as tx:
        runs.commit(tx, [RunOutput(lease=held(retry), events=(output,))]).only()
    assert len(rows(db, "SELECT id FROM pipeline.events WHERE topic = :topic", topic=OUT)) == 1
