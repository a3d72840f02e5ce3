"""Events: a list, one with its deliveries, and what happened to a message as a tree in both directions.

And events that a consumer cannot use, by consumer and error.
"""

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from pipeline.admin import events as admin_events
from pipeline.admin import trace as admin_trace
from pipeline.admin.events import EventFilter
from pipeline.admin.pages import event_page, quarantine_page
from pipeline.admin.quarantine import QuarantineFilter
from pipeline.api.access import Viewer
from pipeline.api.console.page import List, chosen, list_page, page
from pipeline.api.context import services
from pipeline.domain.errors import NotFoundError
from pipeline.domain.states import DeliveryStatus

router = APIRouter()


@router.get("/events")
def events(request: Request, caller: Viewer) -> HTMLResponse:
    """List events, newest first."""
    asked = request.query_params
    only = EventFilter(
        workflow=asked.get("workflow") or None,
        topic=asked.get("topic") or None,
        status=chosen(DeliveryStatus, asked.get("status")),
        key=asked.get("key") or None,
        message_id=asked.get("message_id") or None,
        within=caller.workflows,
    )
    listed = List(request, lambda after, limit: event_page(services(request).db, only, after=after, limit=limit))
    return list_page(request, caller, "events.html", listed, here="events", only=only, statuses=list(DeliveryStatus))


@router.get("/e/{text}")
def event(request: Request, text: str, caller: Viewer) -> HTMLResponse:
    """Show one event, and everything that it caused and that caused it."""
    found = services(request)
    detail = admin_events.detail(found.db, text, with_payload=caller.can_see_payloads)
    if not caller.can_see_workflow(detail.event.workflow):
        raise NotFoundError("event", text)
    trace = admin_trace.trace(found.db, f"event:{detail.event.id}")
    return page(request, caller, "event.html", here="events", detail=detail, trace=trace)


@router.get("/quarantine")
def quarantine(request: Request, caller: Viewer) -> HTMLResponse:
    """List quarantined events, newest first."""
    asked = request.query_params
    only = QuarantineFilter(
        workflow=asked.get("workflow") or None, handler=asked.get("handler") or None, within=caller.workflows
    )
    listed = List(request, lambda after, limit: quarantine_page(services(request).db, only, after=after, limit=limit))
    return list_page(request, caller, "quarantine.html", listed, here="events", only=only)
