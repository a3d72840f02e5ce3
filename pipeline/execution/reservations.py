"""Why a run cannot have the events its prepare asked for, in words for the author of that prepare."""

from typing import Any
from uuid import UUID

from sqlalchemy import Row

from pipeline.domain.errors import ReservationError
from pipeline.domain.events import DeliveryStatus
from pipeline.domain.values import Prepared
from pipeline.store import views
from pipeline.store.database import Transaction


def wanted(item: Prepared) -> tuple[list[int], list[str]]:
    """The events a prepare wants to pin and the topic it says each is on; asking twice is asking once."""
    topic_of = {int(event): r.topic for r in item.reservations for event in r.ids}
    return list(topic_of), list(topic_of.values())


def reservation_error(tx: Transaction, run: Row[Any], item: Prepared) -> ReservationError:
    """Look again at what could not be reserved and say why, event by event."""
    events, topics = wanted(item)
    rows = views.refused_inputs(tx, run.handler_id, events, topics)
    reasons = {row.event_id: why for row in rows if (why := _why(row, run.id))}
    return ReservationError(run.id, reasons or dict.fromkeys(events, "another run took it just now"))


def _why(row: Row[Any], run_id: UUID) -> str | None:
    if row.found_topic is None:
        return "there is no such event"
    if row.found_topic != row.topic:
        return f"it is on topic {row.found_topic!r}, not {row.topic!r}"
    if row.status is None:
        return "this consumer has no delivery of it"
    if row.status != DeliveryStatus.PENDING:
        return f"it is {row.status}"
    if row.offered_to is not None and row.offered_to != run_id:
        return "it was offered to another run"
    return None
