"""Statements, transactions and connections: all access to Postgres goes through here.

``Statement[RunRow]("SELECT ...")`` is the seam between SQL and Python: ``Transaction.all`` and ``first`` return rows of
the type that the statement names, so that mypy checks every use of a column. Nothing is converted at run time, but for
sealed values, which are opened here (``codecs.py``). A row is a named tuple, and the row type describes it: that of a
table in ``schema.py``, that of a join in ``rows.py``.
The tests compare each row that a statement returns with its type (``tests/support/row_types.py``).

Every transition takes a ``Transaction``. It runs statements, keeps the transition log until it has
committed, and never spans a call to an outside system. How a statement reaches Postgres is in ``connections.py``.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from types import GenericAlias
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar, get_args
from uuid import UUID

from sqlalchemy import Engine, TextClause, create_engine, event
from sqlalchemy.exc import DBAPIError, TimeoutError
from sqlalchemy.pool import NullPool

from pipeline.store.connections import (
    PooledConnection,
    StatementRunner,
    end_open_transaction,
    is_alive,
    is_plan_outdated,
    tune,
)
from pipeline.telemetry import metrics, transition_log

if TYPE_CHECKING:
    from pipeline.store.codecs import Codecs

RowT = TypeVar("RowT")
RowT_co = TypeVar("RowT_co", covariant=True)


class Statement(TextClause, Generic[RowT_co]):
    """A statement that returns rows of one type. Its SQL is ``text``."""

    inherit_cache = True

    if not TYPE_CHECKING:

        def __class_getitem__(cls, row_type: object) -> GenericAlias:
            """Keep the row type; SQLAlchemy's own ``__class_getitem__`` drops it."""
            return GenericAlias(cls, (row_type,))

    def row_type(self) -> Any:
        """Return the type that was named in the brackets."""
        return get_args(self.__orig_class__)[0]  # type: ignore[attr-defined]


class Command(TextClause):
    """A statement that returns no rows. Running it tells how many rows it changed."""

    inherit_cache = True


class UnreadRow(Protocol):
    """A row of which no column is read."""


class _IdentityRow(Protocol):
    identity: str


class _ClockRow(Protocol):
    now: datetime


_IDENTITY = Statement[_IdentityRow](
    "SELECT system_identifier || '/' || current_database() AS identity FROM pg_control_system()"
)
_CLOCK = Statement[_ClockRow]("SELECT pipeline.clock() AS now")
#: A server that vanished without closing its connections, as in a failover, is noticed within half a minute.
_TCP_KEEPALIVE = {
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}
#: A transaction that holds a lock and does not end must not stop a whole installation.
LOCK_TIMEOUT = timedelta(seconds=10)
SHORT_LOCK_TIMEOUT = timedelta(milliseconds=500)  #: once such a transaction was met
_MAX_PART_LENGTH = 32 * 1024 * 1024  #: characters; Postgres takes eight times as much
_SET_LOCK_TIMEOUT = Statement[UnreadRow]("SELECT set_config('lock_timeout', :wait, true)")
_SET_CLOCK_OFFSET = Statement[UnreadRow]("SELECT set_config('pipeline.clock_offset', :offset, true)")


#: Classes of SQLSTATE that a later call may not meet again: connections, a read-only standby, deadlocks, resources,
#: locks, shutdowns, disks.
_TRANSIENT_SQLSTATES = ("08", "25", "40", "53", "55", "57", "58")


_EXPLANATIONS = {
    "53300": "all connections that Postgres allows are taken; end processes, lower PIPELINE_POOL_SIZE, or raise "
    "max_connections",
    "25006": "this database is read-only, as a standby is",
    "55P03": "another transaction holds what this one needs, and does not end; search for old ones in pg_stat_activity",
}


def is_transient(error: BaseException) -> bool:
    """Whether an error is about the state of the database, not about the statement: a later call may succeed.

    True as well when every connection of the pool is taken. False for an error that is not the database's.
    """
    if not isinstance(error, DBAPIError):
        return isinstance(error, TimeoutError)
    if is_plan_outdated(error):
        return True
    state = _sqlstate(error)
    return not state or state[:2] in _TRANSIENT_SQLSTATES


def _sqlstate(error: DBAPIError) -> str:
    """Return the SQLSTATE of an error of any driver; empty if the server gave none."""
    return getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None) or ""  # the second: psycopg2


def describe_error(error: DBAPIError) -> str:
    """Return the message of the database, with an explanation where it needs one."""
    message = str(error.orig).strip()
    meaning = _EXPLANATIONS.get("53300" if is_full(error) else _sqlstate(error))
    return f"{message} ({meaning})" if meaning else message


def is_full(error: BaseException) -> bool:
    """Whether Postgres refused a connection because all that it allows are taken."""
    words = ("too many c", "remaining connection slots")  # a connection that is refused has no SQLSTATE
    return isinstance(error, DBAPIError) and any(each in str(error.orig) for each in words)


def is_lock_timeout(error: BaseException) -> bool:
    """Whether another transaction held what was needed for longer than this one was to wait."""
    return isinstance(error, DBAPIError) and _sqlstate(error) == "55P03"


def is_read_only(error: DBAPIError) -> bool:
    """Whether this database takes no writes at all, as a standby."""
    return _sqlstate(error) == "25006"


def is_disconnected(error: DBAPIError) -> bool:
    """Whether no server answered, or the connection ended."""
    state = _sqlstate(error)
    return not state or state[:2] == "08" or state[:3] == "57P"


class Transaction:
    """One open database transaction.

    It may run on a connection of the caller. Then the caller commits, and calls ``flush_log`` after that commit
    to write what ``log_on_commit`` queued.
    """

    def __init__(
        self,
        connection: StatementRunner,
        *,
        opened_at: datetime | None = None,
        clock_offset: timedelta = timedelta(0),
        codecs: "Codecs | None" = None,
    ) -> None:
        self.connection, self.codecs = connection, codecs
        self._clock_offset = clock_offset
        #: by the clock of this host, and not later than the transaction's time in Postgres
        self.opened_at = opened_at or self.host_clock()
        self._log: list[tuple[str, dict[str, Any]]] = []
        self._counts: list[tuple[str, Mapping[str, str], float]] = []

    def all(self, statement: Statement[RowT], /, **params: Any) -> Sequence[RowT]:
        """Return every row of the statement, with what a codec of this process has sealed opened."""
        rows = self.connection.run(statement, params)[0]
        return rows if self.codecs is None or not rows else self.codecs.open_rows(self, rows)

    def first(self, statement: Statement[RowT], /, **params: Any) -> RowT | None:
        """Return the first row, or None if there is no row."""
        rows = self.all(statement, **params)
        return rows[0] if rows else None

    def one(self, statement: Statement[RowT], /, **params: Any) -> RowT:
        """Return the row of a statement that always returns exactly one."""
        (row,) = self.all(statement, **params)
        return row

    def execute(self, statement: TextClause, /, **params: Any) -> int:
        """Run a statement whose rows nothing reads. Return the number of rows it changed."""
        return self.connection.run(statement, params)[1]

    def guarded(
        self, statement: Statement[RowT], rows: Sequence[Mapping[str, Any]], /, **params: Any
    ) -> Sequence[RowT]:
        """Run a statement over a cohort of rows. Return those whose state was as expected."""
        return self.all(statement, rows=encode_rows(rows), **params)

    def clock(self) -> datetime:
        """Return the database's time: one value for the whole transaction."""
        return self.one(_CLOCK).now

    def host_clock(self) -> datetime:
        """Return the time of this host, as a second witness beside the database's. Nothing else may use it."""
        return datetime.now(UTC) + self._clock_offset  # noqa: TID251 - a jump of the other clock must not move it

    def set_lock_timeout(self, timeout: timedelta) -> None:
        """From now on, wait no longer than this for any one lock."""
        self.all(_SET_LOCK_TIMEOUT, wait=_milliseconds(timeout))

    def log_on_commit(self, name: str, **fields: Any) -> None:
        """Queue a line of the transition log until the commit, if it is shown or counted.

        An unknown name is a bug and raises.
        """
        if transition_log.is_written(name) or metrics.is_on():
            self._log.append((name, fields))

    def count_on_commit(self, metric: str, labels: Mapping[str, str], value: float = 1) -> None:
        """Queue a count or a measurement until the commit. Costs nothing while metrics are off."""
        if metrics.is_on():
            self._counts.append((metric, labels, value))

    def flush_log(self) -> None:
        """Write and count what was queued. Called after the commit."""
        queued, self._log = self._log, []
        counts, self._counts = self._counts, []
        for name, fields in queued:
            transition_log.write(name, fields)
        if queued and metrics.is_on():
            metrics.count_transitions(queued)
        for metric, labels, value in counts:
            metrics.record(metric, labels, value)


class Database:
    """A pool of connections to one database."""

    codecs: "Codecs | None" = None  #: of the workflows whose values this process can open; None: of none

    def __init__(self, engine: Engine, *, clock_offset: timedelta = timedelta(0)) -> None:
        self.engine = engine
        self.clock_offset = clock_offset

    @classmethod
    def connect(cls, url: str, *, pool_size: int = 5, lock_timeout: timedelta = LOCK_TIMEOUT) -> Self:
        """A pool that survives a restart of Postgres: a dead connection is replaced before use.

        A statement waits for any one lock no longer than ``lock_timeout``.
        """
        engine = create_engine(
            url,
            pool_size=pool_size,
            max_overflow=pool_size,
            pool_pre_ping=True,
            hide_parameters=True,  # an error is logged and shown to operators; its parameters are not
            connect_args={"application_name": "pipeline", "connect_timeout": 10, **_TCP_KEEPALIVE},
        )
        engine.dialect.do_ping = is_alive  # type: ignore[assignment, method-assign]
        event.listen(engine, "connect", tune(_milliseconds(lock_timeout), is_reused=True))
        event.listen(engine, "reset", end_open_transaction)
        return cls(engine)

    @classmethod
    def connect_unpooled(cls, url: str) -> Self:
        """One connection per transaction, closed after it: for commands and for tests that fork."""
        engine = create_engine(url, poolclass=NullPool, hide_parameters=True, connect_args={"connect_timeout": 10})
        event.listen(engine, "connect", tune(_milliseconds(LOCK_TIMEOUT), is_reused=False))
        return cls(engine)

    @contextmanager
    def transaction(self, *, is_autocommit: bool = False) -> Iterator[Transaction]:
        """Commit on success and write the transition log; roll back on any error."""
        opened_at = datetime.now(UTC) + self.clock_offset  # noqa: TID251 - see ``Transaction.host_clock``
        with PooledConnection(self.engine) as connection:
            connection.is_autocommit = is_autocommit and connection.can_autocommit and not self.clock_offset
            tx = Transaction(connection, opened_at=opened_at, clock_offset=self.clock_offset, codecs=self.codecs)
            if self.clock_offset:
                tx.all(_SET_CLOCK_OFFSET, offset=interval(self.clock_offset))
            yield tx
            connection.commit()
        tx.flush_log()

    def autocommit(self) -> AbstractContextManager[Transaction]:
        """Commit each statement by itself: for work that is one statement, in one round trip instead of three.

        What fails after a statement does not undo it. Through a pooler, and while the clock is moved, all statements
        are one transaction instead: callers must be right either way.
        """
        return self.transaction(is_autocommit=True)

    def advance_clock(self, by: timedelta) -> None:
        """Move this pool's clock forward. Tests travel in time with it; production never calls it."""
        self.clock_offset += by

    def dispose(self) -> None:
        """Close the pool, as a forked child must before it first connects."""
        self.engine.dispose()


def identity(tx: Transaction) -> str:
    """This database among all others: its server's number, which a standby shares and a dump does not, and its name."""
    return tx.one(_IDENTITY).identity


def _milliseconds(wait: timedelta) -> str:
    return f"{max(1, wait // timedelta(milliseconds=1))}ms"


def encode_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows for ``jsonb_to_recordset``: one parameter carries a cohort of any size."""
    return json.dumps([dict(row) for row in rows], default=_as_text, allow_nan=False)


def encode_row_parts(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Rows in as few parameters as Postgres takes: a value of JSON has a largest size."""
    part: list[str] = []
    size = 0
    for row in rows:
        written = json.dumps(dict(row), default=_as_text, allow_nan=False)
        if part and size + len(written) > _MAX_PART_LENGTH:
            yield f"[{','.join(part)}]"
            part, size = [], 0
        part.append(written)
        size += len(written)
    if part:
        yield f"[{','.join(part)}]"


def interval(value: timedelta) -> str:
    """Write a span as Postgres reads it, to the microsecond.

    Postgres 14 takes no field above 2**31 - 1, so microseconds alone would end at 36 minutes. Days are not used: a day
    of Postgres is not always 24 hours. Each field has its sign, which means the same in every IntervalStyle.
    """
    sign = "-" if value < timedelta(0) else ""
    hours, rest = divmod(abs(value), timedelta(hours=1))
    seconds, microseconds = rest.seconds, rest.microseconds
    return f"{sign}{hours} hours {sign}{seconds} seconds {sign}{microseconds} microseconds"


def _as_text(value: Any) -> str:
    if isinstance(value, timedelta):
        return interval(value)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, UUID | Decimal):
        return str(value)
    raise TypeError(f"{type(value).__qualname__} is not a value of a statement: {value!r}")
