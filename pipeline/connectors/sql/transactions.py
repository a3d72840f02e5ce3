"""Execute one transaction per key, reconcile it, and classify its errors.

The table of effects is in the database that the effects are written to. A row is written in the same transaction as
its effect, so either both exist or neither does. The unique key is the lock: the transaction that inserts a key first
holds it until it ends. Every other transaction that inserts the key, to send or to reconcile, waits for that end.

A sender claims the key first and checks its deadline after that. So a sender that goes on has claimed the key before
its deadline. If a reconcile after the deadline finds the key free, no sender will use it any more.

Before COMMIT every error is definite: the transaction is rolled back. At COMMIT only a refusal of the database is
definite. A connection that breaks at COMMIT leaves the outcome unknown.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

from sqlalchemy import (
    JSON,
    Column,
    Connection,
    DateTime,
    Engine,
    MetaData,
    String,
    Table,
    event,
    func,
    inspect,
    null,
    select,
)
from sqlalchemy.exc import (
    DataError,
    DBAPIError,
    IntegrityError,
    InternalError,
    NotSupportedError,
    ProgrammingError,
    SQLAlchemyError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.schema import CreateTable

from pipeline.connectors.sdk import HIDDEN, Call
from pipeline.domain.errors import AuthError, HandlerError, LogicError, PayloadError, TransientError
from pipeline.domain.payloads import checked_json
from pipeline.domain.reconciliation import Applied, NotFound, Retry, Verdict
from pipeline.domain.values import DEFAULT_LIMITS

TABLE_NAME = "pipeline_effects"


def effects_table(schema: str | None = None) -> Table:
    """Return the table for SQLAlchemy. You may use it in your own migrations."""
    return Table(
        TABLE_NAME,
        MetaData(),
        Column("key", String(512), primary_key=True),
        Column("operation", String(255), nullable=False),
        Column("result", JSON),
        Column("at", DateTime(timezone=True), nullable=False, server_default=func.now()),
        schema=schema,
    )


def create_effects_table(engine: Engine, schema: str | None = None) -> None:
    """Create the table unless it exists. Two processes may do this at once."""
    try:
        with engine.begin() as connection:
            connection.execute(CreateTable(effects_table(schema), if_not_exists=True))
    except DBAPIError:
        if not inspect(engine).has_table(TABLE_NAME, schema=schema):
            raise


def claim_key(connection: Connection, table: Table, key: str, operation: str) -> bool:
    """Take the key for this transaction, after waiting for its holder. False if it was used: roll back, then read."""
    try:
        connection.execute(table.insert().values(key=key, operation=operation, result=null()))
    except IntegrityError:
        return False
    return True


def store_result(connection: Connection, table: Table, key: str, result: Any) -> bool:
    """Store the result of a claimed key. False if the claim is gone because its transaction was ended."""
    wanted = table.update().where(table.c.key == key).values(result=result)
    return connection.execute(wanted).rowcount == 1


def find_effect(connection: Connection, table: Table, key: str) -> tuple[str, Any] | None:
    """Return the committed operation of this key and its result. None if there is none."""
    row = connection.execute(select(table.c.operation, table.c.result).where(table.c.key == key)).first()
    return None if row is None else (row[0], row[1])


_REFUSALS = (DataError, IntegrityError, InternalError, NotSupportedError, ProgrammingError)
_RETRYABLE_CODES = frozenset({"40001", "40P01"})  #: a serialization failure or a deadlock
_DENIED_CODES = frozenset({"42501", "28000", "28P01"})
_DENIED_PHRASES = ("authentication failed", "no password supplied", "no pg_hba.conf entry", "access denied")
_MISSING_TABLE_PHRASES = ("does not exist", "no such table", "doesn't exist")


class UnknownCommitError(Exception):
    """A transaction may or may not have been committed."""


class ErrorText:
    """Describes errors of one operation: with its name, and without values that must be hidden."""

    def __init__(self, name: str, hidden: tuple[str, ...] = ()) -> None:
        self.name, self.hidden = name, hidden

    def describe(self, error: BaseException) -> str:
        """Return the database's message. Hidden values are replaced where they are whole tokens."""
        message = _first_line(error)
        for value in self.hidden:
            message = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", HIDDEN, message)
        return f"{self.name}: {message}"


def error_before_commit(error: Exception, texts: ErrorText) -> HandlerError:
    """Return the error for a transaction that was rolled back."""
    if isinstance(error, HandlerError):
        return error
    code, text, message = _sqlstate(error), texts.describe(error), _first_line(error)
    if code in _DENIED_CODES or any(phrase in message.lower() for phrase in _DENIED_PHRASES):
        return AuthError(f"{text}. Nothing was done; check the connector's user and what it may do.")
    if TABLE_NAME in message and any(phrase in message for phrase in _MISSING_TABLE_PHRASES):
        return LogicError(f"{text}. Nothing was done; create the table with create_effects_table.")
    is_database = isinstance(error, DBAPIError) and not isinstance(error, _REFUSALS)
    if is_database or code in _RETRYABLE_CODES or isinstance(error, PoolTimeoutError):
        return TransientError(f"{text}. Nothing was done.")
    return LogicError(f"{text}. It was rolled back.")


def error_at_claim(error: Exception, texts: ErrorText) -> Exception:
    """Return the error for a key that could not be claimed. Another transaction may hold it and may still commit."""
    definite = error_before_commit(error, texts)
    if not isinstance(definite, TransientError):
        return definite
    return UnknownCommitError(f"{texts.describe(error)}. Another transaction may be carrying out the same call.")


def error_at_commit(error: Exception, texts: ErrorText) -> Exception:
    """Return the error for a COMMIT that failed."""
    is_broken = isinstance(error, DBAPIError) and error.connection_invalidated
    if _sqlstate(error) in _RETRYABLE_CODES or (isinstance(error, _REFUSALS) and not is_broken):
        return error_before_commit(error, texts)
    return UnknownCommitError(f"{texts.describe(error)}. COMMIT was sent, and may or may not have been carried out.")


def _first_line(error: BaseException) -> str:
    """Return the type of an error and its first line. Later lines repeat values, and SQLAlchemy adds parameters."""
    own = getattr(error, "orig", None) or error
    first = next(iter(str(own).strip().splitlines()), "").partition("[SQL")[0].strip()
    return f"{type(own).__name__}: {first}".removesuffix(": ")


def _sqlstate(error: BaseException) -> str | None:
    """Return the SQLSTATE of an error, if the driver has it."""
    own = getattr(error, "orig", None)
    found = getattr(own, "pgcode", None) or getattr(own, "sqlstate", None)
    return found if isinstance(found, str) else None


Work = Callable[[Connection], Any]

_RECONCILE_WAIT_SHARE = 0.8  #: share of the time that a reconcile waits for the key; the rest is for the verdict
_GRACE = timedelta(seconds=1)  #: after the deadline, until the server ends a transaction whose client is idle

#: The call that a connection is opened for.
CURRENT_CALL: ContextVar[Call | None] = ContextVar("call", default=None)


def execute_once(engine: Engine, table: Table, call: Call, work: Work, texts: ErrorText) -> Any:
    """Do the work and store its result. If the key was used, return the stored result instead."""
    with open_connection(engine, call, texts) as connection:
        begun = connection.begin()
        try:
            set_timeouts(connection, call.remaining)
            is_claimed = _claim(connection, table, call, texts)
            if is_claimed:
                result = _execute(connection, table, call, work, texts)
            require_time_left(call, texts)
        except UnknownCommitError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it was, it is rolled back
            if not begun.is_active and not isinstance(error, SQLAlchemyError):
                message = f"{texts.name} ended its own transaction and then failed; expected no commit or rollback."
                raise UnknownCommitError(message) from None
            with suppress(SQLAlchemyError):
                begun.rollback()
            raise error_before_commit(error, texts) from None
        if not is_claimed:
            begun.rollback()
            return _stored_result(connection, table, call, texts)
        if not begun.is_active:
            raise UnknownCommitError(f"{texts.name} ended its own transaction; expected no commit or rollback.")
        try:
            begun.commit()
        except Exception as error:  # noqa: BLE001 - whatever it was, COMMIT may have arrived
            raise error_at_commit(error, texts) from None
        return result


def reconcile(engine: Engine, table: Table, call: Call, texts: ErrorText) -> Verdict:
    """Find out what became of a call. It claims the key and rolls back, so it waits for a sender that holds it.

    A claim is a write, so a replica that lags behind cannot answer.
    """
    try:
        with open_connection(engine, call, texts) as connection:
            begun = connection.begin()
            set_timeouts(connection, call.remaining * _RECONCILE_WAIT_SHARE)
            is_free = claim_key(connection, table, call.idempotency_key, texts.name)
            begun.rollback()
            if is_free:
                return NotFound(f"{table.name} does not have the key, and no open transaction holds it")
            return Applied(_stored_result(connection, table, call, texts))
    except SQLAlchemyError as error:
        return Retry(texts.describe(error))
    except (HandlerError, UnknownCommitError) as error:
        return Retry(str(error))


@contextmanager
def open_connection(engine: Engine, call: Call, texts: ErrorText) -> Iterator[Connection]:
    """Open a connection for this call. A transaction that is still open at the end is rolled back."""
    require_time_left(call, texts)
    token = CURRENT_CALL.set(call)
    try:
        connection = engine.connect()
    except Exception as error:  # noqa: BLE001 - whatever it was, nothing was sent
        raise error_before_commit(error, texts) from None
    finally:
        CURRENT_CALL.reset(token)
    try:
        if getattr(connection.connection.dbapi_connection, "autocommit", None) is True:
            raise LogicError(f"{texts.name}: the engine commits each statement by itself; expected transactions.")
        yield connection
    finally:
        with suppress(SQLAlchemyError):
            connection.close()


def set_timeouts(connection: Connection, left: timedelta) -> None:
    """Let the server end a statement, a lock wait or an idle transaction."""
    if connection.dialect.name == "postgresql":
        statement, idle = (max(1, round(span.total_seconds() * 1000)) for span in (left, left + _GRACE))
        connection.exec_driver_sql(
            f"SELECT set_config('statement_timeout', '{statement}', true), "
            f"set_config('idle_in_transaction_session_timeout', '{idle}', true)"
        )


def set_timeouts_per_statement(connection: Connection, call: Call, texts: ErrorText) -> None:
    """Bound every later statement by the time that is left when it starts."""
    is_busy = False

    def before(*_: Any) -> None:
        nonlocal is_busy
        if not is_busy:
            require_time_left(call, texts)
            is_busy = True
            try:
                set_timeouts(connection, call.remaining)
            finally:
                is_busy = False

    event.listen(connection, "before_cursor_execute", before)


def require_time_left(call: Call, texts: ErrorText) -> None:
    """Raise if the deadline has passed. Nothing was committed until now."""
    if not call.remaining:
        raise TransientError(f"{texts.name}: the time for this call was over before anything was committed.")


def _claim(connection: Connection, table: Table, call: Call, texts: ErrorText) -> bool:
    try:
        return claim_key(connection, table, call.idempotency_key, texts.name)
    except SQLAlchemyError as error:
        raise error_at_claim(error, texts) from None


def _execute(connection: Connection, table: Table, call: Call, work: Work, texts: ErrorText) -> Any:
    require_time_left(call, texts)  # after the claim: see the module's docstring
    set_timeouts_per_statement(connection, call, texts)
    result = work(connection)
    try:
        checked_json(result, what=f"result of {texts.name}", limit=DEFAULT_LIMITS.result)
    except PayloadError as error:
        raise LogicError(str(error)) from None
    if connection.in_transaction() and not store_result(connection, table, call.idempotency_key, result):
        raise LogicError(f"{texts.name} rolled back its own transaction; expected no commit or rollback.")
    return result


def _stored_result(connection: Connection, table: Table, call: Call, texts: ErrorText) -> Any:
    """Return the stored result of this key. It is committed, since otherwise the claim would have succeeded."""
    try:
        with connection.begin():
            set_timeouts(connection, call.remaining)
            row = find_effect(connection, table, call.idempotency_key)
    except SQLAlchemyError as error:
        raise UnknownCommitError(
            f"{texts.describe(error)}. It was done before, and its result could not be read."
        ) from None
    if row is None:
        raise UnknownCommitError(f"{texts.name}: the key was used, and {table.name} has lost it since.")
    operation, result = row
    if operation != texts.name:
        raise LogicError(f"{texts.name} came with the key of {operation}; expected a key of its own.")
    return result
