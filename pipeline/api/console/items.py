"""Items of the inbox that are about no mutation: what they are about, and the acts that end them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.admin.attention import AttentionItem
from pipeline.admin.quarantine import Quarantine, QuarantineFilter
from pipeline.api.access import Caller
from pipeline.api.console.inbox_list import item_kind, item_path
from pipeline.api.console.page import query_path, quoted
from pipeline.api.console.waiting import waiting_items
from pipeline.api.context import Services
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


def find_item(found: Services, caller: Caller, item_id: str) -> AttentionItem:
    """Return an item that waits, by its id."""
    for each in waiting_items(found, caller).items:
        if each.id == item_id:
            return each
    raise NotFoundError("item in the inbox", item_id, hint="It may have been dealt with meanwhile.")


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
