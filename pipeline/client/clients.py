"""Publish events from a service: to the database, or over the broker, with the same method.

``DatabaseClient`` has committed when it returns, and tells which events were new. ``BrokerClient`` has handed the
events to the broker when it returns; a worker publishes them. Both send a wake-up message, so that the events need not
wait for the next tick. The database client needs the Celery app of the service for that.
"""

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

from sqlalchemy.exc import DBAPIError

from pipeline.client.publishing import EventInput, Receipt, publish, serialize_events
from pipeline.config import database_url_of
from pipeline.consumer_engine.bounded import StepRunner, TimedOutError
from pipeline.domain.errors import InvalidInputError, PipelineError
from pipeline.domain.values import DEFAULT_LIMITS, Limits
from pipeline.store.database import Database, describe_error, is_transient
from pipeline.telemetry import spans

log = logging.getLogger(__name__)

_QUEUE = "pipeline.schedule"
_TIMEOUT = timedelta(seconds=30)
_UNKNOWN = "Whether the events are there is unknown; publish them again with the same message ids."
EventInputs = Sequence[EventInput | Mapping[str, Any]]


class UnavailableError(PipelineError):
    """The database or the broker cannot be reached. Trying again is safe: a message id counts once."""


class RefusedError(PipelineError):
    """The database refuses the events. Trying again does not help."""


class App(Protocol):
    """The Celery app of the service."""

    def send_task(self, name: str, *args: Any, **kwargs: Any) -> Any: ...


class DatabaseClient:
    """Publish in a transaction of its own. Every call ends within ``timeout``.

    A client that was made or used before a fork can be used in the child.
    """

    def __init__(
        self,
        database_url: str,
        app: App | None = None,
        *,
        limits: Limits = DEFAULT_LIMITS,
        timeout: timedelta = _TIMEOUT,
    ) -> None:
        try:
            self._url, self._app = database_url_of(database_url), app
        except ValueError as error:
            raise InvalidInputError(f"The URL of the database cannot be used: {error}.") from None
        self._limits, self._bounded = limits, _BoundedCalls(timeout)
        self._pools = {os.getpid(): self._pool()}

    def publish(self, workflow: str, events: EventInputs, *, replace: bool = False) -> Receipt:
        """Publish and commit. Then wake the workflow, if an event is new and the client has a Celery app."""
        try:
            receipt: Receipt = self._bounded.run(self._publish, workflow, events, replace)
        except TimedOutError as error:
            raise UnavailableError(f"The database did not answer in time. {_UNKNOWN}") from error
        except DBAPIError as error:
            problem = describe_error(error)
            if is_transient(error):
                raise UnavailableError(f"The database cannot be used: {problem}. {_UNKNOWN}") from error
            raise RefusedError(f"The database refused the events: {problem}. Nothing was published.") from error
        if self._app is not None and (receipt.new or receipt.replaced):
            self._notify(workflow)
        return receipt

    def close(self) -> None:
        """Close the connections of this process."""
        self._db.dispose()

    @property
    def _db(self) -> Database:
        """Return the pool of this process. Connections from before a fork belong to the parent."""
        pid = os.getpid()
        return self._pools.get(pid) or self._pools.setdefault(pid, self._pool())

    def _pool(self) -> Database:
        return Database.connect(self._url, pool_size=2)

    def _publish(self, workflow: str, given: EventInputs, replace: bool) -> Receipt:
        is_one_statement = len(given) == 1 and not replace
        with self._db.autocommit() if is_one_statement else self._db.transaction() as tx:
            return publish(tx, workflow, given, replace=replace, limits=self._limits)

    def _notify(self, workflow: str) -> None:
        assert self._app is not None
        try:
            self._bounded.send(self._app, "pipeline.schedule", args=[workflow])
        except Exception as error:  # noqa: BLE001 - the events are committed, and the next tick finds them
            log.warning("the broker cannot be reached; the next tick finds the events of %r: %s", workflow, error)


class BrokerClient:
    """Hand events to the broker through the Celery app of the service. Every call ends within ``timeout``."""

    def __init__(self, app: App, *, limits: Limits = DEFAULT_LIMITS, timeout: timedelta = _TIMEOUT) -> None:
        self._app, self._limits, self._bounded = app, limits, _BoundedCalls(timeout)

    def publish(self, workflow: str, events: EventInputs, *, replace: bool = False) -> None:
        """Send events to the broker. The client checks their form; the worker checks the topic's schema."""
        here = spans.current_traceparent()
        messages = [
            event | {"traceparent": event["traceparent"] or here} for event in serialize_events(events, self._limits)
        ]
        kwargs = {"workflow": workflow, "events": messages, "replace": replace}
        shown = {"argsrepr": "()", "kwargsrepr": f"{len(messages)} events for {workflow}"}
        try:
            self._bounded.send(self._app, "pipeline.publish", kwargs=kwargs, **shown)
        except Exception as error:
            raise UnavailableError(
                f"The broker did not take the events: {type(error).__name__}: {error}. Publish them again with the "
                "same message ids."
            ) from error

    def close(self) -> None:
        """Do nothing: this client holds no connection."""


class _BoundedCalls:
    """Call functions with a time limit. A call that does not return is abandoned, with its connection."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout, self._local = timeout, threading.local()

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        if not hasattr(self._local, "steps"):
            self._local.steps = StepRunner()
        return self._local.steps.run(function, *args, limit=self._timeout, what="publish")

    def send(self, app: App, name: str, **how: Any) -> None:
        """Send a task once. The caller decides whether to try again."""

        def send() -> None:
            with spans.preserve_context():
                # JSON, whatever serializer the service uses: our workers accept nothing else
                app.send_task(name, queue=_QUEUE, serializer="json", ignore_result=True, retry=False, **how)

        self.run(send)
