"""The transaction of one message: begin, handler, commit. The caller acknowledges afterwards."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Generic, Protocol, TypeVar

from pipeline.domain.errors import InvalidInputError
from pipeline.ingest.queue import QueueMessage


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
    try:
        handler(message, tx)
        tx.commit()
    except BaseException as error:
        try:
            tx.rollback()
        except Exception as second:  # noqa: BLE001 - the first error is the one to raise
            error.add_note(f"The rollback failed too: {second!r}")
        raise


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
