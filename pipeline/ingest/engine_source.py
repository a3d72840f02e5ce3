"""A stream as a source of the consumer engine.

The engine retries steps within one delivery. The stream redelivers entries that were never
acknowledged. One rule joins the two: an entry may be claimed only when no worker can still process it.
"""

import asyncio
import contextlib
import functools
import logging
import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Self

from pipeline.consumer_engine.bounded import StepRunner
from pipeline.consumer_engine.errors import ExceptionType, TransactionException
from pipeline.consumer_engine.policies import ConsumerPolicy, RetryPolicy
from pipeline.consumer_engine.transactions import FrozenDict, Transaction
from pipeline.domain.errors import InvalidInputError
from pipeline.ingest.bridge import qualified_entry_id
from pipeline.ingest.errors import PoisonError
from pipeline.ingest.queue import (
    QueueConfig,
    QueueMessage,
    RedisStreamsQueue,
    default_consumer,
    park_entry,
    require_positive,
)
from pipeline.ingest.redis_client import connect_again, connect_redis, require_socket_timeout

logger = logging.getLogger("pipeline.ingest")
MARGIN = 5.0  #: seconds between the longest processing time and the first claim
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LATEST_MS = 253_402_300_799_000  #: the last second of the year 9999


class PoisonedFetchError(PoisonError, TransactionException):
    """Unusable entries as a business failure: another attempt would only read past them."""

    def __init__(self, error: PoisonError) -> None:
        super().__init__(error.stream, error.entries, error.messages)
        self.category = ExceptionType.BUSINESS


class StreamSource:
    """Gives out new entries of a stream; with ``recovers``, only stale ones.

    The default success handler acknowledges an item. A failed item stays pending, unless
    ``nack_transaction(item, requeue=False)`` parks it.
    """

    def __init__(
        self, queue: RedisStreamsQueue, policy: ConsumerPolicy | None = None, *, recovers: bool = False
    ) -> None:
        """Check ``policy`` if it is given; else the first loop's policy takes its place."""
        self._queue, self._recovers = queue, recovers
        #: If the first policy bounds the processing time, a recovery may run: every loop must then be bounded.
        self._is_bounded: bool | None = True if recovers else None
        self._poison: PoisonError | None = None
        self._settling = queue  #: acknowledges and parks
        if policy is not None:
            self.check_policy(policy)

    @classmethod
    def connect(cls, url: str, *, stream: str, group: str, recovers: bool = False, **config: Any) -> Self:
        """Connect to a stream, as a consumer named by host and process.

        ``config`` are further fields of `QueueConfig`. A read brings at most ``max_read_count`` entries (1,000); the
        batch of the policy is not larger.
        """
        given = {"consumer": default_consumer(), "max_read_count": 1000, **config}
        chosen = QueueConfig(stream=stream, group=group, **given)
        queue = RedisStreamsQueue(connect_redis(url, longest_block_ms=chosen.block_ms), chosen)
        return cls(queue, recovers=recovers)

    def check_policy(self, policy: ConsumerPolicy, /) -> None:
        """Refuse a policy under which an entry could be claimed during work, or be lost.

        The engine calls it with the policy of each loop: a file, the environment or an argument may have
        changed the one given to the source.
        """
        if self._is_bounded is None:
            self._is_bounded = not math.isinf(max_processing_time(policy))
        require_claim_idle(self._queue, policy, is_bounded=self._is_bounded)
        if policy.loop.continuous and self._settling is self._queue:  # a read blocks while items are settled
            self._settling = RedisStreamsQueue(connect_again(self._queue.client), self._queue.config, create=False)

    def fetch_transactions(self, batch_size: int, /, **extra: Any) -> list[Transaction]:
        """Return at most ``batch_size`` items; wait for the first, at most ``block_ms``.

        Unreadable entries are logged. If good entries came with them, those are returned first, because they
        are already delivered to this consumer; the next fetch then raises. The error ends the loop, whatever
        the number of attempts of a fetch.
        """
        self._raise_poison()
        block_ms = extra.pop("block_ms", None)
        if extra:
            raise InvalidInputError(f"A stream cannot fetch with {', '.join(sorted(extra))}; expected block_ms only.")
        count = min(batch_size, self._queue.config.max_read_count)  # a later policy may have a larger batch
        try:
            found = self._queue.claim_stale(count=count) if self._recovers else self._queue.read(block_ms, count)
        except PoisonError as error:
            for entry in error.entries:
                logger.error("entry %s of stream %r cannot be used: %s", entry.id, error.stream, entry.problem)
            self._poison, found = error, list(error.messages)
            if not found:
                self._raise_poison()
        return [_transaction(message) for message in found]

    def ack_transaction(self, transaction: Transaction, /) -> Any:
        """Acknowledge the entry: it is no longer pending."""
        self.ack_transactions([transaction])

    def ack_transactions(self, transactions: Sequence[Transaction], /) -> Any:
        """Acknowledge the entries in one call."""
        self._settling.ack_entries([self._entry(each) for each in transactions])

    def nack_transaction(self, transaction: Transaction, /, requeue: bool = True) -> Any:
        """Leave a failed item to a recovery, or park it."""
        if not requeue:
            park_entry(self._settling, self._entry(transaction), reason="the consumer gave it up")

    def _raise_poison(self) -> None:
        error, self._poison = self._poison, None
        if error is not None:
            raise PoisonedFetchError(error)

    def _entry(self, transaction: Transaction) -> str:
        """Return the id of the entry that an item was made from."""
        stream, entry = self._queue.config.stream, transaction.metadata.get("entry")
        if transaction.source != stream or not isinstance(entry, str):
            raise InvalidInputError(f"{transaction!r} is not from stream {stream!r}. Nothing was changed.")
        return entry


class AsyncStreamSource:
    """The same for a consumer that works with asyncio. Redis is called in two threads: one reads, one settles."""

    def __init__(
        self, queue: RedisStreamsQueue, policy: ConsumerPolicy | None = None, *, recovers: bool = False
    ) -> None:
        self._use(StreamSource(queue, policy, recovers=recovers))

    @classmethod
    def connect(cls, url: str, *, stream: str, group: str, recovers: bool = False, **config: Any) -> Self:
        """Connect to a stream, as `StreamSource.connect` does."""
        made = cls.__new__(cls)
        made._use(StreamSource.connect(url, stream=stream, group=group, recovers=recovers, **config))
        return made

    def _use(self, source: StreamSource) -> None:
        self._source, self._reading, self._settling = source, StepRunner(), StepRunner()

    def check_policy(self, policy: ConsumerPolicy, /) -> None:
        """Refuse a policy that does not fit the stream."""
        self._source.check_policy(policy)

    async def fetch_transactions_async(self, batch_size: int, /, **extra: Any) -> list[Transaction]:
        """Return at most ``batch_size`` items."""
        fetch = functools.partial(self._source.fetch_transactions, **extra)
        found: list[Transaction] = await _call_in_thread(self._reading, fetch, batch_size)
        return found

    async def ack_transaction(self, transaction: Transaction, /) -> None:
        """Acknowledge the entry: it is no longer pending."""
        await _call_in_thread(self._settling, self._source.ack_transaction, transaction)

    async def ack_transactions(self, transactions: Sequence[Transaction], /) -> None:
        """Acknowledge the entries in one call."""
        await _call_in_thread(self._settling, self._source.ack_transactions, transactions)

    async def nack_transaction(self, transaction: Transaction, /, requeue: bool = True) -> None:
        """Leave a failed item to a recovery, or park it."""
        await _call_in_thread(self._settling, self._source.nack_transaction, transaction, requeue)


async def _call_in_thread(thread: StepRunner, function: Callable[..., Any], *args: Any) -> Any:
    """Do what ``asyncio.to_thread`` does for less. When this is cancelled, the call goes on and is abandoned."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(_set_done, ended)

    job = thread.begin(function, args)
    job.then(wake)
    try:
        await ended
    except asyncio.CancelledError:
        thread.abandon(job)
        raise
    if job.error is not None:
        raise job.error
    return job.value


def _set_done(ended: "asyncio.Future[None]") -> None:
    if not ended.done():
        ended.set_result(None)


def max_processing_time(policy: ConsumerPolicy) -> float:
    """Return the longest time from a fetch to the end of its last item; infinite if unbounded.

    After the timeout of an item, its exception handler has the same time again. With a continuous fetch, the items of
    a batch may first wait for those of the batch before.
    """
    steps, loop = policy.steps, policy.loop
    limit = math.inf if loop.transaction_timeout is None else loop.transaction_timeout
    one = min(_budget(steps.process.retry) + _budget(steps.success.retry), limit)
    one += min(_budget(steps.exception.retry), limit)
    return one * (math.ceil(loop.batch.size / loop.concurrency.value) + loop.continuous)


def require_claim_idle(queue: RedisStreamsQueue, policy: ConsumerPolicy, *, is_bounded: bool) -> None:
    """Refuse settings under which an entry could be claimed while a worker still processes it."""
    idle, longest = queue.config.claim_idle_ms / 1000, max_processing_time(policy)
    if math.isinf(longest):
        if is_bounded:
            raise InvalidInputError(
                "The policy does not bound the processing time of an item, so no entry ever counts as stale; expected "
                "loop.transaction_timeout, or a timeout for each of the steps process, success and exception."
            )
    elif idle < longest + MARGIN:
        raise InvalidInputError(
            f"claim_idle_ms is {queue.config.claim_idle_ms}, and an item may take {longest:g} s from fetch to the end"
            f"; expected at least {math.ceil((longest + MARGIN) * 1000)}, so that no two workers process one entry."
        )
    _require_fetch_limits(queue, policy)


def _require_fetch_limits(queue: RedisStreamsQueue, policy: ConsumerPolicy) -> None:
    size, most = policy.loop.batch.size, queue.config.max_read_count
    if most < size:
        raise InvalidInputError(
            f"loop.batch.size is {size}, and a read of this queue brings at most {most}; expected a max_read_count of "
            f"{size} or more, or a smaller batch."
        )
    block_ms = policy.steps.fetch.extra.get("block_ms", queue.config.block_ms)
    try:
        require_socket_timeout(queue.client, require_positive("steps.fetch.extra.block_ms", block_ms))
    except ValueError as error:
        raise InvalidInputError(str(error)) from None
    timeout, block = policy.steps.fetch.retry.timeout, block_ms / 1000
    if timeout is not None and timeout <= block:
        raise InvalidInputError(
            f"The timeout of the fetch step is {timeout:g} s and a read waits {block:g} s; expected a longer timeout, "
            "because the items of an abandoned fetch are not processed."
        )


def _budget(retry: RetryPolicy) -> float:
    return math.inf if retry.timeout is None else retry.longest()


def _transaction(message: QueueMessage) -> Transaction:
    entry = message.id
    added_ms = min(int(entry.partition("-")[0]), _LATEST_MS)
    origin = {"entry": entry, "group": message.group, "times_delivered": message.times_delivered}
    return Transaction.of_entry(
        qualified_entry_id(message),
        message.payload,
        _EPOCH + timedelta(0, 0, 0, added_ms),
        source=message.stream,
        traceparent=message.traceparent,
        metadata=FrozenDict(origin),
    )
