"""Run statements on a connection: our own from the pool, or one that a service lends.

On our own connections a statement costs as little as Postgres allows:

- It is prepared once per connection and planned once. Otherwise Postgres would spend three times as long on planning
  our large statements as on executing them.
- BEGIN travels with the first statement of a transaction. A statement that commits by itself needs none.
- A pooled connection is checked by its socket, not by a statement.

Behind a pooler a session is shared with other clients. Then nothing is prepared, and each transaction names its
isolation level in its BEGIN.
"""

import json
import re
import select
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self
from uuid import UUID

import psycopg2  # type: ignore[import-untyped]
from psycopg2 import extensions
from sqlalchemy import Connection, Engine, TextClause
from sqlalchemy.exc import DBAPIError

from pipeline.domain.errors import InvalidInputError

#: Every statement is written for this level. It is named in each BEGIN, which costs no round trip. So neither
#: the default of a server, database or role counts, nor what another client of a pooler left in the session.
ISOLATION_LEVEL = "READ COMMITTED"
_BEGIN = f"BEGIN ISOLATION LEVEL {ISOLATION_LEVEL}; "

#: Rows are read by key, in tables that may just have been filled. Compiling a statement costs more than running it.
#: Until the first ANALYZE the planner takes a fresh table for small, and would read it whole for every row of a cohort.
#: A plan that is made once must not depend on the values or the statistics of that moment.
_TUNING = "SET jit = off; SET enable_seqscan = off; SET enable_bitmapscan = off;"
#: Only for a session that is ours alone: other clients of a pooler would get them too.
_OWN_TUNING = f"""
SET plan_cache_mode = force_generic_plan; SET default_transaction_isolation = '{ISOLATION_LEVEL}'"""
#: A timeout that the role, the database or PGOPTIONS set is intended, and stays.
_FACTS = """
SELECT set_config('lock_timeout', CASE current_setting('lock_timeout') WHEN '0' THEN %s
  ELSE current_setting('lock_timeout') END, false), pg_backend_pid()"""
_SESSION = "pipeline.session"  #: where a pooled connection keeps its ``_ServerSession``

_PARAMETER = re.compile(r"(?<![:\w\\]):(\w+)(?!:)")
_PREPARABLE = re.compile(r"[\s(]*(SELECT|INSERT|UPDATE|DELETE|WITH|VALUES)\b")
_OUTDATED_PLAN = "cached plan must not change result type"
_IN_QUOTES = str.maketrans({'"': r"\"", "\\": r"\\"})

_UUID_OID = 2950
_JSON_OIDS = (114, 3802)
#: A run is in the rows of a dozen statements, and all runs of a cohort name one session and one handler. An id that was
#: read before costs a tenth of a new one.
_known_uuid = lru_cache(maxsize=16_384)(UUID)
_UUIDS = extensions.new_type((_UUID_OID,), "UUID", lambda value, _: value and _known_uuid(value))

Rows = Sequence[Any]
MakeRow = Callable[[Sequence[Any]], Any]


class StatementRunner(Protocol):
    """A connection in an open transaction."""

    def run(self, statement: TextClause, params: Mapping[str, Any]) -> tuple[Rows, int]:
        """Run a statement. Return its rows, and how many rows it changed or returned."""


class CallerConnection:
    """A connection of SQLAlchemy that the caller lends, over any driver for Postgres. The caller commits."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def run(self, statement: TextClause, params: Mapping[str, Any]) -> tuple[Rows, int]:
        """Run a statement as SQLAlchemy does."""
        result = self.connection.execute(statement, params)
        return result.all() if result.returns_rows else (), result.rowcount


class CallerPsycopg2Connection:
    """A connection of psycopg2 that the caller lends. The caller commits."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    def run(self, statement: TextClause, params: Mapping[str, Any]) -> tuple[Rows, int]:
        """Run a statement with plain rows, whatever the caller's connection returns by default."""
        with self.connection.cursor(cursor_factory=extensions.cursor) as cursor:
            cursor.execute(_compiled(statement.text).formatted, params)
            return _rows(cursor, _row_maker(cursor)), cursor.rowcount


class CallerCursors:
    """A connection of psycopg2 or psycopg 3 that a framework lends by its cursors. The caller commits."""

    def __init__(self, open_cursor: Callable[[], Any]) -> None:
        self._open_cursor = open_cursor

    def run(self, statement: TextClause, params: Mapping[str, Any]) -> tuple[Rows, int]:
        """Run a statement. JSON is read here: Django gets it as text, from either driver."""
        with self._open_cursor() as cursor:
            cursor.execute(_compiled(statement.text).formatted, params)
            make_row = _row_maker(cursor)
            if make_row is None:
                return [], cursor.rowcount
            is_json = [column.type_code in _JSON_OIDS for column in cursor.description]
            rows = [
                make_row(
                    [
                        json.loads(value) if as_json and isinstance(value, str) else value
                        for value, as_json in zip(values, is_json, strict=True)
                    ]
                )
                for values in cursor.fetchall()
            ]
            return rows, cursor.rowcount


@dataclass(slots=True)
class _Prepared:
    """A statement that a session has prepared."""

    execute: str  #: with a placeholder for each parameter
    names: tuple[str, ...]
    make_row: MakeRow | None = None  #: known once it has run


@dataclass(slots=True)
class _ServerSession:
    """What is known of the session behind a connection."""

    is_direct: bool = False  #: ours alone for many transactions: no pooler is in between
    prepared: dict[str, _Prepared] = field(default_factory=dict)  #: by the text of the statement
    number: int = 0  #: of the last name; none is used twice


class PooledConnection:
    """A connection of our own, held for one transaction. What was not committed is rolled back at the end."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.is_autocommit = False  #: each statement commits by itself
        self._has_begun = False

    def __enter__(self) -> Self:
        try:
            self._proxy = self._engine.raw_connection()
        except psycopg2.Error as error:
            raise _as_sqlalchemy_error(error, "connect", is_lost=True) from error
        connection: Any = self._proxy.dbapi_connection
        self._connection = connection
        connection.autocommit = True  # of the driver: BEGIN and COMMIT are sent from here
        self._session: _ServerSession = self._proxy.info.setdefault(_SESSION, _ServerSession())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if self._has_begun:
                self._send("ROLLBACK")
        except DBAPIError:
            if error is None:
                raise
        finally:
            if self._proxy.is_valid:
                self._connection.autocommit = False
            self._proxy.close()

    @property
    def can_autocommit(self) -> bool:
        """Whether the session is ours alone, so that it has the isolation level that was set."""
        return self._session.is_direct

    def run(self, statement: TextClause, params: Mapping[str, Any]) -> tuple[Rows, int]:
        """Run a statement; BEGIN goes before the first one of a transaction."""
        is_first = not self._has_begun
        try:
            return self._run(statement, params)
        except DBAPIError as error:
            if not is_plan_outdated(error):
                raise
            self._session.prepared.clear()
            if not is_first:
                raise
            if self._has_begun:
                self._send("ROLLBACK")
            return self._run(statement, params)

    def commit(self) -> None:
        """Commit what was run, if anything was."""
        if self._has_begun:
            self._send("COMMIT")

    def _run(self, statement: TextClause, params: Mapping[str, Any]) -> tuple[Rows, int]:
        begin = "" if self._has_begun or self.is_autocommit else _BEGIN
        session, sql = self._session, statement.text
        self._has_begun = not self.is_autocommit
        with self._connection.cursor() as cursor:
            try:
                if not (session.is_direct and _is_constant(statement)):
                    cursor.execute(begin + _compiled(sql).formatted, params)
                    return _rows(cursor, _row_maker(cursor)), cursor.rowcount
                prepared = session.prepared.get(sql)
                if prepared is None:
                    prepared, prepare = self._name(sql)
                    cursor.execute(begin + prepare + prepared.execute, _values(prepared.names, params))
                    prepared.make_row = _row_maker(cursor)
                    session.prepared[sql] = prepared
                else:
                    cursor.execute(begin + prepared.execute, _values(prepared.names, params))
                return _rows(cursor, prepared.make_row), cursor.rowcount
            except psycopg2.Error as error:
                raise self._wrapped(error, sql) from error
            except ValueError as error:  # of psycopg2, before anything is sent
                raise InvalidInputError(
                    f"A text cannot be sent to Postgres ({error}); expected one without NUL characters and in whole "
                    "Unicode characters. Nothing was changed."
                ) from error

    def _name(self, sql: str) -> tuple[_Prepared, str]:
        """Return a statement under a name of its own, and the SQL that prepares it."""
        compiled = _compiled(sql)
        self._session.number += 1
        name = f"p{self._session.number}"
        execute = f"EXECUTE {name} ({', '.join(['%s'] * len(compiled.names))})" if compiled.names else f"EXECUTE {name}"
        return _Prepared(execute, compiled.names), f"PREPARE {name} AS {compiled.numbered}; "

    def _send(self, command: str) -> None:
        """End the transaction. A COMMIT that Postgres answers with ROLLBACK is an error.

        A signal handler may raise before the command is sent. Then the transaction is open, and rolled back at the end.
        """
        with self._connection.cursor() as cursor:
            try:
                cursor.execute(command)
                self._has_begun = False
                if cursor.statusmessage != command:
                    raise psycopg2.InternalError(
                        "a statement of this transaction failed, so nothing of it is committed"
                    )
            except psycopg2.Error as error:
                self._has_begun = False
                raise self._wrapped(error, command) from error

    def _wrapped(self, error: Any, sql: str) -> DBAPIError:
        """Return SQLAlchemy's error for one of the driver. A connection that is lost leaves the pool."""
        is_lost = self._connection.closed or self._engine.dialect.is_disconnect(error, self._connection, None)
        if is_lost:
            self._has_begun = False
            self._proxy.invalidate(error)
        return _as_sqlalchemy_error(error, sql, is_lost=is_lost)


def _as_sqlalchemy_error(error: Any, sql: str, *, is_lost: bool) -> DBAPIError:
    made: Any = DBAPIError.instance(
        sql, None, error, psycopg2.Error, hide_parameters=True, connection_invalidated=is_lost
    )
    return made  # type: ignore[no-any-return]


def is_plan_outdated(error: BaseException) -> bool:
    """Whether a migration changed a table of which this session has a plan. The next transaction plans again."""
    return isinstance(error, DBAPIError) and _OUTDATED_PLAN in str(error.orig)


def is_alive(connection: Any) -> bool:
    """Check a pooled connection before use. A server that ends one writes to it, or closes it."""
    socket = select.poll()  # ``select.select`` takes no descriptor above 1023
    socket.register(connection, select.POLLIN)
    if socket.poll(0):
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
        connection.rollback()
    return True


def end_open_transaction(connection: Any, *_: object) -> None:
    """Roll back what is still open when a connection goes back to the pool. Its next user would commit it."""
    if connection.closed or connection.info.transaction_status == extensions.TRANSACTION_STATUS_IDLE:
        return
    with connection.cursor() as cursor:
        cursor.execute("ROLLBACK")


def tune(lock_timeout: str, *, is_reused: bool) -> Callable[[Any, Any], None]:
    """Return a listener that prepares new connections; none waits for a lock longer than ``lock_timeout``."""

    def configure(connection: Any, record: Any) -> None:
        extensions.register_type(_UUIDS, connection)
        with connection.cursor() as cursor:
            cursor.execute(f"{_TUNING}{_FACTS}" if is_reused else _FACTS, (lock_timeout,))
            ((_, backend),) = cursor.fetchall()
            # a pooler invents the number that it tells its clients
            is_direct = is_reused and backend == connection.info.backend_pid
            if is_direct:
                cursor.execute(_OWN_TUNING)
        connection.commit()
        record.info[_SESSION] = _ServerSession(is_direct=is_direct)

    return configure


class _Compiled(NamedTuple):
    """A statement in the two ways in which it can be sent."""

    formatted: str  #: with parameters of the driver: %(name)s
    numbered: str  #: with parameters of PREPARE: $1
    names: tuple[str, ...]  #: of the numbered parameters


@lru_cache(maxsize=4096)
def _compiled(sql: str) -> _Compiled:
    """Return a statement with :name parameters as the driver and as PREPARE take it."""
    escaped = sql.replace("%", "%%")
    names = tuple(dict.fromkeys(_PARAMETER.findall(sql)))
    numbers = {name: f"${number}" for number, name in enumerate(names, start=1)}
    formatted = _PARAMETER.sub(r"%(\1)s", escaped)
    numbered = _PARAMETER.sub(lambda match: numbers[match[1]], escaped)
    return _Compiled(formatted.replace("\\:", ":"), numbered.replace("\\:", ":"), names)


def _is_constant(statement: TextClause) -> bool:
    """Whether a statement is one of the code's, and of a kind that can be prepared."""
    return type(statement) is not TextClause and _PREPARABLE.match(statement.text) is not None


def _values(names: Sequence[str], params: Mapping[str, Any]) -> list[Any]:
    """Return the parameters of EXECUTE. It takes an array of any type only as text."""
    return [_array(value) if isinstance(value := params[name], list | tuple) else value for name in names]


def _array(values: Sequence[Any]) -> str:
    return "{" + ",".join(map(_element, values)) + "}"


def _element(value: Any) -> str:
    return "NULL" if value is None else f'"{str(value).translate(_IN_QUOTES)}"'


def _row_maker(cursor: Any) -> MakeRow | None:
    """Return what makes a named tuple of a row; None if the statement returns none."""
    if cursor.description is None:
        return None
    make_row: MakeRow = _row_class(tuple(column.name for column in cursor.description))._make
    return make_row


@lru_cache(maxsize=1024)
def _row_class(names: tuple[str, ...]) -> Any:
    return namedtuple("Row", names, rename=True)


def _rows(cursor: Any, make_row: MakeRow | None) -> Rows:
    return [] if make_row is None else [make_row(values) for values in cursor.fetchall()]
