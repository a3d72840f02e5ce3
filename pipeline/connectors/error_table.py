"""What an error says about the outcome of a call: it did not happen, or nobody knows.

Pure: from an exception to a reading. Libraries are known by the names of their exceptions, so that none
of them has to be installed. What is not in the table is unknown: the safe side.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import Any

from pipeline.domain.errors import AuthError, LogicError, TransientError


class ErrorMeaning(StrEnum):
    """What is known of a call that ended with an error."""

    REFUSED = "refused"  #: it did not happen, and the same request would be refused again
    NOT_NOW = "not now"  #: it did not happen, and may be attempted again
    DENIED = "denied"  #: it did not happen, and a person must give access
    UNKNOWN = "unknown"  #: it may or may not have happened


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReading:
    """An outcome, and how long the outside system asks to be left alone."""

    meaning: ErrorMeaning
    after: timedelta | None = None


#: Exceptions by module and name. Only what cannot have reached the outside system, or was refused by it, is here.
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
#: Clients that follow redirects, or try again, by themselves. Their errors of connections are about the last request,
#: and an earlier one may have been heard. Nor is the refusal believed that such an error was raised from.
_RETRYING_CLIENTS = frozenset({"aiohttp", "httpcore", "httpx", "requests", "urllib3"})
_DENIED_STATUSES = frozenset({401, 403, 407})
_NOT_NOW_STATUSES = frozenset({425, 429})
_UNKNOWN_STATUSES = frozenset({408, 409, 499})  #: a timeout, or a conflict with what may be this very request
_LONGEST_AFTER = timedelta(days=1)


def read_error(error: BaseException) -> ErrorReading:
    """What this error says. Ours say it themselves; an answer says it by its status; the rest is in the table."""
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
        redirected = bool(getattr(response, "history", None))  # what was asked first may have done it
        return ErrorReading(meaning=ErrorMeaning.UNKNOWN) if redirected else _by_status(status, response)
    known = (outcome for each in _causes(error) if (outcome := _by_name(type(each))))
    return ErrorReading(meaning=next(known, ErrorMeaning.UNKNOWN))


def read_status(status: int, after: str | None = None, *, now: datetime | None = None) -> ErrorReading:
    """What the status of an HTTP answer says, with its Retry-After."""
    wait = retry_after(after, now=now)
    if status in _DENIED_STATUSES:
        return ErrorReading(meaning=ErrorMeaning.DENIED)
    if status in _NOT_NOW_STATUSES:
        return ErrorReading(meaning=ErrorMeaning.NOT_NOW, after=wait)
    if 400 <= status < 500 and status not in _UNKNOWN_STATUSES:
        return ErrorReading(meaning=ErrorMeaning.REFUSED)
    return ErrorReading(meaning=ErrorMeaning.UNKNOWN, after=wait)


def bounded_pause(value: Any) -> timedelta | None:
    """A pause that somebody asked for, as a span or in seconds, within reason; None when it makes no sense."""
    try:
        wait = value if isinstance(value, timedelta) else timedelta(seconds=float(value))
    except (TypeError, ValueError, OverflowError):
        return None
    return min(max(wait, timedelta(0)), _LONGEST_AFTER)


def retry_after(value: str | None, *, now: datetime | None = None) -> timedelta | None:
    """How long a Retry-After asks to wait, in seconds or as a date; None when it makes no sense."""
    if not value:
        return None
    seconds = bounded_pause(value)
    if seconds is not None:
        return seconds
    try:
        until = parsedate_to_datetime(value).astimezone(UTC)
    except (ValueError, TypeError):
        return None
    return bounded_pause(until - now) if now is not None else None


def _by_status(status: int, response: Any) -> ErrorReading:
    headers = {str(name).lower(): value for name, value in dict(getattr(response, "headers", None) or {}).items()}
    try:
        theirs = parsedate_to_datetime(headers["date"]).astimezone(UTC)
    except (KeyError, ValueError, TypeError):
        theirs = None
    return read_status(status, headers.get("retry-after"), now=theirs)


def _by_name(kind: type[BaseException]) -> ErrorMeaning | None:
    """What an exception of this type says; None when it says nothing, and what it was raised from may."""
    for each in kind.__mro__:
        module = each.__module__.partition("._")[0]
        if known := _MEANING_BY_NAME.get(f"{module}.{each.__qualname__}"):
            return known
        if module.partition(".")[0] in _RETRYING_CLIENTS:
            return ErrorMeaning.UNKNOWN
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, then what it was raised from on purpose: libraries wrap what the socket said.

    Not what merely happened before it: an earlier attempt may have been refused and a later one not.
    """
    current: BaseException | None = error
    for _ in range(8):
        if current is None:
            return
        yield current
        current = current.__cause__
