"""The inbox: everything that waits for an operator, beside the item that is open."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response

from pipeline.admin.attention import AttentionItem
from pipeline.admin.quarantine import Quarantine, QuarantineFilter
from pipeline.api.access import Caller, Viewer
from pipeline.api.console import mutations, system
from pipeline.api.console.inbox_list import item_kind, item_path, list_values
from pipeline.api.console.page import page, query_path, quoted, redirect
from pipeline.api.console.waiting import WaitingItems, waiting_items
from pipeline.api.context import Services, services
from pipeline.domain.errors import NotFoundError

_SHOWN_EVENTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemAct:
    """An act that an item offers, with what follows it."""

    title: str
    consequence: str
    path: str
    fields: Mapping[str, str] = field(default_factory=dict)
    is_risky: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemLink:
    """A page that shows more."""

    title: str
    path: str


def find_item(waiting: WaitingItems, item_id: str) -> AttentionItem | None:
    """Return an item that waits, by its id; None if there is none."""
    return next((each for each in waiting.items if each.id == item_id), None)


def pane_values(found: Services, chosen: AttentionItem) -> dict[str, Any]:
    """Return what the pane shows about an item."""
    entries = []
    if chosen.kind == "quarantined":
        only = QuarantineFilter(workflow=chosen.workflow, handler=_name(chosen))
        entries = Quarantine(found.db).entries(only, limit=_SHOWN_EVENTS)
    return {
        "pane": "item",
        "open_path": item_path(chosen),
        "item": chosen,
        "kind": item_kind(chosen.kind),
        "entries": entries,
        "acts": list(_acts(chosen)),
        "links": list(_links(chosen)),
        "typed": {},
    }


def _name(item: AttentionItem) -> str:
    """Return the name of an item's subject, without the noun before it."""
    return item.subject.partition(" ")[2]


def _acts(item: AttentionItem) -> Iterator[ItemAct]:
    workflow = f"/w/{quoted(item.workflow)}"
    match item.kind:
        case "blocked":
            yield ItemAct(
                title="Resume the workflow",
                consequence="Its blocks are lifted, the failures so far are forgotten, and due runs start.",
                path=f"{workflow}/resume",
            )
        case "maintenance":
            yield ItemAct(
                title="End maintenance",
                consequence="Due runs start with the code that the workers have now.",
                path=f"{workflow}/exit-maintenance",
            )
        case "quarantined":
            handler = {"workflow": item.workflow, "handler": _name(item)}
            yield ItemAct(
                title="Release them",
                consequence="They are offered to the consumer again, as new ones. You see a preview first.",
                path="/bulk/events",
                fields={**handler, "act": "release_event"},
            )
            yield ItemAct(
                title="Skip them",
                consequence="The consumer never gets them. You see a preview first.",
                path="/bulk/events",
                fields={**handler, "act": "skip_event"},
                is_risky=True,
            )
        case "breaker":
            yield ItemAct(
                title="Close the breaker",
                consequence="New mutations of this operation are started again.",
                path="/connectors/breaker",
                fields={"operation": _name(item), "action": "close"},
            )
        case "unclaimed":
            yield ItemAct(
                title="Pause the workflow",
                consequence="It starts no runs until you resume it.",
                path=f"{workflow}/pause",
            )


def _links(item: AttentionItem) -> Iterator[ItemLink]:
    subject, name = item.subject.partition(" ")[0], _name(item)
    if subject == "run":
        yield ItemLink(title="The run, with its traceback", path=f"/r/{quoted(name)}")
    if item.kind in ("quarantined", "retired"):
        path = query_path("/quarantine", workflow=item.workflow, handler=name, waiting=item.kind == "retired" and "1")
        yield ItemLink(title="All of its events", path=path)
    if item.kind == "dead_letter":
        yield ItemLink(title="The messages", path="/dead-letters")
    if item.kind == "broken_invariant":
        yield ItemLink(title="What the doctor found", path="/system")
    if item.kind == "breaker":
        yield ItemLink(title="Connectors and their breakers", path="/connectors")


router = APIRouter()


@router.get("/")
def inbox(request: Request, caller: Viewer) -> HTMLResponse:
    """Show what waits, and the first of it beside the list."""
    found = services(request)
    waiting = waiting_items(found, caller)
    view = list_values(request, found, caller, waiting)
    first = next((row for group in view["groups"] for row in group.rows), None)
    values = _pane_values(request, caller, first.item, waiting) if first else {"pane": "", "open_path": ""}
    report = system.health_report(found) if not view["total"] else None
    return page(request, caller, "inbox.html", here="inbox", health=report, page_class="inbox", **{**view, **values})


@router.get("/i/{item_id:path}")
def item(request: Request, item_id: str, caller: Viewer) -> Response:
    """Show one item that is about no mutation."""
    found = services(request)
    waiting = waiting_items(found, caller)
    chosen = find_item(waiting, item_id)
    if chosen is None:
        if done := request.query_params.get("done"):  # the act from this page ended it
            return redirect(request, "/", done=done)
        raise NotFoundError("item in the inbox", item_id, hint="It may have been dealt with meanwhile.")
    view = list_values(request, found, caller, waiting)
    values = _pane_values(request, caller, chosen, waiting)
    return page(request, caller, "inbox.html", here="inbox", health=None, page_class="item-page", **{**view, **values})


def _pane_values(request: Request, caller: Caller, chosen: AttentionItem, waiting: WaitingItems) -> dict[str, Any]:
    """Return what the pane shows about an item."""
    if chosen.mutation_id is not None:
        return mutations.pane_values(request, caller, str(chosen.mutation_id), waiting)
    return pane_values(services(request), chosen)
