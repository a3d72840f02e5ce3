"""The audit: who did what to what, and why."""

from uuid import UUID

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from pipeline.admin.audit import AuditFilter
from pipeline.admin.pages import audit_page
from pipeline.api.access import Viewer
from pipeline.api.console.lists import List, list_page
from pipeline.api.context import services
from pipeline.domain.errors import InvalidInputError

router = APIRouter()


@router.get("/audit")
def audit(request: Request, caller: Viewer) -> HTMLResponse:
    """List acts, newest first."""
    asked = request.query_params
    only = AuditFilter(
        actor=asked.get("actor") or None,
        act=asked.get("act") or None,
        workflow=asked.get("workflow") or None,
        mutation_id=_uuid(asked.get("mutation")),
        within=caller.workflows,
    )
    listed = List(request, lambda after, limit: audit_page(services(request).db, only, after=after, limit=limit))
    return list_page(request, caller, "audit.html", listed, here="audit", only=only)


def _uuid(text: str | None) -> UUID | None:
    try:
        return UUID(text) if text else None
    except ValueError:
        raise InvalidInputError(f"{text!r} is not the id of a mutation; expected a UUID.") from None
