"""Which events of a batch can be published, by looking only: nothing is written, and no lock is taken."""

from typing import Any

from pipeline.domain.errors import InvalidInputError
from pipeline.domain.values import NewEvent
from pipeline.execution import events, schemas
from pipeline.ingest.errors import PoisonEntry
from pipeline.ingest.queue import QueueMessage
from pipeline.ingest.route import Route
from pipeline.store import views
from pipeline.store.database import Transaction

Ready = list[tuple[QueueMessage, NewEvent]]
_UNTRUE = (" Nothing was written.", " Nothing was published.")  #: the rest of the batch was


def sifted(tx: Transaction, route: Route, ready: Ready) -> tuple[Ready, list[PoisonEntry]]:
    """The entries that can become events, and those that cannot with the reason."""
    schema_of = {row.name: row.schema for row in views.topics(tx, route.workflow)}
    good: Ready = []
    bad: list[PoisonEntry] = []
    for message, event in ready:
        try:
            _check(tx, route, event, schema_of)
        except InvalidInputError as error:
            bad.append(poison(message, error))
        else:
            good.append((message, event))
    return good, bad


def poison(message: QueueMessage, error: InvalidInputError) -> PoisonEntry:
    """An entry that was read well and cannot become an event."""
    words = str(error)
    for untrue in _UNTRUE:
        words = words.removesuffix(untrue)
    return PoisonEntry(message.id, message.fields, words.rstrip("."))


def _check(tx: Transaction, route: Route, event: NewEvent, schema_of: dict[str, Any]) -> None:
    events.event_rows([event], route.limits)
    if event.topic not in schema_of:
        raise events.unknown_topic(tx, route.workflow, event.topic)
    if schema_of[event.topic] is not None:
        what = f"payload of {event.message_id!r}"
        schemas.check(schema_of[event.topic], event.payload, what=what, topic=event.topic)
