"""Workflows: a list, one in detail with charts and the graph of its topics, and the switches of an operator."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response
from markupsafe import Markup

from pipeline.admin import workflows as admin_workflows
from pipeline.admin.controls import ControlResult, WorkflowControls
from pipeline.admin.throughput import HistoryPoint, all_histories, workflow_history
from pipeline.admin.workflows import GraphNode, NodeKind, WorkflowDetail, topic_graph
from pipeline.api import rendering
from pipeline.api.access import Caller, Operator, Viewer
from pipeline.api.console import svg
from pipeline.api.console.page import Fields, field, own_path, page, query_path, quoted, redirect, refusal
from pipeline.api.context import Services, services
from pipeline.api.rendering import Message, url
from pipeline.domain.errors import NotFoundError, PipelineError
from pipeline.domain.values import Actor

router = APIRouter()


SPANS = {
    "1h": ("1 hour", timedelta(hours=1)),
    "1d": ("1 day", timedelta(days=1)),
    "7d": ("7 days", timedelta(days=7)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A series over time with its latest value."""

    title: str
    latest: str
    picture: Markup


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowSwitch:
    """An act on a workflow, with what follows it."""

    key: str
    title: str
    consequence: str
    is_risky: bool = False


_PLANNED_RUNS = 20
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
    found = services(request)
    listed = [each for each in admin_workflows.list_workflows(found.db) if caller.can_see_workflow(each.name)]
    return page(request, caller, "workflows.html", here="workflows", workflows=listed, sparks=_sparks(found))


@router.get("/w/{name}")
def workflow(request: Request, name: str, caller: Viewer) -> HTMLResponse:
    """Show one workflow."""
    return _page(request, caller, name)


@router.get("/w/{name}/plan")
def plan(request: Request, name: str, caller: Viewer) -> HTMLResponse:
    """Show what a workflow would send now. Nothing is reserved or sent."""
    caller.check_workflow(name)
    found = services(request)
    admin_workflows.require(found.db, name)
    planned = found.plan(name, _PLANNED_RUNS) if found.plan is not None else ()
    return page(request, caller, "plan.html", here="workflows", name=name, planned=planned, is_known=bool(found.plan))


@router.post("/w/{name}/run")
def run_producer(request: Request, name: str, form: Fields, caller: Operator) -> Response:
    """Let a producer run now."""
    caller.check_workflow(name)
    found = services(request)
    WorkflowControls(found.db, found.wake_workflow).run_producer(
        name, field(form, "handler"), caller.actor(field(form, "reason"))
    )
    return redirect(request, f"/w/{quoted(name)}", done="run")


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
    return redirect(request, own_path(field(form, "back"), f"/w/{quoted(name)}"), done=act)


def _page(
    request: Request, caller: Caller, name: str, *, status: int = 200, messages: tuple[Message, ...] = ()
) -> HTMLResponse:
    caller.check_workflow(name)
    found = services(request)
    detail = admin_workflows.detail(found.db, name)
    span = request.query_params.get("span", "")
    span = span if span in SPANS else "1h"
    return page(
        request,
        caller,
        "workflow.html",
        here="workflows",
        status=status,
        messages=messages,
        detail=detail,
        acts=_switches(detail),
        charts=_charts(found, name, span),
        span=span,
        spans=[(key, title) for key, (title, _) in SPANS.items()],
        can_plan=found.plan is not None,
        picture=_picture(request, detail),
    )


def _switches(detail: WorkflowDetail) -> list[WorkflowSwitch]:
    """Return the switches that change something."""
    is_held = detail.desired == "paused" or bool(detail.blocks)
    found = [_RESUME] if is_held else []
    found += [] if detail.desired == "paused" else [_PAUSE]
    return [*found, _EXIT if detail.workflow.is_in_maintenance else _ENTER]


def _charts(found: Services, name: str, span: str) -> list[Chart]:
    history = workflow_history(found.db, name, SPANS[span][1])
    if not any(point.published or point.committed or point.backlog or point.unresolved for point in history.points):
        return []
    return [_chart(title, [read(point) for point in history.points], shown) for title, read, shown in _SERIES]


def _chart(title: str, values: list[float | None], shown: Callable[[float], str]) -> Chart:
    known = [each for each in values if each is not None]
    latest, most = (shown(known[-1]), shown(max(known))) if known else ("none", "none")
    return Chart(title=title, latest=latest, picture=svg.chart(values, f"{title}: now {latest}, at most {most}"))


def _per_minute(rate: float) -> str:
    return f"{rendering.number(round(rate * 60, 1))}/min"


_SERIES: tuple[tuple[str, Callable[[HistoryPoint], float | None], Callable[[float], str]], ...] = (
    ("Committed runs", lambda point: point.committed, _per_minute),
    ("Published events", lambda point: point.published, _per_minute),
    ("Backlog", lambda point: float(point.backlog), rendering.number),
    ("Age of the oldest", lambda point: point.oldest_age, rendering.duration),
    ("Unknown outcomes, share", lambda point: point.uncertain_share, lambda share: f"{share:.0%}"),
    ("Unknown outcomes, open", lambda point: float(point.unresolved), rendering.number),
)


def _picture(request: Request, detail: WorkflowDetail) -> Markup:
    name = detail.workflow.name
    graph = topic_graph(services(request).db, name)
    waiting = {each.name: each.waiting for each in detail.handlers}
    nodes = [
        svg.DrawnNode(
            key=each.id,
            name=each.name,
            note=f"{waiting[each.name]} waiting" if waiting.get(each.name) else str(each.kind),
            kind=str(each.kind),
            path=url(request, _node_path(name, each)),
        )
        for each in graph.nodes
    ]
    return svg.graph(
        nodes, [(each.source, each.target) for each in graph.edges], f"Topics, handlers and operations of {name}"
    )


def _node_path(workflow: str, node: GraphNode) -> str:
    match node.kind:
        case NodeKind.TOPIC:
            return query_path("/events", workflow=workflow, topic=node.name)
        case NodeKind.OPERATION:
            return query_path("/ledger", workflow=workflow, operation=node.name)
        case _:
            return query_path("/runs", workflow=workflow, handler=node.name)


def _sparks(found: Services) -> dict[str, Markup]:
    """Return the committed runs of the last hour of each workflow as a small chart."""
    histories = all_histories(found.db, timedelta(hours=1))
    return {
        each.workflow: svg.chart([point.committed for point in each.points], "Committed runs, last hour", "spark")
        for each in histories
        if any(point.committed for point in each.points)
    }
