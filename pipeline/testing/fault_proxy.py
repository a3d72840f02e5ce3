"""Break connections on purpose, with a proxy between a connector and its real server.

``FaultyProxy`` forwards bytes over real sockets until the test plans a fault. ``proxy.will(Fault.RESETS_AFTER)`` lets
the next request reach the server and resets the connection instead of answering. The server is always real; only its
response to the client is changed.

The proxy works for any protocol over TCP. A request ends after a pause, or where ``is_complete`` finds its end. If one
effect needs several requests, ``has_effect`` picks the request with the effect, and faults apply to it only.
"""

import contextlib
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Self

Predicate = Callable[[bytes], bool]

_POLL_INTERVAL = 0.01  #: seconds between two checks of a waiting connection
_SERVER_TIMEOUT = 10.0  #: seconds that a server may take to answer a request


class Fault(StrEnum):
    """What the proxy does with one request."""

    PASSES = "passes"
    TIMES_OUT_BEFORE = "times out before sending"  #: taken from the client, never forwarded, never answered
    RESETS_BEFORE = "resets before sending"  #: taken from the client, never forwarded, connection reset
    RESETS_AFTER = "resets after sending"  #: forwarded, and reset once the server has answered
    TIMES_OUT_AFTER = "times out after sending"  #: forwarded, never answered
    ANSWERS_LATE = "answers late"  #: forwarded; the response is delayed
    DRIPS = "drips"  #: forwarded, and answered byte by byte
    COMMITS_LATE = "commits late"  #: forwarded only after the client has given up
    FAILS_AFTER = "fails after sending"  #: HTTP: forwarded, and answered with a 5xx whatever the server responds
    FAILS_BEFORE = "fails before sending"  #: HTTP: answered with a 5xx, never forwarded
    BUSY = "busy"  #: HTTP: answered with 429 and Retry-After, never forwarded
    UNAVAILABLE = "unavailable"  #: HTTP: answered with 503, never forwarded
    SENDS_TWICE = "sends twice"  #: forwarded twice, answered once


@dataclass(slots=True, kw_only=True)
class ProxiedRequest:
    """A request that came to the proxy."""

    at: float  #: when its first byte came, on this process's monotonic clock
    data: bytes
    has_effect: bool
    fault: Fault
    is_over: bool = False  #: the proxy has finished with it, also with a late commit


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlannedFault:
    """A fault for the next request that matches."""

    fault: Fault
    delay: float
    status: int
    any_request: bool


class FaultyProxy:
    """Forward connections to the server at ``host`` and ``port``, with faults. Use it in a ``with`` statement."""

    retry_after = timedelta(seconds=7)  #: what ``BUSY`` asks for

    def __init__(
        self,
        host: str,
        port: int,
        *,
        is_complete: Predicate | None = None,
        has_effect: Predicate | None = None,
        idle_gap: timedelta = timedelta(milliseconds=50),
    ) -> None:
        self.server = (host, port)
        self.is_complete, self.idle_gap = is_complete, idle_gap.total_seconds()
        self.has_effect = has_effect or (lambda _: True)
        self.requests: list[ProxiedRequest] = []
        self._faults: deque[_PlannedFault] = deque()
        self._connections: set[_ProxyConnection] = set()
        self._lock = threading.Lock()
        self._acceptor: threading.Thread | None = None
        self._listener = _bind(0)
        self.host, self.port = self._listener.getsockname()[:2]
        self._accept()

    @property
    def url(self) -> str:
        """Return the URL to use instead of the server's."""
        return f"http://{self.host}:{self.port}"

    def will(
        self,
        *faults: Fault,
        delay: timedelta = timedelta(milliseconds=200),
        status: int = 500,
        any_request: bool = False,
    ) -> None:
        """Plan faults for the next requests with an effect, one fault each, or for any requests.

        ``delay`` is that of a late response, of each byte that drips, and of a commit after the client has given up.
        ``status`` is the status of ``FAILS_AFTER`` and ``FAILS_BEFORE``.
        """
        plans = [
            _PlannedFault(fault=fault, delay=delay.total_seconds(), status=status, any_request=any_request)
            for fault in faults
        ]
        with self._lock:
            self._faults.extend(plans)

    @property
    def pending_faults(self) -> int:
        """Return how many planned faults are left."""
        return len(self._faults)

    def refuse_connections(self) -> None:
        """Reset every connection, and refuse new ones until ``restore``, like a server that is down."""
        self._stop_accepting()
        self._listener = _bind(
            self.port
        )  # bound, not listening: the port stays ours, and connections to it are refused
        with self._lock:
            lines = list(self._connections)
        for line in lines:
            line.reset.set()
        for line in lines:
            line.join(_SERVER_TIMEOUT)

    def restore(self) -> None:
        """Drop planned faults, accept connections, release held ones. A late commit no longer waits for its client."""
        with self._lock:
            self._faults.clear()
            for line in self._connections:
                line.released.set()
        self._accept()

    def close(self) -> None:
        """End every connection and free the port."""
        self.refuse_connections()
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def next_fault(
        self, line: "_ProxyConnection", data: bytes, at: float
    ) -> tuple[ProxiedRequest, _PlannedFault | None]:
        """Record a request and take its fault from the plan. Connections call this."""
        carries = self.has_effect(data)
        with self._lock:
            line.released.clear()  # an earlier release does not count for a fault that begins now
            fits = bool(self._faults) and (carries or self._faults[0].any_request)
            plan = self._faults.popleft() if fits else None
            seen = ProxiedRequest(at=at, data=data, has_effect=carries, fault=plan.fault if plan else Fault.PASSES)
            self.requests.append(seen)
        return seen, plan

    def remove(self, line: "_ProxyConnection") -> None:
        """Forget a connection that has ended. Connections call this."""
        with self._lock:
            self._connections.discard(line)

    def _accept(self) -> None:
        """Accept connections, unless a thread does so already."""
        if self._acceptor is None:
            self._listener.listen(64)
            self._listener.settimeout(_POLL_INTERVAL)
            self._acceptor = threading.Thread(target=self._accept_loop, name="faulty-proxy", daemon=True)
            self._acceptor.start()

    def _stop_accepting(self) -> None:
        """Stop accepting. Wait for the thread first: a socket that a thread waits for is not closed."""
        acceptor, self._acceptor = self._acceptor, None
        if acceptor is not None:
            acceptor.join(_SERVER_TIMEOUT)
        self._listener.close()

    def _accept_loop(self) -> None:
        while self._acceptor is threading.current_thread():
            with contextlib.suppress(TimeoutError):
                line = _ProxyConnection(self, self._listener.accept()[0])
                with self._lock:
                    self._connections.add(line)
                line.start()


class _ResetError(Exception):
    """The client must see a connection reset."""


class _ProxyConnection(threading.Thread):
    """Forward one connection. This thread reads from the client, another thread from the server."""

    def __init__(self, proxy: FaultyProxy, client: socket.socket) -> None:
        super().__init__(name="faulty-line", daemon=True)
        self.proxy, self.client = proxy, client
        self.server: socket.socket | None = None
        self.reset, self.released = threading.Event(), threading.Event()
        self._answered = threading.Event()
        self._drops_response = False  #: responses do not reach the client
        self._pause = self._drip = 0.0
        self._is_client_gone = False
        self._response_thread = threading.Thread(target=self._relay_responses, name="faulty-answers", daemon=True)

    def run(self) -> None:
        """Forward requests until either side ends, then close both sockets."""
        try:
            self.server = socket.create_connection(self.proxy.server, timeout=_SERVER_TIMEOUT)
            self.server.settimeout(None)
            for side in (self.client, self.server):
                side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._response_thread.start()
            self._relay()
        except (_ResetError, OSError):
            with contextlib.suppress(OSError):
                self.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        finally:
            self._end()

    def _end(self) -> None:
        self.client.close()
        if self.server is not None:
            with contextlib.suppress(OSError):
                self.server.shutdown(socket.SHUT_RDWR)
            if self._response_thread.ident is not None:
                self._response_thread.join(_SERVER_TIMEOUT)
            self.server.close()
        self.proxy.remove(self)

    def _relay(self) -> None:
        while not self._is_client_gone:
            data, at = self._request()
            if data:
                seen, plan = self.proxy.next_fault(self, data, at)
                try:
                    self._apply_fault(data, seen.fault, plan)
                finally:
                    seen.is_over = True
        assert self.server is not None
        with contextlib.suppress(OSError):
            self.server.shutdown(socket.SHUT_WR)  # the server may still respond to a client that only stopped sending
        while self._response_thread.is_alive() and not self.reset.wait(_POLL_INTERVAL):
            pass

    def _apply_fault(self, data: bytes, fault: Fault, plan: _PlannedFault | None) -> None:
        """Apply the planned fault to a request."""
        match fault:
            case Fault.PASSES:
                self._forward(data)
            case Fault.TIMES_OUT_BEFORE:
                self._hold_client()
                raise _ResetError
            case Fault.RESETS_BEFORE:
                raise _ResetError
            case Fault.BUSY:
                self._respond(429, f"Retry-After: {self.proxy.retry_after.total_seconds():.0f}\r\n")
            case Fault.UNAVAILABLE:
                self._respond(503)
            case Fault.FAILS_BEFORE:
                assert plan is not None
                self._respond(plan.status)
            case Fault.SENDS_TWICE:
                self._send_a_copy(data)
                self._forward(data)
            case _:
                assert plan is not None
                self._forward_with_fault(data, plan)

    def _forward_with_fault(self, data: bytes, plan: _PlannedFault) -> None:
        """Apply a fault to a request that reaches the server."""
        self._drops_response = plan.fault not in (Fault.ANSWERS_LATE, Fault.DRIPS)
        self._drip = plan.delay if plan.fault is Fault.DRIPS else 0.0
        self._pause = plan.delay if plan.fault is Fault.ANSWERS_LATE else 0.0
        if plan.fault is Fault.COMMITS_LATE:
            self._hold_client()
            threading.Event().wait(plan.delay)
        self._forward(data)
        if not self._drops_response:
            return
        self._answered.wait(_SERVER_TIMEOUT if self._response_thread.is_alive() else 0)
        if plan.fault is Fault.FAILS_AFTER:
            self._respond(plan.status)
        if plan.fault is Fault.TIMES_OUT_AFTER:
            self._hold_client()
        raise _ResetError

    def _request(self) -> tuple[bytes, float]:
        """Read one whole request and its start time. If the client is gone, return the bytes so far."""
        data, at, last = b"", 0.0, 0.0
        while not self._is_whole(data, last):
            piece = self._read_chunk()
            if piece is None:
                continue
            last = time.monotonic()
            at = at or last
            if not piece:
                self._is_client_gone = True
                break
            data += piece
        return data, at

    def _is_whole(self, data: bytes, last: float) -> bool:
        if not data:
            return False
        return (
            self.proxy.is_complete(data) if self.proxy.is_complete else time.monotonic() - last >= self.proxy.idle_gap
        )

    def _read_chunk(self) -> bytes | None:
        """Read from the client: None if there is nothing yet, empty if the client is gone."""
        if self.reset.is_set():
            raise _ResetError
        if not select.select([self.client], [], [], _POLL_INTERVAL)[0]:
            return None
        try:
            return self.client.recv(1 << 16)
        except OSError:
            return b""

    def _hold_client(self) -> None:
        """Let the client wait until it leaves or is released. Drop what it sends meanwhile."""
        while not (self._is_client_gone or self.released.is_set()):
            self._is_client_gone = self._read_chunk() == b""

    def _forward(self, data: bytes) -> None:
        assert self.server is not None
        self._answered.clear()
        self.server.sendall(data)

    def _send_a_copy(self, data: bytes) -> None:
        with socket.create_connection(self.proxy.server, timeout=_SERVER_TIMEOUT) as server:
            server.sendall(data)
            server.recv(1 << 16)

    def _respond(self, status: int, headers: str = "") -> None:
        """Respond instead of the server, and close as a server does, after the client has the response."""
        head = f"HTTP/1.1 {status} from the proxy\r\n{headers}Content-Length: 0\r\nConnection: close\r\n\r\n"
        self.client.sendall(head.encode())
        self.client.shutdown(socket.SHUT_WR)
        self._hold_client()
        raise _ResetError

    def _relay_responses(self) -> None:
        """Forward responses to the client, unless the fault drops them."""
        assert self.server is not None
        with contextlib.suppress(OSError):
            while data := self.server.recv(1 << 16):
                self._answered.set()
                if self._pause:
                    self.reset.wait(self._pause)
                for piece in self._chunks(data):
                    if not self._drops_response:
                        self.client.sendall(piece)
            if not self._drops_response:
                self.client.shutdown(socket.SHUT_WR)
        self._answered.set()  # a server that has closed its side will not respond any more

    def _chunks(self, data: bytes) -> Iterator[bytes]:
        if not self._drip:
            yield data
            return
        for at in range(len(data)):
            yield data[at : at + 1]
            if self.released.wait(self._drip) or self.reset.is_set():
                return


def is_complete_http_request(data: bytes) -> bool:
    """Tell whether the data is a whole HTTP/1.1 request: its head, and the body that the head announces."""
    head, gap, body = data.partition(b"\r\n\r\n")
    pairs = (line.partition(b":") for line in head.split(b"\r\n")[1:])
    headers = {name.strip().lower(): value.strip().lower() for name, _, value in pairs}
    if headers.get(b"transfer-encoding") == b"chunked":
        return body == b"0\r\n\r\n" or body.endswith(b"\r\n0\r\n\r\n")
    length = headers.get(b"content-length", b"0")
    return bool(gap) and len(body) >= (int(length) if length.isdigit() else 0)


def is_complete_lines(data: bytes) -> bool:
    """Tell whether the data ends with a line end, as requests of SMTP, IMAP and Redis do."""
    return data.endswith(b"\r\n")


def is_complete_postgres_messages(data: bytes) -> bool:
    """Tell whether the data consists of whole messages of a Postgres client."""
    at = 0
    while at + 5 <= len(data):
        kind = 1 if data[at] else 0  # the first message of a connection has no letter in front of its length
        at += kind + int.from_bytes(data[at + kind : at + kind + 4])
    return at == len(data)


def _bind(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    return listener
