"""Statements are planned once per connection, and a connection that was lost or is shared is noticed."""

import fcntl
import importlib
import os
import pkgutil
import resource
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import TextClause, text
from sqlalchemy.exc import DBAPIError

import pipeline.store
from pipeline.store import connections
from pipeline.store.connections import PooledConnection, _compiled, _is_constant
from pipeline.store.database import Command, Database, Statement, Transaction, is_transient
from pipeline.store.reads.invariants import Invariant

_PID = Statement[Any]("SELECT pg_backend_pid() AS pid")
_PREPARED = Statement[Any]("SELECT count(*) AS number FROM pg_prepared_statements")
_XID = Statement[Any]("SELECT pg_current_xact_id() AS xid")
_ALL = Statement[Any]("SELECT * FROM scratch ORDER BY n")
_UUIDS = Statement[Any]("SELECT '018f4e2a-7b1c-7d3e-8f90-123456789abc'::uuid AS id, NULL::uuid AS none")
_INSERT = Command("INSERT INTO scratch (n) VALUES (:n)")
_TEXTS = Statement[Any]("SELECT CAST(:texts AS text[]) AS texts, cardinality(CAST(:texts AS text[])) AS number")
_PERCENT = Statement[Any]("SELECT 100 % CAST(:by AS integer) AS rest, 'a\\:b' AS colon, '1:2' AS time")


@pytest.fixture
def pool(database_url: str) -> Iterator[Database]:
    """A pool of one connection."""
    pool = Database.connect(database_url, pool_size=1)
    yield pool
    pool.dispose()


@pytest.fixture
def scratch(pool: Database) -> Iterator[Database]:
    """The same, with a table that the test may change."""
    with pool.transaction() as tx:
        tx.execute(text("CREATE TABLE scratch (n integer)"))
    yield pool
    with pool.transaction() as tx:
        tx.execute(text("DROP TABLE scratch"))


def shared(pool: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next connection look as one through a pooler: the number of its backend is another's."""
    monkeypatch.setattr(connections, "_FACTS", connections._FACTS.replace("pg_backend_pid()", "0"))
    pool.dispose()


def number_of(scratch: Database) -> int:
    with scratch.transaction() as tx:
        return len(tx.all(_ALL))


def insert_and_fail(transaction: AbstractContextManager[Transaction]) -> None:
    with transaction as tx:
        tx.execute(_INSERT, n=1)
        raise RuntimeError


def insert_and_go_on_after_an_error(scratch: Database) -> None:
    with scratch.transaction() as tx:
        tx.execute(_INSERT, n=1)
        with pytest.raises(DBAPIError):
            tx.execute(text("SELECT 1 / 0"))


def read_second(scratch: Database) -> None:
    with scratch.transaction() as tx:
        tx.one(_PID)
        tx.all(_ALL)


def lose_connection(pool: Database, db: Database) -> None:
    with pool.transaction() as tx:
        end_backend(db, tx.one(_PID).pid)
        tx.one(_PID)


def end_backend(db: Database, pid: int) -> None:
    with db.transaction() as tx:
        tx.execute(text("SELECT pg_terminate_backend(:pid, 10000)"), pid=pid)


def test_a_statement_is_prepared_once_per_connection(pool: Database) -> None:
    for _ in range(3):
        with pool.transaction() as tx:
            tx.one(_PID)
            prepared = tx.one(_PREPARED).number
    assert prepared == 2


def test_an_id_that_was_read_before_is_not_made_again(pool: Database) -> None:
    with pool.transaction() as tx:
        first, second = (tx.one(_UUIDS) for _ in range(2))
    assert first == (UUID("018f4e2a-7b1c-7d3e-8f90-123456789abc"), None)
    assert first.id is second.id


def test_every_statement_of_the_store_can_be_prepared(pool: Database) -> None:
    modules = [
        importlib.import_module(each.name) for each in pkgutil.walk_packages(pipeline.store.__path__, "pipeline.store.")
    ]
    found = {each.text: each for module in modules for each in statements_in(list(vars(module).values()))}
    assert len(found) > 200
    with pool.transaction() as tx:
        for number, sql in enumerate(found):
            if _is_constant(found[sql]):
                tx.execute(text(f"PREPARE s{number} AS {_escaped(_compiled(sql).numbered)}"))
                tx.execute(text(f"DEALLOCATE s{number}"))


def statements_in(value: object) -> Iterator[TextClause]:
    """The statements of a module: as attributes, in tables, and in invariants."""
    if isinstance(value, Statement | Command):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from statements_in(each)
    elif isinstance(value, Invariant):
        yield value.query


def _escaped(sql: str) -> str:
    return sql.replace("%%", "%").replace(":", "\\:")


def test_behind_a_pooler_nothing_is_prepared_and_autocommit_is_one_transaction(
    pool: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared(pool, monkeypatch)
    with pool.autocommit() as tx:
        assert tx.one(_PREPARED).number == 0
        assert tx.one(_XID).xid == tx.one(_XID).xid


def test_statements_in_autocommit_are_transactions_of_their_own(scratch: Database) -> None:
    with scratch.autocommit() as tx:
        assert tx.one(_XID).xid != tx.one(_XID).xid
    with pytest.raises(RuntimeError):
        insert_and_fail(scratch.autocommit())
    assert number_of(scratch) == 1


@pytest.mark.parametrize("is_shared", [False, True], ids=["ours", "shared"])
def test_an_error_in_a_transaction_undoes_all_of_it(
    scratch: Database, monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    if is_shared:
        shared(scratch, monkeypatch)
    with pytest.raises(RuntimeError):
        insert_and_fail(scratch.transaction())
    assert number_of(scratch) == 0


def test_a_transaction_that_goes_on_after_a_failed_statement_does_not_commit(scratch: Database) -> None:
    with pytest.raises(DBAPIError, match="nothing of it is committed"):
        insert_and_go_on_after_an_error(scratch)
    assert number_of(scratch) == 0


@pytest.mark.parametrize("is_autocommit", [False, True], ids=["transaction", "autocommit"])
def test_a_statement_is_planned_again_after_its_table_was_changed(scratch: Database, is_autocommit: bool) -> None:
    with scratch.transaction(is_autocommit=is_autocommit) as tx:
        tx.execute(_INSERT, n=1)
        assert tx.all(_ALL)[0]._fields == ("n",)
    with scratch.transaction() as tx:
        tx.execute(text("ALTER TABLE scratch ADD COLUMN m integer DEFAULT 7"))
    with scratch.transaction(is_autocommit=is_autocommit) as tx:
        assert tx.all(_ALL) == [(1, 7)]


def test_a_change_of_a_table_in_the_middle_of_a_transaction_is_a_transient_error(scratch: Database) -> None:
    assert number_of(scratch) == 0
    with scratch.transaction() as tx:
        tx.execute(text("ALTER TABLE scratch ADD COLUMN m integer"))
    with pytest.raises(DBAPIError) as raised:
        read_second(scratch)
    assert is_transient(raised.value)
    assert number_of(scratch) == 0


def test_a_connection_that_the_server_ended_is_replaced_before_use(pool: Database, db: Database) -> None:
    with pool.transaction() as tx:
        pid = tx.one(_PID).pid
    end_backend(db, pid)
    with pool.transaction() as tx:
        assert tx.one(_PID).pid != pid


def test_a_connection_that_is_lost_in_a_transaction_leaves_the_pool(pool: Database, db: Database) -> None:
    with pytest.raises(DBAPIError) as raised:
        lose_connection(pool, db)
    assert is_transient(raised.value)
    with pool.transaction() as tx:
        tx.one(_PID)


@pytest.mark.parametrize("is_shared", [False, True], ids=["ours", "shared"])
def test_an_array_keeps_every_text(pool: Database, monkeypatch: pytest.MonkeyPatch, is_shared: bool) -> None:
    if is_shared:
        shared(pool, monkeypatch)
    texts = ["", " ", "a,b", '"', "\\", "{}", "NULL", "null", "ä\n\x1f", None, "%s", ":name"]
    with pool.transaction() as tx:
        assert tx.one(_TEXTS, texts=texts) == (texts, len(texts))
        assert tx.one(_TEXTS, texts=[]) == ([], 0)


@pytest.mark.parametrize("is_shared", [False, True], ids=["ours", "shared"])
def test_percent_signs_and_colons_of_a_statement_stay(
    pool: Database, monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    if is_shared:
        shared(pool, monkeypatch)
    with pool.transaction() as tx:
        assert tx.one(_PERCENT, by=7) == (2, "a:b", "1:2")


@pytest.mark.parametrize("command", ["COMMIT", "ROLLBACK"])
def test_an_interruption_before_the_end_of_a_transaction_leaves_none_open(
    scratch: Database, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """As a signal handler does that raises just before the command is sent."""
    plain = PooledConnection._send

    def interrupted(self: PooledConnection, sent: str) -> None:
        if sent == command:
            monkeypatch.setattr(PooledConnection, "_send", plain)
            raise InterruptedError
        plain(self, sent)

    monkeypatch.setattr(PooledConnection, "_send", interrupted)
    with pytest.raises((InterruptedError, RuntimeError)):
        insert_and_fail(scratch.transaction()) if command == "ROLLBACK" else insert(scratch)
    with scratch.autocommit() as tx:
        tx.execute(_INSERT, n=2)
    with scratch.transaction() as tx:
        assert tx.all(_ALL) == [(2,)]


def insert(scratch: Database) -> None:
    with scratch.transaction() as tx:
        tx.execute(_INSERT, n=1)


def test_a_connection_with_a_large_descriptor_can_be_checked() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    reader, writer = os.pipe()
    try:
        large = fcntl.fcntl(reader, fcntl.F_DUPFD, 1500)
        assert connections.is_alive(SimpleNamespace(fileno=lambda: large))
        os.close(large)
    finally:
        os.close(reader)
        os.close(writer)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
