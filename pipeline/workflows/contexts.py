"""The contexts of the phases: each offers what its phase may do, and nothing else.

A context works only while its phase runs. Used later, from a thread or from another phase, it raises an error. Such a
violation fails the run even if the handler catches the error.
"""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any, NoReturn, Protocol

from pydantic import ValidationError

from pipeline.connectors import event_loop
from pipeline.connectors.sdk import Connector, Operation
from pipeline.domain.codec import opened
from pipeline.domain.errors import EventError, LogicError, PhaseViolationError, TamperedError
from pipeline.domain.payloads import json_copy, json_payload
from pipeline.domain.states import EventId
from pipeline.domain.values import DEFAULT_LIMITS, Limits, NewEvent, checked_cost, checked_header, header_of, total_cost
from pipeline.telemetry import phase_observer, spans
from pipeline.workflows.authoring import Topic, parse_payload
from pipeline.workflows.handler_types import Event, RequestedMutation

#: Hints for methods that another phase has.
_OTHER_PHASE_HINTS = {
    "peek": "Events are read in prepare; pass what you need on in data",
    "get_by_ids": "Events are read in prepare; pass what you need on in data",
    "publish": "Events are published in next, or by a producer",
}
#: Attributes of a context: a connector with such a name could not be reached.
RESERVED_NAMES = frozenset(
    {*_OTHER_PHASE_HINTS, "now", "violation", "close", "requested", "published", "add_cost", "cost"}
)
_IDS_END = 2**63  #: ids of events are positive and fit into eight bytes

#: The context of the running phase. It records a violation, whichever context was misused.
CURRENT_CONTEXT: ContextVar["Context | None"] = ContextVar("pipeline_current_context", default=None)
_TOPIC_HINT = "Pass the topic that workflow.topic(...) returned"


class EventReader(Protocol):
    """Reads events of the topics for a prepare."""

    def peek(self, topic: str, limit: int) -> Sequence[Any]: ...

    def get(self, topic: str, ids: Sequence[int]) -> Sequence[Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextInputs:
    """The arguments that every context takes."""

    now: datetime
    connectors: dict[str, Connector]
    limits: Limits = DEFAULT_LIMITS


class Context:
    """Open while its phase runs; keeps the first violation."""

    def __init__(self, phase: str, given: ContextInputs) -> None:
        self._phase, self._connectors, self._limits = phase, given.connectors, given.limits
        self._is_open = True
        self.now = given.now
        self.violation: PhaseViolationError | None = None
        self._costs: list[Decimal] = []

    def add_cost(self, amount: Decimal | int) -> None:
        """Add to the cost of this run, in a unit of your choice."""
        self._require_usable("add_cost")
        self._costs.append(checked_cost(amount))

    @property
    def cost(self) -> Decimal | None:
        """What this phase has reported so far; None if nothing."""
        return total_cost(self._costs)

    def close(self) -> None:
        """Refuse all further use: the phase is over."""
        self._is_open = False

    def _refuse(self, what: str, hint: str) -> NoReturn:
        error = PhaseViolationError(f"{what} in {self._phase}. {hint}")
        for context in (self, CURRENT_CONTEXT.get()):
            if context is not None:
                context.violation = context.violation or error
        raise error

    def _require_usable(self, what: str) -> None:
        if not self._is_open:
            self._refuse(f"{what} after the phase had ended", "A context works only inside the call it was given to")
        if CURRENT_CONTEXT.get() not in (None, self):  # none in a thread that the handler started
            self._refuse(f"{what} through the context of another run", "Use the context that this call was given")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        connector = self._connectors.get(name)
        if connector is None:
            known = ", ".join(sorted(self._connectors)) or "none"
            hint = _OTHER_PHASE_HINTS.get(name) or f"There is no such operation or connector; connectors are: {known}"
            self._refuse(f"ctx.{name} was used", hint)
        return _ConnectorProxy(connector, self._call_operation)

    def _call_operation(self, connector: Connector, operation: Operation[Any], params: dict[str, Any]) -> Any:
        given = f"({', '.join(params)})"
        self._refuse(f"{connector.name}.{operation.name}{given} was called", "This phase may not touch outside systems")


class _ConnectorProxy:
    """The value of ``ctx.mail``: its attributes are the operations of the connector that the phase allows."""

    def __init__(self, connector: Connector, act: Callable[[Connector, Operation[Any], dict[str, Any]], Any]) -> None:
        self._connector, self._call_operation = connector, act

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation = type(self._connector).operations().get(name)
        if operation is None:
            known = ", ".join(sorted(type(self._connector).operations()))
            raise AttributeError(f"connector {self._connector.name!r} has no operation {name!r}; it has: {known}")

        def call(*positional: Any, **params: Any) -> Any:
            if positional:
                known = ", ".join(operation.parameters)
                what = f"{self._connector.name}.{name} was called with positional arguments"
                raise LogicError(f"{what}; it takes keyword arguments: {known}")
            return self._call_operation(self._connector, operation, params)

        return call


def _read(connector: Connector, operation: Operation[Any], params: dict[str, Any]) -> Any:
    """Call a read and return its result. A handler that is not async may use an async connector."""
    span = phase_observer.start_read(connector.name, operation.name)
    try:
        with spans.activate(span):
            value = operation.function(connector, **operation.arguments(params))
            if inspect.isawaitable(value):
                if _is_in_loop():
                    return _await_read(value, span)
                value = event_loop.await_result(value)
    except BaseException as error:
        spans.end_span(span, error=error)
        raise
    spans.end_span(span)
    return value


async def _await_read(value: Any, span: Any) -> Any:
    """Await the result of a read in the event loop of an async handler."""
    try:
        with spans.activate(span):
            result = await event_loop.await_result_async(value)
    except BaseException as error:
        spans.end_span(span, error=error)
        raise
    spans.end_span(span)
    return result


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class PrepareContext(Context):
    """Reads subscribed topics and outside systems."""

    def __init__(self, given: ContextInputs, topics: Sequence[Topic], reader: EventReader) -> None:
        super().__init__("prepare", given)
        self._topics = {topic.name: topic for topic in topics}
        self._reader = reader

    def peek(self, topic: Topic, limit: int = 100) -> list[Event]:
        """Return pending events of a subscribed topic, oldest first."""
        name = self._require_subscribed(topic, "peek")
        if type(limit) is not int or limit < 1:
            raise LogicError(f"peek of topic {name!r} with limit={limit!r}; expected a positive integer")
        return self._events(topic, self._reader.peek(name, limit))

    def get_by_ids(self, topic: Topic, ids: Sequence[EventId]) -> list[Event]:
        """Return events of a subscribed topic by their ids, whatever their status."""
        name = self._require_subscribed(topic, "get_by_ids")
        wrong = [id_ for id_ in ids if type(id_) is not int or not 0 <= id_ < _IDS_END]
        if wrong:
            raise LogicError(f"get_by_ids of topic {name!r} with {wrong[0]!r}; expected ids of events")
        return self._events(topic, self._reader.get(name, ids))

    def _call_operation(self, connector: Connector, operation: Operation[Any], params: dict[str, Any]) -> Any:
        self._require_usable(f"{connector.name}.{operation.name} was called")
        if operation.is_mutation:
            what = f"the mutation {connector.name}.{operation.name} was requested"
            self._refuse(what, "Put its arguments into data and request it in mutate")
        return _read(connector, operation, params)

    def _require_subscribed(self, topic: Topic, verb: str) -> str:
        self._require_usable(verb)
        name = getattr(topic, "name", str(topic))
        if self._topics.get(name) is not topic:
            known = ", ".join(sorted(self._topics))
            self._refuse(f"{verb} of topic {name!r}", f"This consumer is subscribed to: {known}. {_TOPIC_HINT}")
        return name

    def _events(self, topic: Topic, rows: Sequence[Any]) -> list[Event]:
        return [
            Event(
                **header_of(row),
                id=EventId(row.id),
                payload=_parsed_payload(topic, row),
                created_at=row.created_at,
                raw_payload=row.payload,
            )
            for row in rows
        ]


def _parsed_payload(topic: Topic, row: Any) -> Any:
    try:
        return parse_payload(topic, opened(row.payload))
    except TamperedError as error:
        error.event_id = EventId(row.id)
        raise
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "$"
        what = f"event {row.id} ({row.message_id!r}) of topic {topic.name!r} does not fit {error.title}"
        advice = "skip that event, or deploy a model that takes it"
        raise EventError(EventId(row.id), f"{what}: {place}: {first['msg']}; {advice}") from error


class MutateContext(Context):
    """Takes the request of at most one mutation. The worker sends it after the handler has returned."""

    def __init__(self, given: ContextInputs) -> None:
        super().__init__("mutate", given)
        self.requested: RequestedMutation | None = None

    def _call_operation(self, connector: Connector, operation: Operation[Any], params: dict[str, Any]) -> Any:
        what = f"{connector.name}.{operation.name} was called"
        self._require_usable(what)
        if not operation.is_mutation:
            self._refuse(f"the read {what}", "Read in prepare and pass what you found in data")
        if self.requested is not None:
            first = f"{self.requested.connector}.{self.requested.operation}"
            self._refuse(f"a second mutation {what}", f"{first} was requested already, and a run has one")
        kept = json_copy(
            operation.to_stored_params(params),
            what=f"parameters of {connector.name}.{operation.name}",
            limit=self._limits.params,
        )
        self.requested = RequestedMutation(connector=connector.name, operation=operation.name, params=kept)
        return self.requested


class PublishingContext(Context):
    """Publishes to declared topics."""

    def __init__(self, phase: str, given: ContextInputs, topics: Sequence[Topic]) -> None:
        super().__init__(phase, given)
        self._topics = {topic.name: topic for topic in topics}
        self.published: list[NewEvent] = []

    def publish(
        self, topic: Topic, *, message_id: str, payload: Any = None, key: str | None = None, title: str | None = None
    ) -> None:
        """Publish an event with the commit of this run; a message id that exists already is a no-op."""
        self._require_usable("publish")
        name = getattr(topic, "name", str(topic))
        if self._topics.get(name) is not topic:
            known = ", ".join(sorted(self._topics)) or "none"
            self._refuse(f"publish to topic {name!r}", f"This handler declares publishes: {known}. {_TOPIC_HINT}")
        what = f"payload of {message_id!r}"
        body = json_payload(payload, what=what)
        parse_payload(topic, body)
        body = json_copy(body, what=what, limit=self._limits.payload)
        event = NewEvent(topic=name, message_id=message_id, payload=body, key=key, title=title)
        checked_header(event)
        self.published.append(event)


class NextContext(PublishingContext):
    """Publishes the events that follow from the mutation."""

    def __init__(self, given: ContextInputs, topics: Sequence[Topic]) -> None:
        super().__init__("next", given, topics)


class ProducerContext(PublishingContext):
    """Reads outside systems and publishes events."""

    def __init__(self, given: ContextInputs, topics: Sequence[Topic]) -> None:
        super().__init__("a producer", given, topics)

    def _call_operation(self, connector: Connector, operation: Operation[Any], params: dict[str, Any]) -> Any:
        self._require_usable(f"{connector.name}.{operation.name} was called")
        if operation.is_mutation:
            what = f"the mutation {connector.name}.{operation.name} was requested"
            self._refuse(what, "Publish an event and let a consumer request it")
        return _read(connector, operation, params)
