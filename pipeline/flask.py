"""Pipeline as an extension of Flask: publish in the transaction of SQLAlchemy's session."""

from collections.abc import Callable
from typing import Any

from flask import Flask, current_app

from pipeline.client.publishing import (
    WAKE_UP_TIMEOUT,
    App,
    EventInputs,
    Receipt,
    WakeUpSender,
    publish,
    wake_after_commit,
)
from pipeline.config import QUEUE_PREFIX
from pipeline.domain.codec import Codec
from pipeline.domain.errors import InvalidInputError
from pipeline.domain.values import DEFAULT_LIMITS, Limits

__all__ = ["Pipeline"]

_NAME = "pipeline"


class Pipeline:
    """Publish in the transaction of the session of a request.

    ``session`` is a ``scoped_session``, as ``db.session`` of Flask-SQLAlchemy, or a function that returns the session.
    The app's Celery app, for wake-up messages, is ``celery`` or ``app.extensions["celery"]``. The first part of the
    names of our queues is the app's PIPELINE_QUEUE_PREFIX.
    """

    def __init__(
        self,
        app: Flask | None = None,
        *,
        session: Callable[[], Any],
        celery: App | None = None,
        limits: Limits = DEFAULT_LIMITS,
        codec: Codec | None = None,
    ) -> None:
        self._session, self._celery, self._limits, self._codec = session, celery, limits, codec
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Add the extension to an app."""
        app.extensions[_NAME] = self
        app.config.setdefault("PIPELINE_QUEUE_PREFIX", QUEUE_PREFIX)

    def publish(self, workflow: str, events: EventInputs, *, replace: bool = False) -> Receipt:
        """Publish in the open transaction of the session. After its commit, wake the workflow."""
        if current_app.extensions.get(_NAME) is not self:
            raise InvalidInputError(
                f"The app {current_app.name!r} has not got this extension; expected pipeline.init_app(app) before."
            )
        session = self._session()
        receipt = publish(session, workflow, events, replace=replace, limits=self._limits, codec=self._codec)
        celery = self._celery or current_app.extensions.get("celery")
        if celery is not None and (receipt.new or receipt.replaced):
            prefix = current_app.config["PIPELINE_QUEUE_PREFIX"]
            sender = WakeUpSender(celery, timeout=WAKE_UP_TIMEOUT, queue_prefix=prefix)
            wake_after_commit(session, workflow, sender.wake_workflow)
        return receipt
