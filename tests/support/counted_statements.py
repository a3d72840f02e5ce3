"""Count what transactions ask of Postgres."""

from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.store.database import Database
from tests.support.row_locks import recorded_transactions


@contextmanager
def counted_statements(db: Database) -> Iterator[list[list[str]]]:
    """For each transaction, its statements without BEGIN and COMMIT."""
    with recorded_transactions(db, "before", lambda _, statement, noted: noted.append(statement)) as transactions:
        yield transactions
