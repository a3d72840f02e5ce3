"""List, add, release and skip quarantined events, for an operator."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from pipeline.admin import lookup
from pipeline.domain.errors import InvalidInputError, NotFoundError, PipelineError
from pipeline.domain.states import DeliveryStatus, EventId
from pipeline.domain.values import Actor, EventHeader, header_of
from pipeline.store.database import Database, Transaction
from pipeline.store.reads import listings
from pipeline.store.rows import EventDeliveryRow, EventDeliveryStatusRow
from pipeline.transitions import events


class QuarantineAction(StrEnum):
    """What an operator does with an event that a consumer cannot use."""

    ADD = "add"  #: quarantine a waiting event
    RELEASE = "release"  #: offer it again; it counts as new
    SKIP = "skip"  #: never offer it to the consumer


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineEntry(EventHeader):
    """An event and its state for one consumer."""

    event_id: int
    workflow: str
    handler: str
    failures: int
    failing_since: datetime | None  #: the end of its first failed run
    error: str | None
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineFilter:
    """Select events. Empty fields do not restrict."""

    workflow: str | None = None
    handler: str | None = None
    event_ids: tuple[int, ...] = ()
    is_waiting: bool = False  #: events that wait for the consumer instead of quarantined ones
    within: frozenset[str] | None = None  #: only of these workflows


@dataclass(slots=True, kw_only=True)
class QuarantineResult:
    """The events that were changed, and why others were refused."""

    updated: list[int] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)


class Quarantine:
    """Act on quarantined events. ``wake_workflow`` is called for workflows that may continue."""

    def __init__(self, db: Database, wake_workflow: Callable[[str], object] = lambda _: None) -> None:
        self.db, self.wake_workflow = db, wake_workflow

    def entries(self, only: QuarantineFilter, *, limit: int = 100) -> list[QuarantineEntry]:
        """List the selected events, oldest first."""
        if only.handler is not None and only.workflow is None:
            raise InvalidInputError(
                "A handler was named and no workflow; expected both: handler names are unique per workflow."
            )
        if only.is_waiting and only.handler is None:
            raise InvalidInputError(
                "Waiting events are selected for one consumer at a time; expected its workflow and handler."
            )
        status = DeliveryStatus.PENDING if only.is_waiting else DeliveryStatus.QUARANTINED
        with self.db.transaction() as tx:
            if only.handler is not None and only.workflow is not None:
                lookup.require_handler(tx, only.workflow, only.handler)
            elif only.workflow is not None:
                lookup.require_workflow(tx, only.workflow)
            rows: list[EventDeliveryRow]
            if only.event_ids:
                rows = [
                    row for row in _by_id(tx, only) if row.status == status or _is_held_by_retired_handler(row, only)
                ]
            else:
                given = {"workflow": only.workflow, "handler": only.handler}
                rows = list(listings.deliveries_by_status(tx, status=status, limit=limit, **given))
            if only.is_waiting and not only.event_ids and only.workflow is not None and only.handler is not None:
                rows += listings.events_of_retired_handler(tx, only.workflow, only.handler, limit=limit)
        return [quarantine_entry(row) for row in rows]

    def act(self, action: QuarantineAction, entries: Sequence[QuarantineEntry], by: Actor) -> QuarantineResult:
        """Act on each event in its own transaction: a refused one does not affect the others."""
        if not by.reason and action is not QuarantineAction.RELEASE:
            raise InvalidInputError(f"{by.name} gave no reason; expected one, for the audit.")
        done = QuarantineResult()
        workflows: set[str] = set()
        for item in entries:
            try:
                with self.db.transaction() as tx:
                    _ACTIONS[action](tx, item.workflow, item.handler, EventId(item.event_id), by)
            except PipelineError as error:
                done.refused[f"event {item.event_id} for {item.handler}"] = str(error)
            else:
                done.updated.append(item.event_id)
                workflows.add(item.workflow)
        for workflow in sorted(workflows):
            self.wake_workflow(workflow)
        return done


_ACTIONS = {
    QuarantineAction.ADD: events.quarantine,
    QuarantineAction.RELEASE: events.release,
    QuarantineAction.SKIP: events.skip_with_run,
}


def _is_held_by_retired_handler(row: EventDeliveryStatusRow, which: QuarantineFilter) -> bool:
    """Return whether a run of a handler that is no longer in the code holds the event."""
    return which.is_waiting and row.retired and row.status == DeliveryStatus.RESERVED


def _by_id(tx: Transaction, which: QuarantineFilter) -> list[EventDeliveryStatusRow]:
    found = listings.deliveries_by_event(tx, which.event_ids)
    missing = set(which.event_ids) - {row.id for row in found}
    if missing:
        raise NotFoundError("event", min(missing))
    return [row for row in found if which.workflow in (None, row.workflow) and which.handler in (None, row.handler)]


def quarantine_entry(row: EventDeliveryRow) -> QuarantineEntry:
    """Convert a row of a delivery."""
    return QuarantineEntry(
        **header_of(row),
        event_id=row.id,
        workflow=row.workflow,
        handler=row.handler,
        failures=row.failures,
        failing_since=row.failing_since,
        error=row.error,
        created_at=row.created_at,
    )
