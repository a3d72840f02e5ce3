"""Endpoint ``/v1/me``: who calls, and with which rights."""

from fastapi import APIRouter
from pydantic import BaseModel

from pipeline.api.access import CurrentCaller
from pipeline.domain.access import Role

router = APIRouter(tags=["access"])


class CallerView(BaseModel):
    """The authenticated caller."""

    name: str
    role: Role
    can_see_payloads: bool
    workflows: list[str] | None  #: the only workflows in scope; null: all
    authenticated_by: str


@router.get("/me")
def me(caller: CurrentCaller) -> CallerView:
    """Show who calls, and with which rights."""
    return CallerView(
        name=caller.name,
        role=caller.role,
        can_see_payloads=caller.can_see_payloads,
        workflows=None if caller.workflows is None else sorted(caller.workflows),
        authenticated_by=caller.is_authenticated_by,
    )
