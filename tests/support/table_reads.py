"""Small reads that tests make of the tables."""

from typing import Any

from sqlalchemy import Row, text

from pipeline.domain.workflows import BlockKind, DesiredStatus, WorkflowStatus, workflow_status
from pipeline.store.database import Database
from pipeline.store.reads import work


def workflow_row(db: Database, name: str = "billing") -> Row[Any]:
    with db.transaction() as tx:
        row = work.workflow(tx, name)
    assert row is not None
    return row


def status_of(db: Database, name: str = "billing") -> WorkflowStatus:
    """The status people are shown."""
    row = workflow_row(db, name)
    with db.transaction() as tx:
        kinds = [BlockKind(block.kind) for block in work.open_blocks(tx, name)]
    return workflow_status(DesiredStatus(row.desired), kinds)


def session_of(db: Database, run: Row[Any]) -> Row[Any]:
    return one(db, "SELECT * FROM pipeline.sessions WHERE id = :id", id=run.session_id)


def open_session(db: Database, workflow: str = "billing") -> Row[Any] | None:
    with db.transaction() as tx:
        return tx.first(text("SELECT * FROM pipeline.sessions WHERE workflow = :w AND finished_at IS NULL"), w=workflow)


def one(db: Database, query: str, **params: Any) -> Row[Any]:
    with db.transaction() as tx:
        row = tx.first(text(query), **params)
    assert row is not None
    return row


def rows(db: Database, query: str, **params: Any) -> list[Row[Any]]:
    with db.transaction() as tx:
        return list(tx.all(text(query), **params))
