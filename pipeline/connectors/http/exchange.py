"""One exchange over HTTP that ends by the deadline of its call.

The timeouts of httpx bound each read and each write by itself, so a server may drip bytes without end. Here
``asyncio.timeout`` bounds the whole exchange: the name lookup, the connection, the request and the response.
"""

import asyncio
import ssl
import time
from functools import cached_property
from typing import Any

import httpcore
import httpx

from pipeline.connectors.event_loop import ProcessLoop, await_result
from pipeline.connectors.http.answers import UnclearResponseError
from pipeline.domain.errors import AuthError, LogicError, TransientError

TRANSPORT_ERRORS = (httpx.HTTPError, OSError)  #: errors of an exchange; a timeout is an OSError
_IDLE = 20, 5.0  #: connections kept for the next call, and for how many seconds
#: No connector's code runs in this loop, so none can block it.
_LOOP = ProcessLoop("pipeline-http")


class Connections:
    """The connections of one connector. They belong to an event loop, so a forked process opens its own."""

    def __init__(
        self,
        ssl_context: ssl.SSLContext | None = None,
        *,
        trust_env: bool = False,
        proxy: str | None = None,
        keep: bool = True,
    ) -> None:
        self._ssl_context, self._trust_env, self._proxy, self._keep = ssl_context, trust_env, proxy, keep
        self._transports: dict[asyncio.AbstractEventLoop, httpx.AsyncHTTPTransport] = {}

    def transport(self) -> httpx.AsyncHTTPTransport:
        """Return the transport of the running loop. It never retries. If no connection is free, it opens one."""
        loop, (count, seconds) = asyncio.get_running_loop(), _IDLE
        if loop not in self._transports:
            limits = httpx.Limits(max_keepalive_connections=count if self._keep else 0, keepalive_expiry=seconds)
            self._transports[loop] = httpx.AsyncHTTPTransport(self.ssl_context, limits=limits, proxy=self._proxy)
        return self._transports[loop]

    @cached_property
    def ssl_context(self) -> ssl.SSLContext:
        """The TLS settings. Reading the trusted certificates takes a while, so the thread of a call does it."""
        return self._ssl_context or httpx.create_ssl_context(trust_env=self._trust_env)

    def close(self) -> None:
        """Close the connections of this process. The next exchange opens new ones."""
        await_result(self._close(), loop=_LOOP)

    async def _close(self) -> None:
        transport = self._transports.pop(asyncio.get_running_loop(), None)
        if transport is not None:
            await transport.aclose()


class Exchange(httpx.BaseTransport):
    """The transport of one call. The client, and with it any ``httpx.Auth``, runs in the thread of the call."""

    def __init__(self, connections: Connections, ends_at: float, max_bytes: int) -> None:
        self._connections, self._ends_at, self._max_bytes = connections, ends_at, max_bytes
        self._sent = 0
        self._opening: httpcore.AsyncNetworkStream | None = None

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request within the time that is left. Reading stops after ``max_bytes`` bytes of the body."""
        _ = self._connections.ssl_context  # not in the loop
        return await_result(self._exchange(request), loop=_LOOP)  # type: ignore[no-any-return]

    def failure(self, error: BaseException, message: str) -> Exception:
        """The error for an exchange without a whole response. Before the first byte was sent, nothing happened."""
        if self._sent:
            return UnclearResponseError(f"{message}. It was sent, and may or may not have been carried out.")
        if _is_untrusted(error):
            return AuthError(f"{message}. Nothing was sent: the server's certificate is not trusted.")
        if isinstance(error, httpx.LocalProtocolError):
            return LogicError(f"{message}. Nothing was sent: HTTP does not allow such a request.")
        return TransientError(f"{message}. Nothing was sent.")

    async def _exchange(self, request: httpx.Request) -> httpx.Response:
        request.extensions = {"trace": self._trace}  # without the timeouts of httpx
        try:
            async with asyncio.timeout(self._seconds_left()):
                response = await self._connections.transport().handle_async_request(request)
                return await self._read(response)
        finally:
            if self._opening is not None:  # httpcore does not close a connection that is cancelled in its handshake
                await self._opening.aclose()

    async def _read(self, response: httpx.Response) -> httpx.Response:
        body = bytearray()
        try:
            async for piece in response.aiter_bytes():
                body += piece
                if len(body) > self._max_bytes:
                    break
        finally:
            await response.aclose()
        headers = [(name, value) for name, value in response.headers.raw if name.lower() != b"content-encoding"]
        return httpx.Response(response.status_code, headers=headers, content=bytes(body))

    async def _trace(self, event: str, info: dict[str, Any]) -> None:
        """Follow the steps of an exchange. httpcore calls this before and after each of them."""
        match event.split(".")[1:]:
            case ["connect_tcp" | "start_tls", "complete"]:
                self._opening = info["return_value"]
            case ["send_request_headers", "started"]:
                self._opening = None  # from here on the pool owns it
                self._seconds_left()
                self._sent += 1
            case ["send_request_headers", "failed"] if isinstance(info["exception"], httpcore.LocalProtocolError):
                self._sent -= 1  # refused before anything was written

    def _seconds_left(self) -> float:
        seconds = self._ends_at - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("the time for this call is over")
        return seconds


def _is_untrusted(error: BaseException | None) -> bool:
    """Return whether an error comes from a certificate that is not trusted."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__  # httpcore clears the cause of its errors
    return error is not None
