"""A database that effects go to, a connector that brings them there, and ways to disturb both."""

import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.pool import NullPool

from pipeline.connectors.sdk import Call
from pipeline.connectors.sql import Sql, UnknownCommitError, create_effects_table, query, transaction
from pipeline.domain.errors import AuthError, LogicError, TransientError
from pipeline.domain.reconciliation import ErrorMeaning
from tests.connectors.http_server import do
from tests.support import databases
from tests.support.wait import wait_for

SETUP = """
CREATE TABLE bookings (id serial PRIMARY KEY, account text NOT NULL, cents integer CHECK (cents <> 13));
CREATE TABLE slow (id integer PRIMARY KEY);
CREATE FUNCTION wait_at_commit() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(30); RETURN NULL; END';
CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON slow DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION wait_at_commit();
CREATE TABLE parents (id integer PRIMARY KEY);
CREATE TABLE children (id integer REFERENCES parents DEFERRABLE INITIALLY DEFERRED);
"""
BOOK = text("INSERT INTO bookings (account, cents) VALUES (:account, :cents)")
Step = Callable[[Connection, Call], Any]


class Bank(Sql):
    name = "bank"
    step: Step  #: what ``run`` does

    @transaction(timeout=timedelta(seconds=9), redact=["account"], shows="book {cents}")
    def book(self, connection: Connection, call: Call, *, account: str, cents: int) -> dict[str, Any]:
        connection.execute(BOOK, {"account": account, "cents": cents})
        return {"key": call.idempotency_key, "cents": cents}

    @transaction()
    def run(self, connection: Connection, call: Call) -> Any:
        return self.step(connection, call)

    @query
    def total(self, connection: Connection, *, account: str) -> int:
        found = connection.execute(text("SELECT sum(cents) FROM bookings WHERE account = :a"), {"a": account})
        return int(found.scalar() or 0)

    @query
    def wrong(self, connection: Connection, *, statement: str) -> Any:
        return connection.execute(text(statement))


@contextmanager
def target(server_url: str, name: str) -> Iterator[str]:
    """A database with tables of its own, and nothing of ours but the table of effects."""
    with databases.empty(server_url, f"{name}_{os.getpid()}") as url:
        engine = create_engine(url, poolclass=NullPool)
        with engine.begin() as connection:
            connection.execute(text(SETUP))
        create_effects_table(engine)
        yield url


@contextmanager
def judging(url: str) -> Iterator[Engine]:
    """Another way into the same database; it is empty again after the test."""
    engine = create_engine(url, poolclass=NullPool)
    yield engine
    with engine.begin() as connection:
        connection.execute(text("TRUNCATE bookings, slow, children, parents, pipeline_effects"))


def count(judge: Engine, table: str = "bookings") -> int:
    with judge.connect() as connection:
        return int(connection.execute(text(f"SELECT count(*) FROM {table}")).scalar() or 0)


def booking(connection: Connection) -> Any:
    """Book a cent, and return nothing."""
    connection.execute(BOOK, {"account": "a", "cents": 1})


def ends(commits: bool) -> Step:
    def end(*_: Any) -> str:
        if not commits:
            raise ValueError("no")
        return "first"

    return end


@contextmanager
def inside(bank: Bank, to: Call, then: Step) -> Iterator[tuple["Future[Any]", threading.Event, list[int]]]:
    """A call that stands still in the middle of its open transaction: its end, what lets it go on, its backend."""
    is_in, go_on = threading.Event(), threading.Event()
    backend: list[int] = []

    def step(connection: Connection, call: Call) -> Any:
        backend.append(connection.execute(text("SELECT pg_backend_pid()")).scalar_one())
        booking(connection)
        is_in.set()
        assert go_on.wait(90)
        return then(connection, call)

    bank.step = step
    with ThreadPoolExecutor(1) as thread:
        ended = thread.submit(do, bank, "run", to)
        wait_for(lambda: is_in.is_set() or ended.done())
        assert is_in.is_set(), ended.exception(0)
        try:
            yield ended, go_on, backend
        finally:
            go_on.set()


def is_blocked(judge: Engine, backend: int) -> bool:
    """Return whether another backend waits for this one, according to Postgres."""
    with judge.connect() as connection:
        asked = text("SELECT 1 FROM pg_stat_activity WHERE :pid = ANY(pg_blocking_pids(pid))")
        return connection.execute(asked, {"pid": backend}).first() is not None


def terminate(judge: Engine, where: str) -> None:
    """Kill the one backend of this database that fits, once there is one."""
    asked = text(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        f" WHERE datname = current_database() AND pid <> pg_backend_pid() AND {where}"
    )

    def is_done() -> bool:
        with judge.connect() as connection:  # a new one each time: a transaction sees the same activity all along
            return bool(connection.execute(asked).all())

    wait_for(is_done)


@contextmanager
def cutting(url: str, *, hears: bool) -> Iterator[str]:
    """A way to the server that is cut when COMMIT comes by: after it was carried out, or before it arrives."""
    parts = make_url(url)

    def serve() -> None:
        client = listening.accept()[0]
        with client, socket.create_connection((parts.host or "", parts.port or 5432)) as server:
            while True:
                for readable in select.select([client, server], [], [], 20)[0]:
                    data = readable.recv(65536)
                    if not data:
                        return
                    if readable is client and b"COMMIT" in data:
                        if hears:
                            server.sendall(data)
                            assert b"COMMIT" in server.recv(65536)
                        return
                    (server if readable is client else client).sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as thread:
        served = thread.submit(serve)
        through = parts.set(host="127.0.0.1", port=listening.getsockname()[1]).update_query_dict({"sslmode": "disable"})
        yield through.render_as_string(hide_password=False)
        served.result(60)


def relay(source: socket.socket, sink: socket.socket, is_slow: threading.Event, is_over: threading.Event) -> None:
    """Pass on what comes; byte by byte while it is to be slow."""
    with suppress(OSError):
        while data := source.recv(65536):
            while is_slow.is_set() and data and not is_over.is_set():
                sink.sendall(data[:1])
                data = data[1:]
                is_over.wait(0.1)
            sink.sendall(data)
    for each in (source, sink):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


@contextmanager
def dripping(url: str) -> Iterator[tuple[str, threading.Event]]:
    """A way to the server on which answers come byte by byte once the event is set."""
    parts, is_slow, is_over = make_url(url), threading.Event(), threading.Event()

    def connect(client: socket.socket, server: socket.socket, threads: ThreadPoolExecutor) -> None:
        with client, server:
            asked = threads.submit(relay, client, server, threading.Event(), is_over)
            relay(server, client, is_slow, is_over)
            asked.result()

    def serve(threads: ThreadPoolExecutor) -> None:
        with suppress(OSError):
            while True:
                client = listening.accept()[0]
                server = socket.create_connection((parts.host or "", parts.port or 5432))
                threads.submit(connect, client, server, threads)

    with ThreadPoolExecutor(20) as threads, socket.create_server(("127.0.0.1", 0)) as listening:
        threads.submit(serve, threads)
        through = parts.set(host="127.0.0.1", port=listening.getsockname()[1]).update_query_dict({"sslmode": "disable"})
        try:
            yield through.render_as_string(hide_password=False), is_slow
        finally:
            is_over.set()
            listening.shutdown(socket.SHUT_RDWR)


def outcome(bank: Sql, operation: str, to: Call | None = None, **params: Any) -> tuple[ErrorMeaning, str]:
    """Return the meaning and the message of this call's error."""
    with pytest.raises((LogicError, TransientError, AuthError, UnknownCommitError)) as caught:
        do(bank, operation, to, **params)
    return type(bank).operations()[operation].reading(caught.value).meaning, str(caught.value)
