"""Connect to an outside system over HTTP, with one line per operation.

A mutation carries its idempotency key in a header and is sent once. The connector follows no redirect and does not
retry. It reconciles a mutation by the read that the mutation names as its ``lookup``. Every exchange ends by the
deadline of its call, however slowly the server answers.

An operation is a method, a path with parameters in braces, and options. ``{id}`` takes text or a whole number.
``{id:int}``, ``{id:str}`` and ``{id:uuid}`` take that type only. ``{key}`` is the idempotency key and
``{json.order.id}`` is a value of the request's body. These two are not parameters.
"""

import base64
import inspect
import re
import ssl
import warnings
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from decimal import Decimal
from string import ascii_letters, digits, punctuation
from typing import Annotated, Any, TypedDict, Unpack
from urllib.parse import quote, urlsplit
from uuid import UUID

try:
    import httpx
except ImportError as error:
    raise ImportError(
        "The connector http needs httpx, which is not installed: pip install 'celery-durable-effects[http]'"
    ) from error

from pydantic import AfterValidator, BaseModel, SecretStr

from pipeline.connectors.http_exchange import (
    TRANSPORT_ERRORS,
    Connections,
    Exchange,
    HttpResponse,
    HttpResult,
    UnclearResponseError,
    checked_statuses,
    raise_for_reading,
    read_response,
    response_reading,
)
from pipeline.connectors.sdk import Call, Connector, Operation
from pipeline.domain.errors import HandlerError, InvalidInputError, LogicError, TransientError
from pipeline.domain.policies import BreakerPolicy, MutationRetryPolicy, ReconcilePolicy
from pipeline.domain.reconciliation import Applied, ErrorMeaning, ErrorReading, NotFound, Retry, Verdict

__all__ = ["Http", "UnclearResponseError", "delete", "get", "patch", "post", "put"]

_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
_NAME = re.compile(r"(?P<name>[a-z_][a-z0-9_]*)(:(?P<kind>[a-z]+))?", re.IGNORECASE)
_BODY_PATH = re.compile(r"json(\.\w+)+")
_RESERVED = frozenset({"self", "call", "json", "query"})


def _check_segment(value: str | int) -> str | int:
    """Refuse a path segment that would change the path: empty text or dots."""
    if value in ("", ".", ".."):
        raise ValueError(f"{value!r} would lead to another path; expected text that names one thing")
    return value


_TYPES: dict[str | None, Any] = {
    None: Annotated[str | int, AfterValidator(_check_segment)],
    "str": Annotated[str, AfterValidator(_check_segment)],
    "int": int,
    "uuid": UUID,
}


@dataclass(frozen=True, slots=True)
class Template:
    """Text with placeholders. It is checked once, when the operation is declared."""

    text: str
    parameters: dict[str, Any] = field(init=False)  #: parameters by name, with their types

    def __post_init__(self) -> None:
        kinds, holes = {}, _PLACEHOLDER.findall(self.text)
        if _PLACEHOLDER.sub("", self.text).count("{") or _PLACEHOLDER.sub("", self.text).count("}"):
            raise InvalidInputError(f"{self.text!r} has a brace without its other half; expected names in braces.")
        for hole in holes:
            if hole == "key" or _BODY_PATH.fullmatch(hole):
                continue
            match = _NAME.fullmatch(hole)
            if match is None or match["kind"] not in _TYPES or match["name"] in _RESERVED:
                known = ", ".join(kind for kind in _TYPES if kind)
                raise InvalidInputError(
                    f"{self.text!r} has {{{hole}}}; expected a name like {{id}}, of a type like {{id:int}} "
                    f"({known}), {{key}}, or a value of the body like {{json.id}}."
                )
            kinds[match["name"]] = _TYPES[match["kind"]]
        object.__setattr__(self, "parameters", kinds)

    def fill(self, values: Mapping[str, Any], *, as_path: bool) -> str:
        """Return the text with these values. In a path each value is quoted, including slashes."""
        return _PLACEHOLDER.sub(lambda match: _placeholder_text(match[1].partition(":")[0], values, as_path), self.text)


def checked_path(text: str) -> Template:
    """Check a path below the base URL."""
    if not text.startswith("/") or "?" in text or "#" in text or "//" in text:
        raise InvalidInputError(f"The path {text!r} cannot be used; expected one like '/things/{{id}}', without query.")
    return Template(text)


def value_at(values: Mapping[str, Any], name: str) -> Any:
    """Return the value with this name or dotted path. None if there is none."""
    found: Any = values
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def all_parameters(*templates: Template) -> dict[str, Any]:
    """Return the parameters of all these templates."""
    return {name: kind for template in templates for name, kind in template.parameters.items()}


def _placeholder_text(name: str, values: Mapping[str, Any], as_path: bool) -> str:
    value = value_at(values, name)
    if value is None:
        given = ", ".join(sorted(values)) or "nothing"
        raise LogicError(f"{name} is missing; given were: {given}")
    if not as_path:
        return str(value)
    try:
        return quote(str(_check_segment(str(value))), safe="")
    except ValueError as error:
        raise LogicError(f"{name} cannot be part of a path: {error}") from None


Query = Mapping[str, str | int | bool]


_SETTLE = timedelta(minutes=1)  #: the default; a server may commit after its client has given up


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """A request whose parameters are filled in."""

    method: str
    path: str
    query: dict[str, Any]
    json: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTemplate:
    """The request of an operation before its parameters are known."""

    method: str
    path: Template
    query: dict[str, Template]
    key_field: str | None = None

    @property
    def request_line(self) -> str:
        """The request line for messages, without any values."""
        return f"{self.method} {self.path.text}"

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters with their types."""
        return all_parameters(self.path, *self.query.values())

    def fill(self, sent: Mapping[str, Any]) -> HttpRequest:
        """Return the request for these values. Raises LogicError if one is missing."""
        body = sent.get("json")
        if self.key_field:
            if not isinstance(body, dict | None):
                raise LogicError(
                    f"json is a {type(body).__name__}; expected an object, which {self.key_field!r} goes into"
                )
            body = {**(body or {}), self.key_field: sent["key"]}
        query = {name: template.fill(sent, as_path=False) for name, template in self.query.items()}
        query |= {name: value for name, value in (sent.get("query") or {}).items() if value is not None}
        return HttpRequest(method=self.method, path=self.path.fill(sent, as_path=True), query=query, json=body)


@dataclass(slots=True, kw_only=True)
class HttpOperation(Operation[Any]):
    """An operation that is one request."""

    template: RequestTemplate
    statuses: dict[int, str]
    lookup: "HttpOperation | None" = None
    fetch_by: "HttpOperation | None" = None
    found: Callable[..., Any] | None = None


class HttpMutationOptions(TypedDict, total=False):
    """The options of a mutation. Those up to ``four_eyes_above`` are as in ``pipeline.mutation``."""

    timeout: timedelta
    settle: timedelta
    keyed: bool
    key_lifetime: timedelta
    policy: ReconcilePolicy
    retry: MutationRetryPolicy
    breaker: BreakerPolicy
    redact: Collection[str]
    shown: Collection[str]
    shows: str
    look_up: str
    value: str
    four_eyes_above: Decimal | int
    lookup: HttpOperation  #: the read that finds the effect of this mutation
    fetch_by: HttpOperation  #: the read of the effect by the outside system's id, which is {external_id}
    found: Callable[..., Any]  #: returns the effect from the lookup's body (and the sent values), or None
    statuses: Mapping[int, str]  #: what a status means here: "applied" or one of the outcomes
    query: Query  #: sent with every request; values may have parameters in braces
    body: type[BaseModel]  #: the type of ``json``
    key_field: str  #: where in ``json`` the idempotency key goes, besides its header


def get(path: str, *, query: Query | None = None, timeout: timedelta = timedelta(seconds=30)) -> HttpOperation:
    """Declare a read. Its result has ``status``, ``body`` and ``headers``. 404 is a result like 2xx."""

    def fetch(connector: Any, **params: Any) -> Any:
        return connector._fetch(operation, params)

    shape = _template("GET", path, query)
    operation = _operation(fetch, shape, _optional("query", dict[str, Any] | None), timeout=timeout, is_mutation=False)
    return operation


def post(path: str, **facts: Unpack[HttpMutationOptions]) -> HttpOperation:
    """Declare a mutation that is sent as POST."""
    return _mutation("POST", path, facts)


def put(path: str, **facts: Unpack[HttpMutationOptions]) -> HttpOperation:
    """Declare a mutation that is sent as PUT."""
    return _mutation("PUT", path, facts)


def patch(path: str, **facts: Unpack[HttpMutationOptions]) -> HttpOperation:
    """Declare a mutation that is sent as PATCH."""
    return _mutation("PATCH", path, facts)


def delete(path: str, **facts: Unpack[HttpMutationOptions]) -> HttpOperation:
    """Declare a mutation that is sent as DELETE."""
    return _mutation("DELETE", path, facts)


def _mutation(method: str, path: str, facts: HttpMutationOptions) -> HttpOperation:
    rest: dict[str, Any] = dict(facts)
    shape = _template(method, path, rest.pop("query", None), rest.pop("key_field", None))
    body = rest.pop("body", None)
    rest |= {name: frozenset(rest.get(name, ())) for name in ("redact", "shown")}
    lookup, found = rest.get("lookup"), rest.pop("found", None)
    _check_lookup(shape, lookup, found)
    _check_fetch(shape, rest.get("fetch_by"))

    def send(connector: Any, call: Any, **params: Any) -> Any:
        return connector._send(operation, call, params)

    def reconcile(connector: Any, call: Any, **params: Any) -> Any:
        return connector._reconcile(operation, call, params)

    def fetch(connector: Any, call: Any, *, external_id: str) -> Any:
        return connector._fetch_result(operation, call, external_id)

    json = _required("json", body) if body else _optional("json", Any)
    takes = {**json, **_optional("query", dict[str, Any] | None)}
    statuses = checked_statuses(rest.pop("statuses", {}))
    operation = _operation(send, shape, takes, is_mutation=True, statuses=statuses, **rest)
    operation.found = found and _with_two_arguments(found)
    operation.reconcile_function = reconcile if lookup else None
    operation.fetch_function = fetch if operation.fetch_by else None
    return operation


def _template(method: str, path: str, query: Query | None, key_field: str | None = None) -> RequestTemplate:
    templates = {name: Template(str(value)) for name, value in (query or {}).items()}
    return RequestTemplate(method=method, path=checked_path(path), query=templates, key_field=key_field)


def _check_lookup(shape: RequestTemplate, lookup: HttpOperation | None, found: Callable[..., Any] | None) -> None:
    """Refuse a lookup that cannot be sent, or whose response cannot be read."""
    if lookup is None:
        if found is not None:
            raise InvalidInputError(
                f"{shape.request_line} has found= without lookup=; expected the read whose response it gets."
            )
        return
    if not isinstance(lookup, HttpOperation) or lookup.is_mutation:
        raise InvalidInputError(f"{shape.request_line} has a lookup that is no read; expected lookup=get(...).")
    missing = sorted(set(lookup.template.parameters) - set(shape.parameters))
    if missing:
        raise InvalidInputError(
            f"{shape.request_line} is looked up by {lookup.template.request_line}, which needs "
            f"{{{missing[0]}}}; expected a parameter of "
            "the mutation, {key} for the idempotency key, or a value of its body like {json.id}."
        )
    if lookup.template.query and found is None:
        raise InvalidInputError(
            f"{shape.request_line} is looked up by a search, which also answers 200 when it finds nothing; "
            "expected found=, a function that returns the effect from the body of the response, or None."
        )


def _check_fetch(shape: RequestTemplate, fetch_by: HttpOperation | None) -> None:
    """Refuse a read that does not fetch one effect by the outside system's id alone."""
    if fetch_by is None:
        return
    if not isinstance(fetch_by, HttpOperation) or fetch_by.is_mutation:
        raise InvalidInputError(f"{shape.request_line} has a fetch_by that is no read; expected fetch_by=get(...).")
    if set(fetch_by.template.parameters) != {"external_id"}:
        raise InvalidInputError(
            f"{shape.request_line} is fetched by {fetch_by.template.request_line}; expected {{external_id}} in it, and "
            "no other parameter."
        )


def _operation(
    function: Any, shape: RequestTemplate, takes: dict[str, inspect.Parameter], **rest: Any
) -> HttpOperation:
    """Set the declared signature on the function and make it an operation."""
    taken = {**{name: _required(name, kind)[name] for name, kind in shape.parameters.items()}, **takes}
    first = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", "call")]
    function.__signature__ = inspect.Signature([*first[: 2 if rest["is_mutation"] else 1], *taken.values()])
    function.__annotations__ = {name: parameter.annotation for name, parameter in taken.items()}
    function.__annotations__["return"] = HttpResult
    function.__name__ = function.__qualname__ = shape.request_line
    with warnings.catch_warnings():
        # A parameter called json hides a deprecated method of pydantic's models, which is not called here.
        warnings.filterwarnings("ignore", message='Field name "json"', category=UserWarning)
        return HttpOperation(function=function, template=shape, **{"statuses": {}, "settle": _SETTLE, **rest})


def _required(name: str, kind: Any) -> dict[str, inspect.Parameter]:
    return {name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind)}


def _optional(name: str, kind: Any) -> dict[str, inspect.Parameter]:
    return {name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=None)}


def _with_two_arguments(found: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``found`` be called with two arguments, even if it takes only the body."""
    takes = [each for each in inspect.signature(found).parameters.values() if each.default is each.empty]
    if len(takes) > 1:
        return found
    return lambda body, _: found(body)


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
        body = "" if operation.has_hidden_params else response.snippet()
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
