"""A stream as a source of the consumer engine.

The engine retries steps within one delivery. The stream redelivers entries that were never
acknowledged. One rule joins the two: an entry may be claimed only when no worker can still process it.
"""

import asyncio
import logging
import math
from datetime import UTC, datetime, timedelta
from typing import Any

from pipeline.consumer_engine.errors import ExceptionType, TransactionException
from pipeline.consumer_engine.policies import ConsumerPolicy, RetryPolicy
from pipeline.consumer_engine.transactions import Transaction
from pipeline.domain.errors import InvalidInputError
from pipeline.ingest.bridge import qualified_entry_id
from pipeline.ingest.errors import PoisonError
from pipeline.ingest.queue import QueueMessage, RedisStreamsQueue, park_entry, require_positive
from pipeline.ingest.redis_client import require_socket_timeout

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

    def __init__(self, queue: RedisStreamsQueue, policy: ConsumerPolicy, *, recovers: bool = False) -> None:
        self._queue, self._recovers = queue, recovers
        #: If the first policy bounds the processing time, a recovery may run: every loop must then be bounded.
        self._is_bounded = recovers or not math.isinf(max_processing_time(policy))
        self._poison: PoisonError | None = None
        self.check_policy(policy)

    def check_policy(self, policy: ConsumerPolicy, /) -> None:
        """Refuse a policy under which an entry could be claimed during work, or be lost.

        The engine calls it with the policy of each loop: a file, the environment or an argument may have
        changed the one given to the source.
        """
        require_claim_idle(self._queue, policy, is_bounded=self._is_bounded)

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
        self._queue.ack(self._message(transaction))

    def nack_transaction(self, transaction: Transaction, /, requeue: bool = True) -> Any:
        """Leave a failed item to a recovery, or park it."""
        if not requeue:
            park_entry(self._queue, self._message(transaction).id, reason="the consumer gave it up")

    def _raise_poison(self) -> None:
        error, self._poison = self._poison, None
        if error is not None:
            raise PoisonedFetchError(error)

    def _message(self, transaction: Transaction) -> QueueMessage:
        config, entry = self._queue.config, transaction.metadata.get("entry")
        if transaction.source != config.stream or not isinstance(entry, str):
            raise InvalidInputError(f"{transaction!r} is not from stream {config.stream!r}. Nothing was changed.")
        return QueueMessage(stream=config.stream, group=config.group, id=entry, payload={})


class AsyncStreamSource:
    """The same for a consumer that works with asyncio. Redis is called in a thread."""

    def __init__(self, queue: RedisStreamsQueue, policy: ConsumerPolicy, *, recovers: bool = False) -> None:
        self._source = StreamSource(queue, policy, recovers=recovers)

    def check_policy(self, policy: ConsumerPolicy, /) -> None:
        """Refuse a policy that does not fit the stream."""
        self._source.check_policy(policy)

    async def fetch_transactions_async(self, batch_size: int, /, **extra: Any) -> list[Transaction]:
        """Return at most ``batch_size`` items."""
        return await asyncio.to_thread(self._source.fetch_transactions, batch_size, **extra)

    async def ack_transaction(self, transaction: Transaction, /) -> None:
        """Acknowledge the entry: it is no longer pending."""
        await asyncio.to_thread(self._source.ack_transaction, transaction)

    async def nack_transaction(self, transaction: Transaction, /, requeue: bool = True) -> None:
        """Leave a failed item to a recovery, or park it."""
        await asyncio.to_thread(self._source.nack_transaction, transaction, requeue)


def max_processing_time(policy: ConsumerPolicy) -> float:
    """Return the longest time from a fetch to the end of its last item; infinite if unbounded.

    The timeout of an item does not cut a success handler that has begun: one attempt may run beyond it.
    """
    steps, loop = policy.steps, policy.loop
    steps_time = _budget(steps.process.retry) + _budget(steps.success.retry)
    limit = _or_infinite(loop.transaction_timeout) + _or_infinite(steps.success.retry.timeout)
    one = min(steps_time, limit) + _budget(steps.exception.retry)
    return one * math.ceil(loop.batch.size / loop.concurrency.value)


def require_claim_idle(queue: RedisStreamsQueue, policy: ConsumerPolicy, *, is_bounded: bool) -> None:
    """Refuse settings under which an entry could be claimed while a worker still processes it."""
    idle, longest = queue.config.claim_idle_ms / 1000, max_processing_time(policy)
    if math.isinf(longest):
        if is_bounded:
            raise InvalidInputError(
                "The policy does not bound the processing time of an item, so no entry ever counts as stale; expected "
                "timeouts for success and exception, and loop.transaction_timeout or a timeout for process."
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


def _or_infinite(timeout: float | None) -> float:
    return math.inf if timeout is None else timeout


def _budget(retry: RetryPolicy) -> float:
    if retry.timeout is None:
        return math.inf
    return retry.max_attempts * retry.timeout + sum(retry.pause(index) for index in range(retry.max_attempts - 1))


def _transaction(message: QueueMessage) -> Transaction:
    added_ms = min(int(message.id.partition("-")[0]), _LATEST_MS)
    return Transaction(
        transaction_id=qualified_entry_id(message),
        payload=dict(message.payload),
        created_at=_EPOCH + timedelta(milliseconds=added_ms),
        source=message.stream,
        traceparent=message.traceparent,
        metadata={"entry": message.id, "group": message.group, "times_delivered": message.times_delivered},
    )
