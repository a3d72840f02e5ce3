"""A small real HTTP server that keeps what happened by key, and a client that holds its deadline.

``POST /keyed`` does one thing once per key, ``POST /plain`` does it every time, ``GET /things/KEY`` tells.
``POST /strict`` is keyed as well, refuses another body under a known key with 422, and marks what it replays.
"""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from email.parser import Parser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from pipeline.connectors.sdk import Call
from pipeline.domain.errors import TransientError


class World(ThreadingHTTPServer):
    """What happened, by key. ``hides`` keeps it from a search, as a search index that lags does."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.happened: list[str] = []
        self.times: list[float] = []  #: when it happened, on the monotonic clock
        self.requests: list[str] = []
        self.hides = threading.Event()
        self.keys: dict[str, bytes] = {}  #: of ``/strict``, with the body that came first
        self._lock = threading.Lock()

    def effects(self, key: str) -> int:
        with self._lock:
            return self.happened.count(key)

    def do(self, key: str, *, keyed: bool) -> None:
        with self._lock:
            if not keyed or key not in self.happened:
                self.times.append(time.monotonic())
                self.happened.append(key)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is the point of these tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: World

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        key = self.headers["Idempotency-Key"]
        self.server.requests.append(f"POST {self.path}")
        if self.path == "/strict":
            self.do_strictly(key, body)
            return
        self.server.do(key, keyed=self.path == "/keyed")
        self.answer(201, {"id": f"thing-{key}"})

    def do_strictly(self, key: str, body: bytes) -> None:
        first = self.server.keys.setdefault(key, body)
        if first is body:
            self.server.do(key, keyed=False)
            self.answer(201, {"id": f"thing-{key}"})
        elif first == body:
            self.answer(200, {"id": f"thing-{key}", "replayed": True})
        else:
            self.answer(422, {"error": "the key belongs to another request"})

    def do_GET(self) -> None:
        key = unquote(self.path.removeprefix("/things/"))
        self.server.requests.append(f"GET {self.path}")
        if self.server.effects(key) and not self.server.hides.is_set():
            self.answer(200, {"id": f"thing-{key}"})
        else:
            self.answer(404, {})

    def answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def running() -> Iterator[World]:
    with World() as world:
        thread = threading.Thread(target=world.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield world
        world.shutdown()
        thread.join()


@dataclass
class Answer:
    """An answer, with the names that readings know it by."""

    status_code: int
    headers: Message
    body: dict[str, Any] = field(default_factory=dict)


class AnswerError(Exception):
    """The server did not respond with success."""

    def __init__(self, response: Answer) -> None:
        self.response = response
        super().__init__(f"the server answered {response.status_code}")


def post(url: str, path: str, call: Call, body: dict[str, Any], token: str = "") -> dict[str, Any]:
    data = json.dumps(body)
    headers = f"Idempotency-Key: {call.idempotency_key}\r\nAuthorization: Bearer {token}\r\n"
    answer = exchange(url, f"POST {path} HTTP/1.1\r\n{headers}Content-Length: {len(data)}", data, call)
    if answer.status_code >= 400:
        raise AnswerError(answer)
    return answer.body


def get(url: str, call: Call) -> Answer:
    return exchange(url, f"GET /things/{quote(call.idempotency_key, safe='')} HTTP/1.1", "", call)


def exchange(url: str, head: str, body: str, call: Call) -> Answer:
    """One request on a connection of its own. Every wait is for what remains, so all of them end by the deadline."""
    place = urlsplit(url)
    assert place.port
    if not call.remaining:
        raise TransientError("its time had passed before anything was sent")
    with socket.create_connection((place.hostname or "", place.port), left(call)) as line:
        line.settimeout(left(call))
        line.sendall(f"{head}\r\nHost: {place.netloc}\r\nConnection: close\r\n\r\n{body}".encode())
        data = b""
        while True:
            line.settimeout(left(call))
            piece = line.recv(65536)
            if not piece:
                break
            data += piece
    top, gap, rest = data.partition(b"\r\n\r\n")
    if not gap:
        raise ConnectionResetError("the server went away without an answer")
    status, _, headers = top.decode().partition("\r\n")
    return Answer(int(status.split()[1]), Parser().parsestr(headers), json.loads(rest or b"{}"))


def left(call: Call) -> float:
    if not call.remaining:
        raise TimeoutError("no answer in time")
    return call.remaining.total_seconds()
