"""Guard every request and every answer of the app.

- A body is limited while it is read, with or without a declared length.
- ``X-Forwarded-*`` is followed only if a listed proxy sent it.
- Every answer carries the security headers; only static files may be cached.
- An unexpected error is logged under a reference and answered without internals.
"""

import ipaddress
from collections.abc import Iterable

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.api.problems import ProblemError, internal_problem
from pipeline.config import Settings

PEER = "pipeline.peer"  #: key of the scope: the address of the other end of the connection, proxy or not
PREFIX = "pipeline.prefix"  #: key of the scope: the path under which this app is mounted
_POLICY = "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'"
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # with no-referrer, browsers would send `Origin: null` with forms
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_UPLOADS = ("/import", "/imports")  #: ends of the paths that take files


class Guard:
    """The outermost layer of the app, inside Starlette's own."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app = app
        self.max_body, self.max_upload = settings.api_max_body_bytes, settings.api_max_upload_bytes
        self.proxies = Proxies(settings.api_trusted_proxies)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope = self.proxies.resolve(scope)
        answer = _Answer(scope, send)
        try:
            await self.app(scope, self._limited(scope, receive), answer.send)
        except Exception as error:
            problem = internal_problem(Request(scope), error)
            if answer.is_started:  # too late for another status: the server must cut the connection
                raise
            await problem(scope, receive, answer.send)

    def _limited(self, scope: Scope, receive: Receive) -> Receive:
        headers = Headers(scope=scope)
        is_upload = headers.get("content-type", "").startswith("multipart/") and scope["path"].endswith(_UPLOADS)
        limit, seen = self.max_upload if is_upload else self.max_body, 0
        declared = headers.get("content-length", "")

        async def receive_limited() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b"")) if message["type"] == "http.request" else 0
            if seen > limit or (declared.isdigit() and int(declared) > limit):
                raise ProblemError(
                    "too-large", f"The body has more than {limit} bytes, which is the limit. Nothing was changed."
                )
            return message

        return receive_limited


class _Answer:
    """The answer to one request, on its way out."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.scope, self._send, self.is_started = scope, send, False
        self._caching = _caching(scope)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.is_started = True
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
            headers.setdefault("Cache-Control", self._caching)
            for cookie in self.scope["state"].get("new_cookies", ()):
                headers.append("Set-Cookie", cookie)
        await self._send(message)


def _caching(scope: Scope) -> str:
    if not local_path(scope).startswith("/static/"):
        return "no-store"
    is_versioned = b"v=" in scope.get("query_string", b"")
    return "public, max-age=31536000, immutable" if is_versioned else "no-cache"


def local_path(scope: Scope) -> str:
    """Return the path of a request without the prefix under which the app is mounted."""
    path: str = scope["path"]
    return path.removeprefix(prefix_of(scope)) or "/"


def prefix_of(scope: Scope) -> str:
    """Return the path under which the app is mounted, without a slash at its end.

    ``root_path`` is not it: while a static file is served, that includes the folder.
    """
    found: str = scope.get(PREFIX, scope.get("root_path", ""))
    return found.rstrip("/")


class Proxies:
    """The proxies whose headers are followed."""

    def __init__(self, networks: Iterable[str]) -> None:
        self._networks = [ipaddress.ip_network(each) for each in networks]

    def is_trusted(self, address: str) -> bool:
        """Whether an address belongs to a listed proxy."""
        try:
            found = ipaddress.ip_address(address)
        except ValueError:
            return False
        return any(found in network for network in self._networks)

    def resolve(self, scope: Scope) -> Scope:
        """Return the scope of a request as its first client sent it."""
        peer = (scope.get("client") or ("", 0))[0]
        resolved = {**scope, PEER: peer, PREFIX: scope.get("root_path", "")}
        resolved.setdefault("state", {})
        headers = Headers(scope=scope)
        if not self.is_trusted(peer):
            return resolved
        addresses = [each.strip() for each in headers.get("x-forwarded-for", "").split(",") if each.strip()]
        client = next((each for each in reversed(addresses) if not self.is_trusted(each)), None)
        if client is not None:
            resolved["client"] = (client, 0)
        if (scheme := _last(headers, "x-forwarded-proto")) in ("http", "https"):
            resolved["scheme"] = scheme
        if host := _last(headers, "x-forwarded-host"):
            others = [(name, value) for name, value in scope["headers"] if name != b"host"]
            resolved["headers"] = [*others, (b"host", host.encode("latin-1"))]
        return resolved


def _last(headers: Headers, name: str) -> str:
    return headers.get(name, "").rpartition(",")[2].strip()


def peer_of(request: Request) -> str:
    """Return the address of the other end of the connection: of the proxy, if there is one."""
    found: str = request.scope.get(PEER, "")
    return found


def address_of(request: Request) -> str:
    """Return the address of the client; behind a listed proxy the one that the proxy names."""
    return request.client.host if request.client else ""


def is_secure(request: Request) -> bool:
    """Whether the browser sent this request over HTTPS."""
    return bool(request.scope["scheme"] == "https")


def origin_of(request: Request) -> str:
    """Return the origin of this app, as the browser names it."""
    return f"{request.scope['scheme']}://{request.headers.get('host', '')}"


def add_cookie(request: Request, cookie: str) -> None:
    """Send a cookie with the answer to this request."""
    request.scope["state"].setdefault("new_cookies", []).append(cookie)
