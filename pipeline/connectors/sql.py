"""Write effects to a SQL database, so that every outcome can be reconciled.

An operation is a function of an open transaction. The connector writes its key to the table ``pipeline_effects`` in
the same transaction. The same key a second time returns the stored result. A reconcile waits for a transaction that
holds the key.

The table of effects is in the database that the effects are written to. A row is written in the same transaction as
its effect, so either both exist or neither does. The unique key is the lock: the transaction that inserts a key first
holds it until it ends. Every other transaction that inserts the key, to send or to reconcile, waits for that end.

A sender claims the key first and checks its deadline after that. So a sender that goes on has claimed the key before
its deadline. If a reconcile after the deadline finds the key free, no sender will use it any more.

Before COMMIT every error is definite: the transaction is rolled back. At COMMIT only a refusal of the database is
definite. A connection that breaks at COMMIT leaves the outcome unknown.
"""

import functools
import inspect
import math
import os
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from decimal import Decimal
from typing import Any, TypedDict, Unpack

from pydantic import SecretStr
from sqlalchemy import (
    JSON,
    Column,
    Connection,
    DateTime,
    Engine,
    MetaData,
    String,
    Table,
    create_engine,
    event,
    func,
    null,
    select,
)
from sqlalchemy import (
    inspect as inspector,
)
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import (
    ArgumentError,
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

from pipeline.connectors.sdk import Call, Connector, Operation
from pipeline.domain.errors import AuthError, HandlerError, InvalidInputError, LogicError, PayloadError, TransientError
from pipeline.domain.payloads import checked_json
from pipeline.domain.policies import BreakerPolicy, MutationRetryPolicy, ReconcilePolicy
from pipeline.domain.reconciliation import Applied, NotFound, Retry, Verdict
from pipeline.domain.redaction import HIDDEN
from pipeline.domain.values import DEFAULT_LIMITS

__all__ = ["Sql", "UnknownCommitError", "create_effects_table", "effects_table", "query", "transaction"]

TABLE_NAME = "pipeline_effects"
MAX_ANSWER_BYTES = 32 * 1024 * 1024  #: what a server may send in one call, unless the connector says otherwise


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
        if not inspector(engine).has_table(TABLE_NAME, schema=schema):
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
    """Describes errors of one call: with the operation's name, and without values that must be hidden."""

    def __init__(self, name: str, hidden: tuple[str, ...] = (), max_answer_bytes: int = 0) -> None:
        self.name, self.hidden, self.max_answer_bytes = name, hidden, max_answer_bytes
        self.is_too_large = False  #: the server sent more than that, and was cut off

    @property
    def too_large(self) -> str:
        """What is said when the server was cut off because it sent too much."""
        return (
            f"{self.name}: the database sent more than {self.max_answer_bytes} bytes in this call, and was cut off. "
            "Expected less: select fewer rows or columns, or raise max_answer_bytes of the connector"
        )

    def describe(self, error: BaseException) -> str:
        """Return the database's message. Hidden values are replaced where they are whole tokens."""
        message = _first_line(error)
        for value in self.hidden:
            message = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", HIDDEN, message)
        return f"{self.name}: {message}"


def error_before_commit(error: Exception, texts: ErrorText) -> HandlerError:
    """Return the error for a transaction that was rolled back."""
    if texts.is_too_large:
        return LogicError(f"{texts.too_large}. It was rolled back.")
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
    if not (isinstance(definite, TransientError) or texts.is_too_large):
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
_WATCH_EVERY = 0.05  #: seconds
#: At its close a connection is reset. Otherwise a server that waits to send more can hold its locks for a minute.
_RESET_AT_CLOSE = struct.pack("ii", 1, 0)
_TCP_INFO_SIZE, _BYTES_RECEIVED = 192, 128  #: bytes of Linux's struct tcp_info, and where tcpi_bytes_received is in it
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
    driver = connection.connection.dbapi_connection
    with cut_off(driver, call, texts):
        try:
            if getattr(driver, "autocommit", None) is True:
                raise LogicError(f"{texts.name}: the engine commits each statement by itself; expected transactions.")
            yield connection
        finally:
            with suppress(SQLAlchemyError):
                connection.close()


@contextmanager
def cut_off(driver: Any, call: Call, texts: ErrorText) -> Iterator[None]:
    """Shut the socket down of a server that holds a call beyond its deadline, or sends more than it may.

    Its own timeouts end before that. They say nothing about an answer that it sends slowly or without end, and the
    driver keeps all of an answer in memory before it returns.
    """
    lock, is_over, end = (
        threading.Lock(),
        threading.Event(),
        time.monotonic() + (call.remaining + 2 * _GRACE).total_seconds(),
    )

    def watch() -> None:
        with suppress(Exception), socket.socket(fileno=os.dup(driver.fileno())) as shared:  # or it has no socket
            most = _received(shared) + texts.max_answer_bytes
            while not is_over.wait(_WATCH_EVERY):
                is_too_large = _received(shared) > most
                if is_too_large or time.monotonic() > end:
                    with lock:
                        if not is_over.is_set():
                            texts.is_too_large = is_too_large
                            shared.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
                            shared.shutdown(socket.SHUT_RDWR)
                    return

    threading.Thread(target=watch, name="pipeline-sql-watch", daemon=True).start()
    try:
        yield
    finally:
        with lock:
            is_over.set()


def _received(shared: socket.socket) -> int:
    """Return how many bytes a socket has received; 0 where the system does not count them."""
    try:
        info = shared.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_SIZE)
        return int.from_bytes(info[_BYTES_RECEIVED : _BYTES_RECEIVED + 8], sys.byteorder)
    except (OSError, AttributeError):  # not over TCP, or not on Linux
        return 0


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


_POOL_WAIT = 5  #: seconds to wait for a free connection
_TCP_USER_TIMEOUT_MS = 30_000  #: milliseconds that sent data may stay unacknowledged before a connection counts as lost


class SqlMutationOptions(TypedDict, total=False):
    """The options of an operation. Each is as in ``pipeline.mutation``."""

    timeout: timedelta
    policy: ReconcilePolicy
    retry: MutationRetryPolicy
    breaker: BreakerPolicy
    redact: Collection[str]
    shown: Collection[str]
    shows: str
    look_up: str
    value: str
    four_eyes_above: Decimal | int


def transaction(**facts: Unpack[SqlMutationOptions]) -> Callable[[Callable[..., Any]], Operation[Any]]:
    """Mark a method ``(self, connection, call, *, …)`` that works in one transaction.

    It returns JSON, and must not commit or roll back. It is a mutation of grade A: its key is honoured, and it can be
    reconciled.
    """

    def mark(function: Callable[..., Any]) -> Operation[Any]:
        def send(self: Sql, call: Call, **params: Any) -> Any:
            work = functools.partial(function, self, call=call, **params)
            return execute_once(self.engine, self._table, call, work, self._error_text(operation, params))

        def find(self: Sql, call: Call, **params: Any) -> Verdict:
            return reconcile(self.engine, self._table, call, self._error_text(operation, params))

        rest: dict[str, Any] = {
            **facts,
            "redact": frozenset(facts.get("redact", ())),
            "shown": frozenset(facts.get("shown", ())),
            "keyed": True,
            "reconcile_function": find,
        }
        shown = _copy_signature(send, function, "self", "connection", "call")
        operation: Operation[Any] = Operation(function=shown, is_mutation=True, **rest)
        return operation

    return mark


def query(function: Callable[..., Any]) -> Operation[Any]:
    """Mark a method ``(self, connection, *, …)`` that only reads. Its writes are rolled back."""

    def read(self: Sql, **params: Any) -> Any:
        texts = self._error_text(operation, params)
        call = Call.within("", operation.timeout)
        with open_connection(self.engine, call, texts) as connection:
            set_timeouts_per_statement(connection, call, texts)
            try:
                return function(self, connection, **params)
            except Exception as error:  # noqa: BLE001 - a read changes nothing
                raise error_before_commit(error, texts) from None

    operation: Operation[Any] = Operation(
        function=_copy_signature(read, function, "self", "connection"), is_mutation=False
    )
    return operation


class Sql(Connector):
    """A database for effects. Subclasses set ``name`` and mark their operations.

    It takes a URL or an engine. The table ``pipeline_effects`` must exist, in ``schema`` if one is given.
    ``create_effects_table`` creates it. A server that sends more than ``max_answer_bytes`` in a call is cut off.
    """

    def __init__(
        self,
        engine_url: SecretStr | str | None = None,
        *,
        engine: Engine | None = None,
        schema: str | None = None,
        pool_size: int = 10,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        if (engine_url is None) == (engine is None):
            raise InvalidInputError(f"{type(self).__qualname__} takes a URL or an engine, one of the two.")
        self.pool_size, self.max_answer_bytes, self._caller_engine = pool_size, max_answer_bytes, engine
        url = engine.url if engine is not None else _checked_url(engine_url, type(self).__qualname__)
        self._url = SecretStr(url.render_as_string(hide_password=False))
        self._password = SecretStr(str(url.password or ""))
        self._engines: dict[int, Engine] = {} if engine is None else {os.getpid(): engine}
        self._table = effects_table(schema)

    @property
    def engine(self) -> Engine:
        """The engine of this process. Connections from before a fork belong to the parent and are not used."""
        pid = os.getpid()
        return self._engines.get(pid) or self._engines.setdefault(pid, self._new_engine())

    def create_table(self) -> None:
        """Create the table of effects unless it exists."""
        create_effects_table(self.engine, self._table.schema)

    def _new_engine(self) -> Engine:
        if self._caller_engine is not None:
            self._caller_engine.dispose(close=False)
            return self._caller_engine
        url = make_url(self._url.get_secret_value())
        made = create_engine(
            url,
            pool_pre_ping=True,
            pool_size=self.pool_size,
            max_overflow=self.pool_size,
            pool_timeout=_POOL_WAIT,
            hide_parameters=True,
        )
        if url.get_driver_name() in ("psycopg2", "psycopg"):
            event.listen(made, "do_connect", _set_connect_timeouts)
        _bound_pings(made)
        return made

    def _error_text(self, operation: Operation[Any], params: Mapping[str, Any]) -> ErrorText:
        hidden = {*operation.redaction.hidden_texts(params)}
        hidden |= {self._url.get_secret_value(), self._password.get_secret_value()} - {""}
        ordered = tuple(sorted(hidden, key=len, reverse=True))
        return ErrorText(f"{self.name}.{operation.name}", ordered, self.max_answer_bytes)


def _bound_pings(engine: Engine) -> None:
    """Bound the question whether a connection of the pool still lives by the deadline of the call."""
    dialect: Any = engine.dialect
    ping = dialect.do_ping

    def bounded(driver: Any) -> Any:
        call = CURRENT_CALL.get()
        if call is None:
            return ping(driver)
        with cut_off(driver, call, ErrorText("ping", max_answer_bytes=MAX_ANSWER_BYTES)):
            return ping(driver)

    dialect.do_ping = bounded


def _set_connect_timeouts(_: Any, __: Any, ___: Any, given: dict[str, Any]) -> None:
    """Bound the time to connect by the deadline, and detect a dead server."""
    call = CURRENT_CALL.get()
    given.setdefault("tcp_user_timeout", _TCP_USER_TIMEOUT_MS)
    given.setdefault("connect_timeout", max(1, math.ceil(call.remaining.total_seconds())) if call else 10)


def _copy_signature(wrapper: Callable[..., Any], function: Callable[..., Any], *first: str) -> Callable[..., Any]:
    """Give the wrapper the parameters of the function, except the connection, which the connector passes."""
    signature = inspect.signature(function)
    names = tuple(signature.parameters)
    if inspect.iscoroutinefunction(function) or names[: len(first)][1:] != first[1:]:
        wanted = ", ".join((*first, "*, …"))
        raise InvalidInputError(f"{function.__qualname__} cannot be an operation; expected `def` with ({wanted}).")
    functools.update_wrapper(wrapper, function)
    kept = [parameter for name, parameter in signature.parameters.items() if name != "connection"]
    hints = inspect.get_annotations(function)
    wrapper.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {name: kind for name, kind in hints.items() if name in (*names[len(first) :], "return")}
    return wrapper


def _checked_url(url: SecretStr | str | None, owner: str) -> URL:
    try:
        return make_url(url.get_secret_value() if isinstance(url, SecretStr) else str(url))
    except (ArgumentError, ValueError):
        raise InvalidInputError(
            f"{owner} was given a URL that cannot be read; expected one like 'postgresql+psycopg2://user@host/database'."
        ) from None
