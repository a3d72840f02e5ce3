"""A real HTTP server that keeps effects by key, and misbehaves as a test wants.

``with world() as it:`` serves charges and customers. ``it.will(...)`` says what happens to the next
mutations, ``it.reads_will(...)`` to the next reads: each is a function of the exchange. What really
happened is in ``it.effects``, whatever the caller received.
"""

import functools
import json
import socket
import ssl
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from pipeline.connectors.sdk import Call, Connector

T = TypeVar("T")
DRIP = 0.05  #: seconds between two bytes of a server that drips


@dataclass(frozen=True, slots=True)
class Seen:
    """A request that arrived, as it was on the line."""

    method: str
    target: str
    headers: dict[str, str]
    body: Any


@dataclass(slots=True)
class World:
    """What the server knows. Customers are by id; charges by idempotency key, each done once."""

    url: str = ""
    effects: list[tuple[str, Any]] = field(default_factory=list)  #: key and body, as often as it happened
    charges: dict[str, dict[str, Any]] = field(default_factory=dict)
    customers: dict[str, Any] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    closed: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    mutations: deque["Behaviour"] = field(default_factory=deque)
    reads: deque["Behaviour"] = field(default_factory=deque)

    def will(self, *behaviours: "Behaviour") -> None:
        self.mutations.extend(behaviours)

    def reads_will(self, *behaviours: "Behaviour") -> None:
        self.reads.extend(behaviours)

    def times(self, key: str) -> int:
        """How often the effect of this key really happened."""
        return sum(each == key for each, _ in self.effects)


class Exchange(BaseHTTPRequestHandler):
    """One request and its answer."""

    protocol_version = "HTTP/1.1"
    world: World
    seen: Seen

    def serve(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        raw = self.rfile.read(length)
        seen = Seen(
            self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, json.loads(raw or b"null")
        )
        self.seen = seen
        with self.world.lock:
            self.world.seen.append(seen)
            waiting = self.world.reads if self.command == "GET" else self.world.mutations
            behaviour = waiting.popleft() if waiting else answers
        try:
            behaviour(self)
        except OSError:
            self.close_connection = True

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = serve  # noqa: N815 - names that http.server calls

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def commit(self) -> tuple[int, Any]:
        """Carry out the request, or read its effect."""
        seen, world = self.seen, self.world
        path = urlsplit(self.path)
        last = unquote(path.path.rsplit("/", 1)[-1])
        with world.lock:
            if self.command == "GET" and path.path == "/charges":
                wanted = parse_qs(path.query).get("key", [""])[0]
                return 200, {"items": [world.charges[wanted]] if wanted in world.charges else []}
            if self.command == "GET":
                return (200, world.customers[last]) if last in world.customers else (404, {"error": "no such customer"})
            key = seen.headers.get("idempotency-key", "")
            if key in world.charges:
                return 200, world.charges[key]
            world.effects.append((key, seen.body))
            done = {"id": len(world.effects), "key": key, "sent": seen.body}
            world.charges[key] = done
            if path.path.startswith("/customers/"):
                world.customers[last] = seen.body
            return 201, done

    def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def reset(self) -> None:
        """End the connection as a crashed host would."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        raise ConnectionResetError


Behaviour = Callable[[Exchange], None]


def answers(exchange: Exchange) -> None:
    status, body = exchange.commit()
    exchange.reply(status, json.dumps(body).encode(), {"X-Request-Id": "r-1", "X-Inner": "not for you"})


def resets_before(exchange: Exchange) -> None:
    exchange.reset()


def resets_after(exchange: Exchange) -> None:
    exchange.commit()
    exchange.reset()


def is_silent(exchange: Exchange) -> None:
    exchange.commit()
    exchange.world.closed.wait(120)
    exchange.reset()


def drips_head(exchange: Exchange) -> None:
    exchange.commit()
    _drip(exchange, b"HTTP/1.1 200 OK\r\nX-Slow: ")


def drips_body(exchange: Exchange) -> None:
    exchange.commit()
    _drip(exchange, b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")


def floods(exchange: Exchange) -> None:
    exchange.commit()
    exchange.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
    while not exchange.world.closed.is_set():
        exchange.wfile.write(b"x" * 65536)


def breaks_off(exchange: Exchange) -> None:
    exchange.commit()
    exchange.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
    exchange.wfile.flush()
    exchange.reset()


def fails_after(exchange: Exchange) -> None:
    exchange.commit()
    exchange.reply(502, b'{"error": "bad gateway"}', {})


def says(status: int, body: bytes = b"{}", **headers: str) -> Behaviour:
    """Answer this, and do nothing. Underscores in names of headers become dashes."""
    return lambda exchange: exchange.reply(status, body, {name.replace("_", "-"): v for name, v in headers.items()})


def after(event: threading.Event, then: Behaviour = answers) -> Behaviour:
    """Take the request in, and go on only when released: a slow commit."""

    def behaviour(exchange: Exchange) -> None:
        event.wait(120)
        then(exchange)

    return behaviour


def _drip(exchange: Exchange, head: bytes) -> None:
    exchange.wfile.write(head)
    while not exchange.world.closed.wait(DRIP):
        exchange.wfile.write(b"x")
        exchange.wfile.flush()
    exchange.close_connection = True


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no news."""


@contextmanager
def world(tls: ssl.SSLContext | None = None) -> Iterator[World]:
    """The server, in threads of this process, on a port of its own."""
    known = World()
    server = _Server(("127.0.0.1", 0), type("Serving", (Exchange,), {"world": known}))
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    known.url = f"http{'s' if tls else ''}://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield known
    finally:
        known.closed.set()
        server.shutdown()
        server.server_close()
        thread.join(5)


@contextmanager
def deaf(*, takes: int) -> Iterator[str]:
    """A server that takes so many connections and never reads from them; with none, it accepts no connection."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listening:
        port = listening.getsockname()[1]
        held: list[socket.socket] = []
        for _ in range(0 if takes else 2):  # fills what the system would take in by itself
            waiting = socket.socket()
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
            held.append(waiting)

        def take() -> None:
            with suppress(OSError):  # the test is over
                held.extend(listening.accept()[0] for _ in range(takes))

        taking = threading.Thread(target=take, daemon=True)
        taking.start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            listening.shutdown(socket.SHUT_RDWR)  # ends an accept that still waits; closing alone does not
            taking.join()
            for each in held:
                each.close()


def call(key: str = "billing:1", seconds: float = 20.0) -> Call:
    """A call that may take so long."""
    return Call.within(key, timedelta(seconds=seconds))


def do(connector: Connector, operation: str, to: Call | None = None, **params: Any) -> Any:
    """Carry out an operation as the host does: with checked parameters, read back from JSON."""
    known = type(connector).operations()[operation]
    given = known.arguments(known.to_stored_params(params))
    return known.function(connector, to or call(), **given) if known.is_mutation else known.function(connector, **given)


def ask(connector: Connector, operation: str, to: Call | None = None, **params: Any) -> Any:
    """Reconcile as the host does."""
    known = type(connector).operations()[operation]
    assert known.reconcile_function is not None
    return known.reconcile_function(connector, to or call(), **known.arguments(known.to_stored_params(params)))


@functools.cache
def _taken() -> socket.socket:
    """Bound and deaf for as long as this process lives: no other process can listen there."""
    made = socket.socket()
    made.bind(("127.0.0.1", 0))
    return made


def unused_port() -> int:
    """A port without a listener."""
    return int(_taken().getsockname()[1])


def with_time(test: Callable[[float], T]) -> T:
    """Test with a time that is waited out, and with more of it when the machine stood still before it was used."""
    for seconds in (1.2, 4.0):
        try:
            return test(seconds)
        except (Exception, pytest.fail.Exception):  # noqa: BLE001 - with time enough it says what it was
            continue
    return test(15.0)
