"""Publish from asyncio: in the transaction of an ``AsyncSession``, or through a client.

SQLAlchemy runs the same code as without asyncio, and the event loop goes on while it waits for the database. So the
checks, the statement and the errors are those of ``publishing.py``. Wake-up messages are sent from a thread.
"""

import asyncio
import logging
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib.util import find_spec
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from sqlalchemy import event

from pipeline.client.publishing import (
    WAKE_UP_TIMEOUT,
    App,
    EventInputs,
    Receipt,
    WakeUpSender,
    client_errors,
    publish,
    wake_after_commit,
)
from pipeline.config import QUEUE_PREFIX, database_url_of
from pipeline.domain.codec import Codec
from pipeline.domain.errors import InvalidInputError
from pipeline.domain.values import DEFAULT_LIMITS, Limits
from pipeline.store import migrate
from pipeline.store.connections import ISOLATION_LEVEL
from pipeline.store.database import LOCK_TIMEOUT

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession

log = logging.getLogger(__name__)

_TIMEOUT = timedelta(seconds=30)
_DRIVERS = ("asyncpg", "psycopg")  #: the first that is installed, if the URL names none
_PREPARE_SESSION = f"""
SELECT set_config('application_name', 'pipeline', false), set_config('lock_timeout',
  CASE current_setting('lock_timeout') WHEN '0' THEN '{LOCK_TIMEOUT // timedelta(milliseconds=1)}ms'
  ELSE current_setting('lock_timeout') END, false)"""


async def publish_async(
    connection: "AsyncSession | AsyncConnection",
    workflow: str,
    events: EventInputs,
    *,
    replace: bool = False,
    limits: Limits = DEFAULT_LIMITS,
    codec: Codec | None = None,
) -> Receipt:
    """Publish in the open transaction of an ``AsyncSession`` or ``AsyncConnection``. The caller commits.

    Everything else is as in ``publish``.
    """
    if not _is_async(connection):
        kind = f"{type(connection).__module__}.{type(connection).__qualname__}"
        raise InvalidInputError(
            f"Events cannot be published through a {kind}; expected an AsyncSession or AsyncConnection of SQLAlchemy. "
            "For a connection without asyncio there is publish."
        )
    return await connection.run_sync(
        lambda inner: publish(inner, workflow, events, replace=replace, limits=limits, codec=codec)
    )


class AsyncClient:
    """Publish from asyncio, in a transaction of its own or in that of a caller's session.

    ``database`` is a URL, or an ``AsyncEngine`` of the service, which stays open. A call with a transaction of its own
    ends within ``timeout``. With a Celery app a workflow is woken after the commit, from a thread. A client belongs to
    one event loop.
    """

    def __init__(
        self,
        database: "str | AsyncEngine",
        app: App | None = None,
        *,
        limits: Limits = DEFAULT_LIMITS,
        timeout: timedelta = _TIMEOUT,
        queue_prefix: str = QUEUE_PREFIX,
        codec: Codec | None = None,
    ) -> None:
        self._url = _async_url(database) if isinstance(database, str) else ""
        self._engine = None if isinstance(database, str) else database
        self._limits, self._codec, self._seconds = limits, codec, timeout.total_seconds()
        self._wake_ups = None if app is None else _BackgroundWakeUps(app, queue_prefix)

    async def publish(self, workflow: str, events: EventInputs, *, replace: bool = False) -> Receipt:
        """Publish and commit. Then wake the workflow, if an event is new and the client has a Celery app."""
        with client_errors():
            async with asyncio.timeout(self._seconds), self._connected().begin() as connection:
                receipt = await self._publish(connection, workflow, events, replace)
        if receipt.new or receipt.replaced:
            self.wake_workflow(workflow)
        return receipt

    async def publish_in(
        self,
        transaction: "AsyncSession | AsyncConnection",
        workflow: str,
        events: EventInputs,
        *,
        replace: bool = False,
    ) -> Receipt:
        """Publish in the open transaction of a session or connection. After the commit of a session, wake the workflow.

        SQLAlchemy does not tell when a connection has committed: its caller calls ``wake_workflow``.
        """
        receipt = await self._publish(transaction, workflow, events, replace)
        session = getattr(transaction, "sync_session", None)
        if session is not None and self._wake_ups is not None and (receipt.new or receipt.replaced):
            wake_after_commit(session, workflow, self.wake_workflow)
        return receipt

    def wake_workflow(self, workflow: str) -> None:
        """Notify a worker that a workflow may have work. Returns at once, and does nothing without a Celery app."""
        if self._wake_ups is not None:
            self._wake_ups.send(workflow)

    async def check_schema(self) -> None:
        """Raise ``SchemaVersionError`` if the database is not at a version that this code can use.

        Errors of the database are raised as they are: a role of the database may publish and not read the version.
        """
        async with asyncio.timeout(self._seconds), self._connected().connect() as connection:
            await connection.run_sync(migrate.require_version)

    async def close(self) -> None:
        """Send the wake-up messages that wait, and close the connections that this client has opened."""
        if self._wake_ups is not None:
            await asyncio.to_thread(self._wake_ups.close)
        if self._url and self._engine is not None:
            await self._engine.dispose()
            self._engine = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _publish(self, connection: Any, workflow: str, events: EventInputs, replace: bool) -> Receipt:
        return await publish_async(
            connection, workflow, events, replace=replace, limits=self._limits, codec=self._codec
        )

    def _connected(self) -> "AsyncEngine":
        """Return the engine, which is made when it is first used: a client may be made before a fork."""
        if self._engine is None:
            from sqlalchemy.ext.asyncio import create_async_engine

            self._engine = create_async_engine(
                self._url, pool_pre_ping=True, hide_parameters=True, isolation_level=ISOLATION_LEVEL
            )
            event.listen(self._engine.sync_engine, "connect", _prepare_session)
        return self._engine


class _BackgroundWakeUps:
    """Send wake-up messages from one thread. Several that wait for one workflow are one."""

    def __init__(self, app: App, queue_prefix: str) -> None:
        self._sender = WakeUpSender(app, timeout=WAKE_UP_TIMEOUT, queue_prefix=queue_prefix)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pipeline-wake-up")
        self._waiting: set[str] = set()
        self._lock = threading.Lock()

    def send(self, workflow: str) -> None:
        """Send a message later. What commits after the client was closed is found by the next tick."""
        with self._lock:
            if workflow in self._waiting:
                return
            try:
                self._thread.submit(self._send, workflow)
            except RuntimeError:
                log.warning("the client is closed; the next tick finds the work of %r", workflow)
            else:
                self._waiting.add(workflow)

    def close(self) -> None:
        """Wait until everything is sent."""
        self._thread.shutdown()

    def _send(self, workflow: str) -> None:
        with self._lock:
            self._waiting.discard(workflow)
        self._sender.wake_workflow(workflow)


def _is_async(connection: object) -> bool:
    """Return whether this is a session or connection of SQLAlchemy's asyncio. A process without it has none."""
    found = sys.modules.get("sqlalchemy.ext.asyncio")
    return found is not None and isinstance(connection, found.AsyncSession | found.AsyncConnection)


def _async_url(value: str) -> str:
    """Return a URL of Postgres for a driver of asyncio."""
    _, plus, driver = urlsplit(value).scheme.partition("+")
    is_named = plus and driver in _DRIVERS
    try:
        url = database_url_of(value.replace(f"+{driver}", "", 1) if is_named else value)
    except ValueError as error:
        raise InvalidInputError(f"The URL of the database cannot be used: {error}.") from None
    installed = [name for name in ([driver] if is_named else _DRIVERS) if find_spec(name) is not None]
    if not installed or find_spec("greenlet") is None:
        raise InvalidInputError("AsyncClient needs asyncpg: `pip install 'celery-durable-effects[async]'`.")
    return url.replace("+psycopg2:", f"+{installed[0]}:", 1)


def _prepare_session(connection: Any, _: object) -> None:
    """Prepare a new connection; none waits for a lock forever, unless the role or database has another limit."""
    cursor = connection.cursor()
    cursor.execute(_PREPARE_SESSION)
    cursor.close()
    connection.commit()
