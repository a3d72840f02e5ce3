"""What an HTTP answer says: a result, a refusal, or nothing that can be relied on."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, NoReturn

import httpx

from pipeline.connectors.error_table import ErrorMeaning, ErrorReading, read_status
from pipeline.domain.errors import AuthError, InvalidInputError, LogicError, TransientError

APPLIED = "applied"  #: what a status may be declared to mean, besides the outcomes
_SNIPPET = 200  #: characters of an answer that an error repeats


class UnclearResponseError(Exception):
    """A request went out, and what came back does not say whether it was carried out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpResponse:
    """An answer that came in whole, or as much of it as is wanted."""

    status: int
    body: Any
    headers: dict[str, str]
    is_truncated: bool
    reading: ErrorReading  #: what the status says when it is no success and nothing else was declared

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    def result(self) -> dict[str, Any]:
        """What the ledger keeps."""
        cut = {"truncated": True} if self.is_truncated else {}
        return {"status": self.status, "body": self.body, "headers": self.headers, **cut}

    def snippet(self) -> str:
        """The beginning of the body, for an error."""
        text = self.body if isinstance(self.body, str) else json.dumps(self.body, ensure_ascii=False)
        short = " ".join(text[: _SNIPPET * 2].split())[:_SNIPPET]
        return f": {short}" if self.body not in (None, "") else ""


def read_response(response: httpx.Response, *, keep: Collection[str], limit: int) -> HttpResponse:
    """Read an answer, at most so many bytes of its body; the rest is left on the line, which is then closed."""
    body = bytearray()
    for piece in response.iter_bytes():
        body += piece
        if len(body) > limit:
            break
    is_cut = len(body) > limit
    headers = {name: _storable(response.headers[name]) for name in keep if name in response.headers}
    after, date = response.headers.get("retry-after"), response.headers.get("date")
    return HttpResponse(
        status=response.status_code,
        body=_body(bytes(body[:limit]), response, is_cut=is_cut),
        headers=headers,
        is_truncated=is_cut,
        reading=_status_reading(response.status_code, after, date),
    )


def checked_statuses(declared: Mapping[int, str]) -> dict[int, str]:
    """What an operation says its statuses mean, refused when nobody would understand it."""
    known = [APPLIED, *ErrorMeaning]
    for status, meaning in declared.items():
        if meaning not in known or not 200 <= status <= 599:
            words = ", ".join(repr(str(word)) for word in known)
            raise InvalidInputError(f"statuses has {status}: {meaning!r}; expected a status from 200 to 599: {words}.")
    return {status: str(meaning) for status, meaning in declared.items()}


def response_reading(response: HttpResponse, declared: Mapping[int, str]) -> ErrorReading | None:
    """None when the answer says that it was done; else what it says."""
    word = declared.get(response.status)
    if word == APPLIED or (word is None and response.is_success):
        return None
    return ErrorReading(meaning=ErrorMeaning(word), after=response.reading.after) if word else response.reading


def raise_for_reading(reading: ErrorReading, message: str) -> NoReturn:
    """Raise what tells the host the same as this reading."""
    match reading.meaning:
        case ErrorMeaning.REFUSED:
            raise LogicError(message)
        case ErrorMeaning.DENIED:
            raise AuthError(f"{message} Check the connector's credentials and what they may do.")
        case ErrorMeaning.NOT_NOW:
            raise TransientError(message, after=reading.after)
        case ErrorMeaning.UNKNOWN:
            raise UnclearResponseError(f"{message} It may or may not have been carried out.")


def _status_reading(status: int, after: str | None, date: str | None) -> ErrorReading:
    """A Retry-After that names an instant counts from the Date of the same answer: one clock wrote both."""
    try:
        now = parsedate_to_datetime(date) if date else None
        return read_status(status, after, now=now)
    except (ValueError, TypeError, OverflowError):
        return read_status(status)


def _body(raw: bytes, response: httpx.Response, *, is_cut: bool) -> Any:
    """JSON where the answer says so and is; else its text; None for nothing."""
    if not raw:
        return None
    if "json" in response.headers.get("content-type", "").lower() and not is_cut:
        try:
            return json.loads(raw, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            pass
    try:
        text = raw.decode(response.charset_encoding or "utf-8", errors="replace")
    except LookupError:
        text = raw.decode(errors="replace")
    return _storable(text)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _storable(text: str) -> str:
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()
