"""Execute one transaction per key, and reconcile it.

A sender claims the key first and checks its deadline after that. So a sender that goes on has claimed the key before
its deadline. If a reconcile after the deadline finds the key free, no sender will use it any more.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, Engine, Table, event
from sqlalchemy.exc import SQLAlchemyError

from pipeline.connectors.sdk import Call
from pipeline.connectors.sql import effects
from pipeline.connectors.sql.errors import (
    ErrorText,
    UnknownCommitError,
    error_at_claim,
    error_at_commit,
    error_before_commit,
)
from pipeline.domain.errors import HandlerError, LogicError, PayloadError, TransientError
from pipeline.domain.payloads import checked_json
from pipeline.domain.reconciliation import Applied, NotFound, Retry, Verdict
from pipeline.domain.values import DEFAULT_LIMITS

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
            is_free = effects.claim(connection, table, call.idempotency_key, texts.name)
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
        return effects.claim(connection, table, call.idempotency_key, texts.name)
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
    if connection.in_transaction() and not effects.store_result(connection, table, call.idempotency_key, result):
        raise LogicError(f"{texts.name} rolled back its own transaction; expected no commit or rollback.")
    return result


def _stored_result(connection: Connection, table: Table, call: Call, texts: ErrorText) -> Any:
    """Return the stored result of this key. It is committed, since otherwise the claim would have succeeded."""
    try:
        with connection.begin():
            set_timeouts(connection, call.remaining)
            row = effects.find_effect(connection, table, call.idempotency_key)
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
