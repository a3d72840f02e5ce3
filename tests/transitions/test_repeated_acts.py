"""The same act twice is one act, and a commit that would lose an event is refused."""

import pytest
from sqlalchemy import text

from pipeline.domain.errors import IllegalTransitionError
from pipeline.domain.failures import FailureKind
from pipeline.domain.states import Phase
from pipeline.domain.values import RunLease, RunOutput
from pipeline.domain.workflows import BlockKind
from pipeline.store.database import Database, Transaction
from pipeline.transitions import runs, workflows
from tests.factories import SOMEBODY, a_run, a_workflow, held, some_events, stopped, the_run
from tests.support.table_reads import rows, workflow_row


def test_a_workflow_paused_twice_is_paused_once(db: Database) -> None:
    a_workflow(db)
    for _ in range(2):
        with db.transaction() as tx:
            workflows.pause(tx, "billing", SOMEBODY)
    assert [row.act for row in rows(db, "SELECT act FROM pipeline.audit")] == ["workflow.pause"]


def test_one_cause_makes_one_block(db: Database) -> None:
    a_workflow(db)
    run = stopped(db, a_run(db, Phase.PREPARING), FailureKind.AUTH)
    with db.transaction() as tx:
        workflows.block(tx, [{"workflow": "billing", "run": run.id, "kind": BlockKind.APPROVAL, "reason": "again"}])
    assert [row.reason for row in rows(db, "SELECT reason FROM pipeline.blocks")] == ["division by zero"]


def test_the_first_reason_for_maintenance_stands(db: Database) -> None:
    a_workflow(db)
    stopped(db, a_run(db, Phase.PREPARING))
    with db.transaction() as tx:
        workflows.enter_maintenance(tx, "billing", "something else")
    assert workflow_row(db).maintenance_reason == "division by zero"


def test_leaving_maintenance_when_there_is_none_changes_nothing(db: Database) -> None:
    a_workflow(db)
    with db.transaction() as tx:
        workflows.exit_maintenance(tx, "billing", SOMEBODY)
    assert rows(db, "SELECT act FROM pipeline.audit") == []


def test_a_commit_that_would_not_consume_all_its_inputs_is_refused_whole(db: Database) -> None:
    """The database lets no transition take an input away; with its guards off, the commit notices."""
    a_workflow(db)
    some_events(db, "m1")
    run = a_run(db, Phase.EMITTING)
    with pytest.raises(IllegalTransitionError, match="0 of its 1 reserved events"), db.transaction() as tx:
        _commit_without_inputs(tx, held(run))
    assert the_run(db, run.id).phase == Phase.EMITTING


def _commit_without_inputs(tx: Transaction, mine: RunLease) -> None:
    tx.execute(text("SET LOCAL session_replication_role = replica"))
    tx.execute(text("UPDATE pipeline.deliveries SET status = 'pending', run_id = NULL"))
    runs.commit(tx, [RunOutput(lease=mine)]).only()
