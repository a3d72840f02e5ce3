"""Endpoints about the audit, the search, the doctor, the system, and the filters that a caller saved."""

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Query

from pipeline.admin import attention, lookup, pages, search, system
from pipeline.admin.audit import AuditFilter
from pipeline.api.access import Viewer
from pipeline.api.v1.models import (
    AuditView,
    DoctorView,
    FindingView,
    PageView,
    SavedViewBody,
    SavedViewView,
    SearchView,
    SystemView,
)
from pipeline.api.v1.parameters import (
    Fields,
    Found,
    Listed,
    Name,
    NameFilter,
    PrivateField,
    page_view,
    private_fields,
)

router = APIRouter(tags=["records"])


@router.get("/audit")
def list_audit(
    found: Found,
    caller: Viewer,
    asked: Listed,
    actor: NameFilter = None,
    act: NameFilter = None,
    mutation_id: UUID | None = None,
    run_id: UUID | None = None,
    event_id: Annotated[str | None, Query(pattern=r"^[0-9]{1,19}$")] = None,
    fields: Fields = None,
) -> PageView[AuditView]:
    """List the acts of operators and sweeps, newest first."""
    private = private_fields(caller, fields)
    only = AuditFilter(
        actor=actor,
        act=act,
        **asked.filter(caller),
        mutation_id=mutation_id,
        run_id=run_id,
        event_id=None if event_id is None else lookup.parse_event_id(event_id),
    )
    page = page_view(AuditView, pages.audit_page(found.db, only, **asked.page))
    if PrivateField.EVIDENCE not in private:
        page.items = [each.model_copy(update={"evidence": None}) for each in page.items]
    return page


@router.get("/search")
def search_everything(
    found: Found, caller: Viewer, q: Annotated[str, Query(min_length=1, max_length=255, description="What to find.")]
) -> SearchView:
    """Find an event, message, run, mutation, idempotency key, external id or workflow by a text."""
    return SearchView.model_validate(search.search(found.db, q, within=caller.workflows))


@router.get("/system")
def show_system(found: Found, caller: Viewer) -> SystemView:
    """Show workers, sweeps, queues, versions and, to operators without a limit of workflows, settings."""
    report = system.system_report(found.db, found.settings, found.sweep_periods, found.queue_lengths)
    view = SystemView.model_validate(report)
    return view if caller.can_see_settings else view.model_copy(update={"settings": [], "unsafe_settings": []})


@router.get("/doctor")
def run_doctor(found: Found, caller: Viewer) -> DoctorView:
    """Check the rules that the tables must keep. Repairs nothing."""
    caller.check_sees_all("the doctor checks the tables of")
    findings = system.findings(found.db)
    return DoctorView(is_healthy=not findings, findings=[FindingView.model_validate(each) for each in findings])


@router.get("/views")
def list_views(found: Found, caller: Viewer) -> PageView[SavedViewView]:
    """List the filters that the caller saved, by name."""
    listed = attention.list_views(found.db, caller.name)
    return PageView(items=[SavedViewView.model_validate(each) for each in listed], next=None)


@router.put("/views/{name}")
def save_view(found: Found, caller: Viewer, name: Name, body: SavedViewBody) -> SavedViewView:
    """Save a filter under a name. One of the same name is replaced."""
    saved = attention.save_view(found.db, caller.name, name, page=body.page, query=body.query)
    return SavedViewView.model_validate(saved)


@router.delete("/views/{name}", status_code=204)
def delete_view(found: Found, caller: Viewer, name: Name) -> None:
    """Delete a filter that the caller saved."""
    attention.delete_view(found.db, caller.name, name)
