"""One exchange over HTTP that ends by the deadline of its call, and the reading of its response.

The timeouts of httpx bound each read and each write by itself, so a server may drip bytes without end. Here
``asyncio.timeout`` bounds the whole exchange: the name lookup, the connection, the request and the response.
A response is a result, a refusal, or unclear.
"""

import asyncio
import json
import ssl
import time
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import (
    Any,
    NoReturn,
    NotRequired,
)

import httpcore
import httpx
from typing_extensions import TypedDict  # that of typing has no schema before Python 3.12

from pipeline.connectors.error_table import read_status
from pipeline.connectors.event_loop import ProcessLoop, await_result
from pipeline.domain.errors import AuthError, InvalidInputError, LogicError, TransientError
from pipeline.domain.reconciliation import ErrorMeaning, ErrorReading
from pipeline.text import single_line

APPLIED = "applied"  #: a declared meaning of a status, besides the outcomes
_SNIPPET = 200  #: characters of a response that an error repeats


class HttpResult(TypedDict):
    """The result of an operation, as the ledger stores it."""

    status: int
    body: Any
    headers: dict[str, str]
    truncated: NotRequired[bool]


class UnclearResponseError(Exception):
    """A request was sent, and the response does not say whether it was carried out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpResponse:
    """A response that was read to its end, or up to the limit."""

    status: int
    body: Any
    headers: dict[str, str]
    is_truncated: bool
    reading: ErrorReading  #: by the status, if it is no success and has no declared meaning

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    def result(self) -> dict[str, Any]:
        """Return the result as the ledger stores it."""
        cut = {"truncated": True} if self.is_truncated else {}
        return {"status": self.status, "body": self.body, "headers": self.headers, **cut}

    def snippet(self) -> str:
        """Return the beginning of the body, for an error."""
        text = self.body if isinstance(self.body, str) else json.dumps(self.body, ensure_ascii=False)
        return f": {single_line(text[: _SNIPPET * 2], _SNIPPET)}" if self.body not in (None, "") else ""


def read_response(response: httpx.Response, *, keep: Collection[str], limit: int) -> HttpResponse:
    """Read a response, with at most ``limit`` bytes of its body."""
    body = response.content
    is_cut = len(body) > limit
    headers = {name: _storable(response.headers[name]) for name in keep if name in response.headers}
    after, date = response.headers.get("retry-after"), response.headers.get("date")
    return HttpResponse(
        status=response.status_code,
        body=_body(body[:limit], response, is_cut=is_cut),
        headers=headers,
        is_truncated=is_cut,
        reading=read_status(response.status_code, after, date),
    )


def checked_statuses(declared: Mapping[int, str]) -> dict[int, str]:
    """Check the meanings that an operation declares for statuses."""
    known = [APPLIED, *ErrorMeaning]
    for status, meaning in declared.items():
        if meaning not in known or not 200 <= status <= 599:
            meanings = ", ".join(repr(str(each)) for each in known)
            raise InvalidInputError(f"statuses has {status}: {meaning!r}; expected a status (200 to 599): {meanings}.")
    return {status: str(meaning) for status, meaning in declared.items()}


def response_reading(response: HttpResponse, declared: Mapping[int, str]) -> ErrorReading | None:
    """Classify a response. None means that the request was carried out."""
    meaning = declared.get(response.status)
    if meaning == APPLIED or (meaning is None and response.is_success):
        return None
    return ErrorReading(meaning=ErrorMeaning(meaning), after=response.reading.after) if meaning else response.reading


def raise_for_reading(reading: ErrorReading, message: str) -> NoReturn:
    """Raise the error that has this reading."""
    match reading.meaning:
        case ErrorMeaning.REFUSED:
            raise LogicError(message)
        case ErrorMeaning.DENIED:
            raise AuthError(f"{message} Check the connector's credentials and what they may do.")
        case ErrorMeaning.NOT_NOW:
            raise TransientError(message, after=reading.after)
        case ErrorMeaning.UNKNOWN:
            raise UnclearResponseError(f"{message} It may or may not have been carried out.")


def _body(raw: bytes, response: httpx.Response, *, is_cut: bool) -> Any:
    """Return the body: valid JSON if declared, else text, None if empty."""
    if not raw:
        return None
    if "json" in response.headers.get("content-type", "").lower() and not is_cut:
        try:
            return json.loads(raw, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            pass
    try:
        text = raw.decode(response.charset_encoding or "utf-8", errors="replace")
    except (LookupError, ValueError):  # an unknown charset, or one that replaces nothing, such as idna
        text = raw.decode(errors="replace")
    return _storable(text)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _storable(text: str) -> str:
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()


TRANSPORT_ERRORS = (httpx.HTTPError, OSError)  #: errors of an exchange; a timeout is an OSError
_ANY_HEADER = zlib.MAX_WBITS | 32  #: gzip's or zlib's
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
        request.headers["accept-encoding"] = "gzip"  # httpx also asks for what it can only unpack without a bound
        try:
            async with asyncio.timeout(self._seconds_left()):
                response = await self._connections.transport().handle_async_request(request)
                return await self._read(response)
        finally:
            if self._opening is not None:  # httpcore does not close a connection that is cancelled in its handshake
                await self._opening.aclose()

    async def _read(self, response: httpx.Response) -> httpx.Response:
        body, unpacked = bytearray(), _unpacker(response.headers.get("content-encoding", ""))
        try:
            async for piece in response.aiter_raw():
                body += unpacked(piece, self._max_bytes + 1 - len(body))
                if len(body) > self._max_bytes:
                    break
        except zlib.error as error:
            raise httpx.DecodingError(str(error)) from None
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


def _unpacker(encoding: str) -> Callable[[bytes, int], bytes]:
    """Return a function that unpacks a piece of a body to at most so many bytes. Only gzip and deflate are unpacked.

    Without that bound a few hundred bytes could become gigabytes, the more so if they are packed several times.
    """
    if encoding.strip().lower() not in ("gzip", "x-gzip", "deflate"):
        return lambda piece, _: piece
    return zlib.decompressobj(_ANY_HEADER).decompress


def _is_untrusted(error: BaseException | None) -> bool:
    """Return whether an error comes from a certificate that is not trusted."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__  # httpcore clears the cause of its errors
    return error is not None
