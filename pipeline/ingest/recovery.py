"""Recovery of messages that were delivered and never acknowledged.

It has a runner of its own. The consumer's loop does not know about it, so new messages never wait for it.
"""

import threading
import time
from collections.abc import Callable

from pipeline.ingest.queue import QueueMessage, RedisStreamsQueue, require_positive
from pipeline.ingest.transactions import DbFactory, Tx, handle_in_transaction

_POLL_EVERY = 0.1  #: seconds between checks of the stop flag


class RecoveryRunner:
    """Claims stale messages one at a time, so that none becomes stale while waiting."""

    def __init__(self, queue: RedisStreamsQueue) -> None:
        self._queue = queue
        self._is_stopping = False

    def stop(self, *, now: bool = False) -> None:  # noqa: ARG002 - a second request changes nothing
        """Claim nothing further; a wait ends at once."""
        self._is_stopping = True

    def run(
        self,
        handler: Callable[[QueueMessage, Tx], None],
        db_factory: DbFactory[Tx],
        *,
        min_idle_ms: int | None = None,
        every_ms: int = 5_000,
    ) -> None:
        """Claim, handle, commit, acknowledge, until ``stop``. Poll every ``every_ms`` when idle."""
        require_positive("every_ms", every_ms)
        while not self._is_stopping:
            if self.run_once(handler, db_factory, min_idle_ms=min_idle_ms) == 0:
                wait_interruptibly(every_ms / 1000, lambda: self._is_stopping)

    def run_once(
        self,
        handler: Callable[[QueueMessage, Tx], None],
        db_factory: DbFactory[Tx],
        *,
        min_idle_ms: int | None = None,
        limit: int = 100,
    ) -> int:
        """Process at most ``limit`` stale messages and return their number."""
        for done in range(require_positive("limit", limit)):
            found = [] if self._is_stopping else self._queue.claim_stale(min_idle_ms, 1)
            if not found:
                return done
            handle_in_transaction(found[0], handler, db_factory)
            self._queue.ack(found[0])
        return limit


def wait_interruptibly(seconds: float, is_over: Callable[[], bool]) -> None:
    """Wait so many seconds, or until ``is_over``. The flag is polled: a signal may set it."""
    ends_at = time.monotonic() + seconds
    never = threading.Event()
    while not is_over() and (left := ends_at - time.monotonic()) > 0:
        never.wait(min(left, _POLL_EVERY))
