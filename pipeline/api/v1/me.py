"""Endpoint ``/v1/me``: who calls, and with which rights."""

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from pipeline.api.access import CurrentCaller, csrf_token
from pipeline.domain.access import Role

router = APIRouter(tags=["access"])


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
