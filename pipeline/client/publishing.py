"""Publish events from other services: inside their own transaction, to the database, or over the broker.

A publish is idempotent by message id, checks each payload against the topic's schema, and tells which events were new.
Events of ``publish`` exist if and only if the caller commits.

``DatabaseClient`` has committed when it returns, and tells which events were new. ``BrokerClient`` has handed the
events to the broker when it returns; a worker publishes them. Both send a wake-up message, so that the events need not
wait for the next tick. The database client needs the Celery app of the service for that.
"""

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from typing import Any, Protocol
from uuid import UUID

from psycopg2 import extensions  # type: ignore[import-untyped]
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass
from sqlalchemy import event
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from pipeline.config import QUEUE_PREFIX, database_url_of
from pipeline.consumer_engine.bounded import StepRunner, TimedOutError
from pipeline.domain.codec import Codec, seal
from pipeline.domain.errors import InvalidInputError, RefusedError, UnavailableError
from pipeline.domain.payloads import json_payload
from pipeline.domain.states import PhaseTask, chained_tasks
from pipeline.domain.values import DEFAULT_LIMITS, Limits, NewEvent
from pipeline.store.codecs import Codecs, published_place
from pipeline.store.connections import CallerConnection, CallerPsycopg2Connection
from pipeline.store.database import Database, Transaction, describe_error, is_transient
from pipeline.telemetry import spans
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
    codec: Codec | None = None,
) -> Receipt:
    """Publish in the open transaction of a SQLAlchemy connection or session, or of psycopg2.

    The caller commits. A wake-up message afterwards saves the wait for the next tick, which finds the events anyway.
    ``codec`` encrypts the payloads of a workflow that declares one, which takes no others.
    """
    tx = _transaction(connection)
    if codec is not None:
        tx.codecs = Codecs(default=codec)
    return publish_in_transaction(tx, workflow, events, replace=replace, limits=limits)


def publish_in_transaction(
    tx: Transaction,
    workflow: str,
    events: Sequence[EventInput | Mapping[str, Any]],
    *,
    replace: bool = False,
    limits: Limits = DEFAULT_LIMITS,
    sealed_only: bool = False,
) -> Receipt:
    """Publish in a transaction of our own.

    ``sealed_only``: an encrypted topic takes no payload that came in the clear.
    """
    made = [_to_new_event(event) for event in parse_events(events)]
    published = event_transitions.publish(tx, workflow, made, replace=replace, limits=limits, sealed_only=sealed_only)
    names = list(dict.fromkeys((item.topic, item.message_id) for item in made))
    known = {*published.new, *published.replaced}
    return Receipt(
        new=tuple(name[1] for name in names if name in published.new),
        replaced=tuple(name[1] for name in names if name in published.replaced),
        repeated=tuple(name[1] for name in names if name not in known),
    )


def serialize_events(
    events: Sequence[EventInput | Mapping[str, Any]], limits: Limits, codec: Codec | None = None, workflow: str = ""
) -> list[dict[str, Any]]:
    """Convert events for a message, with every check of a publish that needs no database. A codec encrypts them."""
    made = [_to_new_event(event) for event in parse_events(events)]
    event_transitions.event_rows(made, limits)
    if codec is None:
        return [asdict(event) for event in made]
    return [
        asdict(event) | {"payload": seal(codec, event.payload, *published_place(workflow, event))} for event in made
    ]


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
        require_postgres(connection.dialect.name)
        _require_transaction(connection.connection.dbapi_connection)
        return Transaction(CallerConnection(connection))
    if isinstance(connection, extensions.connection) and not connection.async_:
        _require_transaction(connection)
        return Transaction(CallerPsycopg2Connection(connection))
    kind = f"{type(connection).__module__}.{type(connection).__qualname__}"
    raise InvalidInputError(
        f"Events cannot be published through a {kind}; expected a Connection or Session of SQLAlchemy, or a connection "
        "of psycopg2 that is not asynchronous, with its transaction open. An AsyncSession publishes with "
        "`await publish_async(session, ...)`."
    )


def require_postgres(kind: str) -> None:
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


log = logging.getLogger(__name__)

PUBLISH_QUEUE = "publish"  #: behind the prefix: what other services send, events and wake-ups
_TIMEOUT = timedelta(seconds=30)
#: How long a request of a web application waits for the broker, at most.
WAKE_UP_TIMEOUT = timedelta(seconds=5)
_WAITING = "pipeline.waiting"  #: where a session keeps what it wakes after its commit
_UNKNOWN = "Whether the events are there is unknown; publish them again with the same message ids."
EventInputs = Sequence[EventInput | Mapping[str, Any]]


@contextmanager
def client_errors() -> Iterator[None]:
    """Raise the errors of a client instead of those of drivers."""
    try:
        yield
    except (TimedOutError, TimeoutError) as error:
        raise UnavailableError(
            f"The database did not answer in time, which `timeout=` of the client sets. {_UNKNOWN}"
        ) from error
    except PoolTimeoutError as error:
        raise UnavailableError("Every connection of the pool is taken. Nothing was published.") from error
    except OSError as error:
        raise UnavailableError(f"The database cannot be reached: {error}. {_UNKNOWN}") from error
    except DBAPIError as error:
        problem = describe_error(error)
        if is_transient(error):
            raise UnavailableError(f"The database cannot be used: {problem}. {_UNKNOWN}") from error
        raise RefusedError(f"The database refused the events: {problem}. Nothing was published.") from error


class App(Protocol):
    """The Celery app of the service."""

    def send_task(self, name: str, *args: Any, **kwargs: Any) -> Any: ...


class WakeUpSender:
    """Send wake-up messages through the Celery app of a service. One that is not sent costs time only."""

    def __init__(self, app: App, *, timeout: timedelta = _TIMEOUT, queue_prefix: str = QUEUE_PREFIX) -> None:
        self._app, self._bounded = app, _BoundedCalls(timeout, queue_prefix)

    def wake_workflow(self, name: str) -> None:
        """Notify a worker that a workflow may have work."""
        self._send("pipeline.schedule", f"the work of {name!r}", args=[name])

    def dispatch_run(self, run_id: UUID) -> None:
        """Notify a worker that the request of a run may be sent."""
        ids = [str(run_id)]
        later: list[dict[str, Any]] = [
            {"task": task.value, "args": [ids, 0], "kwargs": {}, "options": {}, "immutable": True}
            for task in chained_tasks(PhaseTask.MUTATE)[1:]
        ]
        self._send(PhaseTask.MUTATE.value, f"run {run_id}", args=[ids, 0], chain=later)

    def _send(self, task: str, subject: str, **how: Any) -> None:
        try:
            self._bounded.send(self._app, task, **how)
        except Exception as error:  # noqa: BLE001 - the change is committed, and the next tick finds it
            log.warning("the broker cannot be reached; the next tick finds %s: %s", subject, error)


def wake_after_commit(session: Any, workflow: str, wake: Callable[[str], None]) -> None:
    """Call ``wake`` once the open transaction of a Session of SQLAlchemy has committed.

    Several calls for one workflow are one. Nothing is called after a rollback; a savepoint changes nothing.
    """
    if _WAITING not in session.info:
        session.info[_WAITING] = {}
        event.listen(session, "after_commit", _wake_waiting)
        event.listen(session, "after_transaction_end", _forget_waiting)
    session.info[_WAITING][workflow] = wake


def _wake_waiting(session: Any) -> None:
    if session.in_nested_transaction():  # a savepoint is released
        return
    waiting = dict(session.info[_WAITING])
    session.info[_WAITING].clear()
    for workflow, wake in waiting.items():
        wake(workflow)


def _forget_waiting(session: Any, transaction: Any) -> None:
    if transaction.parent is None:
        session.info[_WAITING].clear()


class DatabaseClient:
    """Publish in a transaction of its own. Every call ends within ``timeout``.

    A client that was made or used before a fork can be used in the child.
    """

    def __init__(
        self,
        database_url: str,
        app: App | None = None,
        *,
        limits: Limits = DEFAULT_LIMITS,
        timeout: timedelta = _TIMEOUT,
        queue_prefix: str = QUEUE_PREFIX,
        codec: Codec | None = None,
    ) -> None:
        self._codecs = None if codec is None else Codecs(default=codec)
        try:
            self._url = database_url_of(database_url)
        except ValueError as error:
            raise InvalidInputError(f"The URL of the database cannot be used: {error}.") from None
        self._limits, self._bounded = limits, _BoundedCalls(timeout, queue_prefix)
        self._wake_ups = None if app is None else WakeUpSender(app, timeout=timeout, queue_prefix=queue_prefix)
        self._pools = {os.getpid(): self._pool()}

    def publish(self, workflow: str, events: EventInputs, *, replace: bool = False) -> Receipt:
        """Publish and commit. Then wake the workflow, if an event is new and the client has a Celery app."""
        with client_errors():
            receipt: Receipt = self._bounded.run(self._publish, workflow, events, replace)
        if self._wake_ups is not None and (receipt.new or receipt.replaced):
            self._wake_ups.wake_workflow(workflow)
        return receipt

    def close(self) -> None:
        """Close the connections of this process."""
        self._db.dispose()

    @property
    def _db(self) -> Database:
        """Return the pool of this process. Connections from before a fork belong to the parent."""
        pid = os.getpid()
        return self._pools.get(pid) or self._pools.setdefault(pid, self._pool())

    def _pool(self) -> Database:
        db = Database.connect(self._url, pool_size=2)
        db.codecs = self._codecs
        return db

    def _publish(self, workflow: str, given: EventInputs, replace: bool) -> Receipt:
        is_one_statement = len(given) == 1 and not replace
        with self._db.autocommit() if is_one_statement else self._db.transaction() as tx:
            return publish(tx, workflow, given, replace=replace, limits=self._limits)


class BrokerClient:
    """Hand events to the broker through the Celery app of the service. Every call ends within ``timeout``."""

    def __init__(
        self,
        app: App,
        *,
        limits: Limits = DEFAULT_LIMITS,
        timeout: timedelta = _TIMEOUT,
        queue_prefix: str = QUEUE_PREFIX,
        codec: Codec | None = None,
    ) -> None:
        self._app, self._limits, self._bounded = app, limits, _BoundedCalls(timeout, queue_prefix)
        self._codec = codec

    def publish(self, workflow: str, events: EventInputs, *, replace: bool = False) -> None:
        """Send events to the broker. The client checks their form; the worker checks the topic's schema.

        With a codec every payload is encrypted on its way, whether the workflow declares one or not.
        """
        here = spans.current_traceparent()
        messages = [
            event | {"traceparent": event["traceparent"] or here}
            for event in serialize_events(events, self._limits, self._codec, workflow)
        ]
        kwargs = {"workflow": workflow, "events": messages, "replace": replace}
        shown = {"argsrepr": "()", "kwargsrepr": f"{len(messages)} events for {workflow}"}
        try:
            self._bounded.send(self._app, "pipeline.publish", kwargs=kwargs, **shown)
        except Exception as error:
            raise UnavailableError(
                f"The broker did not take the events: {type(error).__name__}: {error}. Publish them again with the "
                "same message ids."
            ) from error

    def close(self) -> None:
        """Do nothing: this client holds no connection."""


class _BoundedCalls:
    """Call functions with a time limit. A call that does not return is abandoned, with its connection."""

    def __init__(self, timeout: timedelta, queue_prefix: str) -> None:
        self._timeout, self._local = timeout, threading.local()
        self._queue = f"{queue_prefix}.{PUBLISH_QUEUE}"

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        if not hasattr(self._local, "steps"):
            self._local.steps = StepRunner()
        return self._local.steps.run(function, *args, limit=self._timeout, what="publish")

    def send(self, app: App, name: str, **how: Any) -> None:
        """Send a task once. The caller decides whether to try again."""

        def send() -> None:
            with spans.preserve_context():
                # JSON, whatever serializer the service uses: our workers accept nothing else
                app.send_task(name, queue=self._queue, serializer="json", ignore_result=True, retry=False, **how)

        self.run(send)
