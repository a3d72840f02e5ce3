"""Workflows: a list, one in detail with charts and the graph of its topics, and the switches of an operator."""

from collections.abc import Callable
from dataclasses import dataclass

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response
from markupsafe import Markup

from pipeline.admin import workflows as admin_workflows
from pipeline.admin.controls import ControlResult, WorkflowControls
from pipeline.admin.workflows import WorkflowDetail
from pipeline.api.access import Caller, Operator, Viewer
from pipeline.api.console import svg
from pipeline.api.console.page import Fields, field, own_path, page, query_path, quoted, redirect, refusal
from pipeline.api.console.waiting import forget_waiting
from pipeline.api.context import services
from pipeline.api.rendering import Message, url
from pipeline.domain.errors import NotFoundError, PipelineError
from pipeline.domain.values import Actor

router = APIRouter()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowSwitch:
    """An act on a workflow, with what follows it."""

    key: str
    title: str
    consequence: str
    is_risky: bool = False


_PAUSE = WorkflowSwitch(
    key="pause", title="Pause", consequence="Active runs continue. No new one starts until it is resumed."
)
_RESUME = WorkflowSwitch(
    key="resume",
    title="Resume",
    consequence="Its pause and the blocks that wait for an operator are lifted. Due runs start now.",
)
_ENTER = WorkflowSwitch(
    key="enter-maintenance",
    title="Enter maintenance",
    consequence="No run starts until new code is deployed, or until an operator ends it.",
    is_risky=True,
)
_EXIT = WorkflowSwitch(
    key="exit-maintenance", title="End maintenance", consequence="Due runs start with the code that the workers have."
)
_ACTS: dict[str, Callable[[WorkflowControls, str, Actor], ControlResult]] = {
    "pause": WorkflowControls.pause,
    "resume": WorkflowControls.resume,
    "enter-maintenance": WorkflowControls.enter_maintenance,
    "exit-maintenance": WorkflowControls.exit_maintenance,
}


@router.get("/w")
def workflows(request: Request, caller: Viewer) -> HTMLResponse:
    """List the workflows in scope."""
    found = [
        each for each in admin_workflows.list_workflows(services(request).db) if caller.can_see_workflow(each.name)
    ]
    return page(request, caller, "workflows.html", here="workflows", workflows=found, sparks={})


@router.get("/w/{name}")
def workflow(request: Request, name: str, caller: Viewer) -> HTMLResponse:
    """Show one workflow."""
    return _page(request, caller, name)


@router.post("/w/{name}/{act}")
def switch(request: Request, name: str, act: str, form: Fields, caller: Operator) -> Response:
    """Pause or resume a workflow, or put it into maintenance."""
    caller.check_workflow(name)
    found = services(request)
    if act not in _ACTS:
        raise NotFoundError("act on a workflow named", act, list(_ACTS))
    try:
        _ACTS[act](WorkflowControls(found.db, found.wake_workflow), name, caller.actor(field(form, "reason")))
    except PipelineError as error:
        status, message = refusal(error)
        return _page(request, caller, name, status=status, messages=(message,))
    forget_waiting(found)
    return redirect(request, own_path(field(form, "back"), f"/w/{quoted(name)}"), done=act)


def _page(
    request: Request, caller: Caller, name: str, *, status: int = 200, messages: tuple[Message, ...] = ()
) -> HTMLResponse:
    caller.check_workflow(name)
    found = services(request)
    detail = admin_workflows.detail(found.db, name)
    return page(
        request,
        caller,
        "workflow.html",
        here="workflows",
        status=status,
        messages=messages,
        detail=detail,
        acts=_switches(detail),
        charts=[],
        span="",
        spans=(),
        can_plan=False,
        can_run=False,
        picture=_picture(request, detail),
    )


def _switches(detail: WorkflowDetail) -> list[WorkflowSwitch]:
    """Return the switches that change something."""
    is_held = detail.desired == "paused" or bool(detail.blocks)
    found = [_RESUME] if is_held else []
    found += [] if detail.desired == "paused" else [_PAUSE]
    return [*found, _EXIT if detail.workflow.is_in_maintenance else _ENTER]


def _picture(request: Request, detail: WorkflowDetail) -> Markup:
    name = detail.workflow.name
    nodes = [
        svg.DrawnNode(
            key=f"topic {each.name}",
            name=each.name,
            note="topic",
            kind="topic",
            path=url(request, query_path("/events", workflow=name, topic=each.name)),
        )
        for each in detail.topics
    ]
    edges = []
    for each in detail.handlers:
        waiting = f"{each.waiting} waiting" if each.waiting else each.kind
        nodes.append(
            svg.DrawnNode(
                key=f"handler {each.name}",
                name=each.name,
                note=waiting,
                kind=each.kind,
                path=url(request, query_path("/runs", workflow=name, handler=each.name)),
                is_retired=each.is_retired,
            )
        )
        edges += [(f"topic {topic}", f"handler {each.name}") for topic in each.subscribes]
    return svg.graph(nodes, edges, f"Topics and handlers of {name}")
