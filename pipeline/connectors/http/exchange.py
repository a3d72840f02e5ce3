"""Sockets that keep one deadline for a whole exchange, whatever the other side does.

httpx bounds each read and each write by itself, so a server that sends a byte now and then is waited
for without end. Here every step of an exchange, from the name lookup to the last byte of the body,
gets what is left of the same time, and nothing is sent once none is left.
"""

import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from queue import Empty, SimpleQueue
from typing import Any

import httpcore
import httpx

#: What can go wrong between two sockets, whichever layer says it.
TRANSPORT_ERRORS = (
    httpx.HTTPError,
    httpcore.NetworkError,
    httpcore.ProtocolError,
    httpcore.ProxyError,
    httpcore.TimeoutException,
    httpcore.UnsupportedProtocol,
    OSError,
)
_CHUNK = 8192  #: small enough for a socket that can be written to at all to take it at once
_IDLE = 20, 5.0  #: connections kept for the next call, and seconds


class Budget:
    """How long an exchange may still take, and whether any byte of it has been handed to a socket."""

    def __init__(self, ends_at: float) -> None:
        self.ends_at, self.has_sent = ends_at, False

    def seconds_left(self, late: type[Exception]) -> float:
        """Seconds that are left; raises this error when none are."""
        seconds = self.ends_at - time.monotonic()
        if seconds <= 0:
            raise late("the time for this call is over")
        return seconds


_BUDGET: ContextVar[Budget] = ContextVar("budget")


@contextmanager
def deadline(ends_at: float) -> Iterator[Budget]:
    """Let every exchange inside this block end by then, on the monotonic clock."""
    budget = Budget(ends_at)
    token = _BUDGET.set(budget)
    try:
        yield budget
    finally:
        _BUDGET.reset(token)


class BoundedStream(httpcore.NetworkStream):
    """A connection that gives each read and write only what is left. Kept connections serve many budgets."""

    def __init__(self, inner: httpcore.NetworkStream) -> None:
        self.inner = inner

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ARG002 - the budget decides
        return self.inner.read(max_bytes, _BUDGET.get().seconds_left(httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ARG002 - the budget decides
        budget = _BUDGET.get()
        for start in range(0, len(buffer), _CHUNK):
            left = budget.seconds_left(httpcore.WriteTimeout)
            budget.has_sent = True  # before the write: one that fails may have sent a part
            self.inner.write(buffer[start : start + _CHUNK], left)

    def close(self) -> None:
        self.inner.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ARG002 - the budget decides
    ) -> httpcore.NetworkStream:
        left = _BUDGET.get().seconds_left(httpcore.ConnectTimeout)
        return BoundedStream(self.inner.start_tls(ssl_context, server_hostname, left))

    def get_extra_info(self, info: str) -> Any:
        return self.inner.get_extra_info(info)


class BoundedBackend(httpcore.NetworkBackend):
    """Makes connections within the budget: looking up the name counts, and all addresses share what is left."""

    def __init__(self) -> None:
        self.inner = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ARG002 - the budget decides
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        budget = _BUDGET.get()
        waiting = _addresses(host, port, budget.seconds_left(httpcore.ConnectTimeout))
        while True:
            share = budget.seconds_left(httpcore.ConnectTimeout) / len(waiting)
            try:
                made = self.inner.connect_tcp(waiting.pop(0), port, share, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                if not waiting:
                    raise
            else:
                return BoundedStream(made)


class BoundedTransport(httpx.BaseTransport):
    """What httpx sends through. It never sends anything twice, and waits for no free connection: it makes one."""

    def __init__(self, ssl_context: ssl.SSLContext) -> None:
        kept, seconds = _IDLE
        self.pool = httpcore.ConnectionPool(
            ssl_context=ssl_context,
            max_connections=None,
            max_keepalive_connections=kept,
            keepalive_expiry=seconds,
            network_backend=BoundedBackend(),
        )

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        assert isinstance(request.stream, httpx.SyncByteStream)
        answer = self.pool.handle_request(
            httpcore.Request(
                method=request.method,
                url=httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
                headers=request.headers.raw,
                content=request.stream,
            )
        )
        return httpx.Response(answer.status, headers=answer.headers, stream=_Body(answer))

    def close(self) -> None:
        self.pool.close()


class _Body(httpx.SyncByteStream):
    def __init__(self, answer: httpcore.Response) -> None:
        self.response = answer

    def __iter__(self) -> Iterator[bytes]:
        return self.response.iter_stream()

    def close(self) -> None:
        self.response.close()


def _addresses(host: str, port: int, left: float) -> list[str]:
    """Where a name leads. The system's lookup cannot be stopped, so it is left behind when it takes too long."""
    try:
        return [str(ipaddress.ip_address(host))]
    except ValueError:
        pass
    found: SimpleQueue[list[str] | OSError] = SimpleQueue()
    threading.Thread(target=_resolve_host, args=(host, port, found), name="pipeline-lookup", daemon=True).start()
    try:
        answer = found.get(timeout=left)
    except Empty:
        raise httpcore.ConnectTimeout(f"the name {host} was not found in time") from None
    if isinstance(answer, OSError) or not answer:
        raise httpcore.ConnectError(f"the name {host} was not found: {answer or 'it has no address'}")
    return answer


def _resolve_host(host: str, port: int, found: SimpleQueue[list[str] | OSError]) -> None:
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        found.put(error if isinstance(error, OSError) else OSError(str(error)))
    else:
        found.put(list(dict.fromkeys(str(info[4][0]) for info in infos)))
