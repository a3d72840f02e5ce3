"""What an error says about the outcome of a call. Whatever is not certain is unknown."""

import socket
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
import sqlalchemy.exc

from pipeline.connectors.error_table import read_error, read_status, retry_after
from pipeline.domain.errors import AuthError, LogicError, TransientError
from pipeline.domain.reconciliation import ErrorMeaning, ErrorReading

REQUEST = httpx.Request("POST", "https://example.org")


def of_library(name: str, *bases: type[Exception]) -> Exception:
    """An error as a library has it that need not be installed."""
    module, _, kind = name.rpartition(".")
    made: Exception = type(kind, bases or (Exception,), {"__module__": module})("refused")
    return made


def answered(status: int, **headers: str) -> httpx.HTTPStatusError:
    response = httpx.Response(status, headers={name.replace("_", "-"): value for name, value in headers.items()})
    return httpx.HTTPStatusError("an answer", request=REQUEST, response=response)


def raised_from(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


KNOWN: list[tuple[BaseException, ErrorMeaning]] = [
    (LogicError("no"), ErrorMeaning.REFUSED),
    (TransientError("not now"), ErrorMeaning.NOT_NOW),
    (AuthError("who are you"), ErrorMeaning.DENIED),
    (ConnectionRefusedError(111, "refused"), ErrorMeaning.NOT_NOW),
    (socket.gaierror(-2, "no such host"), ErrorMeaning.NOT_NOW),
    (httpx.InvalidURL("no host"), ErrorMeaning.REFUSED),
    (answered(400), ErrorMeaning.REFUSED),
    (answered(404), ErrorMeaning.REFUSED),
    (answered(422), ErrorMeaning.REFUSED),
    (answered(401), ErrorMeaning.DENIED),
    (answered(403), ErrorMeaning.DENIED),
    (answered(429), ErrorMeaning.NOT_NOW),
    (sqlalchemy.exc.IntegrityError("INSERT", {}, Exception("duplicate key")), ErrorMeaning.REFUSED),
    (sqlalchemy.exc.ProgrammingError("SELEC", {}, Exception("syntax error")), ErrorMeaning.REFUSED),
    (raised_from(RuntimeError("wrapped"), ConnectionRefusedError()), ErrorMeaning.NOT_NOW),
]
#: These clients follow redirects, or try again, by themselves: an earlier request may have arrived.
FOLLOWING: list[BaseException] = [
    httpx.ConnectError("refused"),
    httpx.ConnectTimeout("too slow"),
    httpx.PoolTimeout("full"),
    httpx.UnsupportedProtocol("ftp"),
    raised_from(httpx.ConnectError("refused"), ConnectionRefusedError()),
    of_library("mine.Refused", httpx.ConnectError),
    of_library("requests.exceptions.InvalidURL"),
    of_library("requests.exceptions.ConnectionError"),
    raised_from(of_library("urllib3.exceptions.MaxRetryError"), ConnectionRefusedError()),
    raised_from(of_library("aiohttp.client_exceptions.ClientConnectorError", OSError), ConnectionRefusedError()),
    raised_from(of_library("aiohttp.client_exceptions.ClientConnectorDNSError", OSError), socket.gaierror()),
    raised_from(RuntimeError("wrapped"), raised_from(httpx.ConnectError("no"), ConnectionRefusedError())),
]
UNKNOWN: list[BaseException] = [
    httpx.ReadTimeout("no answer"),
    httpx.ReadError("reset"),
    httpx.WriteError("reset"),
    httpx.RemoteProtocolError("garbage"),
    answered(500),
    answered(502),
    answered(503),
    answered(408),
    answered(409),
    ConnectionResetError(104, "reset"),
    BrokenPipeError(32, "broken"),
    TimeoutError("slow"),
    sqlalchemy.exc.OperationalError("COMMIT", {}, Exception("server closed the connection")),
    RuntimeError("whatever"),
    SystemExit(1),
]


@pytest.mark.parametrize(("error", "outcome"), KNOWN, ids=lambda value: repr(value)[:60])
def test_an_unsent_or_refused_request_has_a_definite_reading(error: BaseException, outcome: ErrorMeaning) -> None:
    assert read_error(error).meaning is outcome


@pytest.mark.parametrize("error", UNKNOWN, ids=lambda value: repr(value)[:60])
def test_a_request_that_may_have_arrived_is_unknown(error: BaseException) -> None:
    assert read_error(error).meaning is ErrorMeaning.UNKNOWN


@pytest.mark.parametrize("error", FOLLOWING, ids=lambda value: repr(value)[:60])
def test_a_connection_error_of_a_client_that_follows_redirects_is_unknown(error: BaseException) -> None:
    assert read_error(error).meaning is ErrorMeaning.UNKNOWN


def test_a_refusal_of_an_earlier_attempt_does_not_decide_about_a_later_one() -> None:
    error: BaseException = RuntimeError("never")
    try:
        try:
            raise ConnectionRefusedError
        except ConnectionRefusedError:
            raise TimeoutError("the second host took the request and did not answer")  # noqa: B904 - the case
    except TimeoutError as caught:
        error = caught
    assert read_error(error).meaning is ErrorMeaning.UNKNOWN


def test_a_response_after_a_redirect_is_unknown() -> None:
    error = answered(404)
    error.response.history = [httpx.Response(303)]
    assert read_error(error).meaning is ErrorMeaning.UNKNOWN


def test_a_retry_after_date_counts_from_the_date_of_the_response() -> None:
    error = answered(429, retry_after="Tue, 01 Jan 2030 00:01:00 GMT", date="Tue, 01 Jan 2030 00:00:00 GMT")
    assert read_error(error).after == timedelta(minutes=1)


def test_a_pause_that_is_asked_for_is_part_of_the_reading() -> None:
    assert read_error(answered(429, retry_after="7")) == ErrorReading(
        meaning=ErrorMeaning.NOT_NOW, after=timedelta(seconds=7)
    )
    assert read_error(TransientError("busy", after=timedelta(seconds=3))).after == timedelta(seconds=3)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("120", timedelta(minutes=2)),
        ("0.5", timedelta(milliseconds=500)),
        ("Tue, 01 Jan 2030 00:01:00 GMT", timedelta(minutes=1)),
        ("Mon, 31 Dec 2029 23:00:00 GMT", timedelta(0)),
        ("-5", timedelta(0)),
        ("999999999", timedelta(days=1)),
        ("soon", None),
        ("", None),
        (None, None),
        ("nan", None),
        ("inf", None),
    ],
)
def test_a_retry_after_is_seconds_or_a_date_and_anything_else_is_ignored(value: Any, expected: Any) -> None:
    assert retry_after(value, now=datetime(2030, 1, 1, tzinfo=UTC)) == expected


def test_a_retry_after_date_without_a_response_date_is_ignored() -> None:
    assert retry_after("Tue, 01 Jan 2030 00:01:00 GMT") is None


@pytest.mark.parametrize("status", [200, 302, 500, 599])
def test_a_status_that_is_no_refusal_is_unknown_when_it_comes_as_an_error(status: int) -> None:
    assert read_status(status).meaning is ErrorMeaning.UNKNOWN
