"""Publishing from asyncio, with both drivers: as safe as without it, and the event loop never stands still."""

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.pool import NullPool

from pipeline import InvalidInputError, NotFoundError, PayloadError
from pipeline.client import AsyncClient, Receipt, RefusedError, UnavailableError, publish_async
from pipeline.domain.errors import SchemaVersionError
from pipeline.embedded import servers
from pipeline.store.database import Database
from pipeline.testing import Inline
from tests.client.test_publishing import ORDER, Celery, count, shop  # noqa: F401 - a fixture
from tests.support import databases
from tests.support.table_reads import one

WAITING = """
SELECT count(*) AS n FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'
"""
DRIVERS = pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
OPENED = pytest.mark.parametrize("opened", [AsyncSession, AsyncEngine.connect], ids=["session", "connection"])


@pytest.fixture
def url(database_url: str, driver: str, shop: Inline) -> str:  # noqa: F811
    del shop
    return database_url.replace("+psycopg2:", f"+{driver}:")


@asynccontextmanager
async def engine_of(url: str, **options: Any) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(url, poolclass=NullPool, **options)
    yield engine
    await engine.dispose()


def with_session(url: str, work: Callable[[Any, AsyncEngine], Awaitable[None]], opened: Any = AsyncSession) -> None:
    """Run something with a session or a connection."""

    async def run() -> None:
        async with engine_of(url) as engine, opened(engine) as connection:
            await work(connection, engine)

    asyncio.run(run())


@DRIVERS
@OPENED
def test_an_event_is_there_if_and_only_if_the_callers_commit_is(url: str, db: Database, opened: Any) -> None:
    async def work(connection: Any, _: AsyncEngine) -> None:
        assert await publish_async(connection, "shop", [ORDER]) == Receipt(new=("order:1",))
        await connection.rollback()
        assert count(db) == 0
        async with connection.begin_nested() as savepoint:
            await publish_async(connection, "shop", [ORDER])
            await savepoint.rollback()
        second = {**ORDER, "message_id": "order:2"}
        assert (await publish_async(connection, "shop", [second])).new == ("order:2",)
        assert count(db) == 0, "nobody else sees it before the commit"
        await connection.commit()
        assert await publish_async(connection, "shop", [second]) == Receipt(repeated=("order:2",))
        assert await publish_async(connection, "shop", [second], replace=True) == Receipt(replaced=("order:2",))
        await connection.commit()

    with_session(url, work, opened)
    assert one(db, "SELECT message_id FROM pipeline.events").message_id == "order:2"


@DRIVERS
@OPENED
@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({**ORDER, "payload": {"id": 1}}, PayloadError, r"\$\.email is missing; expected it, as topic 'orders'"),
        ({**ORDER, "topic": "orderz"}, NotFoundError, "There is no topic of workflow 'shop' named 'orderz'"),
        ({"topic": "orders"}, InvalidInputError, "Event 2: message_id: Field required"),
    ],
)
def test_checks_and_errors_are_those_of_publish(
    url: str, db: Database, opened: Any, wrong: Any, error: type[Exception], words: str
) -> None:
    async def work(connection: Any, _: AsyncEngine) -> None:
        with pytest.raises(error, match=words):
            await publish_async(connection, "shop", [{**ORDER, "message_id": "good"}, wrong])
        await connection.commit()

    with_session(url, work, opened)
    assert count(db) == 0


@DRIVERS
@pytest.mark.parametrize("level", ["AUTOCOMMIT", "REPEATABLE READ", "SERIALIZABLE"])
def test_autocommit_and_stricter_transactions_are_refused(url: str, db: Database, level: str) -> None:
    async def run() -> None:
        async with engine_of(url, isolation_level=level) as engine, AsyncSession(engine) as session:
            words = "in autocommit" if level == "AUTOCOMMIT" else f"{level}.*READ COMMITTED"
            with pytest.raises(InvalidInputError, match=words):
                await publish_async(session, "shop", [ORDER])

    asyncio.run(run())
    assert count(db) == 0


@pytest.mark.parametrize("given", ["postgresql://somewhere", None])
def test_another_connection_is_refused_with_the_expected_types(given: Any) -> None:
    with pytest.raises(InvalidInputError, match="expected an AsyncSession or AsyncConnection of SQLAlchemy"):
        asyncio.run(publish_async(given, "shop", [ORDER]))


@DRIVERS
def test_the_event_loop_goes_on_while_a_publish_waits_for_a_lock(url: str, db: Database) -> None:
    async def work(holder: Any, engine: AsyncEngine) -> None:
        await publish_async(holder, "shop", [ORDER])
        client = AsyncClient(engine)
        waiting = asyncio.create_task(client.publish("shop", [ORDER]))
        while not await asyncio.to_thread(lambda: one(db, WAITING).n):
            assert not waiting.done()
        ticks = 0
        for _ in range(100):
            await asyncio.sleep(0.001)
            ticks += not waiting.done()
        assert ticks == 100, "the loop ticked while the publish waited for the lock, which is held by this very loop"
        await holder.commit()
        assert await waiting == Receipt(repeated=("order:1",))
        await client.close()

    with_session(url, work)
    assert count(db) == 1


class SlowCelery(Celery):
    """A broker that answers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = threading.Event()

    def send_task(self, name: str, *_: Any, **kwargs: Any) -> None:
        assert self.may_answer.wait(30)
        super().send_task(name, **kwargs)


def woken(app: Celery) -> list[str]:
    return [kwargs["args"][0] for _, kwargs in app.sent]


@DRIVERS
def test_the_client_commits_and_wakes_the_workflow_without_waiting_for_the_broker(url: str, db: Database) -> None:
    app = SlowCelery()

    async def run() -> None:
        async with AsyncClient(url.replace("postgresql", "postgres", 1), app) as client:
            await client.check_schema()
            for number in range(5):
                receipt = await client.publish("shop", [{**ORDER, "message_id": f"order:{number}"}])
                assert receipt.new == (f"order:{number}",)
            assert (await client.publish("shop", [ORDER])).repeated == ("order:1",)
            assert app.sent == [], "the broker has not answered yet"
            app.may_answer.set()

    asyncio.run(run())
    assert count(db) == 5
    assert woken(app) in (["shop"], ["shop", "shop"]), "those that wait are one, and closing waits for them"


@DRIVERS
def test_a_session_wakes_after_its_commit_only(url: str, caplog: pytest.LogCaptureFixture) -> None:
    app = Celery()

    async def work(session: AsyncSession, engine: AsyncEngine) -> None:
        client = AsyncClient(engine, app)
        await client.publish_in(session, "shop", [ORDER])
        await session.rollback()
        await client.publish_in(session, "shop", [ORDER])
        await session.close()
        async with session.begin():
            async with session.begin_nested():
                await client.publish_in(session, "shop", [ORDER])
            await session.execute(text("SELECT 1"))
            assert app.sent == []
        async with session.begin():
            assert (await client.publish_in(session, "shop", [ORDER])).repeated
        await client.close()
        async with session.begin():
            assert (await client.publish_in(session, "shop", [{**ORDER, "message_id": "late"}])).new
        async with engine.begin() as connection:
            assert (await client.publish_in(connection, "shop", [ORDER])).repeated

    with_session(url, work)
    assert woken(app) == ["shop"], "once, although more was committed after the client was closed"
    assert "the client is closed; the next tick finds the work of 'shop'" in caplog.text


@DRIVERS
def test_a_broker_that_is_away_costs_a_tick_and_nothing_else(
    url: str, db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with AsyncClient(url, Celery(is_away=True)) as client:
            await client.publish("shop", [ORDER])

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert count(db) == 1
    assert "the next tick finds the work of 'shop'" in caplog.text


@DRIVERS
def test_errors_of_the_database_are_those_of_the_other_clients(url: str, db: Database) -> None:
    async def run(url: str, **options: Any) -> None:
        async with AsyncClient(url, **options) as client:
            await client.publish("shop", [ORDER])

    with pytest.raises(UnavailableError, match="publish them again with the same message ids"):
        asyncio.run(run(url.rpartition("@")[0] + "@127.0.0.1:1/none"))
    with db.transaction() as tx:
        tx.execute(text("LOCK TABLE pipeline.events IN ACCESS EXCLUSIVE MODE"))
        with pytest.raises(UnavailableError, match="did not answer in time"):
            asyncio.run(run(url, timeout=timedelta(milliseconds=300)))
    assert count(db) == 0


@DRIVERS
def test_a_database_that_was_never_migrated_is_named_and_takes_nothing(embedded: servers.Servers, driver: str) -> None:
    async def run(url: str) -> None:
        async with AsyncClient(url.replace("+psycopg2:", f"+{driver}:")) as client:
            with pytest.raises(SchemaVersionError, match="pipeline db upgrade"):
                await client.check_schema()
            with pytest.raises(RefusedError, match="Nothing was published"):
                await client.publish("shop", [ORDER])

    with databases.empty(embedded.database_url, f"empty_{driver}_{os.getpid()}") as url:
        asyncio.run(run(url))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("mysql://db/shop", "expected postgresql://"),
        ("postgresql://db", "with the name of the database"),
        ("postgresql+pg8000://db/shop", "expected postgresql://"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused(given: str, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        AsyncClient(given)
