"""The bridge from a stream to a topic: routes entries, publishes them, acknowledges them."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import Any

from sqlalchemy.exc import DBAPIError

from pipeline.domain.errors import InvalidInputError, NotFoundError, PayloadError
from pipeline.domain.payloads import checked_name
from pipeline.domain.values import DEFAULT_LIMITS, Limits, NewEvent
from pipeline.ingest.consumer import wait_interruptibly
from pipeline.ingest.errors import LockedError, PoisonEntry, PoisonError
from pipeline.ingest.queue import QueueMessage, RedisStreamsQueue
from pipeline.store.database import Database, Transaction, is_lock_timeout
from pipeline.store.reads import work
from pipeline.store.rows import NamedTopicRow
from pipeline.telemetry import spans
from pipeline.transitions import events

_LONGEST_ENTRY_ID = 41  #: two 64-bit numbers and a dash


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The way from the entries of a stream to the events of a workflow.

    Field names are keys of an entry's JSON object.
    """

    workflow: str
    topic: str  #: for entries without a topic of their own
    topic_field: str | None = None
    message_id_field: str | None = None
    key_field: str | None = None
    limits: Limits = DEFAULT_LIMITS

    def event(self, message: QueueMessage) -> NewEvent:
        """Return the event of a message, or raise a PayloadError with the problem."""
        return NewEvent(
            topic=self._field_text(message, self.topic_field, "topic") or self.topic,
            message_id=self._field_text(message, self.message_id_field, "message id") or qualified_entry_id(message),
            key=self._field_text(message, self.key_field, "key"),
            payload=message.payload,
            traceparent=_traceparent(message),
        )

    def _field_text(self, message: QueueMessage, name: str | None, what: str) -> str | None:
        """Return the text of a field. A whole number becomes its digits; null counts as missing."""
        value: Any = None if name is None else message.payload.get(name)
        if value is None:
            return None
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str):
            raise PayloadError(f"{what} in field {name!r}", f"it is {_json_type(value)}", "text or a whole number")
        return checked_name(value, what=f"{what} in field {name!r}")


def _traceparent(message: QueueMessage) -> str | None:
    """Return the producer's trace: from the entry's field, or from the key ``traceparent``.

    A value that is not a traceparent is only payload.
    """
    if message.traceparent is not None:
        return message.traceparent
    given = message.payload.get("traceparent")
    return given if isinstance(given, str) and spans.parse_traceparent(given) is not None else None


def qualified_entry_id(message: QueueMessage) -> str:
    """Return a message id for an entry without one. Two streams may use the same entry ids."""
    return f"{message.stream}:{message.id}"


def require_short_stream(stream: str) -> None:
    """Refuse a stream whose name is too long to be part of a message id."""
    try:
        checked_name(f"{stream}:{'9' * _LONGEST_ENTRY_ID}", what="stream")
    except PayloadError as error:
        raise InvalidInputError(f"Stream {stream[:60]!r} cannot be part of a message id: {error.problem}.") from None


def _json_type(value: Any) -> str:
    return {bool: "a boolean", float: "a fraction", list: "an array", dict: "an object"}.get(type(value), "no name")


RoutedBatch = list[tuple[QueueMessage, NewEvent]]
_UNTRUE_ENDINGS = (" Nothing was written.", " Nothing was published.")  #: not true here: the rest of the batch was


def split_publishable(tx: Transaction, route: Route, ready: RoutedBatch) -> tuple[RoutedBatch, list[PoisonEntry]]:
    """Split a batch into entries that can become events, and the others with their problems."""
    topics = work.topics_by_name(tx, route.workflow)
    good: RoutedBatch = []
    bad: list[PoisonEntry] = []
    for message, event in ready:
        try:
            _check_event(tx, route, event, topics)
        except InvalidInputError as error:
            bad.append(poison_entry(message, error))
        else:
            good.append((message, event))
    return good, bad


def poison_entry(message: QueueMessage, error: InvalidInputError) -> PoisonEntry:
    """Return a readable entry that cannot become an event, with its problem."""
    problem = str(error)
    for untrue in _UNTRUE_ENDINGS:
        problem = problem.removesuffix(untrue)
    return PoisonEntry(message.id, message.fields, problem.rstrip("."))


def _check_event(tx: Transaction, route: Route, event: NewEvent, topics: Mapping[str, NamedTopicRow]) -> None:
    events.event_rows([event], route.limits)
    if event.topic not in topics:
        raise events.unknown_topic_error(tx, route.workflow, event.topic)
    events.check_event(topics[event.topic], event)


logger = logging.getLogger("pipeline.ingest")
LOCK_WAIT = timedelta(seconds=5)  #: how long a batch waits for another transaction with the same message ids
_SHORT_WAIT = timedelta(milliseconds=50)  #: the same, once another transaction is known to hold some of them
_MAX_LOCK_PROBES = 200  #: attempts to separate the locked entries of a batch from the rest


class OnPoison(StrEnum):
    """What happens after an entry that cannot become an event. It stays pending either way."""

    STOP = "stop"  #: publish the good entries of its batch, then end the loop with the error
    LEAVE = "leave"  #: log it and go on


@dataclass(slots=True)
class BridgeCounts:
    """The counts of a bridge so far."""

    published: int = 0  #: events that are new
    duplicates: int = 0  #: entries whose event was there already
    poison: int = 0  #: deliveries of entries that cannot become an event
    locked: int = 0  #: entries that a recovery left pending: another transaction held their message ids


@dataclass
class Bridge:
    """Publishes the entries of a stream until it is stopped.

    Several bridges share the work of a group.
    """

    queue: RedisStreamsQueue
    database: Database
    route: Route
    on_poison: OnPoison = OnPoison.STOP
    counts: BridgeCounts = field(default_factory=BridgeCounts)
    touch_liveness: Callable[[], None] = lambda: None  #: called in each round of the loop
    lock_wait: timedelta = LOCK_WAIT

    def __post_init__(self) -> None:
        require_short_stream(self.queue.config.stream)
        self._is_stopping = False

    def require_target(self) -> None:
        """Refuse a workflow or topic that does not exist."""
        with self.database.transaction() as tx:
            topics = work.topics_by_name(tx, self.route.workflow)
            names = work.workflow_names(tx)
            if not topics and self.route.workflow not in names:
                raise NotFoundError("workflow", self.route.workflow, names, "Nothing was read.")
        if self.route.topic not in topics:
            what = f"topic of workflow {self.route.workflow!r} named"
            raise NotFoundError(what, self.route.topic, topics, "Nothing was read.")

    def stop(self) -> None:
        """Begin no further read. The current batch is finished first."""
        self._is_stopping = True

    def run(self) -> None:
        """Publish new entries until ``stop``.

        A batch that waits too long for a lock ends the loop and stays pending.
        """
        while not self._is_stopping:
            self.touch_liveness()
            self.read_once()

    def recover(self, *, every_ms: int = 5_000) -> None:
        """Publish stale entries until ``stop``. When there is none, remove the consumers that are gone."""
        while not self._is_stopping:
            self.touch_liveness()
            if self.recover_once() == 0:
                for name in self.queue.remove_gone_consumers():
                    logger.info("removed consumer %s of stream %r: it is gone", name, self.queue.config.stream)
                wait_interruptibly(every_ms / 1000, lambda: self._is_stopping)

    def read_once(self, block_ms: int | None = None) -> int:
        """Read one batch of new entries, publish it, and return its size."""
        return self._process_batch(lambda: self.queue.read(block_ms), self._publish)

    def recover_once(self) -> int:
        """Claim one batch of stale entries, publish it, and return its size."""
        return self._process_batch(
            lambda: self.queue.claim_stale(count=self.queue.config.max_read_count), self._publish_unlocked
        )

    def _process_batch(
        self, fetch: Callable[[], list[QueueMessage]], publish: Callable[[RoutedBatch, list[PoisonEntry]], None]
    ) -> int:
        """Process one batch. An error before the acknowledgement leaves all of it pending."""
        bad: list[PoisonEntry] = []
        try:
            messages: Sequence[QueueMessage] = fetch()
        except PoisonError as error:
            messages, bad = error.messages, list(error.entries)
        count = len(messages) + len(bad)
        ready = self._route_messages(messages, bad)
        try:
            if ready:
                publish(ready, bad)
        finally:
            if bad:
                self._log_poison(bad)
        if bad and self.on_poison is OnPoison.STOP:
            raise PoisonError(self.queue.config.stream, bad)
        return count

    def _route_messages(self, messages: Sequence[QueueMessage], bad: list[PoisonEntry]) -> RoutedBatch:
        ready: RoutedBatch = []
        for message in messages:
            try:
                ready.append((message, self.route.event(message)))
            except PayloadError as error:
                bad.append(poison_entry(message, error))
        return ready

    def _publish(self, ready: RoutedBatch, bad: list[PoisonEntry], wait: timedelta | None = None) -> None:
        refused: list[PoisonEntry] = []
        with self._translate_lock_timeout(ready), self.database.transaction() as tx:
            tx.set_lock_timeout(wait or self.lock_wait)
            try:
                new, good = self._write(tx, ready), ready
            except InvalidInputError:  # nothing was written: find the entries that were refused
                good, refused = split_publishable(tx, self.route, ready)
                new = self._write(tx, good)
        self.counts.published += new
        self.counts.duplicates += len(good) - new
        bad += refused
        self.queue.ack(*(message for message, _ in good))

    def _publish_unlocked(self, ready: RoutedBatch, bad: list[PoisonEntry]) -> None:
        """Publish the entries that no other transaction holds; leave the others pending.

        The held entries are found by halving the batch.
        """
        try:
            return self._publish(ready, bad)
        except LockedError:
            waiting, probes = [ready], 0
        while waiting and probes < _MAX_LOCK_PROBES and not self._is_stopping:
            self.touch_liveness()
            part, probes = waiting.pop(), probes + 1
            try:
                self._publish(part, bad, _SHORT_WAIT)
            except LockedError as error:
                middle = len(part) // 2
                if middle:
                    waiting += [part[middle:], part[:middle]]
                else:
                    self.counts.locked += 1
                    logger.warning("%s", error)
        left = sum(len(part) for part in waiting)
        self.counts.locked += left
        if left:
            logger.warning("%d more entries of the same batch were not attempted; they stay pending", left)
        return None

    def _write(self, tx: Transaction, ready: RoutedBatch) -> int:
        made = [event for _, event in ready]
        return len(events.publish(tx, self.route.workflow, made, limits=self.route.limits).new)

    @contextmanager
    def _translate_lock_timeout(self, ready: RoutedBatch) -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            if not is_lock_timeout(error):
                raise
            ids = [message.id for message, _ in ready]
            named = f"entry {ids[0]}" if len(ids) == 1 else f"the batch from {ids[0]} to {ids[-1]}"
            raise LockedError(
                f"Another transaction holds the message ids of {named} of stream {self.queue.config.stream!r}, and "
                "did not end in time. It stays pending for a recovery. Find old transactions in pg_stat_activity."
            ) from error

    def _log_poison(self, bad: Sequence[PoisonEntry]) -> None:
        """Count and log each entry, so that an operator can find and park it."""
        self.counts.poison += len(bad)
        for entry in bad:
            logger.error("entry %s of stream %r cannot be used: %s", entry.id, self.queue.config.stream, entry.problem)
