"""Events that a consumer cannot use, by consumer and error."""

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from pipeline.admin.pages import quarantine_page
from pipeline.admin.quarantine import QuarantineFilter
from pipeline.api.access import Viewer
from pipeline.api.console.lists import List, list_page
from pipeline.api.context import services

router = APIRouter()


@router.get("/quarantine")
def quarantine(request: Request, caller: Viewer) -> HTMLResponse:
    """List quarantined events, newest first."""
    asked = request.query_params
    only = QuarantineFilter(
        workflow=asked.get("workflow") or None, handler=asked.get("handler") or None, within=caller.workflows
    )
    listed = List(request, lambda after, limit: quarantine_page(services(request).db, only, after=after, limit=limit))
    return list_page(request, caller, "quarantine.html", listed, here="events", only=only)
