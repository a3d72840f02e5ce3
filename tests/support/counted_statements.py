"""Count what transactions ask of Postgres."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import pytest
from sqlalchemy import TextClause

from pipeline.store.database import Transaction


class _Counter:
    """The statements of each transaction. One that a method sends by another one counts once."""

    def __init__(self) -> None:
        self.transactions: list[list[str]] = []
        self._last: Transaction | None = None
        self._depth = 0

    def counting(self, method: Any) -> Any:
        @wraps(method)
        def counted(tx: Transaction, statement: TextClause, /, *args: Any, **params: Any) -> Any:
            if not self._depth:
                self._count(tx, statement)
            self._depth += 1
            try:
                return method(tx, statement, *args, **params)
            finally:
                self._depth -= 1

        return counted

    def _count(self, tx: Transaction, statement: TextClause) -> None:
        if tx is not self._last:
            self.transactions.append([])
        self._last = tx
        self.transactions[-1].append(statement.text)


@contextmanager
def counted_statements() -> Iterator[list[list[str]]]:
    """For each transaction of this process, its statements without BEGIN and COMMIT. One transaction at a time."""
    counter = _Counter()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all", "first", "one", "execute", "guarded"):
            patch.setattr(Transaction, name, counter.counting(getattr(Transaction, name)))
        yield counter.transactions
