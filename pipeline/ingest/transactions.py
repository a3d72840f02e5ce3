"""The order in which a message is worked on: begin, handler, commit. Acknowledging comes after, elsewhere."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Generic, Protocol, TypeVar

from pipeline.domain.errors import InvalidInputError
from pipeline.ingest.queue import QueueMessage


class DbTx(Protocol):
    """An open transaction."""

    def commit(self) -> None:
        """Make it true."""

    def rollback(self) -> None:
        """Make it as if it had never been."""


Tx = TypeVar("Tx", bound=DbTx)
TxCo = TypeVar("TxCo", bound=DbTx, covariant=True)
T = TypeVar("T")


class DbFactory(Protocol[TxCo]):
    """Opens transactions."""

    def begin(self) -> TxCo:
        """A transaction of its own for one message."""
        ...


def handle_in_transaction(
    message: QueueMessage, handler: Callable[[QueueMessage, Tx], None], db_factory: DbFactory[Tx]
) -> None:
    """Hand the message to the handler once, in a transaction of its own, and commit.

    Whatever goes wrong is raised as it is, interruptions too. A rollback that fails as well is a note on
    it, never in its place.
    """
    tx = db_factory.begin()
    _require_commit_and_rollback(db_factory, tx)
    try:
        handler(message, tx)
        tx.commit()
    except BaseException as error:
        try:
            tx.rollback()
        except Exception as second:  # noqa: BLE001 - the first error is the one to tell
            error.add_note(f"The rollback failed too: {second!r}")
        raise


def _require_commit_and_rollback(db_factory: object, tx: object) -> None:
    """What begins as a context manager would be handed over unopened, and fail only after the handler's work."""
    if not (callable(getattr(tx, "commit", None)) and callable(getattr(tx, "rollback", None))):
        raise InvalidInputError(
            f"begin() of {type(db_factory).__name__} gave a {type(tx).__name__}, which has no commit and rollback; "
            "expected a transaction. Wrap what makes context managers: Scopes(engine.begin). The message stays pending."
        )


class ContextManagerTx(Generic[T]):
    """A context manager that commits when it ends well, as a transaction with verbs. ``tx`` is what it yields."""

    def __init__(self, manager: AbstractContextManager[T]) -> None:
        self._manager: AbstractContextManager[T] | None = manager
        self.tx = manager.__enter__()

    def commit(self) -> None:
        """End it well. What fails now is the commit, and there is nothing left to roll back."""
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.__exit__(None, None, None)

    def rollback(self) -> None:
        """End it badly."""
        manager, self._manager = self._manager, None
        if manager is None:
            return
        undo = _RollbackError()
        try:
            manager.__exit__(_RollbackError, undo, None)
        except _RollbackError:
            return


class ContextManagerTxFactory(Generic[T]):
    """A factory over anything that makes such context managers: ``Database.transaction``, ``Engine.begin``."""

    def __init__(self, manager: Callable[[], AbstractContextManager[T]]) -> None:
        self._manager = manager

    def begin(self) -> ContextManagerTx[T]:
        """Enter one."""
        return ContextManagerTx(self._manager())


class _RollbackError(Exception):
    """Tells a context manager to undo its work."""
