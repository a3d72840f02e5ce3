"""Endpoints about runs and sessions."""

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Query

from pipeline.admin import pages, runs, trace
from pipeline.admin.runs import RunDetail, RunFilter, SessionFilter
from pipeline.api.access import Caller, Viewer
from pipeline.api.v1.models import PageView, RunDetailView, RunView, SessionView, TimelineView, TraceView
from pipeline.api.v1.parameters import (
    Fields,
    Found,
    Listed,
    NameFilter,
    PrivateField,
    Uuid,
    page_view,
    private_fields,
    require_in_scope,
)
from pipeline.domain.states import Phase, RunStatus
from pipeline.domain.workflows import SessionResult

router = APIRouter(tags=["runs"])


@router.get("/runs")
def list_runs(
    found: Found,
    caller: Viewer,
    asked: Listed,
    handler: NameFilter = None,
    status: RunStatus | None = None,
    phase: Phase | None = None,
    session_id: UUID | None = None,
    is_waiting: Annotated[bool, Query(description="Only runs that stopped and wait for something.")] = False,
) -> PageView[RunView]:
    """List runs, newest first."""
    only = RunFilter(
        **asked.filter(caller),
        handler=handler,
        status=status,
        phase=phase,
        session_id=session_id,
        is_waiting=is_waiting,
    )
    return page_view(RunView, pages.run_page(found.db, only, **asked.page))


@router.get("/runs/{run_id}")
def show_run(found: Found, caller: Viewer, run_id: Uuid, fields: Fields = None) -> RunDetailView:
    """Show a run: its inputs, plan, outputs, mutation, timeline, and what to do."""
    private = private_fields(caller, fields)
    return RunDetailView.model_validate(_detail(found, caller, run_id, with_data=PrivateField.PAYLOAD in private))


@router.get("/runs/{run_id}/timeline")
def show_run_timeline(found: Found, caller: Viewer, run_id: Uuid) -> list[TimelineView]:
    """Show what happened to a run, oldest first, and what is planned."""
    return [TimelineView.model_validate(entry) for entry in _detail(found, caller, run_id).timeline]


@router.get("/runs/{run_id}/trace")
def trace_run(found: Found, caller: Viewer, run_id: Uuid) -> TraceView:
    """Show what caused a run and what it caused, as a tree."""
    _detail(found, caller, run_id)
    return TraceView.model_validate(trace.trace(found.db, f"run:{run_id}"))


@router.get("/sessions")
def list_sessions(
    found: Found,
    caller: Viewer,
    asked: Listed,
    result: SessionResult | None = None,
    is_open: bool | None = None,
) -> PageView[SessionView]:
    """List sessions, newest first."""
    only = SessionFilter(**asked.filter(caller), result=result, is_open=is_open)
    return page_view(SessionView, pages.session_page(found.db, only, **asked.page))


@router.get("/sessions/{session_id}")
def show_session(found: Found, caller: Viewer, session_id: Uuid) -> SessionView:
    """Show a session with the cost of its runs."""
    detail = runs.session_detail(found.db, str(session_id))
    require_in_scope(caller, detail.workflow, "session", session_id)
    return SessionView.model_validate(detail)


def _detail(found: Found, caller: Caller, run_id: UUID, *, with_data: bool = False) -> RunDetail:
    detail = runs.detail(found.db, str(run_id), with_data=with_data)
    require_in_scope(caller, detail.run.workflow, "run", run_id)
    return detail
