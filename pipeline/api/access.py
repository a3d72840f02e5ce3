"""Say who calls, and what the caller may do.

Endpoints depend on ``caller`` or on ``require(role)``. An unauthenticated request is refused with 401, a missing role
with 403. A workflow out of scope reads as not found. A caller is found, in this order, by:

1. an API token in the header ``Authorization``
2. ``identify``, the login of an application that this app is mounted into
3. the header of a trusted proxy
4. the cookie of a login
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool

from pipeline.admin.access import TOKEN_PREFIX, Access, Identity
from pipeline.api import security
from pipeline.api.context import services
from pipeline.api.problems import ProblemError
from pipeline.api.security import Proxies
from pipeline.api.security import csrf_token as csrf_token
from pipeline.config import Settings, SettingsError
from pipeline.domain.access import Rights, Role, rights_of, role_rules
from pipeline.domain.errors import InvalidInputError, NotFoundError, PipelineError
from pipeline.domain.payloads import checked_name
from pipeline.domain.values import Actor

LOGIN_COOKIE = "pipeline_login"


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """A caller as ``identify`` names it, by the login of a proxy or of an application."""

    name: str  #: kept in the audit with every act
    role: Role = Role.VIEWER
    can_see_payloads: bool = False
    workflows: frozenset[str] | None = None  #: the only workflows in scope; None: all
    is_ambient: bool = True  #: the browser sends the login by itself, so acts need a CSRF token


#: Names the caller of a request by another system's login; None: it knows no caller.
Identify = Callable[[Request], Person | Awaitable[Person | None] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The authenticated caller of one request."""

    name: str
    role: Role
    can_see_payloads: bool
    workflows: frozenset[str] | None  #: the only workflows in scope; None: all
    is_authenticated_by: str  #: identify, proxy, token, link or oidc

    def __post_init__(self) -> None:
        checked_name(self.name, what="the name of the caller")

    @property
    def rights(self) -> Rights:
        """Return the rights of this caller, which it cannot exceed by what it gives to others."""
        return Rights(role=self.role, can_see_payloads=self.can_see_payloads, workflows=self.workflows)

    def actor(self, reason: str = "", evidence: Mapping[str, Any] | None = None) -> Actor:
        """Return who acts, for the audit: always the authenticated name."""
        return Actor(name=self.name, reason=reason, evidence=evidence)

    def can_see_workflow(self, name: str) -> bool:
        """Whether a workflow is in scope."""
        return self.workflows is None or name in self.workflows

    def check_workflow(self, name: str) -> None:
        """Refuse a workflow out of scope as if it did not exist."""
        if not self.can_see_workflow(name):
            raise NotFoundError("workflow", name)

    @property
    def can_see_settings(self) -> bool:
        """Whether the settings of the installation are shown, with secrets masked."""
        return self.role.covers(Role.OPERATOR) and self.workflows is None

    def check_sees_all(self, what: str) -> None:
        """Refuse an act on every workflow to a caller of some. ``what`` says what the act does in all of them."""
        if self.workflows is not None:
            raise ProblemError(
                "forbidden",
                f"{self.name} sees some workflows, and {what} all; expected a caller without a limit of workflows. "
                "Nothing was changed.",
            )


async def caller(request: Request) -> Caller:
    """Return the authenticated caller; refuse a request without one, and an act that another site sent."""
    known: Caller | None = getattr(request.state, "caller", None)
    if known is not None:
        return known
    found, is_ambient = await _authenticate(request)
    if is_ambient:
        await security.check_act(request)
    request.state.caller = found
    return found


CurrentCaller = Annotated[Caller, Depends(caller)]


def require(role: Role) -> Callable[[Caller], Caller]:
    """Return a dependency that refuses callers whose role does not cover this one."""

    def check_role(found: CurrentCaller) -> Caller:
        if not found.role.covers(role):
            raise ProblemError(
                "forbidden", f"{found.name} has the role {found.role}; expected {role}. Nothing was changed."
            )
        return found

    return check_role


Viewer = Annotated[Caller, Depends(require(Role.VIEWER))]
Operator = Annotated[Caller, Depends(require(Role.OPERATOR))]
Admin = Annotated[Caller, Depends(require(Role.ADMIN))]
Publisher = Annotated[Caller, Depends(require(Role.PUBLISHER))]


async def _authenticate(request: Request) -> tuple[Caller, bool]:
    """Return the caller, and whether the browser authenticates it by itself."""
    scheme, _, secret = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and secret.startswith(TOKEN_PREFIX):
        return _by_identity(await run_in_threadpool(_token_identity, request, secret.strip())), False
    person = await _identified(request)
    if person is not None:
        return _by_rights(person.name, _rights_of(person), "identify"), person.is_ambient
    if (proxied := _by_proxy(request)) is not None:
        return proxied, True
    return _by_identity(await run_in_threadpool(_login_identity, request)), True


def _token_identity(request: Request, secret: str) -> Identity:
    found = Access(services(request).db).token_identity(secret)
    if found is None:
        raise _unauthenticated("The API token is unknown, expired or revoked; expected one that can be used.")
    return found


def _login_identity(request: Request) -> Identity:
    secret = login_secret(request)
    context = services(request)
    found = Access(context.db).login_identity(secret, idle=context.settings.api_login_idle) if secret else None
    if found is None:
        raise _unauthenticated(
            "This needs a caller; expected a login, or the header `Authorization: Bearer pl_...` with an API token."
        )
    request.state.login_secret = secret
    return found


def login_secret(request: Request) -> str:
    """Return the secret in the cookie of a login; empty without one."""
    return request.cookies.get(security.cookie_name(request, LOGIN_COOKIE), "")


async def _identified(request: Request) -> Person | None:
    identify: Identify | None = request.app.state.identify
    if identify is None:
        return None
    if inspect.iscoroutinefunction(identify):
        found: Person | Awaitable[Person | None] | None = await identify(request)
    else:  # it may wait for its own database
        found = await run_in_threadpool(identify, request)
    return await found if inspect.isawaitable(found) else found


def _by_proxy(request: Request) -> Caller | None:
    """Return the person that a trusted proxy names; refuse the header from any other address."""
    settings = services(request).settings
    names = request.headers.getlist(settings.api_identity_header) if settings.api_identity_header else []
    if not names:
        return None
    if not Proxies(settings.api_trusted_proxies).is_trusted(security.peer_of(request)):
        raise ProblemError(
            "untrusted-proxy",
            f"The header {settings.api_identity_header} came from {security.peer_of(request) or 'an unknown address'}; "
            "expected it only from an address in PIPELINE_API_TRUSTED_PROXIES.",
        )
    if len(names) > 1:
        raise ProblemError("bad-request", f"The header {settings.api_identity_header} came twice; expected it once.")
    try:
        checked_name(names[0], what="the name of the caller")
    except PipelineError as error:
        raise ProblemError("bad-request", f"The header {settings.api_identity_header}: {error}") from None
    listed = request.headers.get(settings.api_groups_header, "") if settings.api_groups_header else ""
    groups = {group.strip() for group in listed.split(",")}
    return _by_rights(names[0], granted_rights(names[0], groups, settings.api_roles), "proxy")


def check_role_rules(settings: Settings) -> None:
    """Refuse settings whose roles by group cannot be read."""
    try:
        role_rules(settings.api_roles)
    except InvalidInputError as error:
        raise SettingsError([f"PIPELINE_API_ROLES: {error}"]) from None


def granted_rights(name: str, groups: set[str], rules: str) -> Rights:
    """Return the rights of a person by its groups; refuse a person without a role."""
    found = rights_of(groups, role_rules(rules))
    if found is None:
        raise ProblemError(
            "forbidden", f"{name} is in no group that has a role; expected one of those in PIPELINE_API_ROLES."
        )
    return found


def _rights_of(person: Person) -> Rights:
    return Rights(role=person.role, can_see_payloads=person.can_see_payloads, workflows=person.workflows)


def _by_identity(identity: Identity) -> Caller:
    return _by_rights(identity.name, identity.rights, identity.source)


def _by_rights(name: str, rights: Rights, by: str) -> Caller:
    return Caller(
        name=name,
        role=rights.role,
        can_see_payloads=rights.can_see_payloads,
        workflows=rights.workflows,
        is_authenticated_by=str(by),
    )


def _unauthenticated(detail: str) -> ProblemError:
    return ProblemError("unauthenticated", detail, headers={"WWW-Authenticate": 'Bearer realm="pipeline"'})
