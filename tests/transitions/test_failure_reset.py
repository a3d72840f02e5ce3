"""Failures are reset once the cause is fixed, and one bad row never delays the others."""

from datetime import timedelta

import pytest
from sqlalchemy import text

from pipeline.background import rescuer
from pipeline.domain.failures import FailureKind
from pipeline.domain.policies import Backoff, FailurePolicy
from pipeline.domain.states import Phase
from pipeline.store.database import Database
from pipeline.transitions import events, workflows
from tests.factories import (
    LEASE,
    SOMEBODY,
    TIMEOUT,
    a_delivery,
    a_run,
    a_workflow,
    carried_forward,
    claimed_next,
    some_events,
    stopped,
    the_run,
)
from tests.support.table_reads import status_of

TWICE = FailurePolicy(max_failures=2, backoff=Backoff(base=timedelta(0), cap=timedelta(0)))


@pytest.mark.parametrize("concurrency", [1, 2])
def test_the_failures_of_events_and_handlers_are_forgotten(db: Database, concurrency: int) -> None:
    a_workflow(db, concurrency=concurrency, failures=TWICE)
    (event,) = some_events(db, "m1")
    stopped(db, a_run(db, Phase.PREPARED), FailureKind.TRANSIENT)
    assert stopped(db, a_run(db, Phase.PREPARED), FailureKind.TRANSIENT).status == "failed:internal"
    resumed(db)
    assert a_delivery(db, event).failures == 0
    assert stopped(db, a_run(db, Phase.PREPARED), FailureKind.TRANSIENT).status == "paused:transient"


def test_the_failures_of_a_run_that_waits_for_its_retry_are_forgotten(db: Database) -> None:
    a_workflow(db, failures=TWICE)
    some_events(db, "m1")
    first = stopped(db, a_run(db, Phase.EMITTING), FailureKind.TRANSIENT)
    second = stopped(db, claimed_next(db, carried_forward(db, first)), FailureKind.TRANSIENT)
    assert (second.status, second.attempt) == ("failed:internal", 2)
    resumed(db)
    third = stopped(db, claimed_next(db, carried_forward(db, the_run(db, second.id))), FailureKind.TRANSIENT)
    assert third.status == "paused:transient"


def test_leaving_maintenance_forgets_failures_too(db: Database) -> None:
    a_workflow(db, concurrency=2, failures=TWICE)
    (event,) = some_events(db, "m1")
    stopped(db, a_run(db, Phase.PREPARED), FailureKind.TRANSIENT)
    stopped(db, a_run(db, Phase.PREPARED), FailureKind.LOGIC)
    with db.transaction() as tx:
        workflows.exit_maintenance(tx, "billing", SOMEBODY)
    assert a_delivery(db, event).failures == 0


def test_resuming_leaves_quarantined_events_in_quarantine(db: Database) -> None:
    a_workflow(db)
    (event,) = some_events(db, "m1")
    with db.transaction() as tx:
        events.quarantine(tx, "billing", "send", event, SOMEBODY)
    resumed(db)
    assert (a_delivery(db, event).status, status_of(db)) == ("quarantined", "active")


def test_one_policy_that_cannot_be_read_does_not_keep_other_runs_from_recovery(db: Database) -> None:
    for workflow in ("first", "second"):
        a_workflow(db, workflow)
        some_events(db, "m1", workflow=workflow)
    lapsed = [a_run(db, Phase.PREPARED, workflow=workflow) for workflow in ("first", "second")]
    with db.transaction() as tx:
        tx.execute(text("UPDATE pipeline.handlers SET failure_policy = '{\"unheard of\": 1}' WHERE workflow = 'first'"))
    db.advance_clock(LEASE + TIMEOUT)
    assert {ended.run_id for ended in rescuer.recover(db).runs} == {run.id for run in lapsed}
    assert [the_run(db, run.id).status for run in lapsed] == ["crashed", "crashed"]


def resumed(db: Database) -> None:
    with db.transaction() as tx:
        workflows.resume(tx, "billing", SOMEBODY, forget_failures=True)
