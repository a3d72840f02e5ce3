"""Two connections at once, with the moment between them under the test's control.

A race is proved, not hoped for: one side holds a lock, the test waits until Postgres itself reports
the other side blocked by it, then lets go.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from sqlalchemy import text

from pipeline.store.database import Database, Statement, Transaction
from tests.support.wait import wait_for

T = TypeVar("T")

#: However long the holder takes: that a lock is given up after a while is not what is proved here.
_PATIENCE = timedelta(minutes=1)
_BLOCKED = text("SELECT pid FROM pg_stat_activity WHERE :pid = ANY(pg_blocking_pids(pid))")


@contextmanager
def meanwhile(db: Database, act: Callable[[Transaction], T]) -> Iterator[Callable[[], "Future[T]"]]:
    """A second connection that starts ``act`` in a transaction of its own when called."""
    with ThreadPoolExecutor(max_workers=1) as pool:

        def begin() -> "Future[T]":
            return pool.submit(_in_transaction, db, act)

        yield begin


def raced(db: Database, first: Callable[[Transaction], object], second: Callable[[Transaction], T]) -> "Future[T]":
    """Run ``first`` and hold its transaction open, start ``second``, see it blocked, then commit ``first``.

    Returns how ``second`` ended.
    """
    with meanwhile(db, second) as begin:
        with db.transaction() as tx:
            first(tx)
            ended = begin()
            wait_until_blocked_by(db, tx)
        ended.exception(timeout=_PATIENCE.total_seconds())
    return ended


def wait_until_blocked_by(db: Database, tx: Transaction) -> None:
    """Return once Postgres reports somebody waiting for a lock that this transaction holds."""
    row = tx.first(Statement[Any]("SELECT pg_backend_pid() AS pid"))
    assert row is not None
    with db.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as watcher:
        wait_for(lambda: watcher.execute(_BLOCKED, {"pid": row.pid}).first(), why="somebody blocked by the holder")


def _in_transaction(db: Database, act: Callable[[Transaction], T]) -> T:
    with db.transaction() as tx:
        tx.set_lock_timeout(_PATIENCE)
        return act(tx)
