"""A client that follows redirects may fail at the second address, when the first one has done the work."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from pipeline import Call, Connector, ErrorMeaning, ErrorReading, Workflow, mutation
from pipeline.store.database import Database
from pipeline.testing import Inline


class Provider(ThreadingHTTPServer):
    """Charges, and redirects the caller to another place."""

    def __init__(self, elsewhere: str) -> None:
        super().__init__(("127.0.0.1", 0), _Charging)
        self.elsewhere, self.charges = elsewhere, 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Charging(BaseHTTPRequestHandler):
    server: Provider

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.charges += 1
        self.send_response(303)
        self.send_header("Location", self.server.elsewhere)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def closed_port() -> Iterator[str]:
    """An address where every connection is refused, for as long as this lasts."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@contextmanager
def provider(elsewhere: str) -> Iterator[Provider]:
    with Provider(elsewhere) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield server
        server.shutdown()


def _posted(url: str, order: str, *, follow_redirects: bool) -> Any:
    sent = {"order": order}
    return httpx.post(url, json=sent, follow_redirects=follow_redirects, trust_env=False, timeout=20).json()


class Payments(Connector):
    name = "payments"

    def __init__(self, url: str) -> None:
        self.url = url

    @mutation(timeout=timedelta(seconds=20))
    def charge(self, _call: Call, *, order: str) -> Any:
        return _posted(self.url, order, follow_redirects=True)

    @mutation(
        timeout=timedelta(seconds=20),
        errors=lambda e: ErrorReading(meaning=ErrorMeaning.NOT_NOW) if isinstance(e, httpx.ConnectError) else None,
    )
    def charge_once(self, _call: Call, *, order: str) -> Any:
        return _posted(self.url, order, follow_redirects=False)


def started(db: Database, url: str, operation: str) -> Inline:
    shop = Workflow("shop")
    orders = shop.topic("orders")
    shop.effect(orders)(lambda ctx, order: getattr(ctx.payments, operation)(order=order.payload))
    run = Inline(db, [shop], [Payments(url)])
    run.publish(orders, "4711")
    run.run()
    return run


@pytest.mark.parametrize("elsewhere", ["refuses", "myapp://charged"])
def test_a_failure_after_a_redirect_is_in_doubt_and_not_repeated(db: Database, elsewhere: str) -> None:
    with closed_port() as dead, provider(dead if elsewhere == "refuses" else elsewhere) as server:
        run = started(db, server.url, "charge")
        for _ in range(3):
            run.advance(timedelta(minutes=15))
            run.sweeps.tick()
            run.run()
        assert server.charges == 1
    (row,) = run.ledger()
    assert (row.status, row.attempts) == ("indeterminate", 1)


def test_an_operation_without_redirects_may_read_a_refused_connection_as_not_done(db: Database) -> None:
    with closed_port() as dead:
        run = started(db, dead, "charge_once")
    (row,) = run.ledger()
    assert (row.status, row.resolved_by, row.attempts) == ("failed", "call", 3)
