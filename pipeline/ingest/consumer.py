"""The loop over a stream: one message at a time; every failure is raised.

It promises no more than Redis does: delivery at least once, in no promised order. It never retries,
reclaims or reconnects, and keeps no state but the stop flag. It acknowledges when the caller asks.
"""

from collections.abc import Callable, Iterator

from pipeline.ingest.queue import QueueConfig, QueueMessage, RedisStreamsQueue
from pipeline.ingest.transactions import DbFactory, Tx, handle_in_transaction


class QueueConsumer:
    """Delivers messages to the caller's code until it is stopped."""

    def __init__(self, queue: RedisStreamsQueue) -> None:
        if queue.config.max_read_count != 1:
            raise ValueError(
                f"max_read_count is {queue.config.max_read_count}; expected 1, because a consumer holds one message."
            )
        self._queue = queue
        self._is_stopping = False  # a plain flag: a signal handler may set it at any time

    @property
    def config(self) -> QueueConfig:
        """The configuration of the queue."""
        return self._queue.config

    def next(self, block_ms: int | None = None) -> QueueMessage | None:
        """Return one new message; None if none came within ``block_ms``, and after ``stop``.

        A message that arrives during a waiting read is delivered even after ``stop``. It is already pending
        with this consumer, so dropping it would only delay it.
        """
        if self._is_stopping:
            return None
        found = self._queue.read(block_ms, 1)
        return found[0] if found else None

    def iter_messages(self) -> Iterator[QueueMessage]:
        """Yield messages one by one until ``stop``."""
        while not self._is_stopping:
            message = self.next()
            if message is not None:
                yield message

    def ack(self, message: QueueMessage) -> None:
        """Acknowledge a message: its work is committed. Works after ``stop`` as well."""
        self._queue.ack(message)

    def stop(self, *, now: bool = False) -> None:  # noqa: ARG002 - a second request changes nothing
        """Begin no further read. The current message stays pending unless the caller acknowledges it."""
        self._is_stopping = True

    def run(self, handler: Callable[[QueueMessage, Tx], None], db_factory: DbFactory[Tx]) -> None:
        """Fetch, handle, commit, acknowledge, until ``stop``. The current message is finished first.

        If the acknowledgement fails, the commit stands and the message is delivered again. The handler's
        work must therefore be safe to repeat.
        """
        for message in self.iter_messages():
            handle_in_transaction(message, handler, db_factory)
            self.ack(message)
