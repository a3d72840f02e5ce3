"""Refuse acts that another site makes a browser send: Origin and CSRF token.

Only requests that a browser authenticates by itself need this: by a cookie, or by the login of a proxy. A request with
an API token in its header does not.
"""

import hashlib
import hmac
import secrets

from fastapi import Request

from pipeline.api.problems import ProblemError
from pipeline.api.security import add_cookie, is_secure, origin_of

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
