"""Endpoints about workflows, their handlers and topics, and the switches that operators use."""

from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Query

from pipeline.admin import throughput, workflows
from pipeline.admin.controls import ControlResult, WorkflowControls
from pipeline.api.access import Operator, Viewer
from pipeline.api.preconditions import IdempotentRoute
from pipeline.api.problems import ProblemError
from pipeline.api.v1.models import (
    ControlView,
    GraphView,
    HandlerView,
    HistoryView,
    OptionalReasonBody,
    PageView,
    PlannedRunView,
    PlanView,
    ReasonBody,
    TopicSchemaView,
    TopicView,
    WorkflowDetailView,
    WorkflowView,
)
from pipeline.api.v1.parameters import Found, Name
from pipeline.domain.errors import NotFoundError

router = APIRouter(prefix="/workflows", tags=["workflows"], route_class=IdempotentRoute)


@router.get("")
def list_workflows(found: Found, caller: Viewer) -> PageView[WorkflowView]:
    """List every workflow in scope, by name."""
    listed = workflows.list_workflows(found.db)
    visible = [WorkflowView.model_validate(each) for each in listed if caller.can_see_workflow(each.name)]
    return PageView(items=visible, next=None)


@router.get("/{workflow}")
def show_workflow(found: Found, caller: Viewer, workflow: Name) -> WorkflowDetailView:
    """Show a workflow with its handlers, topics, blocks and newest acts."""
    caller.check_workflow(workflow)
    return WorkflowDetailView.model_validate(workflows.detail(found.db, workflow))


@router.get("/{workflow}/handlers")
def list_handlers(found: Found, caller: Viewer, workflow: Name) -> PageView[HandlerView]:
    """List the handlers of a workflow with their backlogs."""
    return PageView(items=show_workflow(found, caller, workflow).handlers, next=None)


@router.get("/{workflow}/handlers/{handler}")
def show_handler(found: Found, caller: Viewer, workflow: Name, handler: Name) -> HandlerView:
    """Show a handler with its backlog."""
    known = {each.name: each for each in show_workflow(found, caller, workflow).handlers}
    if handler not in known:
        raise NotFoundError(f"handler of workflow {workflow!r} named", handler, known)
    return known[handler]


@router.post("/{workflow}/handlers/{handler}/run")
def run_producer(
    found: Found, caller: Operator, workflow: Name, handler: Name, body: OptionalReasonBody
) -> ControlView:
    """Let a producer run now. Its schedule goes on after that run."""
    caller.check_workflow(workflow)
    return _view(_controls(found).run_producer(workflow, handler, caller.actor(body.reason)))


@router.get("/{workflow}/topics")
def list_topics(found: Found, caller: Viewer, workflow: Name) -> PageView[TopicView]:
    """List the topics of a workflow with their consumers."""
    return PageView(items=show_workflow(found, caller, workflow).topics, next=None)


@router.get("/{workflow}/topics/{topic}/schema")
def show_topic_schema(found: Found, caller: Viewer, workflow: Name, topic: Name) -> TopicSchemaView:
    """Show the JSON Schema that payloads of a topic must match."""
    caller.check_workflow(workflow)
    schema = workflows.topic_schema(found.db, workflow, topic)
    return TopicSchemaView(workflow=workflow, topic=topic, payload_schema=schema)


@router.get("/{workflow}/graph")
def show_graph(found: Found, caller: Viewer, workflow: Name) -> GraphView:
    """Show the topics, handlers and operations of a workflow as nodes and edges."""
    caller.check_workflow(workflow)
    return GraphView.model_validate(workflows.topic_graph(found.db, workflow))


@router.get("/{workflow}/history")
def show_history(
    found: Found,
    caller: Viewer,
    workflow: Name,
    span: Annotated[int, Query(ge=60, le=31_536_000, description="Seconds before now.")] = 3_600,
) -> HistoryView:
    """Show throughput, backlog, age and the share of unknown outcomes over time."""
    caller.check_workflow(workflow)
    return HistoryView.model_validate(throughput.workflow_history(found.db, workflow, timedelta(seconds=span)))


@router.get("/{workflow}/plan")
def plan_workflow(
    found: Found, caller: Viewer, workflow: Name, limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> PlanView:
    """Show what a workflow would send now. Nothing is reserved or sent."""
    caller.check_workflow(workflow)
    workflows.require(found.db, workflow)
    if found.plan is None:
        raise ProblemError(
            "not-here", "This process has no code of workflows; expected it to run with PIPELINE_WORKFLOWS set."
        )
    planned = [PlannedRunView.model_validate(each) for each in found.plan(workflow, limit)]
    return PlanView(workflow=workflow, runs=planned)


@router.post("/{workflow}/pause")
def pause(found: Found, caller: Operator, workflow: Name, body: OptionalReasonBody) -> ControlView:
    """Start no run until an operator resumes the workflow."""
    caller.check_workflow(workflow)
    return _view(_controls(found).pause(workflow, caller.actor(body.reason)))


@router.post("/{workflow}/resume")
def resume(found: Found, caller: Operator, workflow: Name, body: OptionalReasonBody) -> ControlView:
    """Lift an operator's pause and the blocks that wait for an operator."""
    caller.check_workflow(workflow)
    return _view(_controls(found).resume(workflow, caller.actor(body.reason)))


@router.post("/{workflow}/maintenance")
def enter_maintenance(found: Found, caller: Operator, workflow: Name, body: ReasonBody) -> ControlView:
    """Start no run until new code is deployed, or an operator ends maintenance."""
    caller.check_workflow(workflow)
    return _view(_controls(found).enter_maintenance(workflow, caller.actor(body.reason)))


@router.post("/{workflow}/maintenance/exit")
def exit_maintenance(found: Found, caller: Operator, workflow: Name, body: OptionalReasonBody) -> ControlView:
    """End maintenance, and reset the failures of the old code."""
    caller.check_workflow(workflow)
    return _view(_controls(found).exit_maintenance(workflow, caller.actor(body.reason)))


def _controls(found: Found) -> WorkflowControls:
    return WorkflowControls(found.db, found.wake_workflow)


def _view(result: ControlResult) -> ControlView:
    return ControlView.model_validate(result)
