"""Outside systems that speak HTTP: one line per operation.

A mutation carries its idempotency key in a header and is sent once: no redirect is followed, nothing is
sent again. What became of it is found out by the read that it names as its ``lookup``. Every exchange
ends by the deadline of its call, however slowly the other side answers.
"""

import base64
import os
import ssl
from collections.abc import Awaitable, Iterator, Mapping
from dataclasses import replace
from http.cookiejar import CookieJar, DefaultCookiePolicy
from string import ascii_letters, digits, punctuation
from typing import Any
from urllib.parse import quote, urlsplit

from pydantic import BaseModel, SecretStr

from pipeline.connectors.error_table import ErrorMeaning, ErrorReading
from pipeline.connectors.http.answers import (
    HttpResponse,
    UnclearResponseError,
    raise_for_reading,
    read_response,
    response_reading,
)
from pipeline.connectors.http.exchange import TRANSPORT_ERRORS, BoundedTransport, Budget, deadline
from pipeline.connectors.http.operations import HttpOperation, HttpRequest
from pipeline.connectors.sdk import HIDDEN, Applied, Call, Connector, NotFound, Retry, Verdict
from pipeline.domain.errors import AuthError, HandlerError, InvalidInputError, LogicError, TransientError

try:
    import httpx
except ImportError as error:
    raise ImportError("The connector http needs httpx, which is not installed: pip install 'pipeline[http]'") from error


#: Headers that are credentials, whatever they hold.
_CREDENTIALS = frozenset({"authorization", "proxy-authorization", "cookie", "x-api-key"})
_KEY_CHARACTERS = (ascii_letters + digits + punctuation).replace("%", "")  #: what a key may hold as it is


class Http(Connector):
    """A system behind a base URL. Subclasses name themselves and declare operations.

    ``token`` is sent as a bearer token; ``auth`` is a name and a password, or an ``httpx.Auth``; ``headers``
    go with every request, credentials among them as ``SecretStr``. ``ssl_context`` replaces the usual trust.
    """

    base_url: str = ""
    key_header: str = "Idempotency-Key"
    max_body: int = 65_536  #: bytes of an answer that are read
    keep_headers: tuple[str, ...] = ("content-type", "etag", "location", "request-id", "retry-after", "x-request-id")

    def __init__(
        self,
        base_url: str | None = None,
        *,
        token: SecretStr | None = None,
        auth: tuple[str, SecretStr] | httpx.Auth | None = None,
        headers: Mapping[str, str | SecretStr] | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self.base_url = _checked_url(base_url or self.base_url, type(self).__qualname__)
        self.token, self.auth, self.ssl_context = token, auth, ssl_context
        self.headers = dict(headers or {})
        self._clients: dict[int, httpx.Client] = {}
        _check_headers({**self.headers, **({"the token": token} if token else {})})

    def _send(self, operation: HttpOperation, call: Call, params: Mapping[str, Any]) -> dict[str, Any]:
        """Send a mutation once. Returns its result, or raises what says whether it happened."""
        key = header_key(call)
        sent = _template_values(params, key)
        request = self._fill(operation, sent)
        if operation.lookup:
            self._fill(operation.lookup, {**sent, "query": None})  # what could not be looked for is not sent
        answer = self._exchange(operation, request, call.ends_at, {self.key_header: key})
        reading = response_reading(answer, operation.statuses)
        if reading is None:
            return answer.result()
        return raise_for_reading(reading, self._description(operation, answer))

    def _fetch(self, operation: HttpOperation, params: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out a read. What a mutation would be in doubt about is merely a reason to read again."""
        call = Call.within("", operation.timeout)
        try:
            answer = self._exchange(operation, self._fill(operation, _template_values(params, "")), call.ends_at, {})
        except UnclearResponseError as error:
            raise TransientError(str(error)) from None
        if answer.is_success or answer.status == 404:
            return answer.result()
        reading, words = answer.reading, self._description(operation, answer)
        if reading.meaning is ErrorMeaning.UNKNOWN:
            reading = ErrorReading(meaning=ErrorMeaning.NOT_NOW, after=reading.after)
        return raise_for_reading(reading, words)

    def _reconcile(self, operation: HttpOperation, call: Call, params: Mapping[str, Any]) -> Verdict:
        """Find out what became of a mutation, by its lookup. Whatever is no clear answer is none."""
        lookup = operation.lookup
        assert lookup is not None
        sent = _template_values(params, header_key(call))
        try:
            request = replace(self._fill(lookup, {**sent, "query": None}), json=None)  # what was sent is not sent again
            answer = self._exchange(lookup, request, call.ends_at, {})
        except (HandlerError, UnclearResponseError) as error:
            return Retry(str(error))
        if answer.status == 404 and (answer.body in (None, "") or not isinstance(answer.body, str)):
            return NotFound(f"{lookup.template.request_line} answered 404")
        if not answer.is_success:
            return Retry(self._description(lookup, answer), after=answer.reading.after)
        return _verdict(operation, answer, sent)

    def close_connections(self) -> None:
        """Close the connections of this process. The next call opens new ones."""
        client = self._clients.pop(os.getpid(), None)
        if client is not None:
            client.close()

    def scrub(self, text: str) -> str:
        """Words without this connector's credentials, also those in headers."""
        for secret in self._secrets():
            text = text.replace(secret, HIDDEN)
        return super().scrub(text)

    def _secrets(self) -> Iterator[str]:
        yield from (
            value.get_secret_value() for value in self.headers.values() if isinstance(value, SecretStr) and value
        )
        if isinstance(self.auth, tuple) and self.auth[1]:
            name, password = self.auth[0], self.auth[1].get_secret_value()
            yield from (base64.b64encode(f"{name}:{password}".encode()).decode(), password)

    def _fill(self, operation: HttpOperation, sent: Mapping[str, Any]) -> HttpRequest:
        try:
            return operation.template.fill(sent)
        except LogicError as error:
            raise LogicError(f"{self.name}.{operation.name}: {operation.template.request_line}: {error}") from None

    def _exchange(
        self, operation: HttpOperation, request: HttpRequest, ends_at: float, headers: Mapping[str, str]
    ) -> HttpResponse:
        what = f"{self.name}.{operation.name or 'lookup'}: {operation.template.request_line}"
        client = self._client()
        try:
            body = {} if request.json is None else {"json": request.json}
            made = client.build_request(
                request.method, self.base_url + request.path, params=request.query or None, headers=headers, **body
            )
        except (TypeError, ValueError, httpx.InvalidURL) as error:
            raise LogicError(self.scrub(f"{what} could not be put together: {error}")) from None
        with deadline(ends_at) as budget:
            try:
                response = client.send(made, stream=True)
                try:
                    return read_response(response, keep=self.keep_headers, limit=self.max_body)
                finally:
                    response.close()
            except TRANSPORT_ERRORS as error:
                raise _no_response_error(
                    budget, error, self.scrub(f"{what}: {type(error).__name__}: {error}")
                ) from None

    def _client(self) -> httpx.Client:
        """The client of this process. One from before a fork is left alone: its sockets are the parent's."""
        pid = os.getpid()
        return self._clients.get(pid) or self._clients.setdefault(pid, self._new_client())

    def _new_client(self) -> httpx.Client:
        headers = {"Accept": "application/json, */*;q=0.5", "Accept-Encoding": "identity"}
        headers |= {name: _reveal(value) for name, value in self.headers.items()}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token.get_secret_value()}"
        auth = (self.auth[0], self.auth[1].get_secret_value()) if isinstance(self.auth, tuple) else self.auth
        return httpx.Client(
            transport=BoundedTransport(self.ssl_context or httpx.create_ssl_context(trust_env=False)),
            headers=headers,
            auth=auth,
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),  # one call leaves nothing behind for the next
            timeout=None,  # noqa: S113 - the transport bounds every step by the call's deadline
            trust_env=False,
            follow_redirects=False,
        )

    def _description(self, operation: HttpOperation, answer: HttpResponse) -> str:
        """What was answered. The body is left out where the operation hides something: it may repeat it."""
        said = "" if operation.redact else answer.snippet()
        name = f"{self.name}.{operation.name}: " if operation.name else ""
        return self.scrub(f"{name}{operation.template.request_line} answered {answer.status}{said}.")


def header_key(call: Call) -> str:
    """The idempotency key as every header can carry it; what is not plain is quoted."""
    return quote(call.idempotency_key, safe=_KEY_CHARACTERS)


def _template_values(params: Mapping[str, Any], key: str) -> dict[str, Any]:
    json = params.get("json")
    body = json.model_dump(mode="json", by_alias=True) if isinstance(json, BaseModel) else json
    return {**params, "json": body, "key": key}


def _verdict(operation: HttpOperation, answer: HttpResponse, sent: Mapping[str, Any]) -> Verdict:
    """What a lookup that was answered says. Only what ``found`` accepts, or a single thing, was found."""
    assert operation.lookup is not None
    line = operation.lookup.template.request_line
    if operation.found is None:
        if answer.status != 200 or not isinstance(answer.body, dict) or not answer.body:
            return Retry(f"{line} answered {answer.status} without one thing in it; expected one, or found= to pick it")
        return Applied(answer.result())
    if answer.is_truncated:
        return Retry(f"{line} answered more than can be looked through; expected a narrower lookup")
    try:
        found = operation.found(answer.body, sent)
        is_empty = not found or isinstance(found, Iterator | Awaitable)  # those are true, and may hold nothing
    except Exception as error:  # noqa: BLE001 - a lookup that breaks has not found out anything
        return Retry(f"found= of {operation.name} could not read the answer to {line}: {type(error).__name__}")
    if found is not None and is_empty:
        kind = type(found).__name__
        return Retry(f"found= of {operation.name} gave an empty {kind}; expected what was found, or None")
    return NotFound(f"{line} does not have it") if found is None else Applied({**answer.result(), "body": found})


def _no_response_error(budget: Budget, error: BaseException, words: str) -> Exception:
    """What to raise when no whole answer came. Until the first byte was sent, nothing can have happened."""
    if budget.has_sent:
        return UnclearResponseError(f"{words}. It was sent, and may or may not have been carried out.")
    if any(isinstance(each, ssl.SSLCertVerificationError) for each in (error, *error.args)):
        return AuthError(f"{words}. Nothing was sent: the server's certificate is not trusted.")
    if type(error).__name__ == "LocalProtocolError":
        return LogicError("The request cannot be put on the line; expected plain headers and a length that fits.")
    return TransientError(f"{words}. Nothing was sent.")


def _checked_url(url: str, owner: str) -> str:
    """A base URL that says everything it must and nothing it must not. It is not repeated: it may hold a password."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise InvalidInputError(f"{owner} was given a base URL that cannot be read.") from None
    if parts.username is not None or parts.password is not None:
        raise InvalidInputError(f"{owner} was given credentials in its base URL; expected them as token= or auth=.")
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise InvalidInputError(f"{owner} was given the base URL {url!r}; expected one like 'https://api.example.com'.")
    if parts.query or parts.fragment:
        raise InvalidInputError(
            f"{owner} was given a base URL with a query or a fragment; expected query= of operations."
        )
    return url.rstrip("/")


def _check_headers(headers: Mapping[str, str | SecretStr]) -> None:
    for name, value in headers.items():
        if name.lower() in _CREDENTIALS and not isinstance(value, SecretStr):
            raise InvalidInputError(f"The header {name!r} is a credential; expected it as a SecretStr.")
        text = _reveal(value)
        if not text.isascii() or not text.isprintable() or text != text.strip():
            raise InvalidInputError(
                f"{name!r} has characters that no header can carry, perhaps a line break at its end; "
                "expected printable ASCII without spaces around it."
            )


def _reveal(value: str | SecretStr) -> str:
    return value.get_secret_value() if isinstance(value, SecretStr) else value
