"""Notice what our connections do: each statement, before and after it, and the ends of transactions."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self
from unittest import mock

from sqlalchemy import Engine, TextClause

from pipeline.store import database
from pipeline.store.connections import PooledConnection, Rows
from pipeline.store.database import Database


def _ignore(*_: Any) -> None:
    """Do nothing."""


@dataclass(frozen=True, kw_only=True)
class Listener:
    """What to call at which moment. A transaction is told apart by its connection object."""

    opened: Callable[[PooledConnection], None] = _ignore
    before: Callable[[PooledConnection, str], None] = _ignore
    after: Callable[[PooledConnection, str], None] = _ignore
    failed: Callable[[Exception], None] = _ignore
    committing: Callable[[], None] = _ignore
    closed: Callable[[PooledConnection], None] = _ignore


@contextmanager
def observed(db: Database, listener: Listener) -> Iterator[None]:
    """Call the listener for each transaction of this pool."""
    plain = vars(database)["PooledConnection"]

    def connection_of(engine: Engine) -> PooledConnection:
        return _observed_class(plain, listener)(engine) if engine is db.engine else plain(engine)

    with mock.patch.object(database, "PooledConnection", connection_of):
        yield


def _observed_class(plain: Any, listener: Listener) -> type[PooledConnection]:
    class Observed(plain):  # type: ignore[misc]
        def __enter__(self) -> Self:
            super().__enter__()
            listener.opened(self)
            return self

        def run(self, statement: TextClause, params: Mapping[str, Any]) -> tuple[Rows, int]:
            listener.before(self, statement.text)
            try:
                result: tuple[Rows, int] = super().run(statement, params)
            except Exception as error:
                listener.failed(error)
                raise
            listener.after(self, statement.text)
            return result

        def commit(self) -> None:
            listener.committing()
            super().commit()

        def __exit__(self, *raised: Any) -> None:
            super().__exit__(*raised)
            listener.closed(self)

    return Observed
