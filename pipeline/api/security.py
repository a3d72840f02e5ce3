"""Guard every request and every answer of the app.

- A body is limited while it is read, with or without a declared length.
- ``X-Forwarded-*`` is followed only if a listed proxy sent it.
- Acts that another site makes a browser send are refused, by Origin and CSRF token.
- Every answer carries the security headers; only static files may be cached.
- An unexpected error is logged under a reference and answered without internals.
- Every answer says in ``Server-Timing`` how long the server took, and is one line of the log at level INFO. The line
  has no query, because a query may hold a one-time link or a text that a person searched.
"""

import hashlib
import hmac
import ipaddress
import logging
import secrets
import time
from collections.abc import Iterable
from urllib.parse import quote

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.api.problems import ProblemError, internal_problem
from pipeline.config import Settings
from pipeline.text import parse_id

log = logging.getLogger(__name__)

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
        declared = parse_id(headers.get("content-length", ""))

        async def receive_limited() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b"")) if message["type"] == "http.request" else 0
            if max(seen, declared or 0) > limit:
                raise ProblemError(
                    "too-large", f"The body has more than {limit} bytes, which is the limit. Nothing was changed."
                )
            return message

        return receive_limited


class _Answer:
    """The answer to one request, on its way out."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.scope, self._send, self.is_started = scope, send, False
        self._caching, self._begun_at = _caching(scope), time.perf_counter()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.is_started = True
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
            headers.setdefault("Cache-Control", self._caching)
            for cookie in self.scope["state"].get("new_cookies", ()):
                headers.append("Set-Cookie", cookie)
            took = (time.perf_counter() - self._begun_at) * 1000
            headers["Server-Timing"] = f"app;dur={took:.1f}"
            self._log(message["status"], took)
        await self._send(message)

    def _log(self, status: int, took: float) -> None:
        caller = self.scope["state"].get("caller")
        name = f" by {caller.name}" if caller is not None else ""
        log.info("%s %s %d in %.0f ms%s", self.scope["method"], quote(self.scope["path"]), status, took, name)


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


FIELD, HEADER = "csrf_token", "X-CSRF-Token"
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_FORMS = ("application/x-www-form-urlencoded", "multipart/form-data")
_SEED = "pipeline_csrf"


def cookie_name(request: Request, name: str) -> str:
    """Return the name of a cookie; over HTTPS with the prefix that binds it to this host."""
    return f"__Host-{name}" if is_secure(request) else name


def cookie_text(request: Request, name: str, value: str, *, seconds: int | None = None) -> str:
    """Return a cookie that no script can read and no other site can send with a form."""
    parts = [f"{cookie_name(request, name)}={value}", "Path=/", "HttpOnly", "SameSite=Lax"]
    parts += ["Secure"] if is_secure(request) else []
    parts += [f"Max-Age={seconds}"] if seconds is not None else []
    return "; ".join(parts)


def csrf_token(request: Request) -> str:
    """Return the token that forms send as ``csrf_token`` and scripts as ``X-CSRF-Token``.

    It is bound to the login. A caller without one, such as a person that a proxy names, gets a cookie to bind it to.
    """
    seed = getattr(request.state, "login_secret", "") or _seed(request)
    return hmac.new(seed.encode(), b"csrf", hashlib.sha256).hexdigest()


def _seed(request: Request) -> str:
    found: str = request.cookies.get(cookie_name(request, _SEED), "") or getattr(request.state, "csrf_seed", "")
    if not found:
        found = secrets.token_urlsafe(32)
        request.state.csrf_seed = found
        add_cookie(request, cookie_text(request, _SEED, found))
    return found


def check_site(request: Request) -> None:
    """Refuse a request that does not come from a page of this app."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    own = origin_of(request)
    if site not in (None, "same-origin") or origin not in (None, own):
        raise ProblemError(
            "cross-site",
            f"The request comes from {origin or 'another site'}; expected {own}. Behind a proxy, list its address in "
            "PIPELINE_API_TRUSTED_PROXIES. Nothing was changed.",
        )
    if site is None and origin is None:
        raise ProblemError(
            "cross-site", "The request does not name its origin; expected the header Origin. Nothing was changed."
        )


async def check_act(request: Request) -> None:
    """Refuse an act without the CSRF token of this login, or from another site."""
    if request.method in SAFE_METHODS:
        return
    check_site(request)
    given = request.headers.get(HEADER, "")
    if not given and request.headers.get("content-type", "").startswith(_FORMS):
        given = str((await request.form()).get(FIELD, ""))
    if not hmac.compare_digest(csrf_token(request).encode(), given.encode()):
        raise ProblemError(
            "csrf-token",
            f"The CSRF token is missing or belongs to another login; expected it in the field {FIELD} or the header "
            f"{HEADER}. Load the page again. Nothing was changed.",
        )
