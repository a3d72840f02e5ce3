"""From a stream to a topic: fetch, publish the batch in one transaction, commit, acknowledge.

An entry is acknowledged only after the event it became is committed. Between the two the process may
die at any point: the entry is then claimed by a recovery, published under the same message id, and
found to be there already.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from pipeline.domain.errors import InvalidInputError, PayloadError, UnknownError
from pipeline.domain.values import NewEvent
from pipeline.execution import events
from pipeline.ingest.errors import PoisonEntry, PoisonError
from pipeline.ingest.queue import QueueMessage, RedisStreamsQueue
from pipeline.ingest.recovery import pause
from pipeline.ingest.route import Route, require_short
from pipeline.store import views
from pipeline.store.database import Database, Transaction

logger = logging.getLogger("pipeline.ingest")
_Ready = list[tuple[QueueMessage, NewEvent]]


class OnPoison(StrEnum):
    """What happens after an entry that cannot become an event. It stays pending either way."""

    STOP = "stop"  #: the good ones of its batch are published, then the loop ends with the error
    LEAVE = "leave"  #: it is said in the log, and the loop goes on


@dataclass(slots=True)
class Tally:
    """What a bridge has done so far."""

    published: int = 0  #: events that are new
    repeats: int = 0  #: entries whose event was there already
    poison: int = 0  #: deliveries of entries that cannot become an event


@dataclass
class Bridge:
    """Publishes the entries of a stream until it is stopped. Several of them share the work of a group."""

    queue: RedisStreamsQueue
    database: Database
    route: Route
    on_poison: OnPoison = OnPoison.STOP
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        require_short(self.queue.config.stream)
        self._is_stopping = False
        self._topics: frozenset[str] = frozenset()

    def require_target(self) -> None:
        """Refuse a workflow or topic that does not exist, and a topic whose schema this process does not know."""
        with self.database.transaction() as tx:
            names = views.workflow_names(tx)
            if self.route.workflow not in names:
                raise UnknownError("workflow", self.route.workflow, names, "Nothing was read.")
            topics = {row.name: row.schema for row in views.topics(tx, self.route.workflow)}
        if self.route.topic not in topics:
            what = f"topic of workflow {self.route.workflow!r} named"
            raise UnknownError(what, self.route.topic, topics, "Nothing was read.")
        reached = set(topics) if self.route.topic_field else {self.route.topic}
        unchecked = sorted(name for name in reached if topics[name] is not None and name not in self.route.schemas)
        if unchecked:
            raise InvalidInputError(
                f"Payloads for {', '.join(unchecked)} cannot be checked: the topic has a schema and this process does "
                f"not know it. Expected the module of workflow {self.route.workflow!r} in PIPELINE_WORKFLOWS."
            )

    def stop(self) -> None:
        """Begin no further read. The batch in hand is finished first."""
        self._is_stopping = True

    def run(self) -> None:
        """Publish what is new, until ``stop``."""
        while not self._is_stopping:
            self._turn(self.queue.read)

    def recover(self, *, every_ms: int = 5_000) -> None:
        """Publish what went stale, until ``stop``."""
        while not self._is_stopping:
            if self.recover_once() == 0:
                pause(every_ms / 1000, lambda: self._is_stopping)

    def recover_once(self) -> int:
        """Claim one batch of stale entries, publish it, and say how many there were."""
        return self._turn(lambda: self.queue.claim_stale(count=self.queue.config.max_read_count))

    def _turn(self, fetch: Callable[[], list[QueueMessage]]) -> int:
        """One batch on its way. An error before the acknowledgement leaves all of it pending."""
        poison: list[PoisonEntry] = []
        try:
            messages: Sequence[QueueMessage] = fetch()
        except PoisonError as error:
            messages, poison = error.messages, list(error.entries)
        count = len(messages) + len(poison)
        ready = self._routed(messages, poison)
        if ready:
            self._publish(ready, poison)
        if poison:
            self._tell(poison)
        return count

    def _routed(self, messages: Sequence[QueueMessage], poison: list[PoisonEntry]) -> _Ready:
        ready: _Ready = []
        for message in messages:
            try:
                ready.append((message, self.route.event(message)))
            except PayloadError as error:
                poison.append(_poison(message, error))
        return ready

    def _publish(self, ready: _Ready, poison: list[PoisonEntry]) -> None:
        with self.database.transaction() as tx:
            known = self._to_known_topics(tx, ready, poison)
            written, new = self._written(tx, known, poison)
        self.tally.published += new
        self.tally.repeats += len(written) - new
        self.queue.ack(*(message for message, _ in written))

    def _to_known_topics(self, tx: Transaction, ready: _Ready, poison: list[PoisonEntry]) -> _Ready:
        wanted = {event.topic for _, event in ready}
        if wanted - self._topics:  # looked up again only when something is missing: topics are rarely added
            self._topics = frozenset(row.name for row in views.topics(tx, self.route.workflow))
        for message, event in ready:
            if event.topic not in self._topics:
                problem = UnknownError(f"topic of workflow {self.route.workflow!r} named", event.topic)
                poison.append(_poison(message, problem))
        return [(message, event) for message, event in ready if event.topic in self._topics]

    def _written(self, tx: Transaction, ready: _Ready, poison: list[PoisonEntry]) -> tuple[_Ready, int]:
        """What was published, and how much of it is new. One event that cannot be stored does not hold up the rest."""
        try:
            published = events.publish(tx, self.route.workflow, [e for _, e in ready], limits=self.route.limits)
        except PayloadError:  # refused before anything was written: look which ones it is about
            good = self._storable(ready, poison)
            published = events.publish(tx, self.route.workflow, [e for _, e in good], limits=self.route.limits)
            return good, len(published.new)
        return ready, len(published.new)

    def _storable(self, ready: _Ready, poison: list[PoisonEntry]) -> _Ready:
        good: _Ready = []
        for message, event in ready:
            try:
                self.route.require_storable(event)
            except PayloadError as error:
                poison.append(_poison(message, error))
            else:
                good.append((message, event))
        return good

    def _tell(self, poison: Sequence[PoisonEntry]) -> None:
        self.tally.poison += len(poison)
        error = PoisonError(self.queue.config.stream, poison)
        if self.on_poison is OnPoison.STOP:
            raise error
        logger.error("%s", error)


def _poison(message: QueueMessage, error: InvalidInputError) -> PoisonEntry:
    return PoisonEntry(message.id, {}, str(error).removesuffix(" Nothing was written."))
