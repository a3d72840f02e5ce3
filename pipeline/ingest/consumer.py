"""Loops over a stream: one message at a time, each in a transaction of the caller; every failure is raised.

A loop promises no more than Redis does: delivery at least once, in no promised order. It never retries or reconnects,
and keeps no state but the stop flag. It acknowledges after the commit, or when the caller asks. New messages have
a consumer, and stale ones a recovery runner of their own, so that new messages never wait for a recovery.
"""

import inspect
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import CoroutineType
from typing import Generic, Protocol, TypeVar

from pipeline.domain.errors import InvalidInputError
from pipeline.ingest.queue import QueueConfig, QueueMessage, RedisStreamsQueue, require_positive

_POLL_EVERY = 0.1  #: seconds between checks of the stop flag


class DbTx(Protocol):
    """An open transaction."""

    def commit(self) -> None:
        """Commit."""

    def rollback(self) -> None:
        """Roll back."""


Tx = TypeVar("Tx", bound=DbTx)
TxCo = TypeVar("TxCo", bound=DbTx, covariant=True)
T = TypeVar("T")


class DbFactory(Protocol[TxCo]):
    """Opens transactions."""

    def begin(self) -> TxCo:
        """Return a new transaction for one message."""
        ...


def handle_in_transaction(
    message: QueueMessage, handler: Callable[[QueueMessage, Tx], None], db_factory: DbFactory[Tx]
) -> None:
    """Call the handler once in its own transaction, and commit.

    Every error is raised as it is, interruptions too. If the rollback fails as well, that becomes a note
    on the first error.
    """
    tx = db_factory.begin()
    _require_commit_and_rollback(db_factory, tx)
    call: Callable[..., object] = handler
    try:
        _require_plain_return(handler, call(message, tx))
        tx.commit()
    except BaseException as error:
        try:
            tx.rollback()
        except Exception as second:  # noqa: BLE001 - the first error is the one to raise
            error.add_note(f"The rollback failed too: {second!r}")
        raise


def _require_plain_return(handler: object, returned: object) -> None:
    """Refuse an ``async def`` or generator function: nothing of it has run, and the message would be acknowledged."""
    if inspect.isawaitable(returned) or inspect.isgenerator(returned) or inspect.isasyncgen(returned):
        if isinstance(returned, CoroutineType):
            returned.close()  # else Python warns that it was never awaited
        name = getattr(handler, "__qualname__", type(handler).__name__)
        raise InvalidInputError(
            f"The handler {name} returned something of type {type(returned).__name__}, which has not run; expected a "
            "plain function. For async code use AsyncConsumerMixin. The message stays pending."
        )


def _require_commit_and_rollback(db_factory: object, tx: object) -> None:
    """Refuse a context manager: unopened, it would fail only after the handler's work."""
    if not (callable(getattr(tx, "commit", None)) and callable(getattr(tx, "rollback", None))):
        raise InvalidInputError(
            f"begin() of {type(db_factory).__name__} gave a {type(tx).__name__}, which has no commit and rollback; "
            "expected a transaction. Wrap a factory of context managers: ContextManagerTxFactory(engine.begin). The "
            "message stays pending."
        )


class ContextManagerTx(Generic[T]):
    """Adapts a context manager that commits on a normal exit. ``tx`` is the value that it yields."""

    def __init__(self, manager: AbstractContextManager[T]) -> None:
        self._manager: AbstractContextManager[T] | None = manager
        self.tx = manager.__enter__()

    def commit(self) -> None:
        """Exit normally. If that fails, the commit failed, and nothing is left to roll back."""
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.__exit__(None, None, None)

    def rollback(self) -> None:
        """Exit with an error."""
        manager, self._manager = self._manager, None
        if manager is None:
            return
        undo = _RollbackError()
        try:
            manager.__exit__(_RollbackError, undo, None)
        except _RollbackError:
            return


class ContextManagerTxFactory(Generic[T]):
    """A factory over ``Database.transaction``, ``Engine.begin`` and the like."""

    def __init__(self, manager: Callable[[], AbstractContextManager[T]]) -> None:
        self._manager = manager

    def begin(self) -> ContextManagerTx[T]:
        """Enter a context manager."""
        return ContextManagerTx(self._manager())


class _RollbackError(Exception):
    """Makes a context manager undo its work."""


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
        """Claim, handle, commit, acknowledge, until ``stop``. Poll every ``every_ms`` when idle.

        When nothing is stale, remove the consumers of the group that are gone.
        """
        require_positive("every_ms", every_ms)
        while not self._is_stopping:
            if self.run_once(handler, db_factory, min_idle_ms=min_idle_ms) == 0:
                self._queue.remove_gone_consumers(min_idle_ms)
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
