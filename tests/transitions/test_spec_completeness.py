"""EXECUTION's completeness table: every row a test, in the order of the table."""

from typing import Any

import pytest
from sqlalchemy import text

from pipeline.background import rescuer
from pipeline.domain.failures import FailureKind
from pipeline.domain.policies import FailurePolicy
from pipeline.domain.states import EventId, Evidence, MutationOutcome, Phase, Resolver, RunStatus
from pipeline.domain.values import AppliedMutation, FailedMutation
from pipeline.domain.workflows import WorkflowStatus
from pipeline.store.database import Database, Statement
from pipeline.transitions import mutations, resolution, starts, workflows
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
    refused,
    some_events,
    stopped,
    the_mutation,
    the_run,
)
from tests.support.rule import rule
from tests.support.table_reads import one, open_session, session_of, status_of, workflow_row

BEFORE = [Phase.PREPARING, Phase.PREPARED]
AFTER = [Phase.EMITTING]
STATUS = {
    FailureKind.TRANSIENT: (RunStatus.PAUSED_TRANSIENT, WorkflowStatus.ACTIVE),
    FailureKind.LOGIC: (RunStatus.FAILED_LOGIC, WorkflowStatus.ACTIVE),
    FailureKind.AUTH: (RunStatus.PAUSED_APPROVAL, WorkflowStatus.ERROR),
    FailureKind.INTERNAL: (RunStatus.FAILED_INTERNAL, WorkflowStatus.ERROR),
}


@rule("X-C1", "X-C2", "X-C3", "X-C4", "X-C5", "X-C6", "X-M3", "X-M4", "X-M7", "X-A2")
@pytest.mark.parametrize("kind", list(STATUS))
@pytest.mark.parametrize("phase", [*BEFORE, *AFTER])
def test_every_kind_of_failure_disposes_of_inputs_by_the_boundary(
    db: Database, phase: Phase, kind: FailureKind
) -> None:
    a_workflow(db)
    (event,) = some_events(db, "m1")
    run = stopped(db, a_run(db, phase), kind)
    assert (run.status, status_of(db)) == STATUS[kind]
    assert run.phase == phase, "a failure never changes the phase"
    keeps = phase in AFTER
    assert (run.retry_pending, event_status(db, event)) == (keeps, "reserved" if keeps else "pending")
    assert session_of(db, run).result == "failed"
    assert open_session(db) is None


@rule("X-C7", "X-A7")
def test_an_applied_mutation_sets_the_outcome_with_the_ledger(db: Database) -> None:
    a_workflow(db)
    some_events(db, "m1")
    run = applied(db, a_run(db, Phase.MUTATING), {"id": 1})
    ledger = the_mutation(db, run.mutation_id)
    assert (ledger.status, ledger.resolved_by, ledger.result) == ("applied", Resolver.CALL, {"id": 1})
    assert (run.mutation_outcome, run.phase) == (MutationOutcome.SUCCESS, Phase.MUTATED)


@rule("X-C8")
def test_a_refused_mutation_releases_inputs(db: Database) -> None:
    a_workflow(db)
    (event,) = some_events(db, "m1")
    run = refused(db, a_run(db, Phase.MUTATING))
    assert (run.mutation_outcome, event_status(db, event)) == (MutationOutcome.FAILURE, "pending")


@rule("X-C9")
def test_a_mutation_that_reconcile_finds_absent_releases_inputs(db: Database) -> None:
    run, event = in_doubt(db)
    with db.transaction() as tx:
        verdict = FailedMutation(
            mutation_id=run.mutation_id,
            error="not found",
            evidence=Evidence.ABSENCE,
            resolved_by=Resolver.RECONCILE,
        )
        mutations.fail(tx, [verdict]).only()
    run = the_run(db, run.id)
    assert (run.mutation_outcome, run.retry_pending) == (MutationOutcome.FAILURE, False)
    assert (event_status(db, event), status_of(db)) == ("pending", WorkflowStatus.ACTIVE)


def test_a_mutation_that_reconcile_finds_is_continued_by_a_retry(db: Database) -> None:
    run, event = in_doubt(db)
    with db.transaction() as tx:
        verdict = AppliedMutation(mutation_id=run.mutation_id, result={"id": 7}, resolved_by=Resolver.RECONCILE)
        mutations.apply(tx, [verdict]).only()
    run = the_run(db, run.id)
    assert (run.mutation_outcome, run.retry_pending, run.status) == ("success", True, "paused:reconciliation")
    assert status_of(db) is WorkflowStatus.ACTIVE
    committed(db, carried_forward(db, run))
    assert event_status(db, event) == "consumed"


@rule("X-C10")
def test_an_operators_did_not_happen_releases_inputs(db: Database) -> None:
    run, event = in_doubt(db)
    with db.transaction() as tx:
        resolution.did_not_happen(tx, run.mutation_id, SOMEBODY)
    assert event_status(db, event) == "pending"
    row = one(db, "SELECT * FROM pipeline.audit WHERE mutation_id = :id", id=run.mutation_id)
    assert (row.actor, row.act, row.reason) == ("ada", "mutation.did_not_happen", SOMEBODY.reason)


@rule("X-C11")
def test_an_operators_skip_marks_events_and_lets_next_commit_the_run(db: Database) -> None:
    run, event = in_doubt(db)
    with db.transaction() as tx:
        resolution.skip(tx, run.mutation_id, SOMEBODY)
    assert event_status(db, event) == "skipped"
    done = committed(db, carried_forward(db, the_run(db, run.id)))
    assert (done.status, event_status(db, event)) == (RunStatus.COMMITTED, "skipped")


@rule("X-C12", "X-A6")
def test_a_commit_consumes_exactly_the_inputs_of_its_run(db: Database) -> None:
    a_workflow(db)
    first, second = some_events(db, "m1", "m2")
    a_run(db, Phase.COMMITTED)
    assert (event_status(db, first), event_status(db, second)) == ("consumed", "pending")


@rule("X-13")
def test_a_commit_consumes_saves_the_state_ends_the_run_and_counts_in_its_session(db: Database) -> None:
    a_workflow(db)
    (event,) = some_events(db, "m1")
    run = a_run(db, Phase.EMITTING)
    assert (event_status(db, event), _state(db)) == ("reserved", None)
    run = committed(db, run, state={"sent": 1}, has_state=True)
    assert (run.phase, run.status, run.lease_expires_at) == ("committed", "committed", None)
    assert run.finished_at is not None
    assert (event_status(db, event), _state(db)) == ("consumed", {"sent": 1})
    with db.transaction() as tx:
        workflows.finish_sessions(tx, [run.session_id])
    assert session_of(db, run).run_count == 1


def _state(db: Database) -> Any:
    with db.transaction() as tx:
        return tx.one(Statement[Any]("SELECT state FROM pipeline.handlers WHERE name = 'send'")).state


@rule("X-C13", "X-A5")
@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        (Phase.PENDING, "pending"),
        (Phase.PREPARING, "pending"),
        (Phase.PREPARED, "reserved"),
        (Phase.MUTATING, "reserved"),
        (Phase.MUTATED, "reserved"),
        (Phase.EMITTING, "reserved"),
        (Phase.COMMITTED, "consumed"),
    ],
)
def test_events_are_reserved_with_prepared_and_consumed_with_committed(
    db: Database, phase: Phase, expected: str
) -> None:
    a_workflow(db)
    (event,) = some_events(db, "m1")
    a_run(db, phase)
    assert event_status(db, event) == expected


@rule("X-C14")
@pytest.mark.parametrize("phase", [Phase.PREPARING, Phase.PREPARED, Phase.MUTATING, Phase.EMITTING])
def test_a_crashed_run_is_disposed_of_like_a_stopped_one(db: Database, phase: Phase) -> None:
    a_workflow(db)
    (event,) = some_events(db, "m1")
    run = a_run(db, phase)
    db.advance_clock(LEASE + TIMEOUT)
    (ended,) = rescuer.recover_crashed_runs(db)
    keeps = phase in (Phase.MUTATING, Phase.EMITTING)
    assert ended.decision.disposition.retry_pending is keeps
    assert (the_run(db, run.id).retry_pending, event_status(db, event)) == (keeps, "reserved" if keeps else "pending")


@rule("X-C16", "X-M5", "X-A4")
def test_a_retry_copies_the_plan_and_takes_the_inputs(db: Database) -> None:
    a_workflow(db)
    some_events(db, "m1")
    run = stopped(db, a_run(db, Phase.EMITTING), FailureKind.TRANSIENT)
    db.advance_clock(LEASE)
    retry = carried_forward(db, run)
    assert (retry.phase, retry.prepare_result, retry.mutation_id) == ("emitting", run.prepare_result, run.mutation_id)
    assert (retry.mutation_outcome, retry.attempt, retry.event_ids) == ("success", 2, run.event_ids)


@rule("X-C17")
def test_a_session_without_work_left_is_finished_as_completed(db: Database) -> None:
    a_workflow(db)
    some_events(db, "m1")
    run = a_run(db, Phase.COMMITTED)
    with db.transaction() as tx:
        assert workflows.finish_sessions(tx, [run.session_id]) == (run.session_id,)
        assert workflows.finish_sessions(tx, [run.session_id]) == ()
    assert session_of(db, run).result == "completed"


def test_a_session_with_an_active_run_is_not_finished(db: Database) -> None:
    a_workflow(db)
    run = a_run(db, Phase.PREPARING)
    with db.transaction() as tx:
        assert workflows.finish_sessions(tx, [run.session_id]) == ()


@rule("X-C18")
def test_the_run_that_stops_ends_its_session_as_failed_with_its_error(db: Database) -> None:
    a_workflow(db)
    run = stopped(db, a_run(db, Phase.PREPARING))
    session = session_of(db, run)
    assert (session.result, session.error) == ("failed", "division by zero")


@rule("X-C19")
def test_an_unfinished_session_is_found_and_finished(db: Database) -> None:
    a_workflow(db)
    some_events(db, "m1")
    run = a_run(db, Phase.COMMITTED)
    assert rescuer.recover(db).sessions == 1
    assert session_of(db, run).result == "completed"


@rule("X-C20", "X-C21", "X-C22", "X-C23")
def test_maintenance_and_its_task_come_with_the_failure_and_end_with_a_fix(db: Database) -> None:
    a_workflow(db)
    (event,) = some_events(db, "m1")
    run = stopped(db, a_run(db, Phase.EMITTING))
    assert workflow_row(db).maintenance_reason == "division by zero"
    assert rescuer.recover_maintenance_mode(db) == 0, "the task was opened with the failure"
    with db.transaction() as tx:
        tx.execute(text("DELETE FROM pipeline.maintenance_tasks"))
    assert rescuer.recover_maintenance_mode(db) == 1, "the sweep opens a task that is missing"
    with db.transaction() as tx:
        assert not workflows.open_maintenance_task(tx, "billing"), "one open task per workflow"
        assert starts.retry(tx, [run.id]).hold_reason == "maintenance"
        workflows.exit_maintenance(tx, "billing", SOMEBODY)
    assert not workflow_row(db).maintenance
    assert the_run(db, run.id).retry_pending, "leaving maintenance keeps what waits for a retry"
    committed(db, carried_forward(db, run))
    assert event_status(db, event) == "consumed"


@rule("X-C24")
def test_pausing_and_resuming_change_no_run_no_event_and_no_count(db: Database) -> None:
    a_workflow(db, concurrency=4, failures=FailurePolicy(max_failures=2))
    some_events(db, "m1", "m2", "m3", "m4")
    waiting = stopped(db, a_run(db, Phase.EMITTING), FailureKind.TRANSIENT)
    in_flight = a_run(db, Phase.MUTATING)
    stopped(db, a_run(db, Phase.PREPARED), FailureKind.TRANSIENT)
    stopped(db, a_run(db, Phase.PREPARED), FailureKind.AUTH)
    before = _rows(db)
    assert waiting.retry_at
    assert in_flight.lease_expires_at
    with db.transaction() as tx:
        workflows.pause(tx, "billing", SOMEBODY)
        assert starts.start(tx, "billing", "send").hold_reason == "paused"
        workflows.resume(tx, "billing", SOMEBODY)
    assert status_of(db) == "active", "the block of the refused credentials is lifted"
    assert _rows(db) == before
    with db.transaction() as tx:
        workflows.resume(tx, "billing", SOMEBODY, forget_failures=True)
    assert _rows(db) != before, "forgetting the failures is a decision of its own"


def _rows(db: Database) -> dict[str, list[str]]:
    """Every row that pause and resume must not touch."""
    tables = ("runs", "events", "deliveries", "handlers", "mutations", "sessions")
    with db.transaction() as tx:
        found = {
            name: tx.all(Statement[Any](f"SELECT CAST(t AS text) AS line FROM pipeline.{name} t")) for name in tables
        }
    return {name: sorted(row.line for row in rows) for name, rows in found.items()}


def in_doubt(db: Database) -> tuple[Any, EventId]:
    """A run whose worker vanished while its mutation was in flight."""
    a_workflow(db)
    (event,) = some_events(db, "m1")
    run = a_run(db, Phase.MUTATING)
    db.advance_clock(LEASE + TIMEOUT)
    rescuer.recover_crashed_runs(db)
    return the_run(db, run.id), event
