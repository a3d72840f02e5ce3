"""Our connections choose their isolation level themselves, whatever the server, the database or the role says."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.engine import make_url

from pipeline.embedded import servers
from pipeline.store.database import Database, Statement
from pipeline.testing import FaultyProxy, is_complete_postgres_messages
from tests.support import databases
from tests.support.scripted_consumers import Shop
from tests.support.wait import wait_for

_LOCK_WORKFLOWS = Statement[Any]("SELECT 1 FROM pipeline.workflows FOR NO KEY UPDATE")
_LEVEL = Statement[Any]("""
SELECT current_setting('transaction_isolation') AS ours, current_setting('default_transaction_isolation') AS theirs
""")
_WAITING = Statement[Any]("""
SELECT count(*) AS number FROM pg_stat_activity
WHERE datname = current_database() AND pg_blocking_pids(pid) <> '{}'
""")


def waiting(database: Database) -> int:
    """How many connections wait for a lock."""
    with database.transaction() as tx:
        return int(tx.one(_WAITING).number)


@pytest.fixture
def strict_url(embedded: servers.Servers) -> Iterator[str]:
    """A database whose default level is not ours."""
    with databases.clone_database(embedded.database_url, f"strict_{os.getpid()}") as url:
        with Database.connect_unpooled(url).engine.begin() as connection:
            name = connection.engine.url.database
            connection.execute(text(f"ALTER DATABASE \"{name}\" SET default_transaction_isolation = 'repeatable read'"))
        yield url


@pytest.mark.parametrize("connect", [Database.connect, Database.connect_unpooled], ids=["pooled", "unpooled"])
def test_every_transaction_is_read_committed_whatever_the_default(
    strict_url: str, connect: Callable[[str], Database]
) -> None:
    database = connect(strict_url)
    for _ in range(2):  # a new connection, and one from the pool
        with database.transaction() as tx:
            level = tx.one(_LEVEL)
        assert level.ours == "read committed"
        with database.autocommit() as tx:
            assert tx.one(_LEVEL).ours == "read committed"
    database.dispose()


def test_a_level_that_another_client_left_in_a_shared_session_does_not_reach_our_transactions(strict_url: str) -> None:
    """A pooler in transaction mode gives each transaction a session that others have used."""
    database = Database.connect(strict_url, pool_size=1)
    with database.transaction() as tx:
        tx.execute(text("SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL SERIALIZABLE"))
    with database.transaction() as tx:
        level = tx.one(_LEVEL)
    assert (level.ours, level.theirs) == ("read committed", "serializable")
    database.dispose()


def test_two_schedulers_start_one_run_of_concurrency_1_whatever_the_default_level(strict_url: str) -> None:
    database = Database.connect(strict_url)
    shop = Shop(concurrency=1)
    run = shop.started(database, 1)
    run.scheduler.schedule(["shop"])
    while run.messages:
        run.deliver(run.messages.popleft())  # its session stays open
    run.publish(shop.orders, {"n": 1}, {"n": 2})
    with ThreadPoolExecutor(max_workers=2) as pool:
        with database.transaction() as holder:
            holder.all(_LOCK_WORKFLOWS)
            first = pool.submit(run.scheduler.schedule, ["shop"])
            second = pool.submit(run.scheduler.schedule, ["shop"])
            wait_for(lambda: waiting(database) == 2)
        first.result(timeout=60)
        second.result(timeout=60)
    assert [row.status for row in run.runs()] == ["committed", "active"]
    database.dispose()


def test_the_level_costs_no_round_trip(strict_url: str) -> None:
    server = make_url(strict_url)
    assert server.host is not None
    assert server.port is not None
    with FaultyProxy(server.host, server.port, is_complete=is_complete_postgres_messages) as proxy:
        database = Database.connect(server.set(host=proxy.host, port=proxy.port).render_as_string(hide_password=False))
        with database.transaction() as tx:
            tx.one(_LEVEL)
        before = len(proxy.requests)
        with database.transaction() as tx:
            tx.one(_LEVEL)
        sent = [request.data for request in proxy.requests[before:]]
        database.dispose()
    assert len(sent) == 2, sent
    assert b"BEGIN ISOLATION LEVEL READ COMMITTED; EXECUTE" in sent[0]
    assert b"COMMIT" in sent[1]
