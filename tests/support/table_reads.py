"""Small reads that tests make of the tables."""

from typing import Any

from pipeline.domain.workflows import BlockKind, DesiredStatus, WorkflowStatus, workflow_status
from pipeline.store.database import Database, Statement
from pipeline.store.reads import work


def workflow_row(db: Database, name: str = "billing") -> Any:
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


def session_of(db: Database, run: Any) -> Any:
    return one(db, "SELECT * FROM pipeline.sessions WHERE id = :id", id=run.session_id)


def open_session(db: Database, workflow: str = "billing") -> Any | None:
    with db.transaction() as tx:
        return tx.first(
            Statement[Any]("SELECT * FROM pipeline.sessions WHERE workflow = :w AND finished_at IS NULL"), w=workflow
        )


def one(db: Database, query: str, **params: Any) -> Any:
    with db.transaction() as tx:
        row = tx.first(Statement[Any](query), **params)
    assert row is not None
    return row


def rows(db: Database, query: str, **params: Any) -> list[Any]:
    with db.transaction() as tx:
        return list(tx.all(Statement[Any](query), **params))
