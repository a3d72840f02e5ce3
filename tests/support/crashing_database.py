"""A process that dies at a commit boundary, simulated where it can be aimed: at the database's door."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from pipeline.store.database import Database, Statement, Transaction


class _WritesRow(Protocol):
    writes: bool


_WRITES = Statement[_WritesRow]("SELECT pg_current_xact_id_if_assigned() IS NOT NULL AS writes")


class Crash(BaseException):
    """The process is gone. Nothing of ours catches it."""


class CrashingDatabase(Database):
    """Lets a number of transactions pass, then dies before or after the commit of the next.

    ``before_commit=3`` dies with the third transaction's writes lost, ``after_commit=3`` with them
    kept but everything that would have followed them not done.

    A run without a crash lists the ``crashes`` that leave different states. A crash before a commit leaves what a crash
    after the write before it leaves, unless ``outside`` or the clock has changed in between.
    """

    def __init__(
        self,
        db: Database,
        *,
        before_commit: int = 0,
        after_commit: int = 0,
        outside: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(db.engine, clock_offset=db.clock_offset)
        self.before_commit, self.after_commit = before_commit, after_commit
        self.transactions = 0
        self.crashes: list[tuple[str, int]] = []  #: sides and numbers of transactions that wrote or locked something
        self._outside = outside
        self._last: object = None  #: the world outside and the clock at the last of these

    @contextmanager
    def transaction(self, *, is_autocommit: bool = False) -> Iterator[Transaction]:  # noqa: ARG002 - one transaction
        self.transactions += 1
        number = self.transactions
        with super().transaction() as tx:
            yield tx
            if not (self.before_commit or self.after_commit) and tx.one(_WRITES).writes:
                self._note_crashes(number)
            if number == self.before_commit:
                raise Crash
        if number == self.after_commit:
            raise Crash

    def _note_crashes(self, number: int) -> None:
        now = (self._outside(), self.clock_offset)
        if now != self._last:
            self.crashes.append(("before", number))
        self.crashes.append(("after", number))
        self._last = now
