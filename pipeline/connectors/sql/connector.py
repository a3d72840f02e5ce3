"""Write effects to a SQL database, so that every outcome can be reconciled.

An operation is a function of an open transaction. The connector writes its key to the table ``pipeline_effects`` in
the same transaction. The same key a second time returns the stored result. A reconcile waits for a transaction that
holds the key.
"""

import functools
import inspect
import math
import os
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from typing import Any, TypedDict, Unpack

from pydantic import SecretStr
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from pipeline.connectors.sdk import Call, Connector, Operation, leaf_texts
from pipeline.connectors.sql.transactions import (
    CURRENT_CALL,
    ErrorText,
    create_effects_table,
    effects_table,
    error_before_commit,
    execute_once,
    open_connection,
    reconcile,
    set_timeouts_per_statement,
)
from pipeline.domain.errors import InvalidInputError
from pipeline.domain.policies import BreakerPolicy, MutationRetryPolicy, ReconcilePolicy
from pipeline.domain.reconciliation import Verdict

_POOL_WAIT = 5  #: seconds to wait for a free connection
_TCP_USER_TIMEOUT_MS = 30_000  #: milliseconds that sent data may stay unacknowledged before a connection counts as lost


class SqlMutationOptions(TypedDict, total=False):
    """The options of an operation. Each is as in ``pipeline.mutation``."""

    timeout: timedelta
    policy: ReconcilePolicy
    retry: MutationRetryPolicy
    breaker: BreakerPolicy
    redact: Collection[str]
    shows: str


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
    ``create_effects_table`` creates it.
    """

    def __init__(
        self,
        engine_url: SecretStr | str | None = None,
        *,
        engine: Engine | None = None,
        schema: str | None = None,
        pool_size: int = 10,
    ) -> None:
        if (engine_url is None) == (engine is None):
            raise InvalidInputError(f"{type(self).__qualname__} takes a URL or an engine, one of the two.")
        self.pool_size, self._caller_engine = pool_size, engine
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
        return made

    def _error_text(self, operation: Operation[Any], params: Mapping[str, Any]) -> ErrorText:
        hidden = {text for name in operation.redact for text in leaf_texts(params.get(name))}
        hidden |= {self._url.get_secret_value(), self._password.get_secret_value()} - {""}
        return ErrorText(f"{self.name}.{operation.name}", tuple(sorted(hidden, key=len, reverse=True)))


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
