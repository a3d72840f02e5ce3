"""Show events to an operator: a list, or one with its deliveries and what each caused."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from pipeline.admin import lookup, timeline
from pipeline.admin.runs import EventLine, RunSummary, event_line, run_summary
from pipeline.admin.timeline import TimelineEntry
from pipeline.domain.errors import NotFoundError
from pipeline.domain.redaction import BY_NAME
from pipeline.domain.states import DeliveryStatus
from pipeline.domain.values import header_of
from pipeline.store.database import Database, Transaction
from pipeline.store.reads import listings, traces
from pipeline.store.rows import EventHeadRow, ListedEventRow, ListedRunRow

#: How many runs after an event are searched for those that held and released it.
RUNS_AFTER = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSummary(EventLine):
    """An event in one line."""

    workflow: str
    created_at: datetime
    created_by_run_id: UUID | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """The state of an event for one consumer, and what it caused."""

    handler: str
    status: str
    is_retired: bool  #: the consumer is no longer in the code
    failures: int  #: failed runs that are put down to it
    failing_since: datetime | None  #: the end of its first failed run
    error: str | None
    available_at: datetime | None  #: not offered to a run before this instant
    runs: tuple[RunSummary, ...]  #: every run that had it among its inputs or failed while it chose, oldest first
    outputs: tuple[EventLine, ...]  #: events that those runs published


@dataclass(frozen=True, slots=True, kw_only=True)
class EventDetail:
    """Everything about one event."""

    event: EventSummary
    payload: Any  #: null unless requested: it may hold personal data. Fields that look like secrets are hidden
    caused_by: tuple[int, ...]  #: the events at its root
    deliveries: tuple[Delivery, ...]
    acts: tuple[TimelineEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFilter:
    """Select events. Empty fields do not restrict."""

    workflow: str | None = None
    topic: str | None = None
    status: DeliveryStatus | None = None
    key: str | None = None
    message_id: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    within: frozenset[str] | None = None  #: only of these workflows


def detail(db: Database, text: str, *, with_payload: bool = False) -> EventDetail:
    """Return an event by its id; with its payload if requested."""
    event_id = lookup.parse_event_id(text)
    with db.transaction() as tx:
        found = listings.events_by_id(tx, [event_id])
        if not found:
            raise NotFoundError(
                "event", text, hint="`pipeline events` lists the newest; `pipeline trace` finds more kinds of ids."
            )
        (row,) = found
        return EventDetail(
            event=event_summary(row),
            payload=BY_NAME.value(row.payload) if with_payload else None,
            caused_by=tuple(row.caused_by),
            deliveries=_deliveries(tx, row),
            acts=timeline.of_acts(listings.audit(tx, event_id=event_id)),
        )


def runs_of(tx: Transaction, events: Sequence[EventHeadRow]) -> list[ListedRunRow]:
    """Return every run that had one of these events among its inputs, oldest first."""
    ids = [event.id for event in events]
    since = traces.first_id_at(min(event.created_at for event in events))
    tried = {row.id for row in traces.runs_with_inputs(tx, ids, since, recent=RUNS_AFTER)}
    tried |= {row.run_id for row in listings.deliveries(tx, ids) if row.run_id is not None}
    known = {row.id: row for row in listings.runs_by_id(tx, list(tried))}
    while earlier := {row.retry_of for row in known.values() if row.retry_of is not None} - set(known):
        known |= {row.id: row for row in listings.runs_by_id(tx, list(earlier))}
        if earlier - set(known):
            break
    return sorted(known.values(), key=lambda run: run.id)


def _deliveries(tx: Transaction, event: EventHeadRow) -> tuple[Delivery, ...]:
    runs = runs_of(tx, [event])
    made = []
    for row in listings.deliveries(tx, [event.id]):
        own = [run for run in runs if run.handler == row.handler and run.workflow == row.workflow]
        outputs = listings.outputs(tx, [run.id for run in own]) if own else ()
        made.append(
            Delivery(
                handler=row.handler,
                status=row.status,
                is_retired=row.retired,
                failures=row.failures,
                failing_since=row.failing_since,
                error=row.error,
                available_at=row.available_at,
                runs=tuple(run_summary(run) for run in own),
                outputs=tuple(event_line(output) for output in outputs),
            )
        )
    return tuple(made)


def event_summary(row: ListedEventRow) -> EventSummary:
    """Convert a row of an event."""
    return EventSummary(
        **header_of(row),
        id=row.id,
        workflow=row.workflow,
        deliveries=tuple(row.deliveries or ()),
        created_at=row.created_at,
        created_by_run_id=row.created_by_run_id,
    )
