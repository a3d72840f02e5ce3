"""The system: workers, sweeps, queues, versions, settings, and what the doctor finds. Audit and search, too."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response

from pipeline.admin import system as admin_system
from pipeline.admin.audit import AuditFilter
from pipeline.admin.pages import audit_page
from pipeline.admin.search import SearchHit, search
from pipeline.admin.system import Health, system_report
from pipeline.api import rendering
from pipeline.api.access import Caller, Operator, Viewer
from pipeline.api.console.page import List, list_page, page, quoted, redirect
from pipeline.api.context import Services, services
from pipeline.domain.errors import InvalidInputError, quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthCheck:
    """One part of the system."""

    is_well: bool
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthReport:
    """Since when nothing waits, and whether each part is well."""

    idle_since: datetime | None  #: the last act in the audit; None: there was none
    checks: tuple[HealthCheck, ...]


def health_report(found: Services) -> HealthReport:
    """Return whether workers, beat and the doctor are well."""
    health = admin_system.health(found.db, found.sweep_periods)
    return HealthReport(idle_since=health.last_act_at, checks=tuple(_checks(health)))


def _checks(health: Health) -> Iterator[HealthCheck]:
    gone = f"; {quantity(health.gone_workers, 'worker')} did not end in order" if health.gone_workers else ""
    running = f"{quantity(health.workers, 'worker')} run" + ("s" if health.workers == 1 else "")
    workers = running if health.are_workers_well else "No worker runs"
    yield HealthCheck(is_well=health.are_workers_well, text=f"{workers}{gone}.")
    late = ", ".join(health.late_sweeps)
    beat = "Beat runs every sweep in time." if health.is_beat_well else f"Sweeps are late: {late}. Is beat running?"
    yield HealthCheck(is_well=health.is_beat_well, text=beat)
    yield HealthCheck(is_well=health.is_doctor_well, text=_doctor_text(health))


def _doctor_text(health: Health) -> str:
    if health.doctor_at is None:
        return "The doctor has not checked yet."
    ago = f"{rendering.duration(health.at - health.doctor_at)} ago"
    if health.broken:
        return f"The doctor found {quantity(health.broken, 'broken invariant')} {ago}."
    return f"The doctor found every invariant intact {ago}."


router = APIRouter()

_PATHS = {"event": "/e/", "run": "/r/", "mutation": "/m/", "workflow": "/w/"}


@router.get("/system")
def system(request: Request, caller: Viewer) -> HTMLResponse:
    """Show the installation."""
    return _page(request, caller)


@router.post("/system/doctor")
def run_doctor(request: Request, caller: Operator) -> HTMLResponse:
    """Check every invariant now."""
    caller.check_sees_all("the doctor checks the tables of")
    found = services(request)
    return _page(request, caller, findings=admin_system.findings(found.db))


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
        can_see_settings=caller.can_see_settings,
    )


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
