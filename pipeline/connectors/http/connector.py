"""Connect to an outside system over HTTP, with one line per operation.

A mutation carries its idempotency key in a header and is sent once. The connector follows no redirect and does not
retry. It reconciles a mutation by the read that the mutation names as its ``lookup``. Every exchange ends by the
deadline of its call, however slowly the server answers.
"""

import base64
import ssl
from collections.abc import Awaitable, Iterator, Mapping
from dataclasses import replace
from string import ascii_letters, digits, punctuation
from typing import Any
from urllib.parse import quote, urlsplit

try:  # here, because the package imports this module first
    import httpx
except ImportError as error:
    raise ImportError("The connector http needs httpx, which is not installed: pip install 'pipeline[http]'") from error
from pydantic import BaseModel, SecretStr

from pipeline.connectors.http.exchange import (
    TRANSPORT_ERRORS,
    Connections,
    Exchange,
    HttpResponse,
    UnclearResponseError,
    raise_for_reading,
    read_response,
    response_reading,
)
from pipeline.connectors.http.operations import HttpOperation, HttpRequest
from pipeline.connectors.sdk import Call, Connector
from pipeline.domain.errors import HandlerError, InvalidInputError, LogicError, TransientError
from pipeline.domain.reconciliation import Applied, ErrorMeaning, ErrorReading, NotFound, Retry, Verdict

#: Headers that always hold credentials.
_CREDENTIALS = frozenset({"authorization", "proxy-authorization", "cookie", "x-api-key"})
#: Characters of a key that are sent as they are.
_KEY_CHARACTERS = (ascii_letters + digits + punctuation).replace("%", "")


class Http(Connector):
    """A system behind a base URL. Subclasses set ``name`` and declare operations.

    ``token`` is sent as a bearer token. ``auth`` is a name and a password, or an ``httpx.Auth``. ``headers`` are sent
    with every request; those that are credentials must be ``SecretStr``. ``ssl_context`` replaces the default one.
    """

    base_url: str = ""
    key_header: str = "Idempotency-Key"
    max_body: int = 65_536  #: bytes of a response body that are kept
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
        self.token, self.auth = token, auth
        self.headers = dict(headers or {})
        self._connections = Connections(ssl_context)
        _check_headers({**self.headers, **({"the token": token} if token else {})})

    def _send(self, operation: HttpOperation, call: Call, params: Mapping[str, Any]) -> dict[str, Any]:
        """Send a mutation once. Returns its result, or raises an error that says whether it happened."""
        key = header_key(call)
        sent = _template_values(params, key)
        request = self._fill(operation, sent)
        if operation.lookup:
            self._fill(operation.lookup, {**sent, "query": None})  # refuses a mutation that could not be reconciled
        response = self._exchange(operation, request, call.ends_at, {self.key_header: key})
        reading = response_reading(response, operation.statuses)
        if reading is None:
            return response.result()
        return raise_for_reading(reading, self._description(operation, response))

    def _fetch_result(self, operation: HttpOperation, call: Call, external_id: str) -> dict[str, Any] | NotFound:
        """Fetch the effect of a mutation by the outside system's id."""
        fetch_by = operation.fetch_by
        assert fetch_by is not None
        result = self._fetch(fetch_by, {"external_id": external_id}, call)
        return NotFound(f"{fetch_by.template.request_line} answered 404") if result["status"] == 404 else result

    def _fetch(self, operation: HttpOperation, params: Mapping[str, Any], call: Call | None = None) -> dict[str, Any]:
        """Carry out a read. An unclear response is a transient error, since a read can be repeated."""
        call = call or Call.within("", operation.timeout)
        try:
            response = self._exchange(operation, self._fill(operation, _template_values(params, "")), call.ends_at, {})
        except UnclearResponseError as error:
            raise TransientError(str(error)) from None
        if response.is_success or response.status == 404:
            return response.result()
        reading, message = response.reading, self._description(operation, response)
        if reading.meaning is ErrorMeaning.UNKNOWN:
            reading = ErrorReading(meaning=ErrorMeaning.NOT_NOW, after=reading.after)
        return raise_for_reading(reading, message)

    def _reconcile(self, operation: HttpOperation, call: Call, params: Mapping[str, Any]) -> Verdict:
        """Reconcile a mutation by its lookup. A response that is not clear means: ask again."""
        lookup = operation.lookup
        assert lookup is not None
        sent = _template_values(params, header_key(call))
        try:
            request = replace(self._fill(lookup, {**sent, "query": None}), json=None)  # never the mutation's body
            response = self._exchange(lookup, request, call.ends_at, {})
        except (HandlerError, UnclearResponseError) as error:
            return Retry(str(error))
        if response.status == 404 and (response.body in (None, "") or not isinstance(response.body, str)):
            return NotFound(f"{lookup.template.request_line} answered 404")
        if not response.is_success:
            return Retry(self._description(lookup, response), after=response.reading.after)
        return _verdict(operation, response, sent)

    def close_connections(self) -> None:
        """Close the connections of this process. The next call opens new ones."""
        self._connections.close()

    def _fill(self, operation: HttpOperation, sent: Mapping[str, Any]) -> HttpRequest:
        try:
            return operation.template.fill(sent)
        except LogicError as error:
            raise LogicError(f"{self.name}.{operation.name}: {operation.template.request_line}: {error}") from None

    def _exchange(
        self, operation: HttpOperation, request: HttpRequest, ends_at: float, headers: Mapping[str, str]
    ) -> HttpResponse:
        what = f"{self.name}.{operation.name or 'lookup'}: {operation.template.request_line}"
        exchange = Exchange(self._connections, ends_at, self.max_body)
        with self._client(exchange) as client:
            try:
                body = {} if request.json is None else {"json": request.json}
                made = client.build_request(
                    request.method, self.base_url + request.path, params=request.query or None, headers=headers, **body
                )
            except (TypeError, ValueError, httpx.InvalidURL) as error:
                raise LogicError(self.scrub(f"{what} could not be built: {error}")) from None
            try:
                return read_response(client.send(made), keep=self.keep_headers, limit=self.max_body)
            except TRANSPORT_ERRORS as error:
                message = f"{what}: {type(error).__name__}: {error}".removesuffix(": ")
                raise exchange.failure(error, self.scrub(message)) from None

    def _client(self, exchange: Exchange) -> httpx.Client:
        """Return a client for one call, so that the next call gets none of its cookies."""
        headers = {"Accept": "application/json, */*;q=0.5", "Accept-Encoding": "identity"}
        headers |= {name: _reveal(value) for name, value in self.headers.items()}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token.get_secret_value()}"
        auth = (self.auth[0], self.auth[1].get_secret_value()) if isinstance(self.auth, tuple) else self.auth
        if isinstance(auth, tuple):  # so that messages are scrubbed of the header, too
            self._basic = SecretStr(base64.b64encode(":".join(auth).encode()).decode())
        return httpx.Client(transport=exchange, headers=headers, auth=auth, trust_env=False)

    def _description(self, operation: HttpOperation, response: HttpResponse) -> str:
        """Describe a response. The body is left out if the operation redacts anything, since it may repeat that."""
        body = "" if operation.redact else response.snippet()
        name = f"{self.name}.{operation.name}: " if operation.name else ""
        return self.scrub(f"{name}{operation.template.request_line} answered {response.status}{body}.")


def header_key(call: Call) -> str:
    """Return the idempotency key for a header. Characters that a header cannot carry are percent-encoded."""
    return quote(call.idempotency_key, safe=_KEY_CHARACTERS)


def _template_values(params: Mapping[str, Any], key: str) -> dict[str, Any]:
    json = params.get("json")
    body = json.model_dump(mode="json", by_alias=True) if isinstance(json, BaseModel) else json
    return {**params, "json": body, "key": key}


def _verdict(operation: HttpOperation, response: HttpResponse, sent: Mapping[str, Any]) -> Verdict:
    """Return the verdict of a lookup that was answered. Found is what ``found`` returns, or else a single object."""
    assert operation.lookup is not None
    line = operation.lookup.template.request_line
    if operation.found is None:
        if response.status != 200 or not isinstance(response.body, dict) or not response.body:
            return Retry(f"{line} answered {response.status} without one object; expected one, or found= to pick it")
        return Applied(response.result())
    if response.is_truncated:
        return Retry(f"{line} answered more than max_body bytes; expected a narrower lookup")
    try:
        found = operation.found(response.body, sent)
        is_empty = not found or isinstance(found, Iterator | Awaitable)  # these are always true, and may be empty
    except Exception as error:  # noqa: BLE001 - a lookup that fails proves nothing
        return Retry(f"found= of {operation.name} could not read the answer to {line}: {type(error).__name__}")
    if found is not None and is_empty:
        kind = type(found).__name__
        return Retry(f"found= of {operation.name} gave an empty {kind}; expected what was found, or None")
    return NotFound(f"{line} does not have it") if found is None else Applied({**response.result(), "body": found})


def _checked_url(url: str, owner: str) -> str:
    """Check a base URL. The URL is not part of the errors if it may hold a password."""
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
