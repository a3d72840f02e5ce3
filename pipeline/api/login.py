"""Pages to log in and out: with an API token, with the one-time link that `pipeline api` prints, or by OpenID Connect.

There is no password. A login is a row of the database; the browser has its secret in a cookie.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Depends, Form, Request
from fastapi.responses import RedirectResponse, Response

from pipeline.admin.access import Access
from pipeline.admin.problem_types import ProblemType
from pipeline.api import access, security
from pipeline.api.access import CurrentCaller
from pipeline.api.context import Services, services
from pipeline.api.problems import ProblemError
from pipeline.api.rendering import render, url
from pipeline.api.security import SAFE_METHODS, local_path
from pipeline.config import is_loopback

router = APIRouter(include_in_schema=False)

CurrentServices = Annotated[Services, Depends(services)]
Secret = Annotated[str, Form(max_length=500)]
_MAX_ADDRESSES = 10_000  #: whose failed logins are remembered
NextPath = Annotated[str, Form(max_length=2_000)]


class FailedLogins:
    """Count failed logins by address. It keeps the last minute of a bounded number of addresses."""

    def __init__(self, limit: int = 5, seconds: float = 60, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._seconds, self._clock = limit, seconds, clock
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, address: str) -> None:
        """Refuse an address with too many failures in the last minute."""
        with self._lock:
            recent = [at for at in self._failures.get(address, ()) if at > self._clock() - self._seconds]
        if len(recent) >= self._limit:
            wait = int(recent[0] + self._seconds - self._clock()) + 1
            raise ProblemError(
                "too-many-logins",
                f"{self._limit} logins from this address failed within a minute; try again in {wait} s.",
                headers={"Retry-After": str(wait)},
            )

    def record(self, address: str) -> None:
        """Count a failure, and forget the address that failed longest ago when there are too many."""
        with self._lock:
            self._failures.setdefault(address, deque(maxlen=self._limit)).append(self._clock())
            self._failures.move_to_end(address)
            if len(self._failures) > _MAX_ADDRESSES:
                self._failures.popitem(last=False)


@router.get("/login")
def login_page(request: Request, found: CurrentServices, link: str = "", next: str = "/") -> Response:
    """Show the form for an API token, or the button that uses a one-time link."""
    return _page(request, found, link=link, next_path=next)


@router.post("/login")
def log_in(request: Request, found: CurrentServices, token: Secret, next: NextPath = "/") -> Response:
    """Log in with an API token."""
    failures = _begin(request)
    identity = Access(found.db).token_identity(token.strip())
    if identity is None:
        failures.record(security.address_of(request))
        return _page(request, found, next_path=next, error="This API token is unknown, expired or revoked.", status=401)
    secret = Access(found.db).open_login(identity, lifetime=found.settings.api_login_lifetime)
    return begin_login(request, secret, next)


@router.post("/login/link")
def log_in_by_link(request: Request, found: CurrentServices, link: Secret, next: NextPath = "/") -> Response:
    """Log in with a one-time link, from the machine on which `pipeline api` runs."""
    failures = _begin(request)
    if not _is_this_machine(request):
        raise ProblemError(
            "forbidden", "A one-time link works only in a browser on the machine on which `pipeline api` runs."
        )
    secret = Access(found.db).open_link(link, lifetime=found.settings.api_login_lifetime)
    if secret is None:
        failures.record(security.address_of(request))
        return _page(
            request,
            found,
            next_path=next,
            error="This link is unknown, was used before, or has expired. Start `pipeline api` again for a new one.",
            status=401,
        )
    return begin_login(request, secret, next)


@router.post("/logout")
def log_out(request: Request, _: CurrentCaller, found: CurrentServices) -> Response:
    """End the login of this browser."""
    Access(found.db).end_login(access.login_secret(request))
    security.add_cookie(request, security.cookie_text(request, access.LOGIN_COOKIE, "", seconds=0))
    return RedirectResponse(url(request, "/login"), status_code=303)


def begin_login(request: Request, secret: str, next_path: str) -> Response:
    """Give the browser the secret of its login, end the one that it had, and go on to a page."""
    if former := access.login_secret(request):
        Access(services(request).db).end_login(former)
    seconds = int(services(request).settings.api_login_lifetime.total_seconds())
    security.add_cookie(request, security.cookie_text(request, access.LOGIN_COOKIE, secret, seconds=seconds))
    return RedirectResponse(url(request, local_target(next_path)), status_code=303)


def local_target(path: str) -> str:
    """Return a path of this app; the start page instead of an address elsewhere."""
    is_local = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if is_local else "/"


def _begin(request: Request) -> FailedLogins:
    """Refuse a login that another site sent, and one too many."""
    security.check_site(request)
    return check_login(request)


def check_login(request: Request) -> FailedLogins:
    """Refuse a login from an address from which too many failed; return the counter."""
    failures: FailedLogins = request.app.state.failed_logins
    failures.check(security.address_of(request))
    return failures


def _page(
    request: Request, found: Services, *, link: str = "", next_path: str = "/", error: str = "", status: int = 200
) -> Response:
    return render(
        request,
        "login.html",
        status=status,
        link=link,
        next_path=local_target(next_path),
        error=error,
        has_oidc=bool(found.settings.oidc_issuer),
    )


def _is_this_machine(request: Request) -> bool:
    """Whether the browser runs on this machine, with no proxy in between."""
    if request.headers.get("x-forwarded-for") or request.headers.get("forwarded"):
        return False
    return is_loopback(security.peer_of(request))


def problem_page(request: Request, problem: ProblemType, detail: str) -> Response | None:
    """Return the page of a problem; None for endpoints of /v1 and callers that do not want HTML."""
    path = local_path(request.scope)
    if path.startswith("/v1/") or "text/html" not in request.headers.get("accept", ""):
        return None
    if problem.status == 401 and request.method in SAFE_METHODS:
        query = request.scope["query_string"].decode("latin-1")
        target = f"{path}?{query}" if query else path
        return RedirectResponse(url(request, f"/login?next={quote(target)}"), status_code=303)
    if problem.status == 401:
        detail = "The login has ended. Log in in another tab, then go back here and send the form again."
    return render(request, "problem.html", status=problem.status, problem=problem, detail=detail)
