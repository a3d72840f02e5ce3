"""The loop over a stream: one message at a time, acknowledged when asked, and every failure passed on.

It coordinates and promises nothing beyond what Redis does: delivery at least once, in no promised
order. It never retries, never reclaims, never reconnects, and remembers nothing but that it was told
to stop.
"""

from collections.abc import Callable, Iterator

from pipeline.ingest.queue import QueueConfig, QueueMessage, RedisStreamsQueue
from pipeline.ingest.transactions import DbFactory, Tx, handle_in_transaction


class QueueConsumer:
    """Delivers messages to the caller's code until it is stopped."""

    def __init__(self, queue: RedisStreamsQueue) -> None:
        if queue.config.max_read_count != 1:
            raise ValueError(
                f"max_read_count is {queue.config.max_read_count}; expected 1, since a consumer holds one message."
            )
        self._queue = queue
        self._is_stopping = False  # a plain flag: a signal handler may set it whatever the thread is doing

    @property
    def config(self) -> QueueConfig:
        """Which stream, as whom."""
        return self._queue.config

    def next(self, block_ms: int | None = None) -> QueueMessage | None:
        """One new message, waiting for it at most so long; None when there was none, and after ``stop``.

        A message that arrives while a read waits is delivered even if ``stop`` was called meanwhile:
        it is pending with this consumer already, and dropping it would only delay it.
        """
        if self._is_stopping:
            return None
        found = self._queue.read(block_ms, 1)
        return found[0] if found else None

    def iter_messages(self) -> Iterator[QueueMessage]:
        """Messages until ``stop``, one by one."""
        while not self._is_stopping:
            message = self.next()
            if message is not None:
                yield message

    def ack(self, message: QueueMessage) -> None:
        """Acknowledge a message: its work is done and committed. Works after ``stop`` as well."""
        self._queue.ack(message)

    def stop(self, *, now: bool = False) -> None:  # noqa: ARG002 - there is one way to stop, asked once or twice
        """Begin no further read. What is in hand stays pending unless the caller acknowledges it."""
        self._is_stopping = True

    def run(self, handler: Callable[[QueueMessage, Tx], None], db_factory: DbFactory[Tx]) -> None:
        """Fetch, handle, commit, acknowledge, until ``stop``. The message in hand is finished first.

        If the acknowledgement fails the commit stands and the message will come again, so what the
        handler does must bear repeating.
        """
        for message in self.iter_messages():
            handle_in_transaction(message, handler, db_factory)
            self.ack(message)
