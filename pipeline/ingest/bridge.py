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
    sign: Callable[[], None] = lambda: None  #: called each time round, as a sign of life

    def __post_init__(self) -> None:
        require_short(self.queue.config.stream)
        self._is_stopping = False

    def require_target(self) -> None:
        """Refuse a workflow or topic that does not exist."""
        with self.database.transaction() as tx:
            names = views.workflow_names(tx)
            if self.route.workflow not in names:
                raise UnknownError("workflow", self.route.workflow, names, "Nothing was read.")
            topics = [row.name for row in views.topics(tx, self.route.workflow)]
        if self.route.topic not in topics:
            what = f"topic of workflow {self.route.workflow!r} named"
            raise UnknownError(what, self.route.topic, topics, "Nothing was read.")

    def stop(self) -> None:
        """Begin no further read. The batch in hand is finished first."""
        self._is_stopping = True

    def run(self) -> None:
        """Publish what is new, until ``stop``."""
        while not self._is_stopping:
            self.sign()
            self._turn(self.queue.read)

    def recover(self, *, every_ms: int = 5_000) -> None:
        """Publish what went stale, until ``stop``."""
        while not self._is_stopping:
            self.sign()
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
            try:
                new, written = self._written(tx, ready), ready
            except InvalidInputError:  # refused as a whole, and nothing was written: find out which ones it is about
                new, written = self._sifted(tx, ready, poison)
        self.tally.published += new
        self.tally.repeats += len(written) - new
        self.queue.ack(*(message for message, _ in written))

    def _written(self, tx: Transaction, ready: _Ready) -> int:
        made = [event for _, event in ready]
        return len(events.publish(tx, self.route.workflow, made, limits=self.route.limits).new)

    def _sifted(self, tx: Transaction, ready: _Ready, poison: list[PoisonEntry]) -> tuple[int, _Ready]:
        """One by one, in the same transaction: one entry that is refused does not hold up the rest."""
        new, good = 0, []
        for message, event in ready:
            try:
                new += self._written(tx, [(message, event)])
            except InvalidInputError as error:
                poison.append(_poison(message, error))
            else:
                good.append((message, event))
        return new, good

    def _tell(self, poison: Sequence[PoisonEntry]) -> None:
        self.tally.poison += len(poison)
        error = PoisonError(self.queue.config.stream, poison)
        if self.on_poison is OnPoison.STOP:
            raise error
        logger.error("%s", error)


def _poison(message: QueueMessage, error: InvalidInputError) -> PoisonEntry:
    return PoisonEntry(message.id, {}, str(error).removesuffix(" Nothing was written."))
