"""FastAPI and Flask: the examples as real processes beside one worker, and what their modules promise."""

import asyncio
import logging
import os
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from sqlalchemy import create_engine
from sqlalchemy.orm import scoped_session, sessionmaker

from examples import receipts
from pipeline import InvalidInputError
from pipeline.client import AsyncClient
from pipeline.domain.errors import SchemaVersionError
from pipeline.embedded import servers
from pipeline.fastapi import lifespan
from pipeline.flask import Pipeline
from pipeline.store.database import Database
from pipeline.testing import Inline, scripted
from tests.client.test_publishing import Celery
from tests.frameworks.conftest import answer, process
from tests.support import databases
from tests.support.environ import clean_environ
from tests.support.ports import free_port
from tests.support.table_reads import rows
from tests.support.wait import wait_for


@dataclass
class Shop:
    """A worker with the workflow `receipts`, and where its mails are."""

    environ: dict[str, str]
    home: Path
    mails: list[str] = field(default_factory=list)

    def pays(self, port: int, number: str) -> None:
        """Pay an order twice, and see that one receipt is sent."""
        for expected in ([f"order:{number}"], []):
            status, body = answer(f"http://127.0.0.1:{port}/orders/{number}/paid", {"email": "ada@example.org"})
            assert (status, body) == (200, {"is_new": bool(expected), "published": expected})
        self.mails.append(f"ada@example.org: Your receipt for {number}\n")
        wait_for(lambda: self.sent() == sorted(self.mails), within=60, every=0.2, why=f"receipt of {number}")

    def sent(self) -> list[str]:
        """Return every line of every mail."""
        return sorted(file.read_text() for file in (self.home / "outbox").glob("*"))


@pytest.fixture(scope="module")
def shop(embedded: servers.Servers, broker_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    home = tmp_path_factory.mktemp("shop")
    with databases.clone_database(embedded.database_url, f"web_{os.getpid()}") as url:
        environ = clean_environ() | {
            "PIPELINE_DATABASE_URL": url,
            "PIPELINE_BROKER_URL": f"{broker_url.rpartition('/')[0]}/1",
            "PIPELINE_WORKFLOWS": "examples.receipts",
            "PIPELINE_ALLOWED_UNSAFE_SETTINGS": "fsync",
            "PIPELINE_TICK": "1s",
            "RECEIPTS_OUTBOX": str(home / "outbox"),
        }
        environ |= {"SHOP_DATABASE_URL": url, "SHOP_BROKER_URL": environ["PIPELINE_BROKER_URL"]}
        worker = ["-m", "celery", "-A", "pipeline", "worker", "-B", "--pool=threads", "--concurrency=2"]
        worker += ["--without-mingle", "--loglevel=INFO", f"--schedule={home / 'schedule'}"]
        with process(worker, environ, home / "worker.log", sign=" ready."):
            yield Shop(environ, home)


@pytest.mark.timeout(300)
def test_the_example_under_uvicorn_pays_and_shows_the_console(shop: Shop) -> None:
    port = free_port()
    environ = shop.environ | {"SHOP_DATABASE_URL": shop.environ["SHOP_DATABASE_URL"].replace("psycopg2", "asyncpg")}
    command = ["-m", "uvicorn", "examples.fastapi_shop.app:app", f"--port={port}"]
    with process(command, environ, shop.home / "fastapi.log", sign="Application startup complete"):
        shop.pays(port, "fastapi")
        page = urllib.request.Request(f"http://127.0.0.1:{port}/ops/", headers={"X-Shop-User": "ada"})
        with urllib.request.urlopen(page, timeout=60) as found:
            assert "Pipeline" in found.read().decode()
        assert answer(f"http://127.0.0.1:{port}/ops/v1/workflows")[0] == 401
    assert "Application shutdown complete" in (shop.home / "fastapi.log").read_text()


@pytest.mark.timeout(300)
def test_the_example_under_werkzeug_pays(shop: Shop) -> None:
    port = free_port()
    command = ["-m", "flask", "--app", "examples.flask_shop.app", "run", f"--port={port}"]
    with process(command, shop.environ, shop.home / "flask.log", sign="Running on"):
        shop.pays(port, "flask")


def test_an_application_does_not_start_on_a_database_that_was_not_migrated(embedded: servers.Servers) -> None:
    async def start(url: str) -> None:
        async with lifespan(AsyncClient(url))(None):
            pytest.fail("it started")

    with databases.empty(embedded.database_url, f"lifespan_{os.getpid()}") as url, pytest.raises(SchemaVersionError):
        asyncio.run(start(url))


def test_an_application_starts_while_the_database_is_away(caplog: pytest.LogCaptureFixture) -> None:
    async def start() -> bool:
        async with lifespan(AsyncClient("postgresql://127.0.0.1:1/none", timeout=timedelta(seconds=5)))(None):
            return True

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(start())
    assert "the version of the database could not be checked" in caplog.text


def test_the_extension_publishes_with_the_session_and_wakes_after_its_commit(db: Database, database_url: str) -> None:
    Inline(db, [receipts.receipts], connectors=[scripted("mail")])
    engine = create_engine(database_url)
    session, celery = scoped_session(sessionmaker(engine)), Celery()
    app = Flask("shop")
    app.config["PIPELINE_QUEUE_PREFIX"] = "eu.shop"
    app.extensions["celery"] = celery
    pipeline = Pipeline(app, session=session)
    paid: dict[str, Any] = {"topic": "orders.paid", "message_id": "1", "payload": {"order": "1", "email": "a"}}
    with app.app_context():
        assert pipeline.publish("receipts", [paid]).new
        session.rollback()
        with session.begin_nested():
            pipeline.publish("receipts", [paid | {"message_id": "2"}])
        assert celery.sent == []
        session.commit()
        assert [(name, how["args"], how["queue"]) for name, how in celery.sent] == [
            ("pipeline.schedule", ["receipts"], "eu.shop.publish")
        ]
        assert pipeline.publish("receipts", [paid | {"message_id": "2"}]).repeated
        session.commit()
        with pytest.raises(InvalidInputError, match="Event 1"):
            pipeline.publish("receipts", [{"topic": "orders.paid"}])
    session.remove()
    engine.dispose()
    assert len(celery.sent) == 1
    assert [row.message_id for row in rows(db, "SELECT message_id FROM pipeline.events")] == ["2"]


def test_an_app_without_the_extension_is_named(database_url: str) -> None:
    engine = create_engine(database_url)
    pipeline = Pipeline(session=scoped_session(sessionmaker(engine)))
    with Flask("other").app_context(), pytest.raises(InvalidInputError, match=r"'other'.*pipeline\.init_app"):
        pipeline.publish("receipts", [])
    engine.dispose()
