"""Endpoints about what waits for an operator, and the stream of changes."""

from typing import Annotated

from fastapi import APIRouter, Header, Query
from fastapi.responses import StreamingResponse

from pipeline.admin import attention
from pipeline.api.access import Viewer
from pipeline.api.v1.models import AttentionView, IncidentView, PageView
from pipeline.api.v1.parameters import Found, NameFilter

router = APIRouter(tags=["attention"])


@router.get("/attention")
def list_attention(
    found: Found,
    caller: Viewer,
    workflow: NameFilter = None,
    kind: Annotated[str | None, Query(max_length=40, description="indeterminate, approval, blocked, …")] = None,
    limit: Annotated[int, Query(ge=1, le=1_000, description="Items of each kind, at most.")] = 100,
) -> PageView[AttentionView]:
    """List everything that waits for an operator, oldest first."""
    if workflow is not None:
        caller.check_workflow(workflow)
    items = attention.items(found.resolutions, workflow=workflow, limit=limit, recent=None)
    visible = [
        AttentionView.model_validate(each)
        for each in items
        if kind in (None, each.kind) and (caller.workflows is None or caller.can_see_workflow(each.workflow))
    ]
    return PageView(items=visible, next=None)


@router.get("/incidents")
def list_incidents(found: Found, caller: Viewer, workflow: NameFilter = None) -> PageView[IncidentView]:
    """List unknown outcomes that are alike as incidents, which can be resolved as one."""
    if workflow is not None:
        caller.check_workflow(workflow)
    listed = attention.open_incidents(found.resolutions, workflow=workflow)
    visible = [each for each in listed if all(caller.can_see_workflow(name) for name in each.workflows)]
    return PageView(items=[IncidentView.model_validate(each) for each in visible], next=None)


@router.get(
    "/attention/stream",
    response_class=StreamingResponse,
    responses={200: {"description": "Server-sent events.", "content": {"text/event-stream": {}}}},
)
async def stream_attention(
    found: Found,
    caller: Viewer,
    last_event_id: Annotated[str | None, Header(max_length=200, description="Resume after this event.")] = None,
) -> StreamingResponse:
    """Stream changes as server-sent events, within a second of each. A lost stream resumes by `Last-Event-ID`."""
    events = found.broadcaster.events(caller.workflows, last_event_id)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)
