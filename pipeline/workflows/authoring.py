"""Declare workflows, topics, consumers and producers.

A wrong declaration raises an error when its module is imported, with the file and the line of the declaration. Nothing
is registered in part.
"""

import inspect
import sys
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, TypeVar, Unpack

from pydantic import BaseModel

from pipeline.domain.codec import Codec
from pipeline.domain.errors import InvalidInputError
from pipeline.domain.payloads import checked_name
from pipeline.domain.policies import Retention
from pipeline.domain.values import HEADER_FIELDS, ConsumerOptions, HandlerOptions, header_of
from pipeline.domain.workflows import OnExhausted, OnLogicError, OnUncertain, can_overtake, default_on_exhausted
from pipeline.workflows import declaration_checks
from pipeline.workflows.handler_types import Event, PrepareResult

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])
E = TypeVar("E", bound=StrEnum)


class DeclarationError(InvalidInputError):
    """A declaration is wrong; the message names its file and line."""

    def __init__(self, problem: str, where: str) -> None:
        self.problem, self.where = problem, where
        super().__init__(f"{where}: {problem}")


@dataclass(frozen=True)
class Topic:
    """A named, ordered set of events of one workflow."""

    workflow: str
    name: str
    schema: type[BaseModel] | None = None
    renamed_from: str = field(default="", compare=False, repr=False)
    where: str = field(default="", compare=False, repr=False)  #: file and line of the declaration


@dataclass(frozen=True, kw_only=True)
class Consumer(ConsumerOptions):
    """A declared consumer: its instance, its topics and its policies."""

    name: str
    instance: Any
    subscribes: tuple[Topic, ...]
    publishes: tuple[Topic, ...] = ()

    @property
    def merge(self) -> Callable[[Any, Any], Any] | None:
        """The function that merges a returned state into the current one; None without one."""
        found: Callable[[Any, Any], Any] | None = getattr(self.instance, "merge", None)
        return found


@dataclass(frozen=True, kw_only=True)
class Producer(HandlerOptions):
    """A declared producer: its function, its topics and its schedule."""

    name: str
    function: Callable[..., Any]
    publishes: tuple[Topic, ...] = ()
    every: timedelta | None = None
    cron: str | None = None


class Workflow:
    """A set of handlers that share topics and are paused together."""

    def __init__(  # noqa: PLR0913 - options of a workflow
        self,
        name: str,
        *,
        version: int = 1,
        concurrency: int = 1,
        on_uncertain: str = OnUncertain.PAUSE,
        on_logic_error: str = OnLogicError.MAINTENANCE,
        on_exhausted: str | None = None,
        retention: Retention | None = None,
        renamed_from: str = "",
        codec: Codec | None = None,
    ) -> None:
        where = _declaration_site()
        self.name = _check_declaration(lambda: checked_name(name, what="workflow name"), where)
        self.renamed_from = _former_name(name, renamed_from, where)
        problem = declaration_checks.workflow_problem(version, concurrency, retention or Retention())
        if codec is not None and not all(hasattr(codec, name) for name in ("key_id", "encode", "decode")):
            problem = f"has codec={codec!r}; expected an object with key_id, encode and decode, such as AesGcm"
        if problem:
            raise DeclarationError(f"workflow {name!r} {problem}", where)
        self.version, self.concurrency = version, concurrency
        self.retention = retention or Retention()
        self.on_uncertain = _choice(OnUncertain, "on_uncertain", on_uncertain, where)
        self.on_logic_error = _choice(OnLogicError, "on_logic_error", on_logic_error, where)
        chosen = default_on_exhausted(self.on_logic_error) if on_exhausted is None else on_exhausted
        self.on_exhausted = _choice(OnExhausted, "on_exhausted", chosen, where)
        self.codec = codec
        self.where = where
        self.topics: dict[str, Topic] = {}
        self.consumers: dict[str, Consumer] = {}
        self.producers: dict[str, Producer] = {}

    @property
    def overlap_reason(self) -> str | None:
        """Why a run may end after one that began later, as text; None if it may not."""
        if not can_overtake(self.concurrency, self.on_uncertain):
            return None
        return f"runs {self.concurrency} at once" if self.concurrency > 1 else "continues while an outcome is in doubt"

    def topic(self, name: str, schema: type[BaseModel] | None = None, *, renamed_from: str = "") -> Topic:
        """Declare a topic; with a schema, every payload is checked against it.

        With ``renamed_from`` it takes over the events and subscriptions of the topic with that former name.
        """
        where = _declaration_site()
        _check_declaration(lambda: checked_name(name, what="topic"), where)
        if name in self.topics:
            raise DeclarationError(f"topic {name!r} is declared twice in workflow {self.name!r}", where)
        problem = declaration_checks.schema_problem(name, schema)
        if problem:
            raise DeclarationError(problem, where)
        self.topics[name] = Topic(self.name, name, schema, _former_name(name, renamed_from, where), where)
        return self.topics[name]

    def consumer(
        self,
        *bare: Any,
        subscribes: Iterable[Topic] = (),
        publishes: Iterable[Topic] = (),
        **options: Unpack[declaration_checks.ConsumerKeywords],
    ) -> Callable[[C], C]:
        """Declare a class with ``prepare``, ``mutate`` and ``next`` as a consumer."""
        where = _declaration_site()
        _refuse_bare(bare, "consumer(subscribes=[topic])", where)
        subscribed, published = _topic_tuple(subscribes, where), _topic_tuple(publishes, where)

        def declare(cls: C) -> C:
            rest: dict[str, Any] = dict(options)
            name = rest.pop("name", None) or getattr(cls, "__name__", repr(cls))
            instance = _instance(cls, name, where)
            self._add_consumer(name, instance, where, subscribes=subscribed, publishes=published, **rest)
            return cls

        return declare

    def effect(self, topic: Topic, **options: Unpack[declaration_checks.ConsumerKeywords]) -> Callable[[F], F]:
        """Declare a function that takes one event and requests at most one mutation as a consumer."""
        where = _declaration_site()
        if not isinstance(topic, Topic):
            raise DeclarationError(f"effect was given {topic!r}; expected @workflow.effect(topic)", where)

        def declare(function: F) -> F:
            rest: dict[str, Any] = dict(options)
            name = rest.pop("name", None) or function.__name__
            wrong = declaration_checks.option_problem(rest, declaration_checks.CONSUMER_OPTIONS)
            problem = f"effect {name} {wrong}" if wrong else declaration_checks.signature_problem(function, 2, name)
            if problem:
                raise DeclarationError(problem, where)
            instance = EffectConsumer(topic, function)
            self._add_consumer(name, instance, where, subscribes=(topic,), publishes=(), **rest)
            return function

        return declare

    def producer(
        self,
        *bare: Any,
        every: timedelta | None = None,
        cron: str | None = None,
        publishes: Iterable[Topic] = (),
        **options: Unpack[declaration_checks.ProducerKeywords],
    ) -> Callable[[F], F]:
        """Declare a function that runs on a schedule and publishes events."""
        where = _declaration_site()
        _refuse_bare(bare, "producer(every=timedelta(...))", where)
        published = _topic_tuple(publishes, where)

        def declare(function: F) -> F:
            rest: dict[str, Any] = dict(options)
            name = rest.pop("name", None) or function.__name__
            self._refuse_duplicate_handler(name, where)
            wrong = declaration_checks.option_problem(
                rest, declaration_checks.PRODUCER_OPTIONS, "every", "cron", "publishes"
            )
            problem = declaration_checks.schedule_problem(every, cron) or declaration_checks.signature_problem(
                function, 2, name
            )
            if wrong or problem:
                raise DeclarationError(f"producer {name} {wrong}" if wrong else str(problem), where)
            self._refuse_unknown_topics(published, where)
            _former_name(name, rest.get("renamed_from", ""), where)
            self.producers[name] = Producer(
                name=name, function=function, publishes=published, every=every, cron=cron, **rest
            )
            return function

        return declare

    def _add_consumer(
        self,
        name: str,
        instance: Any,
        where: str,
        *,
        subscribes: tuple[Topic, ...],
        publishes: tuple[Topic, ...],
        **options: Any,
    ) -> None:
        self._refuse_duplicate_handler(name, where)
        self._refuse_unknown_topics(subscribes, where)
        self._refuse_unknown_topics(publishes, where)
        problem = declaration_checks.consumer_problem(instance, name, subscribes, options, self.overlap_reason)
        if problem:
            raise DeclarationError(problem, where)
        _former_name(name, options.get("renamed_from", ""), where)
        for option, kind in declaration_checks.CHOICES.items():
            if option in options:
                options[option] = _choice(kind, option, options[option], where)
        self.consumers[name] = Consumer(
            name=name, instance=instance, subscribes=subscribes, publishes=publishes, **options
        )
        function = instance.function if isinstance(instance, EffectConsumer) else instance.mutate
        declaration_checks.warn_after_request(
            function, name if isinstance(instance, EffectConsumer) else f"{name}.mutate"
        )

    def _refuse_duplicate_handler(self, name: str, where: str) -> None:
        _check_declaration(lambda: checked_name(name, what="handler name"), where)
        if name in self.consumers or name in self.producers:
            raise DeclarationError(f"workflow {self.name!r} has a handler named {name!r} already", where)

    def _refuse_unknown_topics(self, topics: tuple[Topic, ...], where: str) -> None:
        for topic in topics:
            if not isinstance(topic, Topic) or self.topics.get(topic.name) is not topic:
                shown = getattr(topic, "name", topic)
                known = ", ".join(sorted(self.topics)) or "none"
                raise DeclarationError(
                    f"{shown!r} is not a topic of workflow {self.name!r}; declared are: {known}. "
                    "Declare it with workflow.topic(...) and pass what that returns",
                    where,
                )


def _former_name(name: str, renamed_from: str, where: str) -> str:
    """Return the former name of a workflow, topic or handler, checked; empty if none was given."""
    if renamed_from == "":
        return ""
    if renamed_from == name:
        raise DeclarationError(f"{name!r} is declared as renamed from itself; expected its former name", where)
    former: str = _check_declaration(lambda: checked_name(renamed_from, what=f"renamed_from of {name!r}"), where)
    return former


def _refuse_bare(bare: tuple[Any, ...], expected: str, where: str) -> None:
    if bare:
        raise DeclarationError(f"was given {bare[0]!r}; expected @workflow.{expected}", where)


def _topic_tuple(topics: Any, where: str) -> tuple[Topic, ...]:
    """Return the topics of an iterable, read once: a generator is empty the second time."""
    if isinstance(topics, Topic | str) or not isinstance(topics, Iterable):
        raise DeclarationError(f"{topics!r} was given where a list of topics is expected", where)
    return tuple(topics)


def _instance(cls: Any, name: str, where: str) -> Any:
    if not isinstance(cls, type):
        raise DeclarationError(f"{name} is a {type(cls).__name__}; a consumer is a class with three methods", where)
    try:
        return cls()
    except Exception as error:
        raise DeclarationError(f"{name}() cannot be made without arguments: {error!r}", where) from error


class EffectConsumer:
    """The consumer behind ``Workflow.effect``: it passes the oldest event to the function."""

    def __init__(self, topic: Topic, function: Callable[..., Any]) -> None:
        self.topic, self.function = topic, function

    def prepare(self, ctx: Any, state: Any) -> PrepareResult:
        """Reserve the oldest pending event and store it in the plan, because mutate may not read."""
        del state
        pending = ctx.peek(self.topic, limit=1)
        if not pending:
            return PrepareResult.nothing()
        return PrepareResult(reserve=pending, data=serialize_event(pending[0]))

    def mutate(self, ctx: Any, prepared: Any) -> Any:
        """Call the function with the stored event."""
        return self.function(ctx, deserialize_event(self.topic, prepared.data))

    def next(self, ctx: Any, prepared: Any, result: Any) -> None:
        """Publish nothing."""
        del ctx, prepared, result


def serialize_event(event: Event) -> dict[str, Any]:
    """Return an event as JSON for the plan, with the payload as published: the model parses it again."""
    return header_of(event) | {
        "id": event.id,
        "payload": event.raw_payload,
        "created_at": event.created_at and event.created_at.isoformat(),
    }


def deserialize_event(topic: Topic, data: dict[str, Any]) -> Event:
    """Return the event of a plan, its payload parsed by the topic's model."""
    created_at = data.get("created_at")  # absent in plans of earlier code
    header = {name: data[name] for name in HEADER_FIELDS if name in data}  # as are fields that were added later
    return Event(
        **header | {"topic": topic.name},
        id=data["id"],
        payload=parse_payload(topic, data["payload"]),
        created_at=created_at and datetime.fromisoformat(created_at),
        raw_payload=data["payload"],
    )


def parse_payload(topic: Topic, payload: Any) -> Any:
    """Parse a payload with the topic's model, if it has one. A validator may change its input, so it gets a copy."""
    return topic.schema.model_validate(deepcopy(payload)) if topic.schema else payload


def _declaration_site() -> str:
    """Return file and line of the declaration: the first frame outside this module."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    if frame is None:
        return "<unknown>"
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _check_declaration(check: Callable[[], Any], where: str) -> Any:
    try:
        return check()
    except InvalidInputError as error:
        raise DeclarationError(str(error).removesuffix(" Nothing was written."), where) from error


def _choice(kind: type[E], option: str, value: Any, where: str) -> E:
    try:
        return kind(value)
    except ValueError:
        raise DeclarationError(f"{option} is {value!r}; expected one of: {', '.join(kind)}", where) from None


def workflows_of(module: str) -> list[Workflow]:
    """Return every workflow of a module."""
    return [value for value in vars(sys.modules[module]).values() if isinstance(value, Workflow)]
