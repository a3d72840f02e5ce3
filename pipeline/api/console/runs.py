"""Runs: a list, and one with its phases, inputs, ledger row, outputs and what became of it."""

from dataclasses import dataclass

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from pipeline.admin import runs as admin_runs
from pipeline.admin.pages import run_page
from pipeline.admin.runs import RunDetail, RunFilter
from pipeline.api.access import Viewer
from pipeline.api.console.page import List, chosen, list_page, page
from pipeline.api.context import services
from pipeline.domain.errors import NotFoundError
from pipeline.domain.states import Phase, RunStatus

router = APIRouter()


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseStep:
    """One phase of a run in the phase bar."""

    title: str
    state: str  #: done, unknown, failed or open


@router.get("/runs")
def runs(request: Request, caller: Viewer) -> HTMLResponse:
    """List runs, newest first."""
    asked = request.query_params
    only = RunFilter(
        workflow=asked.get("workflow") or None,
        handler=asked.get("handler") or None,
        status=chosen(RunStatus, asked.get("status")),
        phase=chosen(Phase, asked.get("phase")),
        is_waiting=bool(asked.get("waiting")),
        within=caller.workflows,
    )
    listed = List(request, lambda after, limit: run_page(services(request).db, only, after=after, limit=limit))
    return list_page(request, caller, "runs.html", listed, here="runs", only=only, statuses=list(RunStatus))


@router.get("/r/{text}")
def run(request: Request, text: str, caller: Viewer) -> HTMLResponse:
    """Show one run."""
    found = services(request)
    detail = admin_runs.detail(found.db, text, with_data=caller.can_see_payloads)
    if not caller.can_see_workflow(detail.run.workflow):
        raise NotFoundError("run", text)
    trace = found.settings.trace_url.replace("{trace_id}", detail.trace_id)
    return page(request, caller, "run.html", here="runs", detail=detail, steps=phase_steps(detail), trace_url=trace)


def phase_steps(detail: RunDetail) -> list[PhaseStep]:
    """Return the phases with how far the run got."""
    phases = list(Phase)
    reached = phases.index(Phase(detail.run.phase))
    is_over = detail.run.status == RunStatus.COMMITTED
    is_stopped = detail.run.status not in (RunStatus.ACTIVE, RunStatus.COMMITTED)
    steps = []
    for place, phase in enumerate(phases):
        state = "done" if place < reached or is_over else "open"
        if place == reached and not is_over:
            state = "failed" if is_stopped else "unknown"
        steps.append(PhaseStep(title=str(phase), state=state))
    return steps
