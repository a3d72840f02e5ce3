"""A worker's consumer of messages: what Celery would discard, and show in the log, is kept for a person.

Only the kind, the size, the content type and the name of the task are told. A broker that does not take the copy keeps
the message itself.
"""

import logging
from collections.abc import Callable
from typing import Any

from celery.worker.consumer import Consumer
from kombu.exceptions import ContentDisallowed

from pipeline.tasks import refusals
from pipeline.tasks.refusals import Kind

log = logging.getLogger(__name__)

#: What a message of no possible form makes Celery raise; it would end the worker, and then the next one.
_MALFORMED = (AttributeError, LookupError, TypeError, ValueError)
_PAUSE = 1.0  #: seconds


class Keeping(Consumer):  # type: ignore[misc]  # celery ships no types
    """Celery's consumer, except that it discards nothing."""

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        """A body that cannot be read."""
        words = f"content of type {_type(message)} cannot be read; expected JSON (serializer='json')"
        self._keep(message, Kind.UNREADABLE, words, exc)

    def on_unknown_message(self, body: Any, message: Any) -> None:  # noqa: ARG002 - as Celery calls it
        """A message that names no task."""
        self._keep(message, Kind.NO_TASK, "it names no task", None)

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:  # noqa: ARG002
        """A task that is not there, or not yet."""
        words = f"there is no task {refusals.named(message)!r}; expected pipeline.publish"
        self._keep(message, Kind.UNKNOWN_TASK, words, exc)

    def on_invalid_task(self, body: Any, message: Any, exc: Exception) -> None:  # noqa: ARG002
        """A task in a form that it cannot have, or of a content type that is not accepted."""
        if isinstance(exc, ContentDisallowed):
            self.on_decode_error(message, exc)
        else:
            words = f"the task {refusals.named(message)!r} has a form that no task can have"
            self._keep(message, Kind.INVALID, words, exc)

    def create_task_handler(self, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        """What is called with every message."""
        handle = super().create_task_handler(*args, **kwargs)

        def received(message: Any) -> Any:
            try:
                return handle(message)
            except _MALFORMED as error:
                if message.acknowledged:
                    raise
                return self.on_invalid_task(None, message, error)

        return received

    def _keep(self, message: Any, kind: Kind, words: str, cause: Exception | None) -> None:
        """Move it and say so; if it cannot be moved, hand it back."""
        why = f"{words} ({type(cause).__name__})" if cause is not None else words
        what = "a message of %d bytes, type %s, task %r, was refused: %s"
        about = (len(message.body or b""), _type(message), refusals.named(message), why)
        errors = (*self.connection_errors, *self.channel_errors)
        try:
            refusals.keep(message, kind, why)
        except Exception as error:  # noqa: BLE001 - the message is the only copy, whatever the broker says
            log.error(what + ". It cannot be moved to %s and goes back: %s", *about, refusals.REFUSED, error)
            # later: it comes again at once, and the broker may be in trouble for a while
            self.timer.call_after(_PAUSE, message.reject_log_error, (log, errors, True))
        else:
            log.error(what + ". It was moved to %s; `pipeline refused list` shows it", *about, refusals.REFUSED)
            refusals.count(kind)
            message.ack_log_error(log, errors)


def _type(message: Any) -> str:
    return str(message.content_type or "unknown")[:100]
