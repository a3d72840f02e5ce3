"""Endpoints about callers: who calls (``/v1/me``), and API tokens (``/v1/tokens``)."""

from datetime import datetime, timedelta
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from pipeline.admin.access import DEFAULT_LIFETIME, MAX_LIFETIME, Access, TokenSummary
from pipeline.api.access import Admin, CurrentCaller, csrf_token
from pipeline.api.context import Services, services
from pipeline.api.preconditions import IdempotentRoute
from pipeline.domain.access import Rights, Role

router = APIRouter(tags=["access"], route_class=IdempotentRoute)
CurrentServices = Annotated[Services, Depends(services)]


class TokenView(BaseModel):
    """An API token. Its secret is not known any more."""

    id: UUID
    hint: str = Field(description="the begin of its secret", examples=["pl_Zk3x9Q"])
    name: str = Field(description="of the caller, kept in the audit with every act", examples=["ci"])
    role: Role
    can_see_payloads: bool
    workflows: list[str] | None = Field(description="the only workflows in scope; null: all")
    created_by: str
    created_at: datetime
    expires_at: datetime
    last_used_at: datetime | None = Field(description="to the hour; null: never")
    revoked_at: datetime | None
    revoked_by: str | None

    @classmethod
    def of(cls, token: TokenSummary) -> "TokenView":
        """Return the view of a token."""
        return cls.model_validate(token, from_attributes=True)


class TokenList(BaseModel):
    """API tokens, newest first."""

    items: list[TokenView]


class NewToken(BaseModel):
    """The rights of an API token to create."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1, max_length=255, examples=["ci"])
    role: Role = Role.VIEWER
    can_see_payloads: bool = False
    workflows: list[str] | None = Field(default=None, description="the only workflows in scope; null: all")
    expires_in_days: int = Field(default=DEFAULT_LIFETIME.days, ge=1, le=MAX_LIFETIME.days)
    reason: str = Field(default="", max_length=10_000, description="kept in the audit")


class CreatedTokenView(BaseModel):
    """A new API token with its secret, which is shown this once."""

    secret: str | None = Field(
        description="null in the answer to a repeat: it was shown once, and is not known any more",
        examples=["pl_Zk3x9QmV0yq0c0YQd1x7q7m0d2l5k1s8b4n6v3c2x1z"],
    )
    token: TokenView


@router.get("/tokens")
def list_tokens(admin: Admin, found: CurrentServices) -> TokenList:
    """List the API tokens that the caller could create, newest first."""
    return TokenList(items=[TokenView.of(each) for each in Access(found.db).tokens(admin.rights)])


@router.post("/tokens", status_code=201)
def create_token(
    request: Request, body: NewToken, admin: Admin, found: CurrentServices, response: Response
) -> CreatedTokenView:
    """Create an API token. Its rights may not exceed those of the caller."""
    response.headers["Cache-Control"] = "no-store"  # no cache may keep the secret
    rights = Rights(
        role=body.role,
        can_see_payloads=body.can_see_payloads,
        workflows=None if body.workflows is None else frozenset(body.workflows),
    )
    made = Access(found.db).create_token(
        body.name,
        rights,
        admin.actor(body.reason),
        lifetime=timedelta(days=body.expires_in_days),
        within=admin.rights,
    )
    token = TokenView.of(made.token)
    request.state.kept_answer = CreatedTokenView(secret=None, token=token).model_dump_json().encode()
    return CreatedTokenView(secret=made.secret, token=token)


@router.delete("/tokens/{token_id}", status_code=204)
def revoke_token(token_id: UUID, admin: Admin, found: CurrentServices) -> Response:
    """Revoke an API token, and end the logins that were opened with it."""
    Access(found.db).revoke_token(token_id, admin.actor(), within=admin.rights)
    return Response(status_code=204)


class CallerView(BaseModel):
    """The authenticated caller."""

    name: str
    role: Role
    can_see_payloads: bool
    workflows: list[str] | None = Field(description="the only workflows in scope; null: all")
    authenticated_by: str = Field(description="identify, proxy, token, link or oidc")
    csrf_token: str = Field(description="sent back as X-CSRF-Token with every act that a browser authenticates")


@router.get("/me")
def me(request: Request, caller: CurrentCaller) -> CallerView:
    """Show who calls, and with which rights."""
    return CallerView(
        name=caller.name,
        role=caller.role,
        can_see_payloads=caller.can_see_payloads,
        workflows=None if caller.workflows is None else sorted(caller.workflows),
        authenticated_by=caller.is_authenticated_by,
        csrf_token=csrf_token(request),
    )
