"""The list of the inbox: everything that waits for an operator, filtered and grouped."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from fastapi import Request

from pipeline.admin.attention import AttentionItem, Incident, list_views
from pipeline.admin.resolutions import MutationSummary
from pipeline.api import rendering
from pipeline.api.access import Caller
from pipeline.api.console.page import database_now, query_path, quoted
from pipeline.api.console.waiting import WaitingItems
from pipeline.api.context import Services
from pipeline.domain.errors import quantity

_SHOWN_OF_INCIDENT = 3
BULK_ACTS = (
    ("skip", "Skip them"),
    ("try_again", "Ask again"),
    ("did_not_happen", "They did not happen"),
    ("happened", "They happened, without result"),
    ("approve", "Approve them"),
    ("reject", "Reject them"),
)
_OLDER_THAN = {"1h": timedelta(hours=1), "1d": timedelta(days=1)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemKind:
    """How the inbox names one kind of item."""

    key: str
    label: str
    sign: str
    tone: str


KINDS = {
    each.key: each
    for each in (
        ItemKind(key="late_effect", label="Late effect", sign="!", tone="danger"),
        ItemKind(key="broken_invariant", label="Broken invariant", sign="!", tone="danger"),
        ItemKind(key="indeterminate", label="Unknown outcome", sign="?", tone="danger"),
        ItemKind(key="approval", label="Approval", sign="✓", tone="warn"),
        ItemKind(key="blocked", label="Blocked", sign="■", tone="warn"),
        ItemKind(key="maintenance", label="Maintenance", sign="■", tone="warn"),
        ItemKind(key="quarantined", label="Quarantined", sign="!", tone="warn"),
        ItemKind(key="dead_letter", label="Dead letters", sign="×", tone="warn"),  # noqa: RUF001
        ItemKind(key="breaker", label="Open breaker", sign="○", tone="warn"),
        ItemKind(key="unclaimed", label="No worker", sign="…", tone="warn"),
        ItemKind(key="retired", label="Retired handler", sign="…", tone=""),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class InboxFilter:
    """What the list shows."""

    kind: str = ""
    workflow: str = ""
    older: str = ""
    incident: str = ""
    q: str = ""

    @classmethod
    def of(cls, request: Request) -> "InboxFilter":
        """Read the filter from the query."""
        return cls(**{name: request.query_params.get(name, "").strip() for name in cls.__annotations__})

    def values(self) -> dict[str, str]:
        """Return what is given, by name."""
        return {name: value for name in type(self).__annotations__ if (value := getattr(self, name))}

    def matches(self, item: AttentionItem, now: datetime) -> bool:
        """Return whether an item is shown."""
        age = _OLDER_THAN.get(self.older)
        return (
            self.kind in ("", item.kind)
            and self.workflow in ("", item.workflow)
            and self.incident in ("", item.incident or "")
            and (age is None or item.since is None or now - item.since >= age)
            and self.q.lower() in f"{item.headline} {item.subject} {item.reason}".lower()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class InboxRow:
    """One line of the list."""

    item: AttentionItem
    kind: ItemKind
    path: str
    about: str
    mutation: MutationSummary | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NextItem:
    """What waits next."""

    headline: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InboxGroup:
    """Rows that belong together: an incident, or one item."""

    incident: Incident | None
    rows: tuple[InboxRow, ...]
    more: int = 0  #: alike ones that are not listed
    more_path: str = ""


def list_values(request: Request, found: Services, caller: Caller, waiting: WaitingItems) -> dict[str, Any]:
    """Return what the list shows."""
    only, now = InboxFilter.of(request), database_now(found)
    shown = [each for each in waiting.items if only.matches(each, now)]
    shown.sort(key=lambda each: each.kind != "late_effect")  # found too late: the effect may be there twice
    return {
        "now": now,
        "waiting": waiting.count,
        "total": waiting.count,
        "shown_count": len(shown),
        "counts": [(item_kind(kind), count) for kind, count in sorted(waiting.counts.items(), key=_kind_order)],
        "workflows": sorted({each.workflow for each in waiting.items if each.workflow}),
        "groups": list(_groups(waiting, shown, only, now)),
        "only": only,
        "filter_query": urlencode(only.values()),
        "saved_views": [each for each in list_views(found.db, caller.name) if each.page == "/"],
        "bulk_acts": BULK_ACTS,
        "path_with": lambda **values: query_path("/", **{**only.values(), **values}),
    }


def item_kind(key: str) -> ItemKind:
    """Return how a kind of item is shown."""
    return KINDS.get(key) or ItemKind(key=key, label=key.replace("_", " ").capitalize(), sign="•", tone="")


def item_path(found: AttentionItem) -> str:
    """Return the page of an item."""
    if found.mutation_id is not None:
        return f"/m/{found.mutation_id}"
    return f"/i/{quoted(found.id)}"


def _kind_order(counted: tuple[str, int]) -> int:
    kinds = list(KINDS)
    return kinds.index(counted[0]) if counted[0] in kinds else len(kinds)


def _groups(
    waiting: WaitingItems, shown: Sequence[AttentionItem], only: InboxFilter, now: datetime
) -> Iterator[InboxGroup]:
    """Yield incidents of several and single items, by the oldest of each."""
    by_id = {each.id: each for each in waiting.incidents if each.count > 1}
    done: set[str] = set()
    for each in shown:
        incident = by_id.get(each.incident or "")
        if incident is None:
            yield InboxGroup(incident=None, rows=(_row(waiting, each, now),))
        elif incident.id not in done:
            done.add(incident.id)
            alike = [other for other in shown if other.incident == incident.id]
            listed = alike if only.incident else alike[:_SHOWN_OF_INCIDENT]
            yield InboxGroup(
                incident=incident,
                rows=tuple(_row(waiting, other, now) for other in listed),
                more=incident.count - len(listed),
                more_path=query_path("/", **{**only.values(), "incident": incident.id}),
            )


def _row(waiting: WaitingItems, each: AttentionItem, now: datetime) -> InboxRow:
    mutation = waiting.mutations.get(each.mutation_id) if each.mutation_id else None
    return InboxRow(
        item=each,
        kind=item_kind(each.kind),
        path=item_path(each),
        about=_about(each, mutation, now),
        mutation=mutation,
    )


def _about(each: AttentionItem, mutation: MutationSummary | None, now: datetime) -> str:
    """Say why it waits and what can be checked."""
    if mutation is None:
        return " · ".join(part for part in (each.workflow, each.reason) if part)
    parts = [f"{mutation.connector}.{mutation.operation}"]
    if each.kind == "approval":
        parts.append("waits for approval; nothing was sent")
    else:
        parts.append(rendering.first_clause(mutation.error or "no answer"))
    if mutation.quiet_until is not None:
        parts.append(f"may still arrive until {rendering.instant(mutation.quiet_until, now)}")
    elif each.kind == "indeterminate":
        parts.append(_asked_text(mutation))
    return " · ".join(parts)


def _asked_text(mutation: MutationSummary) -> str:
    if mutation.reconcile_attempts:
        return f"asked {quantity(mutation.reconcile_attempts, 'time')}, found nothing out"
    return "can be asked again" if mutation.can_try_again else "cannot be asked"
