"""Connections and transactions on a real Postgres: what is logged, when, on whose clock, over which connection."""

import logging
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from pipeline.store.connections import CallerConnection
from pipeline.store.database import Database, Statement, Transaction, encode_rows, is_transient
from tests import factories
from tests.support.statement_events import Listener, observed
from tests.support.wait import wait_for

PID = Statement[Any]("SELECT pg_backend_pid() AS pid")
TERMINATE = Statement[Any]("SELECT pg_terminate_backend(:pid)")
INSERT = text("INSERT INTO pipeline.workflows (name) VALUES (:name)")
COUNT = Statement[Any]("SELECT count(*) AS n FROM pipeline.workflows WHERE name = :name")


LogLines = Callable[[], list[str]]


@pytest.fixture
def log_lines(caplog: pytest.LogCaptureFixture) -> Iterator[LogLines]:
    """The log lines so far."""
    with caplog.at_level(logging.INFO, logger="pipeline"):
        yield lambda: [record.getMessage().partition(" ")[0] for record in caplog.records]


def count(db: Database, name: str) -> int:
    with db.transaction() as tx:
        row = tx.first(COUNT, name=name)
    assert row is not None
    return int(row.n)


def pid_of(tx: Transaction) -> int:
    row = tx.first(PID)
    assert row is not None
    return int(row.pid)


def test_log_lines_are_written_after_the_commit_and_in_order(db: Database, log_lines: LogLines) -> None:
    order: list[str] = []

    def committing() -> None:
        order.append(f"commit after {len(log_lines())} lines")

    with observed(db, Listener(committing=committing)), db.transaction() as tx:
        tx.log_on_commit("run.started", run_id=1)
        tx.log_on_commit("run.claimed", run_id=1)
    assert order == ["commit after 0 lines"]
    assert log_lines() == ["run.started", "run.claimed"]


def test_a_logged_change_is_already_visible_to_others(db: Database) -> None:
    seen: list[int] = []

    class Reader(logging.Handler):
        def emit(self, _: logging.LogRecord) -> None:
            seen.append(count(db, "said"))

    logger, reader = logging.getLogger("pipeline"), Reader(level=logging.INFO)
    level = logger.level
    logger.addHandler(reader)
    logger.setLevel(logging.INFO)
    try:
        with db.transaction() as tx:
            tx.execute(INSERT, name="said")
            tx.log_on_commit("workflow.registered", workflow="said")
    finally:
        logger.removeHandler(reader)
        logger.setLevel(level)
    assert seen == [1]


def test_a_transaction_that_rolls_back_leaves_nothing_and_logs_nothing(db: Database, log_lines: LogLines) -> None:
    with pytest.raises(ZeroDivisionError), db.transaction() as tx:  # noqa: PT012 - the whole transaction is what fails
        tx.execute(INSERT, name="gone")
        tx.log_on_commit("workflow.registered", workflow="gone")
        raise ZeroDivisionError
    assert log_lines() == []
    assert count(db, "gone") == 0


def test_a_statement_that_fails_logs_nothing(db: Database, log_lines: LogLines) -> None:
    with pytest.raises(IntegrityError), db.transaction() as tx:  # noqa: PT012 - the whole transaction is what fails
        tx.log_on_commit("workflow.registered", workflow="twice")
        tx.execute(INSERT, name="twice")
        tx.execute(INSERT, name="twice")
    assert log_lines() == []
    assert count(db, "twice") == 0


def test_a_commit_that_does_not_arrive_logs_nothing(db: Database, log_lines: LogLines) -> None:
    with pytest.raises(OperationalError), db.transaction() as tx:  # noqa: PT012 - the commit itself is what fails
        tx.execute(INSERT, name="lost")
        tx.log_on_commit("workflow.registered", workflow="lost")
        terminate(db, pid_of(tx))
    assert log_lines() == []
    assert count(db, "lost") == 0


def terminate(db: Database, pid: int) -> None:
    """End a server process from another connection, and wait until it is gone."""
    with db.transaction() as other:
        other.all(TERMINATE, pid=pid)
    wait_for(lambda: not _alive(db, pid), why=f"server process {pid} gone")


def _alive(db: Database, pid: int) -> bool:
    with db.transaction() as tx:
        return tx.first(Statement[Any]("SELECT FROM pg_stat_activity WHERE pid = :pid"), pid=pid) is not None


def test_a_pooled_connection_that_died_is_replaced_before_it_is_used(database_url: str, db: Database) -> None:
    pool = Database.connect(database_url, pool_size=1)
    try:
        with pool.transaction() as tx:
            first = pid_of(tx)
        with pool.transaction() as tx:
            assert pid_of(tx) == first, "the pool keeps its connection"
        terminate(db, first)
        with pool.transaction() as tx:
            assert pid_of(tx) != first
    finally:
        pool.dispose()


def test_a_database_without_a_pool_keeps_no_connection(database_url: str, db: Database) -> None:
    single = Database.connect_unpooled(database_url)
    with single.transaction() as tx:
        pid = pid_of(tx)
    wait_for(lambda: not _alive(db, pid), why="the connection closed")


def test_the_clock_stands_still_within_a_transaction_and_is_the_databases(db: Database) -> None:
    with db.transaction() as tx:
        now = tx.clock()
        row = tx.first(Statement[Any]("SELECT pipeline.clock() AS ours, transaction_timestamp() AS theirs"))
        assert row is not None
        assert now == row.ours == row.theirs == tx.clock()
    assert now.tzinfo is not None


@pytest.mark.parametrize("by", [timedelta(hours=3), timedelta(days=400), timedelta(seconds=-90.5)])
def test_advancing_moves_the_clock_of_every_later_transaction_by_exactly_that_time(db: Database, by: timedelta) -> None:
    real = Statement[Any]("SELECT transaction_timestamp() AS at")
    db.advance_clock(by)
    for _ in range(2):
        with db.transaction() as tx:
            row = tx.first(real)
            assert row is not None
            assert tx.clock() - row.at == by
    db.advance_clock(by)
    with db.transaction() as tx:
        row = tx.first(real)
        assert row is not None
        assert tx.clock() - row.at == 2 * by


def test_a_moved_clock_stays_with_its_database_and_does_not_leak_through_the_pool(db: Database) -> None:
    still = Database(db.engine)
    db.advance_clock(timedelta(days=10))
    with db.transaction() as tx:
        moved = tx.clock()
    with still.transaction() as tx:
        assert moved - tx.clock() > timedelta(days=9)
        row = tx.first(Statement[Any]("SELECT current_setting('pipeline.clock_offset', true) AS setting"))
    assert row is not None
    assert not row.setting


def test_columns_default_to_the_moved_clock(db: Database) -> None:
    factories.a_workflow(db)
    db.advance_clock(timedelta(days=10))
    factories.a_workflow(db, "later")
    with db.transaction() as tx:
        row = tx.first(Statement[Any]("SELECT max(created_at) - min(created_at) AS apart FROM pipeline.workflows"))
    assert row is not None
    assert row.apart > timedelta(days=9)


def test_changes_and_log_lines_wait_for_the_commit_of_the_callers_connection(db: Database, log_lines: LogLines) -> None:
    with db.engine.connect() as connection:
        tx = Transaction(CallerConnection(connection))
        tx.execute(INSERT, name="theirs")
        tx.log_on_commit("workflow.registered", workflow="theirs")
        assert count(db, "theirs") == 0
        assert log_lines() == []
        connection.commit()
        tx.flush_log()
    assert count(db, "theirs") == 1
    assert log_lines() == ["workflow.registered"]


def test_a_callers_own_connection_that_rolls_back_takes_our_rows_with_it(db: Database) -> None:
    with db.engine.connect() as connection:
        Transaction(CallerConnection(connection)).execute(INSERT, name="theirs")
        connection.rollback()
    assert count(db, "theirs") == 0


def test_a_log_line_is_written_once_however_often_it_is_flushed(db: Database, log_lines: LogLines) -> None:
    with db.transaction() as tx:
        tx.log_on_commit("run.started", run_id=1)
    tx.flush_log()
    assert len(log_lines()) == 1


def test_statements_return_rows_a_row_or_a_count(db: Database) -> None:
    with db.transaction() as tx:
        assert tx.execute(INSERT, name="a") == 1
        assert tx.execute(text("UPDATE pipeline.workflows SET version = 2 WHERE name = 'nobody'")) == 0
        assert tx.first(Statement[Any]("SELECT FROM pipeline.workflows WHERE name = 'nobody'")) is None
        assert [row.name for row in tx.all(Statement[Any]("SELECT name FROM pipeline.workflows"))] == ["a"]


@pytest.mark.parametrize(
    "span",
    [
        timedelta(0),
        timedelta(microseconds=100),
        timedelta(seconds=-1.5),
        timedelta(days=40_000),
        timedelta(microseconds=1),
        timedelta(microseconds=99),
    ],
)
def test_a_cohorts_spans_and_instants_arrive_as_they_were_sent(db: Database, span: timedelta) -> None:
    read = Statement[Any]("SELECT * FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS x(span interval, at timestamptz)")
    with db.transaction() as tx:
        now = tx.clock()
        row = tx.first(read, rows=encode_rows([{"span": span, "at": now}]))
    assert row is not None
    assert (row.span, row.at) == (span, now)


class _ServerError(Exception):
    """An error of the driver with the state that the server sent."""

    def __init__(self, pgcode: str | None) -> None:
        self.pgcode = pgcode


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (None, True),  # the connection broke
        ("08006", True),
        ("25006", True),
        ("40P01", True),
        ("53300", True),
        ("55P03", True),
        ("57P01", True),
        ("58030", True),
        ("23505", False),
        ("22P02", False),
        ("42P01", False),
        ("54000", False),  # the statement is too large, and stays so
    ],
)
def test_an_error_is_transient_by_its_sqlstate(state: str | None, expected: bool) -> None:
    assert is_transient(DBAPIError("SELECT 1", {}, _ServerError(state))) is expected
    assert is_transient(OperationalError("SELECT 1", {}, _ServerError(state))) is expected


def test_a_pool_without_a_free_connection_is_transient_and_other_errors_are_not() -> None:
    assert is_transient(PoolTimeoutError())
    assert not is_transient(ValueError("not the database's"))
    assert not is_transient(TimeoutError("of a socket of somebody else"))
