"""The provider of a chaos run: its own process, which counts effects and fails on purpose.

Every effect is on disk before any response is sent, so the death of a worker cannot undo it. The provider
keeps no ledger: it only counts how often an effect was carried out, under which key. For a keyed operation
a second request with the same key is recognised; for the others it is a second effect. No effect happens
later than the settle window allows. The search finds an effect only after the lag of its operation. Started
again in the same home, it goes on with what its files say.

Run as ``python -m pipeline.chaos.provider HOME SEED [PERCENT]``. It prints its address, and ends with its parent.
PERCENT is the share of its calls in which it misbehaves.
"""

import contextlib
import json
import os
import select
import socket
import struct
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from pipeline.chaos.faults import (
    KEYED,
    SEARCH_LAGS,
    SETTLE,
    TIMEOUT,
    ReconcileFault,
    RequestFault,
    random_fraction,
    reconcile_fault,
    request_fault,
)

EFFECTS, REQUESTS, RECONCILES = "effects.jsonl", "requests.jsonl", "reconciles.jsonl"
#: No effect happens later than this after its request: less than the settle window, for a busy machine.
_MAX_DELAY = SETTLE.total_seconds() - 0.7
_MAX_DURATION = 0.4  #: seconds that an effect takes at most without a fault
_MAX_HOLD = 30.0  #: seconds that a caller is kept waiting at most

_APPLYING_FAULTS = frozenset(
    {
        RequestFault.NONE,
        RequestFault.TWICE,
        RequestFault.TIMEOUT_AFTER,
        RequestFault.RESET_AFTER,
        RequestFault.ERROR_AFTER,
        RequestFault.SLOW,
    }
)
_RESETTING_FAULTS = frozenset({RequestFault.RESET_BEFORE, RequestFault.RESET_AFTER})
_HOLDING_FAULTS = frozenset({RequestFault.TIMEOUT_BEFORE, RequestFault.TIMEOUT_AFTER, RequestFault.SLOW})


def records_of(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a file. A last line that was not written to its end is none: it was never acted on."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


class EffectLog:
    """The effects, in files that only grow."""

    def __init__(self, home: Path, seed: int, percent: int | None = None) -> None:
        self.home, self.seed, self.percent = home, seed, percent
        self._lock = threading.Lock()
        self._request_counts: Counter[str] = Counter()
        self._reconcile_counts: Counter[str] = Counter()
        self._keys: dict[tuple[str, str], float] = {}  #: with the instant of the first effect
        self._names: dict[str, str] = {}  #: key -> order and number; unlike keys, these are the same in every run
        self.in_progress = 0
        self._read_files()

    def _read_files(self) -> None:
        """Go on where an earlier process of this home stopped."""
        ahead = time.monotonic() - time.time()  # noqa: TID251 - the instants in the files are of the machine's clock
        for line in records_of(self.home / EFFECTS):
            self._keys.setdefault((line["operation"], line["key"]), line["at"] + ahead)
        for line in records_of(self.home / REQUESTS):
            name = f"{line['operation']}:{line['order']}"
            self._request_counts[name] += 1
            self._names.setdefault(line["key"], f"{name}:{self._request_counts[name]}")

    def apply(self, operation: str, order: str, key: str) -> None:
        """Carry out the effect. It is on disk when this returns."""
        with self._lock:
            if operation in KEYED and (operation, key) in self._keys:
                return
            at = time.time()  # noqa: TID251 - compared with the database's clock, which is that of this machine
            line = json.dumps({"operation": operation, "order": order, "key": key, "at": at})
            with (self.home / EFFECTS).open("a") as effects:
                effects.write(line + "\n")
                effects.flush()
                os.fsync(effects.fileno())
            self._keys.setdefault((operation, key), time.monotonic())

    def finds(self, operation: str, key: str) -> bool:
        """Return whether the search finds the effect: it was carried out, and the lag is over."""
        done_at = self._keys.get((operation, key))
        return done_at is not None and time.monotonic() - done_at >= _lag(operation)

    def nth_request(self, operation: str, order: str, key: str) -> int:
        """Count a request of an order, which is in progress from now on."""
        name = f"{operation}:{order}"
        with self._lock:
            self.in_progress += 1
            self._request_counts[name] += 1
            self._names.setdefault(key, f"{name}:{self._request_counts[name]}")
            return self._request_counts[name]

    def reconcile_fault(self, key: str) -> ReconcileFault:
        """Count a reconcile request of a key and return its fault."""
        with self._lock:
            name = self._names.get(key, key)
            self._reconcile_counts[name] += 1
            return reconcile_fault(self.seed, name, self._reconcile_counts[name], self.percent)

    def append(self, file: str, **what: Any) -> None:
        """Record a request or a reconcile request, for the report."""
        with self._lock, (self.home / file).open("a") as notes:
            notes.write(json.dumps(what) + "\n")

    def finish_request(self) -> None:
        """Count a request as finished."""
        with self._lock:
            self.in_progress -= 1


class ProviderHandler(BaseHTTPRequestHandler):
    """One connection. POST /OPERATION requests an effect, GET /OPERATION/KEY reconciles it."""

    protocol_version = "HTTP/1.1"
    timeout = 60
    log: EffectLog

    def do_POST(self) -> None:
        """Carry out a request and respond, unless its fault forbids it."""
        came = time.monotonic()
        body = json.loads(self._body())
        operation, order, key = self.path.strip("/"), str(body["order"]), unquote(self.headers["Idempotency-Key"])
        nth = self.log.nth_request(operation, order, key)
        kind = request_fault(self.log.seed, operation, order, nth, self.log.percent)
        try:
            fraction = random_fraction(self.log.seed, "lot", operation, order, nth)
            done = kind in _APPLYING_FAULTS and self._wait_and_check(operation, kind, fraction, came)
            for _ in range(int(done) * (2 if kind is RequestFault.TWICE else 1)):
                self.log.apply(operation, order, key)
            self.log.append(REQUESTS, operation=operation, order=order, key=key, fault=kind, done=done)
            self._respond(kind, fraction, key, was_dropped=kind in _APPLYING_FAULTS and not done)
        finally:
            self.log.finish_request()

    def do_GET(self) -> None:
        """Respond to a reconcile request as the search has it, or not at all."""
        self._body()
        operation, _, quoted = self.path.strip("/").partition("/")
        if not quoted:
            self._send_response(200, {"in_progress": self.log.in_progress})
            return
        key = unquote(quoted)
        kind = self.log.reconcile_fault(key)
        found = self.log.finds(operation, key)
        self.log.append(RECONCILES, operation=operation, key=key, fault=kind, found=found)
        if kind is ReconcileFault.ERROR:
            self._send_response(503, {})
        elif kind is ReconcileFault.SLOW:
            self._hold()
        else:
            self._send_response(200 if found else 404, {"receipt": key} if found else {})

    def _body(self) -> bytes:
        """Read the whole body: bytes that are left would be read as the next request."""
        return self.rfile.read(int(self.headers["Content-Length"] or 0))

    def _wait_and_check(self, operation: str, kind: RequestFault, fraction: float, came: float) -> bool:
        """Take the time of the effect. False when it is too late now: the request is dropped.

        The search of an operation that keeps to its settle window must find the effect in time, too.
        """
        pause = (
            TIMEOUT.total_seconds() * (1.1 + fraction / 2) if kind is RequestFault.SLOW else _MAX_DURATION * fraction
        )
        threading.Event().wait(pause)
        lag = _lag(operation)
        return time.monotonic() - came <= _MAX_DELAY - (lag if lag < SETTLE.total_seconds() else 0.0)

    def _respond(self, kind: RequestFault, fraction: float, key: str, *, was_dropped: bool) -> None:
        """Respond to the caller. A dropped request is never reported as done."""
        if kind in _RESETTING_FAULTS or was_dropped:
            self._reset()
        elif kind in _HOLDING_FAULTS:
            self._hold()
        elif kind is RequestFault.BUSY:
            self._send_response(429, {}, {"Retry-After": "1"})
        elif kind in (RequestFault.ERROR_AFTER, RequestFault.ERROR_BEFORE):
            self._send_response(500 if fraction < 0.5 else 503, {})
        else:
            self._send_response(201, {"receipt": key})

    def _send_response(self, status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        with contextlib.suppress(OSError):  # the caller may be dead: that is the point of a run
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

    def _reset(self) -> None:
        self.close_connection = True
        self.rfile.close()
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def _hold(self) -> None:
        """Send nothing until the caller hangs up."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            ends_at = time.monotonic() + _MAX_HOLD
            while time.monotonic() < ends_at:
                readable, _, _ = select.select([self.connection], [], [], 1.0)
                if readable and not self.connection.recv(1 << 16):
                    return

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def _lag(operation: str) -> float:
    lag = SEARCH_LAGS.get(operation)
    return lag.total_seconds() if lag else 0.0


class ProviderServer(ThreadingHTTPServer):
    """A server whose callers may die at any time."""

    daemon_threads = True
    request_queue_size = 512

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error, unless the caller is gone."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def main() -> None:
    """Serve until the parent is gone, which closes the pipe that is our input."""
    percent = int(sys.argv[3]) if len(sys.argv) > 3 else None
    ProviderHandler.log = EffectLog(Path(sys.argv[1]), int(sys.argv[2]), percent)
    server = ProviderServer(("127.0.0.1", 0), ProviderHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdout.write(f"http://127.0.0.1:{server.server_port}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
