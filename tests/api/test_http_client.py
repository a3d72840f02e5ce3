"""HttpClient against the app: the same receipts and errors as the other clients."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from pipeline.admin.access import Access
from pipeline.api import Role, create
from pipeline.client import EventInput, HttpClient, RefusedError, UnavailableError
from pipeline.config import Settings
from pipeline.domain.access import Rights
from pipeline.domain.errors import InvalidInputError
from pipeline.domain.values import Actor
from pipeline.store.database import Database
from tests.factories import IN, OUT, a_workflow
from tests.support.ports import free_port
from tests.support.table_reads import rows
from tests.support.wait import wait_for


def token(db: Database, role: Role = Role.PUBLISHER) -> str:
    return Access(db).create_token("shop", Rights(role=role), Actor(name="eva")).secret


class Unreliable:
    """An app that answers the first requests with 503, or closes the connection after it has done its work."""

    def __init__(self, app: ASGIApp) -> None:
        self.app, self.failures, self.requests = app, 0, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        self.requests += 1
        if self.failures:
            self.failures -= 1
            await send({"type": "http.response.start", "status": 503, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        await self.app(scope, receive, send)


@contextmanager
def serving(db: Database, database_url: str) -> Iterator[tuple[str, Unreliable]]:
    """The app on a port of this machine, in a thread."""
    app = Unreliable(create(Settings(database_url=database_url), database=db))
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_for(lambda: server.started, why="the server does not listen")
        yield f"http://127.0.0.1:{port}", app
    finally:
        server.should_exit = True
        thread.join(timeout=60)


def event(message_id: str, topic: str = IN) -> EventInput:
    return EventInput(topic=topic, message_id=message_id, payload={"n": 1})


def test_events_are_published_and_the_receipt_says_what_was_new(db: Database, database_url: str) -> None:
    a_workflow(db)
    with serving(db, database_url) as (url, app):
        client = HttpClient(url, token(db))
        receipt = client.publish("billing", [event("m1"), event("m2"), event("r1", OUT)])
        assert (set(receipt.new), receipt.repeated) == ({"m1", "m2", "r1"}, ())
        assert client.publish("billing", [event("m1"), event("m3")]).repeated == ("m1",)
        app.requests = 0
        many = client.publish("billing", [event(f"x{n}") for n in range(1_001)])
        assert (len(many.new), app.requests) == (1_001, 2)
        replaced = client.publish("billing", [{"topic": IN, "message_id": "m1", "payload": {"n": 2}}], replace=True)
        assert replaced.replaced == ("m1",)
        with pytest.raises(InvalidInputError, match="There is no workflow 'nowhere'"):
            client.publish("nowhere", [event("m9")])
        client.close()


def test_a_request_that_fails_for_now_is_sent_again_within_the_time(db: Database, database_url: str) -> None:
    a_workflow(db)
    with serving(db, database_url) as (url, app):
        app.failures = 2
        client = HttpClient(url, token(db), timeout=timedelta(seconds=20))
        assert client.publish("billing", [event("m1")]).new == ("m1",)
        assert app.requests == 3
        app.failures = 1_000
        short = HttpClient(url, token(db), timeout=timedelta(seconds=0.3))
        with pytest.raises(UnavailableError, match="it answered 503"):
            short.publish("billing", [event("m2")])
        client.close()
        short.close()
    assert [row.message_id for row in rows(db, "SELECT message_id FROM pipeline.events")] == ["m1"]


def test_a_token_that_is_refused_and_a_server_that_is_away_are_told_apart(db: Database, database_url: str) -> None:
    a_workflow(db)
    with serving(db, database_url) as (url, _):
        for secret, status in ((token(db, Role.VIEWER), "403"), ("pl_unknown", "401")):
            client = HttpClient(url, secret)
            with pytest.raises(RefusedError, match=status):
                client.publish("billing", [event("m1")])
            client.close()
    away = HttpClient(url, token(db), timeout=timedelta(seconds=0.3))
    with pytest.raises(UnavailableError, match="the same message ids"):
        away.publish("billing", [event("m1")])
    away.close()
    with pytest.raises(InvalidInputError, match="no address of the HTTP API"):
        HttpClient("localhost:8080", "pl_token")
