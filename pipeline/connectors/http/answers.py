"""Read an HTTP response: a result, a refusal, or an unclear response."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from pipeline.connectors.error_table import read_status
from pipeline.domain.errors import AuthError, InvalidInputError, LogicError, TransientError
from pipeline.domain.payloads import single_line
from pipeline.domain.reconciliation import ErrorMeaning, ErrorReading

try:  # here, because the package imports this module first
    import httpx
except ImportError as error:
    raise ImportError("The connector http needs httpx, which is not installed: pip install 'pipeline[http]'") from error

APPLIED = "applied"  #: a declared meaning of a status, besides the outcomes
_SNIPPET = 200  #: characters of a response that an error repeats


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
    except LookupError:
        text = raw.decode(errors="replace")
    return _storable(text)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _storable(text: str) -> str:
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()
