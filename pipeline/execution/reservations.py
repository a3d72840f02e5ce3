"""Why a run cannot have the events its prepare asked for, in words for the author of that prepare."""

from typing import Any

from sqlalchemy import Row

from pipeline.domain.errors import IllegalTransitionError, PipelineError, ReservationError
from pipeline.domain.events import DeliveryStatus
from pipeline.domain.values import Prepared
from pipeline.store import views
from pipeline.store.database import Transaction


def wanted(item: Prepared) -> tuple[list[int], list[str]]:
    """The events a prepare wants to pin and the topic it says each is on; asking twice is asking once."""
    topic_of = {int(event): r.topic for r in item.reservations for event in r.ids}
    return list(topic_of), list(topic_of.values())


def reservation_error(tx: Transaction, run: Row[Any], item: Prepared) -> PipelineError:
    """Look again at what could not be reserved and say why, event by event.

    A run that is refused although it asks for nothing is no consumer's run.
    """
    events, topics = wanted(item)
    if not events:
        return IllegalTransitionError(
            "run", run.id, asked="finish_prepare", found=f"{run.phase}, of a producer", allowed=["of a consumer"]
        )
    rows = views.refused_inputs(tx, run.handler_id, events, topics)
    reasons = {row.event_id: why for row in rows if (why := _why(row, run))}
    moved_on = all(row.found_topic == row.topic and row.status is not None for row in rows)
    return ReservationError(run.id, reasons or dict.fromkeys(events, "another run took it just now"), is_race=moved_on)


def _why(row: Row[Any], run: Row[Any]) -> str | None:
    """The first of these that is true of an event, or None when nothing speaks against it any more."""
    reasons = (
        (row.found_topic is None, "there is no such event"),
        (row.found_topic != row.topic, f"it is on topic {row.found_topic!r}, not {row.topic!r}"),
        (row.status is None, "this consumer has no delivery of it"),
        (row.status != DeliveryStatus.PENDING, f"it is {row.status}"),
        (row.offered_to not in (None, run.id), "it was offered to another run"),
        (row.offered_to is None and run.offered is not None, "it is not in the slice this run was offered"),
    )
    return next((reason for holds, reason in reasons if holds), None)
