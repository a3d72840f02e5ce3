"""Streams of changes: one query per second for all of them, resumed by a mark, filtered by scope."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import uvicorn
from starlette.testclient import TestClient

from pipeline.admin.access import Access
from pipeline.admin.changes import Changes, Mark, changes_since
from pipeline.api import Role, create
from pipeline.api.app import StreamingServer
from pipeline.api.context import Services
from pipeline.api.live import Broadcaster, LiveOptions
from pipeline.config import Settings
from pipeline.domain.access import Rights
from pipeline.domain.values import Actor
from pipeline.store.database import Database
from pipeline.transitions import workflows
from tests.api.conftest import ADA
from tests.factories import a_workflow
from tests.support.counted_statements import counted_statements
from tests.support.ports import free_port
from tests.support.wait import wait_for

STREAMS = 200
SHORT = LiveOptions(period=0.02, heartbeat=0.5)


def broadcaster_of(db: Database, options: LiveOptions = SHORT) -> Broadcaster:
    return Broadcaster(lambda mark: changes_since(db, mark), options)


def pause(db: Database, name: str) -> None:
    with db.transaction() as tx:
        workflows.pause(tx, name, Actor(name="ada", reason="a test"))


async def events_until(stream: AsyncIterator[bytes], is_last: Callable[[str], bool]) -> list[str]:
    """Read a stream until an event of it is the last one that is wanted."""
    found: list[str] = []
    async with asyncio.timeout(30):
        async for part in stream:
            found += [event for event in part.decode().split("\n\n") if event]
            if any(is_last(event) for event in found):
                return found
    return found


def acts(events: list[str]) -> list[dict[str, Any]]:
    lines = [event.splitlines() for event in events if "event: act" in event]
    return [json.loads(next(line for line in event if line.startswith("data: "))[6:]) for event in lines]


def test_a_change_reaches_the_streams_that_may_see_it_and_a_lost_one_resumes(db: Database) -> None:
    a_workflow(db, "billing")
    a_workflow(db, "mail")

    async def watch() -> None:
        live = broadcaster_of(db)
        everything, scoped = live.events(), live.events(frozenset({"mail"}))
        first = await events_until(everything, lambda event: "event: attention" in event)
        other = asyncio.create_task(events_until(scoped, lambda event: '"workflow": "mail"' in event))
        await asyncio.to_thread(pause, db, "billing")
        seen = await events_until(everything, lambda event: "workflow.pause" in event)
        assert [act["workflow"] for act in acts(seen)] == ["billing"]
        await asyncio.to_thread(pause, db, "mail")
        assert [act["workflow"] for act in acts(await other)] == ["mail"], "billing is out of scope"
        await events_until(everything, lambda event: '"workflow": "mail"' in event)
        mark = next(line[4:] for line in first[-1].splitlines() if line.startswith("id: "))
        resumed = await events_until(live.events(last_mark=mark), lambda event: '"workflow": "mail"' in event)
        assert {act["workflow"] for act in acts(resumed)} == {"billing", "mail"}
        unknown = await events_until(live.events(last_mark="0-other"), lambda event: "event: reset" in event)
        assert "event: reset" in unknown[-1]
        live.close()

    asyncio.run(watch())


def test_a_silent_stream_shows_that_it_lives_and_ends_with_the_process(db: Database) -> None:
    async def watch() -> None:
        live = broadcaster_of(db, LiveOptions(period=0.02, heartbeat=0.05))
        stream = live.events()
        await events_until(stream, lambda event: "still here" in event)
        live.close()
        async with asyncio.timeout(30):
            assert [part async for part in stream if b"still here" not in part] == []
        assert live.stream_count == 0
        assert [part async for part in live.events()] == [], "a closed one opens no stream"

    asyncio.run(watch())


def test_a_slow_client_is_dropped(db: Database) -> None:
    async def watch() -> None:
        live = broadcaster_of(db)
        slow = live.events()
        await events_until(slow, lambda event: "event: attention" in event)
        batch = await asyncio.to_thread(changes_since, db)
        for _ in range(200):
            live._send(batch)
        assert live.stream_count == 0
        async with asyncio.timeout(30):
            assert [part async for part in slow] == [], "its client reconnects"

    asyncio.run(watch())


def test_a_stream_ends_for_a_caller_whose_token_was_revoked(db: Database, database_url: str) -> None:
    """It ends for everybody after its lifetime; a client that may still read resumes at its mark."""
    a_workflow(db)
    made = Access(db).create_token("vic", Rights(role=Role.VIEWER), Actor(name="ada"))
    found = Services.connect(Settings(database_url=database_url), db)
    found = replace(found, broadcaster=broadcaster_of(db, replace(SHORT, lifetime=0.2)))
    with TestClient(create(services=found)) as client:
        ask = partial(client.get, "/v1/attention/stream", headers={"Authorization": f"Bearer {made.secret}"})
        first = ask()  # returns at its end
        assert (first.status_code, "event: attention" in first.text) == (200, True)
        mark = next(line[4:] for line in first.text.splitlines() if line.startswith("id: "))
        pause(db, "billing")
        resumed = client.get(
            "/v1/attention/stream", headers={"Authorization": f"Bearer {made.secret}", "Last-Event-ID": mark}
        )
        assert "workflow.pause" in resumed.text
        assert "event: reset" not in resumed.text
        Access(db).revoke_token(made.token.id, Actor(name="ada"))
        assert ask().status_code == 401


def test_a_read_that_fails_ends_no_stream(db: Database) -> None:
    asked: list[Mark | None] = []

    def read(mark: Mark | None) -> Changes:
        asked.append(mark)
        if len(asked) == 1:
            raise OSError("the database is away")
        return changes_since(db, mark)

    async def watch() -> None:
        live = Broadcaster(read, SHORT)
        await events_until(live.events(), lambda event: "event: attention" in event)
        live.close()

    asyncio.run(watch())
    assert len(asked) >= 2


@contextmanager
def serving(db: Database, database_url: str) -> Iterator[tuple[str, Services]]:
    """The app on a port of this machine, in a thread. It must end although streams are open."""
    found = Services.connect(Settings(database_url=database_url), db)
    app, port = create(services=found, identify=lambda _: ADA), free_port()
    config = uvicorn.Config(app, port=port, log_level="warning")
    server = StreamingServer(config, found.broadcaster)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_for(lambda: server.started, why="the server does not listen")
        yield f"http://127.0.0.1:{port}", found
    finally:
        server.should_exit = True
        thread.join(timeout=60)
        assert not thread.is_alive(), "open streams kept the server from its end"


def test_two_hundred_streams_cost_one_query_per_second(db: Database, database_url: str) -> None:
    a_workflow(db)
    reads: list[list[str]] = []

    async def watch(url: str, found: Services) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=60) as client:
            done = asyncio.Event()
            opened = [asyncio.create_task(stream(client, done)) for _ in range(STREAMS)]
            async with asyncio.timeout(60):
                while found.broadcaster.stream_count < STREAMS:
                    await asyncio.sleep(0.01)
            loop = asyncio.get_running_loop()
            with counted_statements(db) as transactions:
                begun = loop.time()
                while len(transactions) < 3:
                    await asyncio.sleep(0.01)
                seconds = loop.time() - begun
                reads.extend(transactions)
            assert len(reads) <= seconds + 1.5, f"{len(reads)} reads in {seconds:.1f} s"
            assert all(len(statements) == 1 for statements in reads), "nothing changes: one statement each"
            done.set()
            for task in opened:
                task.cancel()
            await asyncio.gather(*opened, return_exceptions=True)

    async def stream(client: httpx.AsyncClient, done: asyncio.Event) -> None:
        async with client.stream("GET", "/v1/attention/stream") as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            async for _ in response.aiter_bytes():
                if done.is_set():
                    return

    with serving(db, database_url) as (url, found):
        asyncio.run(watch(url, found))


def test_a_server_ends_although_a_stream_is_open(db: Database, database_url: str) -> None:
    with serving(db, database_url) as (url, _), httpx.stream("GET", f"{url}/v1/attention/stream", timeout=60) as opened:
        assert next(opened.iter_bytes()).startswith(b"retry:")
