"""Clients for services: the same method whether events go straight to the database or over the broker.

``DatabaseClient`` has committed when it returns, and says what was new. ``BrokerClient`` has handed the
events to the broker when it returns; a worker publishes them. Both ring, so that nobody waits for a
tick: the database client through the Celery app of the service, if it is given one.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from sqlalchemy.exc import InterfaceError, OperationalError

from pipeline.client.publishing import Event, Receipt, checked, publish
from pipeline.config import database_url_of
from pipeline.domain.errors import PipelineError
from pipeline.store.database import Database
from pipeline.telemetry import contexts

log = logging.getLogger(__name__)

_QUEUE = "pipeline.schedule"
Given = Sequence[Event | Mapping[str, Any]]


class UnavailableError(PipelineError):
    """What a client speaks to cannot be reached. It is safe to try again: the message ids see to that."""


class App(Protocol):
    """A Celery app, of the service's own."""

    def send_task(self, name: str, *args: Any, **kwargs: Any) -> Any: ...


class Client(Protocol):
    """What every client can do."""

    def publish(self, workflow: str, given: Given, *, replace: bool = False) -> Receipt | None:
        """Publish events. None when a worker will find out which were new."""
        ...

    def close(self) -> None:
        """Give connections back."""
        ...


class DatabaseClient:
    """Publishes in a transaction of its own."""

    def __init__(self, database_url: str, app: App | None = None) -> None:
        self._db, self._app = Database.connect(database_url_of(database_url), pool_size=2), app

    def publish(self, workflow: str, given: Given, *, replace: bool = False) -> Receipt:
        """Publish and commit; then ring, if there is something new and somebody to ring with."""
        try:
            with self._db.transaction() as tx:
                receipt = publish(tx, workflow, given, replace=replace)
        except (OperationalError, InterfaceError) as error:
            raise UnavailableError(
                f"The database cannot be reached: {str(error.orig).strip()}. Whether the events are there is unknown; "
                "publish them again with the same message ids."
            ) from error
        if self._app is not None and (receipt.new or receipt.replaced):
            self._ring(workflow)
        return receipt

    def close(self) -> None:
        """Give connections back."""
        self._db.dispose()

    def _ring(self, workflow: str) -> None:
        assert self._app is not None
        try:
            with contexts.kept():
                self._app.send_task("pipeline.schedule", args=[workflow], queue=_QUEUE, ignore_result=True)
        except Exception as error:  # noqa: BLE001 - the events are there, and the next tick finds them
            log.warning("the broker cannot be reached; the next tick finds the events of %r: %s", workflow, error)


class BrokerClient:
    """Hands events to the broker through the service's own Celery app."""

    def __init__(self, app: App) -> None:
        self._app = app

    def publish(self, workflow: str, given: Given, *, replace: bool = False) -> None:
        """Send events on their way. Their form is checked here, their fit to the topic by the worker."""
        here = contexts.current()
        events = [
            event.model_dump(mode="json") | {"traceparent": event.traceparent or here} for event in checked(given)
        ]
        kwargs = {"workflow": workflow, "events": events, "replace": replace}
        shown = {"argsrepr": "()", "kwargsrepr": f"{len(events)} events for {workflow}"}
        try:
            with contexts.kept():
                self._app.send_task("pipeline.publish", kwargs=kwargs, queue=_QUEUE, ignore_result=True, **shown)
        except Exception as error:
            raise UnavailableError(
                f"The broker did not take the events: {type(error).__name__}: {error}. Publish them again with the "
                "same message ids."
            ) from error

    def close(self) -> None:
        """Nothing is held."""
