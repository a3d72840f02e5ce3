"""Say who calls, and what the caller may do.

Endpoints depend on ``caller`` or on ``require(role)``. An unauthenticated request is refused with 401, a missing role
with 403. A workflow out of scope reads as not found.
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request

from pipeline.api.problems import ProblemError
from pipeline.domain.access import Rights, Role
from pipeline.domain.errors import NotFoundError
from pipeline.domain.values import Actor


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

    def actor(self, reason: str = "", evidence: Mapping[str, Any] | None = None) -> Actor:
        """Return who acts, for the audit: always the authenticated name."""
        return Actor(name=self.name, reason=reason, evidence=evidence)

    @property
    def rights(self) -> Rights:
        """Return the rights of this caller, which it cannot exceed by what it gives to others."""
        return Rights(role=self.role, can_see_payloads=self.can_see_payloads, workflows=self.workflows)

    def can_see_workflow(self, name: str) -> bool:
        """Whether a workflow is in scope."""
        return self.workflows is None or name in self.workflows

    def check_workflow(self, name: str) -> None:
        """Refuse a workflow out of scope as if it did not exist."""
        if not self.can_see_workflow(name):
            raise NotFoundError("workflow", name)


async def caller(request: Request) -> Caller:
    """Return the authenticated caller; refuse a request without one."""
    identify: Identify | None = request.app.state.identify
    found = identify(request) if identify else None
    person = await found if inspect.isawaitable(found) else found
    if person is None:
        raise ProblemError(
            "unauthenticated",
            "This needs a caller. Expected a session, or the header `Authorization: Bearer pl_...`.",
            headers={"WWW-Authenticate": "Bearer"},
        )
    result = Caller(
        name=person.name,
        role=person.role,
        can_see_payloads=person.can_see_payloads,
        workflows=person.workflows,
        is_authenticated_by="identify",
    )
    request.state.caller = result
    return result


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


def csrf_token(request: Request) -> str:
    """Return the token that forms of this session send as ``csrf_token``, and scripts as ``X-CSRF-Token``."""
    found: str = getattr(request.state, "csrf_token", "")
    return found
