"""The outside world as a process of its own: it counts effects, and waits, hangs or forgets to answer when told.

Every effect is appended to a file before it is answered, so nothing that happens to a worker undoes
it. Effects are counted by event, which is what must never happen twice, and by idempotency key, which
is what the ledger must agree with. The recorder does not deduplicate: a second request is a second effect.
"""

import json
import select
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.support.wait import wait_for

#: Where callers can be made to wait. ``before`` and ``after`` stand on either side of an effect.
GATES = ("prepare", "before", "after", "next")


class Gate:
    """Open, or closed with callers waiting in front of it."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._lock = threading.Lock()
        self.waiting = 0

    def set(self, *, is_open: bool) -> None:
        (self._open.set if is_open else self._open.clear)()

    def go_through(self, connection: socket.socket) -> bool:
        """Wait for the gate; False when the caller hung up meanwhile."""
        if self._open.is_set():
            return True
        with self._lock:
            self.waiting += 1
        try:
            while not self._open.wait(0.05):
                if _gone(connection):
                    return False
            return not _gone(connection)
        finally:
            with self._lock:
                self.waiting -= 1


class Book:
    """The effects on disk and in memory, the gates, and what is to happen at named points."""

    def __init__(self, file: Path) -> None:
        self._file, self._lock = file, threading.Lock()
        self.effects: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        self.gates = {name: Gate() for name in GATES}
        self.orders: dict[str, str] = {}
        self.obeyed: dict[str, int] = {}

    def write(self, event: str, key: str, sender: socket.socket) -> bool:
        """Write an effect down, unless its sender hung up: it may have been told already that nothing was found."""
        with self._lock:
            if _gone(sender):
                return False
            with self._file.open("a") as file:
                file.write(json.dumps({"event": event, "key": key}) + "\n")
            self.effects.append({"event": event, "key": key})
            self.keys.add(key)
            return True

    def has(self, key: str) -> bool:
        with self._lock:
            return key in self.keys

    def order_at(self, point: str, pid: int) -> str:
        """What the process that reaches this point shall do; each order is given once."""
        with self._lock:
            if point in self.orders:
                self.obeyed[point] = pid
            return self.orders.pop(point, "")

    def give_order(self, point: str, what: str) -> None:
        with self._lock:
            self.obeyed.pop(point, None)
            self.orders[point] = what

    def forget(self) -> None:
        """As new: no effect, no order, every gate open."""
        for gate in self.gates.values():
            gate.set(is_open=True)
        with self._lock:
            self.effects, self.keys, self.orders, self.obeyed = [], set(), {}, {}


class Handler(BaseHTTPRequestHandler):
    """One request: a verb in the path, its arguments in the body."""

    protocol_version = "HTTP/1.1"
    book: Book

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        answer = getattr(self, self.path.strip("/"))(**body)
        if answer is None:
            self.close_connection = True
            return
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def apply(self, event: str, key: str) -> dict[str, Any] | None:
        """The effect. A request whose sender is gone before it was looked at leaves no trace."""
        if not self.book.gates["before"].go_through(self.connection):
            return None
        if not self.book.write(event, key, self.connection):
            return None
        return {"receipt": key} if self.book.gates["after"].go_through(self.connection) else None

    def find(self, key: str) -> dict[str, Any]:
        return {"found": self.book.has(key)}

    def gate(self, name: str) -> dict[str, Any] | None:
        return {"open": True} if self.book.gates[name].go_through(self.connection) else None

    def at(self, point: str, pid: int) -> dict[str, Any]:
        return {"order": self.book.order_at(point, pid)}

    def turn(self, gate: str, is_open: bool) -> dict[str, Any]:
        self.book.gates[gate].set(is_open=is_open)
        return {}

    def order(self, point: str, what: str) -> dict[str, Any]:
        self.book.give_order(point, what)
        return {}

    def forget(self) -> dict[str, Any]:
        self.book.forget()
        return {}

    def show(self) -> dict[str, Any]:
        waiting = {name: gate.waiting for name, gate in self.book.gates.items()}
        return {"effects": self.book.effects, "waiting": waiting, "obeyed": self.book.obeyed}

    def log_message(self, format: str, *args: Any) -> None:
        """Keep quiet."""


def asked(address: str, verb: str, timeout: float = 30.0, **body: Any) -> dict[str, Any]:
    """What the recorder answers; raises what the network raises when it does not."""
    connection = HTTPConnection(address, timeout=max(timeout, 0.001))
    try:
        connection.request("POST", f"/{verb}", json.dumps(body), {"Content-Type": "application/json"})
        found: dict[str, Any] = json.loads(connection.getresponse().read())
        return found
    finally:
        connection.close()


class Recorder:
    """The recorder as a test sees it."""

    def __init__(self, address: str) -> None:
        self.address = address

    def shut(self, gate: str) -> None:
        """Let callers wait at a gate from now on."""
        asked(self.address, "turn", gate=gate, is_open=False)

    def open(self, gate: str) -> None:
        """Let everybody through again."""
        asked(self.address, "turn", gate=gate, is_open=True)

    def wait_at(self, gate: str, *, within: float = 60.0) -> None:
        """Return once somebody waits at a gate."""
        wait_for(lambda: self.waiting(gate), within=within, why=f"somebody at the gate {gate!r}")

    def waiting(self, gate: str) -> int:
        return int(asked(self.address, "show")["waiting"][gate])

    def order(self, point: str, what: str) -> None:
        """Tell the next process that reaches a point to stop or to die."""
        asked(self.address, "order", point=point, what=what)

    def wait_until_obeyed(self, point: str) -> int:
        """Return once some process has reached the point and got its order, and say which."""
        return int(
            wait_for(lambda: asked(self.address, "show")["obeyed"].get(point), within=60, why=f"one at {point!r}")
        )

    def forget(self) -> None:
        """Begin as if nothing had happened: no effect, no order, and every gate open."""
        asked(self.address, "forget")

    def effects(self) -> Counter[str]:
        """How often each event had its effect."""
        return Counter(effect["event"] for effect in asked(self.address, "show")["effects"])

    def keys(self) -> list[str]:
        """The idempotency keys of all effects, sorted; one that came twice is here twice."""
        return sorted(effect["key"] for effect in asked(self.address, "show")["effects"])


@contextmanager
def recording(home: Path) -> Iterator[Recorder]:
    """A recorder in a process of its own, gone at the end; its file stays."""
    command = [sys.executable, "-m", "tests.support.effect_recorder", str(home / "effects.jsonl")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            yield Recorder(process.stdout.readline().strip())
        finally:
            process.kill()


def _gone(connection: socket.socket) -> bool:
    readable, _, _ = select.select([connection], [], [], 0)
    try:
        return bool(readable) and connection.recv(1, socket.MSG_PEEK) == b""
    except OSError:
        return True


def main() -> None:
    Handler.book = Book(Path(sys.argv[1]))
    ThreadingHTTPServer.request_queue_size = 256
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    sys.stdout.write(f"127.0.0.1:{server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    main()
