"""Events that were set aside: looked at, handed back, or gone on without, one by one or many at once."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import Row

from pipeline.admin import lookup
from pipeline.domain.errors import InvalidInputError, PipelineError
from pipeline.domain.ids import EventId
from pipeline.domain.states import DeliveryStatus
from pipeline.domain.values import Person
from pipeline.store.database import Database, Transaction
from pipeline.store.reads import listings
from pipeline.transitions import events, retired


class Verb(StrEnum):
    """What is done with an event that a consumer cannot use."""

    ADD = "add"  #: set a waiting event aside
    RELEASE = "release"  #: hand it back; it counts as new
    SKIP = "skip"  #: go on without it


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside:
    """An event as it stands for one consumer."""

    event_id: int
    workflow: str
    handler: str
    topic: str
    message_id: str
    title: str | None
    failures: int
    error: str | None
    created_at: datetime

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Which:
    """Which events. Empty fields say nothing."""

    workflow: str | None = None
    handler: str | None = None
    event_ids: tuple[int, ...] = ()
    waiting: bool = False  #: those that wait for the consumer, not those that were set aside


@dataclass(slots=True, kw_only=True)
class Done:
    """What became of many: the events that were acted on, and why others were not."""

    taken: list[int] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)


class Quarantine:
    """Events set aside over one database. ``ring`` hears of workflows that may go on."""

    def __init__(self, db: Database, ring: Callable[[str], object] = lambda _: None) -> None:
        self.db, self.ring = db, ring

    def listed(self, which: Which, *, limit: int = 100) -> list[SetAside]:
        """What the words point at, oldest first. Nothing is changed."""
        if which.handler is not None and which.workflow is None:
            raise InvalidInputError(
                "A handler was named and no workflow; expected both, names are unique only together."
            )
        if which.waiting and which.handler is None:
            raise InvalidInputError(
                "Events that wait are acted on for one consumer at a time; name its workflow and it."
            )
        status = DeliveryStatus.PENDING if which.waiting else DeliveryStatus.QUARANTINED
        with self.db.transaction() as tx:
            if which.handler is not None and which.workflow is not None:
                lookup.handler(tx, which.workflow, which.handler)
            elif which.workflow is not None:
                lookup.workflow(tx, which.workflow)
            if which.event_ids:
                rows = [row for row in _by_id(tx, which) if row.status == status or _is_left(row, which)]
            else:
                given = {"workflow": which.workflow, "handler": which.handler}
                rows = list(listings.set_aside(tx, status=status, limit=limit, **given))
            if which.waiting and not which.event_ids and which.workflow is not None and which.handler is not None:
                rows += listings.left_behind(tx, which.workflow, which.handler, limit=limit)
        return [_set_aside(row) for row in rows]

    def act(self, verb: Verb, chosen: Sequence[SetAside], by: Person) -> Done:
        """Do it to each on its own: one that is refused does not keep the others from being taken."""
        if not by.reason and verb is not Verb.RELEASE:
            raise InvalidInputError(f"{by.name} gave no reason; expected one, for whoever reads the audit later.")
        done = Done()
        workflows: set[str] = set()
        for item in chosen:
            try:
                with self.db.transaction() as tx:
                    _VERBS[verb](tx, item.workflow, item.handler, EventId(item.event_id), by)
            except PipelineError as error:
                done.refused[f"event {item.event_id} for {item.handler}"] = str(error)
            else:
                done.taken.append(item.event_id)
                workflows.add(item.workflow)
        for workflow in sorted(workflows):
            self.ring(workflow)
        return done


_VERBS = {Verb.ADD: events.quarantine, Verb.RELEASE: events.release, Verb.SKIP: retired.skip}


def _is_left(row: Row[Any], which: Which) -> bool:
    """Whether a run of a handler that is gone from the code still holds an event."""
    return which.waiting and row.retired and row.status == DeliveryStatus.RESERVED


def _by_id(tx: Transaction, which: Which) -> list[Row[Any]]:
    found = listings.set_aside_by_id(tx, which.event_ids)
    missing = set(which.event_ids) - {row.id for row in found}
    if missing:
        lookup.unknown("event", min(missing), ())
    return [row for row in found if which.workflow in (None, row.workflow) and which.handler in (None, row.handler)]


def _set_aside(row: Row[Any]) -> SetAside:
    return SetAside(
        event_id=row.id,
        workflow=row.workflow,
        handler=row.handler,
        topic=row.topic,
        message_id=row.message_id,
        title=row.title,
        failures=row.failures,
        error=row.error,
        created_at=row.created_at,
    )
