"""Log in by an OpenID Connect provider: authorization code with PKCE, state and nonce.

What the browser must bring back is in a cookie that lives for ten minutes. The rights of a person follow from the
groups in the ID token, by ``PIPELINE_API_ROLES``.
"""

import base64
import hmac
import secrets
import threading
from dataclasses import dataclass
from typing import Annotated, Any

import httpx
from authlib.oauth2.rfc6749.parameters import prepare_grant_uri
from authlib.oauth2.rfc7636 import create_s256_code_challenge
from fastapi import APIRouter, Depends, Request
from fastapi.responses import RedirectResponse, Response
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet
from joserfc.jwt import JWTClaimsRegistry

from pipeline.admin import Database
from pipeline.admin.access import Access, Identity
from pipeline.admin.system import clock
from pipeline.api import security
from pipeline.api.access import granted_rights
from pipeline.api.context import Services, services
from pipeline.api.login import begin_login, check_login, local_target
from pipeline.api.problems import ProblemError
from pipeline.api.rendering import url
from pipeline.config import Settings
from pipeline.domain.access import LoginSource

router = APIRouter(include_in_schema=False)
CurrentServices = Annotated[Services, Depends(services)]

COOKIE = "pipeline_oidc"
_COOKIE_SECONDS = 600
_LEEWAY = 60  #: seconds by which the clocks of the provider and the database may differ
_TIMEOUT = 10.0  #: seconds for one request to the provider
#: Signatures that a provider may use: with a key pair only, so that no shared secret can forge a token.
_ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")


@dataclass(frozen=True, slots=True)
class LoginAttempt:
    """What a browser must bring back from the provider."""

    state: str
    nonce: str
    verifier: str
    next_path: str

    @classmethod
    def begin(cls, next_path: str) -> "LoginAttempt":
        """Draw new secrets."""
        return cls(secrets.token_urlsafe(32), secrets.token_urlsafe(32), secrets.token_urlsafe(32), next_path)

    def text(self) -> str:
        """Return the value of its cookie."""
        path = base64.urlsafe_b64encode(self.next_path.encode()).decode().rstrip("=")
        return f"{self.state}.{self.nonce}.{self.verifier}.{path}"

    @classmethod
    def read(cls, text: str) -> "LoginAttempt | None":
        """Read the value of a cookie; None if it is not one."""
        parts = text.split(".")
        if len(parts) != 4:
            return None
        try:
            path = base64.urlsafe_b64decode(parts[3] + "=" * (-len(parts[3]) % 4)).decode()
        except ValueError:
            return None
        return cls(parts[0], parts[1], parts[2], path)


class Provider:
    """An OpenID Connect provider. What it publishes about itself is read once; its keys again when one is unknown."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._lock = settings, threading.Lock()
        self._published: dict[str, Any] | None = None
        self._keys: KeySet | None = None

    def login_url(self, attempt: LoginAttempt, redirect_uri: str) -> str:
        """Return where the browser logs in."""
        found: str = prepare_grant_uri(
            self._metadata()["authorization_endpoint"],
            client_id=self._settings.oidc_client_id,
            response_type="code",
            redirect_uri=redirect_uri,
            scope="openid profile email",
            state=attempt.state,
            nonce=attempt.nonce,
            code_challenge=create_s256_code_challenge(attempt.verifier),
            code_challenge_method="S256",
        )
        return found

    def claims(self, code: str, attempt: LoginAttempt, redirect_uri: str, db: Database) -> dict[str, Any]:
        """Exchange the code for an ID token; return its claims once they are checked."""
        secret = self._settings.oidc_client_secret.get_secret_value()
        answer = self._fetch(
            "POST",
            self._metadata()["token_endpoint"],
            data={
                "grant_type": "authorization_code",
                "code": code,
                "redirect_uri": redirect_uri,
                "code_verifier": attempt.verifier,
                "client_id": self._settings.oidc_client_id,
            },
            auth=(self._settings.oidc_client_id, secret) if secret else None,
        )
        checks = JWTClaimsRegistry(
            now=int(clock(db).timestamp()),
            leeway=_LEEWAY,
            iss={"essential": True, "value": self._settings.oidc_issuer},
            aud={"essential": True, "value": self._settings.oidc_client_id},
            sub={"essential": True},
            exp={"essential": True},
            nonce={"essential": True, "value": attempt.nonce},
        )
        try:
            token = self._decode(str(answer.get("id_token", "")))
            checks.validate(token.claims)
        except (JoseError, ValueError) as error:
            raise _failed(f"The ID token of the provider cannot be accepted ({type(error).__name__}).") from error
        return token.claims

    def _decode(self, token: str) -> jwt.Token:
        try:
            return jwt.decode(token, self._key_set(), algorithms=_ALGORITHMS)
        except (JoseError, ValueError):  # the provider may have a new key
            return jwt.decode(token, self._key_set(is_fresh=True), algorithms=_ALGORITHMS)

    def _metadata(self) -> dict[str, Any]:
        with self._lock:
            if self._published is None:
                address = f"{self._settings.oidc_issuer.rstrip('/')}/.well-known/openid-configuration"
                found = self._fetch("GET", address)
                if found.get("issuer") != self._settings.oidc_issuer:
                    raise _failed("The provider names another issuer than PIPELINE_OIDC_ISSUER.")
                self._published = found
            return self._published

    def _key_set(self, *, is_fresh: bool = False) -> KeySet:
        address = self._metadata()["jwks_uri"]
        with self._lock:
            if self._keys is None or is_fresh:
                self._keys = KeySet.import_key_set(self._fetch("GET", address))  # type: ignore[arg-type]  # checked there
            return self._keys

    def _fetch(self, method: str, address: str, **options: Any) -> dict[str, Any]:
        try:
            response = httpx.request(
                method, address, timeout=_TIMEOUT, headers={"Accept": "application/json"}, **options
            )
            body = response.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise ProblemError(
                "identity-provider",
                f"The OpenID Connect provider did not answer as expected ({type(error).__name__}). Try again later.",
            ) from error
        if response.status_code >= 400 or not isinstance(body, dict):
            raise _failed(f"The OpenID Connect provider refused with status {response.status_code}.")
        return body


@router.get("/login/oidc")
def go_to_provider(request: Request, next: str = "/") -> Response:
    """Send the browser to the provider."""
    attempt = LoginAttempt.begin(local_target(next))
    provider: Provider = request.app.state.oidc
    target = provider.login_url(attempt, _redirect_uri(request))
    security.add_cookie(request, security.cookie_text(request, COOKIE, attempt.text(), seconds=_COOKIE_SECONDS))
    return RedirectResponse(target, status_code=303)


@router.get("/login/oidc/callback")
def log_in_by_provider(
    request: Request, found: CurrentServices, code: str = "", state: str = "", error: str = ""
) -> Response:
    """Log in the person that the provider names."""
    check_login(request)
    attempt = LoginAttempt.read(request.cookies.get(security.cookie_name(request, COOKIE), ""))
    security.add_cookie(request, security.cookie_text(request, COOKIE, "", seconds=0))
    if attempt is None or not hmac.compare_digest(attempt.state.encode(), state.encode()):
        raise _failed("The login was not begun in this browser, or more than 10 minutes ago.")
    if error or not code:
        raise _failed("The provider did not log the person in.")
    provider: Provider = request.app.state.oidc
    claims = provider.claims(code, attempt, _redirect_uri(request), found.db)
    secret = Access(found.db).open_login(_identity(claims, found.settings), lifetime=found.settings.api_login_lifetime)
    return begin_login(request, secret, attempt.next_path)


def _identity(claims: dict[str, Any], settings: Settings) -> Identity:
    """Return the person whom the claims name, with the rights of its groups."""
    name = claims.get(settings.oidc_name_claim)
    if not isinstance(name, str) or not name.strip():
        raise _failed(f"The ID token has no claim {settings.oidc_name_claim!r}; expected the name of the person in it.")
    if settings.oidc_name_claim == "email" and claims.get("email_verified") is not True:
        raise _failed("The provider has not verified the e-mail address of the person.")
    given = claims.get(settings.oidc_groups_claim)
    listed = given if isinstance(given, list) else [given] if isinstance(given, str) else []
    groups = {str(group) for group in listed}
    return Identity(name=name, rights=granted_rights(name, groups, settings.api_roles), source=LoginSource.OIDC)


def _redirect_uri(request: Request) -> str:
    return f"{security.origin_of(request)}{url(request, '/login/oidc/callback')}"


def _failed(detail: str) -> ProblemError:
    return ProblemError("login-failed", f"{detail} No person was logged in.")
