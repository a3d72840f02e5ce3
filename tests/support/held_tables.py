"""Find out in which order transactions really lock tables: hold one, and see what the other side holds by then.

Nothing is read from the text of statements, so an UPDATE counts as well as a FOR UPDATE.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from threading import Lock
from typing import Any

from sqlalchemy import text
from sqlalchemy.engine import Connection

from pipeline.domain.lock_order import LOCK_ORDER
from pipeline.store.database import Database, Transaction
from pipeline.store.writes import workflows
from tests.support.row_locks import recorded_transactions
from tests.support.wait import wait_for

_PATIENCE = timedelta(minutes=1)
_BLOCKED = text("SELECT pid FROM pg_stat_activity WHERE :pid = ANY(pg_blocking_pids(pid))")


class _RollBackError(Exception):
    """Ends a transaction whose effect is not wanted."""


def tables_held_too_early(db: Database, act: Callable[[Transaction], object]) -> list[tuple[str, str]]:
    """Pairs of tables that a transaction locks against the order: it holds the first while it waits for the second.

    Each table in turn is locked by another connection. The transaction is rolled back every time.
    """

    return [
        (held, table)
        for number, table in enumerate(LOCK_ORDER, start=1)
        for held in _held_while_waiting(
            db, f"SELECT 1 FROM pipeline.{table} FOR NO KEY UPDATE", act, among=LOCK_ORDER[number:]
        )
    ]


def tables_held_before_subscriptions(db: Database, workflow: str, act: Callable[[Transaction], object]) -> list[str]:
    """Tables that a transaction locks before the subscriptions of a workflow, which come before every table."""
    lock = str(workflows.LOCK_SUBSCRIPTIONS).replace(":workflow", f"'{workflow}'")
    return _held_while_waiting(db, lock, act, among=LOCK_ORDER)


def _held_while_waiting(
    db: Database, lock: str, act: Callable[[Transaction], object], *, among: Sequence[str]
) -> list[str]:
    def attempt() -> None:
        try:
            with db.transaction() as tx:
                tx.set_lock_timeout(_PATIENCE)
                act(tx)
                raise _RollBackError
        except _RollBackError:
            pass

    with ThreadPoolExecutor(max_workers=1) as pool:
        with db.engine.begin() as holder:
            holder.execute(text(lock))
            pid = holder.execute(text("SELECT pg_backend_pid()")).scalar_one()
            ended = pool.submit(attempt)
            found = [held for held in among if _is_held(db, held)] if _is_blocked(db, pid, ended) else []
        ended.result(timeout=60)
    return found


def _is_blocked(db: Database, pid: int, ended: "Future[None]") -> bool:
    """Wait until the other side is blocked by the holder, or has ended without needing its rows."""
    with db.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as watcher:
        wait_for(
            lambda: ended.done() or watcher.execute(_BLOCKED, {"pid": pid}).first(),
            why="the other side blocked, or at its end",
        )
        return not ended.done()


def _is_held(db: Database, table: str) -> bool:
    """Whether a transaction holds a row of this table."""
    with db.engine.connect() as prober:
        return _held_rows(prober, table) > 0


def _held_rows(prober: Connection, table: str) -> int:
    free = f"SELECT 1 FROM pipeline.{table} FOR NO KEY UPDATE SKIP LOCKED"
    row: Any = prober.execute(
        text(f"WITH free AS ({free}) SELECT (SELECT count(*) FROM pipeline.{table}) - (SELECT count(*) FROM free)")
    )
    number: int = row.scalar_one()
    prober.rollback()
    return number


def _is_held_by(prober: Connection, table: str, pid: int) -> bool:
    """Whether the transaction of a connection holds a row that was there before: its id is in the row."""
    own = (
        "SELECT transactionid FROM pg_locks WHERE pid = :pid AND locktype = 'transactionid' AND mode = 'ExclusiveLock'"
    )
    found = prober.execute(text(f"SELECT 1 FROM pipeline.{table} WHERE xmax IN ({own}) LIMIT 1"), {"pid": pid}).first()
    prober.rollback()
    return found is not None


@contextmanager
def recorded_tables(db: Database) -> Iterator[list[list[str]]]:
    """For each transaction, the tables of which it holds rows, in the order in which it got the first of each.

    A call that outlives its task is recorded in its own thread, so rows that another transaction holds do not count.
    """
    with db.engine.connect() as prober:
        turn = Lock()

        def note(connection: Any, _: str, tables: list[str]) -> None:
            with turn:
                pid = connection._connection.info.backend_pid
                tables += [table for table in LOCK_ORDER if table not in tables and _is_held_by(prober, table, pid)]

        with recorded_transactions(db, "after", note) as transactions:
            yield transactions
