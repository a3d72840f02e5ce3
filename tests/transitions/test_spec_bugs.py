"""The five bugs that EXECUTION was written to end, each as a test that would find it again."""

from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from pipeline.background import rescuer
from pipeline.domain.failures import FailureKind
from pipeline.domain.states import Phase, RunStatus
from pipeline.store.database import Database, Statement
from pipeline.store.reads import invariants, work
from pipeline.transitions import starts, workflows
from tests.factories import (
    LEASE,
    SOMEBODY,
    TIMEOUT,
    a_run,
    a_workflow,
    carried_forward,
    claimed_next,
    committed,
    event_status,
    some_events,
    stopped,
    the_run,
)
from tests.support.crashing_database import Crash, CrashingDatabase
from tests.support.rule import rule


@rule("X-B1")
def test_bug_1_a_logic_error_after_the_mutation_does_not_orphan_its_events(db: Database) -> None:
    a_workflow(db)
    (event,) = some_events(db, "m1")
    run = stopped(db, a_run(db, Phase.EMITTING), FailureKind.LOGIC)
    with db.transaction() as tx:
        workflows.exit_maintenance(tx, "billing", SOMEBODY)
        assert work.retryable_runs(tx, "billing") == [run.id]
    committed(db, carried_forward(db, run))
    assert event_status(db, event) == "consumed"


@rule("X-B2")
@pytest.mark.parametrize("phase", [Phase.PREPARING, Phase.MUTATING, Phase.EMITTING])
def test_bug_2_status_inputs_and_retry_mark_change_together_or_not_at_all(db: Database, phase: Phase) -> None:
    a_workflow(db)
    (event,) = some_events(db, "m1")
    run = a_run(db, phase)
    before = event_status(db, event)
    with pytest.raises(Crash):
        stopped(CrashingDatabase(db, before_commit=1), run)
    untouched = the_run(db, run.id)
    assert (untouched.status, untouched.retry_pending, untouched.error) == (RunStatus.ACTIVE, False, None)
    assert event_status(db, event) == before
    with pytest.raises(Crash):
        stopped(CrashingDatabase(db, after_commit=1), run)
    after = the_run(db, run.id)
    assert after.status != RunStatus.ACTIVE
    assert after.retry_pending == (event_status(db, event) == "reserved")


@rule("X-B3")
def test_bug_3_events_of_a_crashed_run_after_its_mutation_are_held_for_its_retry_not_forever(db: Database) -> None:
    a_workflow(db)
    (event,) = some_events(db, "m1")
    dead = stopped(db, a_run(db, Phase.EMITTING))
    with db.transaction() as tx:
        workflows.exit_maintenance(tx, "billing", SOMEBODY)
        assert invariants.findings(tx) == [], "held by a run that waits for a retry"
    retry = carried_forward(db, dead)
    dead_again = stopped(db, claimed_next(db, retry))
    with db.transaction() as tx:
        workflows.exit_maintenance(tx, "billing", SOMEBODY)
    committed(db, carried_forward(db, dead_again))
    assert event_status(db, event) == "consumed"


@rule("X-B4")
def test_bug_4_a_retry_owns_the_reservations_and_consumes_them(db: Database) -> None:
    a_workflow(db)
    first, second = some_events(db, "m1", "m2")
    run = stopped(db, a_run(db, Phase.EMITTING), FailureKind.TRANSIENT)
    db.advance_clock(LEASE)
    retry = carried_forward(db, run)
    with db.transaction() as tx:
        owner = tx.first(Statement[Any]("SELECT run_id FROM pipeline.deliveries WHERE event_id = :e"), e=first)
        assert owner is not None
        assert owner.run_id == retry.id
    done = committed(db, retry)
    assert done.status == RunStatus.COMMITTED
    assert (event_status(db, first), event_status(db, second)) == ("consumed", "pending")


@rule("X-B5", "X-C15")
def test_bug_5_a_crash_right_after_a_stop_needs_no_recovery(db: Database) -> None:
    a_workflow(db)
    (event,) = some_events(db, "m1")
    run = a_run(db, Phase.EMITTING)
    with pytest.raises(Crash):
        stopped(CrashingDatabase(db, after_commit=1), run, FailureKind.TRANSIENT)
    db.advance_clock(LEASE + TIMEOUT)
    assert rescuer.recover_crashed_runs(db) == ()
    with db.transaction() as tx:
        assert work.retryable_runs(tx, "billing") == [run.id]
    committed(db, carried_forward(db, the_run(db, run.id)))
    assert event_status(db, event) == "consumed"


@pytest.mark.broken_on_purpose
@rule("X-B3")
def test_an_orphaned_reservation_is_reported_and_never_released(db: Database) -> None:
    a_workflow(db)
    (event,) = some_events(db, "m1")
    run = stopped(db, a_run(db, Phase.EMITTING))
    with db.transaction() as tx:
        tx.execute(text("UPDATE pipeline.runs SET retry_pending = false WHERE id = :id"), id=run.id)
    rescuer.recover(db)
    assert event_status(db, event) == "reserved"
    with db.transaction() as tx:
        (finding,) = invariants.findings(tx)
    assert finding.invariant == "no-orphaned-reservation"
    assert str(event) in finding.subject
    assert str(run.id) in finding.detail
    with pytest.raises(IntegrityError, match="stays reserved"), db.transaction() as tx:
        tx.execute(
            text("UPDATE pipeline.deliveries SET status = 'pending', run_id = NULL WHERE event_id = :e"), e=event
        )


def test_a_retry_that_was_made_already_is_not_made_twice(db: Database) -> None:
    a_workflow(db, concurrency=4)
    some_events(db, "m1")
    run = stopped(db, a_run(db, Phase.EMITTING), FailureKind.TRANSIENT)
    db.advance_clock(LEASE)
    carried_forward(db, run)
    with db.transaction() as tx:
        assert starts.retry(tx, [run.id]).runs == ()
