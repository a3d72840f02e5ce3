"""The inbox: everything that waits for an operator, beside the item that is open."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from pipeline.admin.attention import AttentionItem
from pipeline.api.access import Caller, Viewer
from pipeline.api.console import health, items, mutations
from pipeline.api.console.inbox_list import list_values
from pipeline.api.console.page import page
from pipeline.api.context import Services, services

router = APIRouter()


@router.get("/")
def inbox(request: Request, caller: Viewer) -> HTMLResponse:
    """Show what waits, and the first of it beside the list."""
    found = services(request)
    view = list_values(request, found, caller)
    first = next((row for group in view["groups"] for row in group.rows), None)
    values = _pane_values(request, found, caller, first.item) if first else {"pane": "", "open_path": ""}
    report = health.health_report(found) if not view["total"] else None
    return page(request, caller, "inbox.html", here="inbox", health=report, page_class="inbox", **{**view, **values})


@router.get("/i/{item_id:path}")
def item(request: Request, item_id: str, caller: Viewer) -> HTMLResponse:
    """Show one item that is about no mutation."""
    found = services(request)
    view = list_values(request, found, caller)
    chosen = items.find_item(found, caller, item_id)
    values = _pane_values(request, found, caller, chosen)
    return page(request, caller, "inbox.html", here="inbox", health=None, page_class="item-page", **{**view, **values})


def _pane_values(request: Request, found: Services, caller: Caller, chosen: AttentionItem) -> dict[str, Any]:
    """Return what the pane shows about an item."""
    if chosen.mutation_id is not None:
        return mutations.pane_values(request, found, caller, str(chosen.mutation_id))
    return items.pane_values(found, chosen)
