"""The system: workers, sweeps, queues, versions, settings, and what the doctor finds. And the search."""

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response

from pipeline.admin import doctor
from pipeline.admin.search import SearchHit, search
from pipeline.admin.system import system_report
from pipeline.api.access import Caller, Operator, Viewer
from pipeline.api.console.health import health_report
from pipeline.api.console.page import page, quoted, redirect
from pipeline.api.context import services
from pipeline.domain.access import Role

router = APIRouter()

_PATHS = {"event": "/e/", "run": "/r/", "mutation": "/m/", "workflow": "/w/"}


@router.get("/system")
def system(request: Request, caller: Viewer) -> HTMLResponse:
    """Show the installation."""
    return _page(request, caller)


@router.post("/system/doctor")
def run_doctor(request: Request, caller: Operator) -> HTMLResponse:
    """Check every invariant now."""
    found = services(request)
    return _page(request, caller, findings=doctor.findings(found.db))


@router.get("/search")
def find(request: Request, caller: Viewer) -> Response:
    """Find anything by an id, a key, an outside id or a name. One hit is opened at once."""
    text = request.query_params.get("q", "").strip()[:500]
    found = search(services(request).db, text, within=caller.workflows)
    hits = [(hit, _hit_path(hit)) for hit in found.hits]
    if len(hits) == 1:
        return redirect(request, hits[0][1])
    return page(request, caller, "search.html", search_text=text, hits=hits, recent=found.recent)


def _hit_path(hit: SearchHit) -> str:
    return _PATHS[hit.noun] + quoted(hit.id)


def _page(request: Request, caller: Caller, *, findings: object = None) -> HTMLResponse:
    found = services(request)
    report = system_report(found.db, found.settings, found.sweep_periods, found.queue_lengths)
    return page(
        request,
        caller,
        "system.html",
        here="system",
        report=report,
        health=health_report(found),
        findings=findings,
        can_see_settings=caller.role.covers(Role.OPERATOR) and caller.workflows is None,
    )
