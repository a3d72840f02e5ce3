"""Endpoints ``/v1/tokens``: list, create and revoke API tokens."""

from datetime import datetime, timedelta
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends, Response
from pydantic import BaseModel, ConfigDict, Field

from pipeline.admin.access import DEFAULT_LIFETIME, MAX_LIFETIME, Access, TokenSummary
from pipeline.api.access import Admin
from pipeline.api.context import Services, services
from pipeline.domain.access import Rights, Role

router = APIRouter(prefix="/tokens", tags=["access"])
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

    secret: str = Field(examples=["pl_Zk3x9QmV0yq0c0YQd1x7q7m0d2l5k1s8b4n6v3c2x1z"])
    token: TokenView


@router.get("")
def list_tokens(admin: Admin, found: CurrentServices) -> TokenList:
    """List the API tokens that the caller could create, newest first."""
    return TokenList(items=[TokenView.of(each) for each in Access(found.db).tokens(admin.rights)])


@router.post("", status_code=201)
def create_token(body: NewToken, admin: Admin, found: CurrentServices, response: Response) -> CreatedTokenView:
    """Create an API token. Its rights may not exceed those of the caller."""
    response.headers["Cache-Control"] = "no-store"  # no cache and no record of answers may keep the secret
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
    return CreatedTokenView(secret=made.secret, token=TokenView.of(made.token))


@router.delete("/{token_id}", status_code=204)
def revoke_token(token_id: UUID, admin: Admin, found: CurrentServices) -> Response:
    """Revoke an API token, and end the logins that were opened with it."""
    Access(found.db).revoke_token(token_id, admin.actor(), within=admin.rights)
    return Response(status_code=204)
