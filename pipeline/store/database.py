"""Connections and transactions: the only door to Postgres.

A ``Transaction`` is handed to every verb. It runs compiled statements, carries the lines to say
once it has committed, and never spans a call to the outside world.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, Self
from uuid import UUID

from sqlalchemy import Connection, Engine, Row, TextClause, create_engine, event, text
from sqlalchemy.pool import NullPool

from pipeline.telemetry import lines

_CLOCK = text("SELECT pipeline.clock()")
_MOVE_CLOCK = text("SELECT set_config('pipeline.clock_offset', :offset, true)")


class Transaction:
    """One open database transaction.

    It may wrap a connection that belongs to the caller: then the caller commits, and the lines
    queued by ``announce`` are said when ``speak`` is called after that commit.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._lines: list[tuple[str, dict[str, Any]]] = []

    def all(self, statement: TextClause, /, **params: Any) -> Sequence[Row[Any]]:
        """Every row the statement returns."""
        return self.connection.execute(statement, params).all()

    def first(self, statement: TextClause, /, **params: Any) -> Row[Any] | None:
        """The first row, or None: zero rows is an answer."""
        return self.connection.execute(statement, params).first()

    def run(self, statement: TextClause, /, **params: Any) -> int:
        """Run a statement that returns nothing and say how many rows it touched."""
        return self.connection.execute(statement, params).rowcount

    def clock(self) -> datetime:
        """The database's time, one value for the whole transaction."""
        row = self.first(_CLOCK)
        assert row is not None
        now: datetime = row[0]
        return now

    def announce(self, name: str, **fields: Any) -> None:
        """Queue a line about a transition, to be said once it is true. An unknown name is a bug, found here."""
        lines.check(name)
        self._lines.append((name, fields))

    def speak(self) -> None:
        """Say what was queued. Called after the commit."""
        queued, self._lines = self._lines, []
        for name, fields in queued:
            lines.say(name, fields)


class Database:
    """A pool of connections to one database."""

    def __init__(self, engine: Engine, *, offset: timedelta = timedelta(0)) -> None:
        self.engine = engine
        self.offset = offset

    @classmethod
    def connect(cls, url: str, *, pool_size: int = 5) -> Self:
        """A pool that survives a restart of Postgres: a dead connection is replaced before use."""
        engine = create_engine(
            url,
            pool_size=pool_size,
            max_overflow=pool_size,
            pool_pre_ping=True,
            hide_parameters=True,  # an error is logged and shown to people; what was sent with it is not
            connect_args={"application_name": "pipeline", "connect_timeout": 10},
        )
        event.listen(engine, "connect", _tuned)
        return cls(engine)

    @classmethod
    def unpooled(cls, url: str) -> Self:
        """One connection per transaction, closed after it: for commands and for tests that fork."""
        return cls(create_engine(url, poolclass=NullPool, hide_parameters=True, connect_args={"connect_timeout": 10}))

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Commit on success, roll back on any error, then say what became true."""
        with self.engine.begin() as connection:
            tx = Transaction(connection)
            if self.offset:
                tx.all(_MOVE_CLOCK, offset=interval(self.offset))
            yield tx
        tx.speak()

    def advance(self, by: timedelta) -> None:
        """Move this pool's clock forward. Tests travel in time with it; production never calls it."""
        self.offset += by

    def dispose(self) -> None:
        """Close the pool, as a forked child must before it first connects."""
        self.engine.dispose()


def _tuned(connection: Any, _: object) -> None:
    """Our statements look up rows by key in tables that may just have been filled.

    Compiling one costs more than running it, and until the first ANALYZE a fresh table looks small
    enough to be read whole for every row of a cohort.
    """
    with connection.cursor() as cursor:
        cursor.execute("SET jit = off; SET enable_seqscan = off")
    connection.commit()


def encoded(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows for ``jsonb_to_recordset``: one parameter carries a cohort of any size."""
    return json.dumps([dict(row) for row in rows], default=_as_text, allow_nan=False)


def interval(value: timedelta) -> str:
    """A span in Postgres's words, to the microsecond."""
    return f"{value // timedelta(microseconds=1)} microseconds"


def _as_text(value: Any) -> str:
    if isinstance(value, timedelta):
        return interval(value)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, UUID | Decimal):
        return str(value)
    raise TypeError(f"{type(value).__qualname__} is not a value of a statement: {value!r}")
