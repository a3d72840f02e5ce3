"""Publish events from other services, inside their own transaction.

A publish is idempotent by message id, checks each payload against the topic's schema, and tells which events were new.
The events exist if and only if the caller commits.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from psycopg2 import extensions  # type: ignore[import-untyped]
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass
from sqlalchemy.engine import Connection

from pipeline.domain.errors import InvalidInputError
from pipeline.domain.payloads import json_payload
from pipeline.domain.values import DEFAULT_LIMITS, Limits, NewEvent
from pipeline.store.connections import CallerConnection, CallerPsycopg2Connection
from pipeline.store.database import Transaction
from pipeline.transitions import events as event_transitions


@pydantic_dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid"))
class EventInput(NewEvent):
    """An event as a service publishes it. The same fact has the same ``message_id``."""

    payload: Any = None


_EVENT_INPUT = TypeAdapter(EventInput)


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """The result of a publish, by message id. An event that was given twice counts once."""

    new: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()  #: published before
    replaced: tuple[str, ...] = ()


def publish(
    connection: Any,
    workflow: str,
    events: Sequence[EventInput | Mapping[str, Any]],
    *,
    replace: bool = False,
    limits: Limits = DEFAULT_LIMITS,
) -> Receipt:
    """Publish in the open transaction of a SQLAlchemy connection or session, or of psycopg2.

    The caller commits. A wake-up message afterwards saves the wait for the next tick, which finds the events anyway.
    """
    tx = _transaction(connection)
    made = [_to_new_event(event) for event in parse_events(events)]
    published = event_transitions.publish(tx, workflow, made, replace=replace, limits=limits)
    names = list(dict.fromkeys((item.topic, item.message_id) for item in made))
    known = {*published.new, *published.replaced}
    return Receipt(
        new=tuple(name[1] for name in names if name in published.new),
        replaced=tuple(name[1] for name in names if name in published.replaced),
        repeated=tuple(name[1] for name in names if name not in known),
    )


def serialize_events(events: Sequence[EventInput | Mapping[str, Any]], limits: Limits) -> list[dict[str, Any]]:
    """Convert events for a message, with every check of a publish that needs no database."""
    made = [_to_new_event(event) for event in parse_events(events)]
    event_transitions.event_rows(made, limits)
    return [asdict(event) for event in made]


def _is_session(connection: Any) -> bool:
    """Say whether this is a session of SQLAlchemy's ORM. A process that has not imported the ORM has none."""
    orm = sys.modules.get("sqlalchemy.orm")
    return orm is not None and isinstance(connection, orm.Session)


def _transaction(connection: Any) -> Transaction:
    if isinstance(connection, Transaction):
        return connection
    if _is_session(connection):
        connection = connection.connection()
    if isinstance(connection, Connection):
        _require_postgres(connection.dialect.name)
        _require_transaction(connection.connection.dbapi_connection)
        return Transaction(CallerConnection(connection))
    if isinstance(connection, extensions.connection) and not connection.async_:
        _require_transaction(connection)
        return Transaction(CallerPsycopg2Connection(connection))
    kind = f"{type(connection).__module__}.{type(connection).__qualname__}"
    raise InvalidInputError(
        f"Events cannot be published through a {kind}; expected a Connection or Session of SQLAlchemy, or a connection "
        "of psycopg2 that is not asynchronous, with its transaction open. An AsyncSession publishes with "
        "`await session.run_sync(lambda session: publish(session, ...))`."
    )


def _require_postgres(kind: str) -> None:
    if kind != "postgresql":
        raise InvalidInputError(
            f"Events cannot be published through a database of kind {kind}; expected the Postgres that the workflows "
            "are in. From another one, publish with a DatabaseClient or a BrokerClient."
        )


def _require_transaction(connection: Any) -> None:
    if getattr(connection, "autocommit", False):
        raise InvalidInputError(
            "Events cannot be published through a connection in autocommit: they would stay although the transaction "
            "is rolled back. Expected an open transaction; nothing was published."
        )


def parse_events(events: Sequence[EventInput | Mapping[str, Any]]) -> list[EventInput]:
    """Parse events. The error names the first one that is wrong."""
    if isinstance(events, EventInput | Mapping | str | bytes) or not isinstance(events, Iterable):
        raise InvalidInputError(
            f"A {type(events).__name__} was given where a list of events is expected; put a single event into a list."
        )
    return [parse_event(item, f"Event {number}") for number, item in enumerate(events, start=1)]


def parse_event(item: EventInput | Mapping[str, Any], label: str) -> EventInput:
    """An event in its form, or an error that says what is wrong with ``label``."""
    try:
        return item if isinstance(item, EventInput) else _EVENT_INPUT.validate_python(dict(item))
    except (ValidationError, TypeError, ValueError) as error:
        known = ", ".join(each.name for each in fields(EventInput))
        problem = f"it is a {type(item).__name__}"
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False, include_input=False)[0]
            problem = f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
        raise InvalidInputError(f"{label}: {problem}; an event has: {known}.") from None


def _to_new_event(event: EventInput) -> NewEvent:
    if not isinstance(event.payload, BaseModel):
        return event
    return replace(event, payload=json_payload(event.payload, what=f"payload of {event.message_id!r}"))
