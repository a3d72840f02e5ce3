"""Classify an error of a call: it did not happen, or the outcome is unknown.

The functions are pure. Exceptions of libraries are known by their names, so no library has to be installed. An
exception that is not in the table means unknown, which is the safe side.
"""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

from pipeline.domain.errors import AuthError, LogicError, TransientError
from pipeline.domain.reconciliation import ErrorMeaning, ErrorReading

#: Exceptions by module and name. All of them mean that the outside system was not reached, or that it refused.
_MEANING_BY_NAME: dict[str, ErrorMeaning] = {
    "builtins.ConnectionRefusedError": ErrorMeaning.NOT_NOW,
    "socket.gaierror": ErrorMeaning.NOT_NOW,
    "ssl.SSLCertVerificationError": ErrorMeaning.DENIED,
    "httpx.InvalidURL": ErrorMeaning.REFUSED,
    "requests.exceptions.MissingSchema": ErrorMeaning.REFUSED,
    "sqlalchemy.exc.IntegrityError": ErrorMeaning.REFUSED,
    "sqlalchemy.exc.DataError": ErrorMeaning.REFUSED,
    "sqlalchemy.exc.ProgrammingError": ErrorMeaning.REFUSED,
    "sqlalchemy.exc.NotSupportedError": ErrorMeaning.REFUSED,
    "sqlalchemy.exc.TimeoutError": ErrorMeaning.NOT_NOW,  # no connection of the pool was free
}
#: Clients that follow redirects or retry by themselves. Their connection errors describe the last request only, and an
#: earlier one may have arrived. So the outcome is unknown, even if such an error was raised from a refused connection.
_RETRYING_CLIENTS = frozenset({"aiohttp", "httpcore", "httpx", "requests", "urllib3"})
_DENIED_STATUSES = frozenset({401, 403, 407})
_NOT_NOW_STATUSES = frozenset({425, 429})
_UNKNOWN_STATUSES = frozenset({408, 409, 499})  #: a timeout, or a conflict with what may be this very request
_LONGEST_AFTER = timedelta(days=1)


def read_error(error: BaseException) -> ErrorReading:
    """Classify an error: by its class if it is ours, by its HTTP status, or by the table."""
    match error:
        case TransientError():
            return ErrorReading(meaning=ErrorMeaning.NOT_NOW, after=bounded_pause(error.fields.get("after")))
        case AuthError():
            return ErrorReading(meaning=ErrorMeaning.DENIED)
        case LogicError():
            return ErrorReading(meaning=ErrorMeaning.REFUSED)
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if isinstance(status, int):
        redirected = bool(getattr(response, "history", None))  # the first request may have had the effect
        return ErrorReading(meaning=ErrorMeaning.UNKNOWN) if redirected else _by_status(status, response)
    known = (outcome for each in _causes(error) if (outcome := _by_name(type(each))))
    return ErrorReading(meaning=next(known, ErrorMeaning.UNKNOWN))


def read_status(status: int, after: str | None = None, date: str | None = None) -> ErrorReading:
    """Classify an HTTP status. A date in Retry-After counts from the Date of the same response."""
    wait = retry_after(after, now=_instant(date))
    if status in _DENIED_STATUSES:
        return ErrorReading(meaning=ErrorMeaning.DENIED)
    if status in _NOT_NOW_STATUSES:
        return ErrorReading(meaning=ErrorMeaning.NOT_NOW, after=wait)
    if 400 <= status < 500 and status not in _UNKNOWN_STATUSES:
        return ErrorReading(meaning=ErrorMeaning.REFUSED)
    return ErrorReading(meaning=ErrorMeaning.UNKNOWN, after=wait)


def bounded_pause(value: Any) -> timedelta | None:
    """Return a requested pause, from a timedelta or seconds, between zero and one day. None if it cannot be read."""
    try:
        wait = value if isinstance(value, timedelta) else timedelta(seconds=float(value))
    except (TypeError, ValueError, OverflowError):
        return None
    return min(max(wait, timedelta(0)), _LONGEST_AFTER)


def retry_after(value: str | None, *, now: datetime | None = None) -> timedelta | None:
    """Return how long a Retry-After asks to wait, in seconds or as a date. None if it cannot be read."""
    if not value:
        return None
    seconds = bounded_pause(value)
    if seconds is not None:
        return seconds
    until = _instant(value)
    return None if until is None or now is None else bounded_pause(until - now)


def _instant(value: Any) -> datetime | None:
    try:
        return parsedate_to_datetime(value).astimezone(UTC)
    except (ValueError, TypeError, OverflowError):
        return None


def _by_status(status: int, response: Any) -> ErrorReading:
    headers = {str(name).lower(): value for name, value in dict(getattr(response, "headers", None) or {}).items()}
    return read_status(status, headers.get("retry-after"), headers.get("date"))


def _by_name(kind: type[BaseException]) -> ErrorMeaning | None:
    """Return the meaning of an exception type. None if the table does not know it; then its cause may be known."""
    for each in kind.__mro__:
        module = each.__module__.partition("._")[0]
        if known := _MEANING_BY_NAME.get(f"{module}.{each.__qualname__}"):
            return known
        if module.partition(".")[0] in _RETRYING_CLIENTS:
            return ErrorMeaning.UNKNOWN
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes: libraries wrap the errors of sockets.

    ``__context__`` is not followed: it may be the refusal of an earlier attempt, and a later attempt may have arrived.
    """
    current: BaseException | None = error
    for _ in range(8):
        if current is None:
            return
        yield current
        current = current.__cause__
