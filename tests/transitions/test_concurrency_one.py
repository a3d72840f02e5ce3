"""One place means one thing at a time; and what was approved is sent only while the workflow may act."""

from datetime import timedelta

import pytest
from sqlalchemy import text

from pipeline.background import rescuer
from pipeline.domain.errors import StaleWriteError
from pipeline.domain.failures import FailureKind
from pipeline.domain.states import Phase, PhaseTask
from pipeline.store.database import Database
from pipeline.transitions import mutations, resolution, runs, starts, workflows
from tests.factories import (
    LEASE,
    SOMEBODY,
    TIMEOUT,
    a_run,
    a_workflow,
    applied,
    carried_forward,
    committed,
    event_status,
    held,
    some_events,
    stopped,
    the_mutation,
    the_run,
)
from tests.support.table_reads import one
from tests.support.transition_steps import a_handler, started

_UNAPPROVED_BUT_ACTIVE = text("""
UPDATE pipeline.runs SET status = 'active', fence = fence + 1,
  lease_expires_at = pipeline.clock() + interval '1 minute' WHERE id = :id
""")


def test_with_concurrency_one_nothing_overtakes_a_run_that_waits_for_its_retry(db: Database) -> None:
    a_workflow(db)
    some_events(db, "m1", "m2")
    first = stopped(db, a_run(db, Phase.EMITTING), FailureKind.TRANSIENT)
    with db.transaction() as tx:
        assert starts.start(tx, "billing", "send").hold_reason == "full"
        assert starts.start(tx, "billing", "poll").hold_reason == "full"
    db.advance_clock(timedelta(minutes=1))
    committed(db, carried_forward(db, first), state={"count": 1}, has_state=True)
    second = a_run(db, Phase.EMITTING)
    count = a_handler(db).state["count"] + 1
    committed(db, second, state={"count": count}, has_state=True)
    assert a_handler(db).state == {"count": 2}, "no update is lost"


def test_a_pending_approval_blocks_a_workflow_with_concurrency_one(db: Database) -> None:
    a_workflow(db)
    some_events(db, "m1", "m2")
    waiting = a_run(db, Phase.MUTATING, needs_approval=True)
    assert started(db) == []
    with db.transaction() as tx:
        resolution.approve(tx, waiting.mutation_id, SOMEBODY, request_hash="abc")
    assert started(db) == []
    assert one(db, "SELECT count(*) AS n FROM pipeline.runs WHERE status = 'active'").n == 1


def test_a_contained_run_in_doubt_does_not_block_concurrency_one(db: Database) -> None:
    a_workflow(db, on_uncertain="contain")
    some_events(db, "m1", "m2")
    stopped(db, a_run(db, Phase.MUTATING))
    assert len(started(db)) == 1


@pytest.mark.parametrize("switch", ["pause", "maintenance"])
def test_an_approved_request_is_not_sent_while_its_workflow_is_switched_off(db: Database, switch: str) -> None:
    a_workflow(db)
    some_events(db, "m1")
    run = a_run(db, Phase.MUTATING, needs_approval=True)
    with db.transaction() as tx:
        if switch == "pause":
            workflows.pause(tx, "billing", SOMEBODY)
        else:
            workflows.enter_maintenance(tx, "billing", "broken code")
        resolution.approve(tx, run.mutation_id, SOMEBODY, request_hash="abc")
        assert runs.claim(tx, PhaseTask.MUTATE, [run.id], lease_duration=LEASE, worker="w").claimed == ()
    with db.transaction() as tx:
        workflows.exit_maintenance(tx, "billing", SOMEBODY)
        workflows.resume(tx, "billing", SOMEBODY)
        (run,) = runs.claim(tx, PhaseTask.MUTATE, [run.id], lease_duration=LEASE, worker="w").claimed
        mutations.send(tx, [held(run)]).only()
    committed(db, applied(db, the_run(db, run.id)))


def test_an_approved_request_is_not_sent_by_a_worker_whose_lease_has_lapsed(db: Database) -> None:
    a_workflow(db)
    (event,) = some_events(db, "m1")
    run = a_run(db, Phase.MUTATING, needs_approval=True)
    with db.transaction() as tx:
        resolution.approve(tx, run.mutation_id, SOMEBODY, request_hash="abc")
        (run,) = runs.claim(tx, PhaseTask.MUTATE, [run.id], lease_duration=LEASE, worker="w").claimed
    db.advance_clock(LEASE + timedelta(seconds=1))
    with pytest.raises(StaleWriteError, match="not leased"), db.transaction() as tx:
        mutations.send(tx, [held(run)]).only()
    assert run.mutation_id is not None
    assert the_mutation(db, run.mutation_id).status == "pending"
    rescuer.recover_crashed_runs(db)
    assert event_status(db, event) == "pending"


@pytest.mark.broken_on_purpose
def test_an_unapproved_request_is_not_sent_even_by_a_run_that_is_wrongly_active(db: Database) -> None:
    """No transition makes such a run; the guard stands for the day on which one does."""
    a_workflow(db)
    some_events(db, "m1")
    run = a_run(db, Phase.MUTATING, needs_approval=True)
    with db.transaction() as tx:
        tx.execute(_UNAPPROVED_BUT_ACTIVE, id=run.id)
    with db.transaction() as tx:
        assert mutations.send(tx, [held(the_run(db, run.id))]).updated == ()
    assert the_mutation(db, run.mutation_id).status == "pending"


def test_a_request_that_nothing_can_reconcile_keeps_its_run_until_its_deadline(db: Database) -> None:
    a_workflow(db)
    some_events(db, "m1")
    run = a_run(db, Phase.MUTATING, timeout=LEASE * 3, reconcilable=False)
    db.advance_clock(LEASE * 2)
    assert rescuer.recover_crashed_runs(db) == ()
    assert the_run(db, run.id).status == "active"
    db.advance_clock(LEASE + TIMEOUT)
    (ended,) = rescuer.recover_crashed_runs(db)
    assert ended.run_id == run.id


def test_an_approved_request_that_nothing_can_reconcile_keeps_its_run_until_its_deadline(db: Database) -> None:
    a_workflow(db)
    some_events(db, "m1")
    run = a_run(db, Phase.MUTATING, needs_approval=True, timeout=LEASE * 3, reconcilable=False)
    with db.transaction() as tx:
        resolution.approve(tx, run.mutation_id, SOMEBODY, request_hash="abc")
        (run,) = runs.claim(tx, PhaseTask.MUTATE, [run.id], lease_duration=LEASE, worker="w").claimed
        mutations.send(tx, [held(run)]).only()
    db.advance_clock(LEASE * 2)
    assert rescuer.recover_crashed_runs(db) == ()
    committed(db, applied(db, run))
