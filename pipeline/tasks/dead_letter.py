"""Keep messages that no worker can process in a dead-letter queue for an operator.

A message may be the only copy of an event, so none is dropped. A message is moved unchanged, with the reason in its
headers, when

- it cannot be read, or is larger or deeper than ``message_limits`` allows,
- it names no task, or
- it names a task that no worker has.

No worker reads the queue. The body of a message is never shown.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from celery.utils.imports import symbol_by_name
from kombu.exceptions import ChannelError, ContentDisallowed

from pipeline.celery import DEAD_LETTER_QUEUE, app, installed
from pipeline.tasks import message_limits
from pipeline.telemetry import metrics

log = logging.getLogger(__name__)

REASON_HEADER, KIND_HEADER, FROM_HEADER, ID_HEADER = (
    "dead-letter-reason",
    "dead-letter-kind",
    "dead-letter-from",
    "dead-letter-id",
)  #: headers that say why and from where a message was moved
DEAD_LETTER_HEADERS = (REASON_HEADER, KIND_HEADER, FROM_HEADER, ID_HEADER)
_COPIED_PROPERTIES = ("correlation_id", "reply_to", "delivery_mode")  #: properties that are copied with a message
_NO_TYPE = "application/data"  #: kombu's type of a message that names none
_MAX_NAME = 100  #: characters kept of a task name from outside


class DeadLetterKind(StrEnum):
    """Why a message was moved to the dead-letter queue."""

    UNPUBLISHABLE = "unpublishable"  #: a publish whose events cannot be published
    UNREADABLE = "unreadable"  #: its content type is not accepted, or its body is not what the type says
    INVALID = "invalid"  #: a known task in a form that no task can have
    UNKNOWN_TASK = "unknown task"
    NO_TASK = "no task"  #: it names no task at all


def dead_letter_queue() -> Any:
    """Return the queue; it is not in the table of queues, where it would become one that this worker consumes."""
    return installed().queue(DEAD_LETTER_QUEUE)


def count_dead_letter(kind: DeadLetterKind, amount: int = 1) -> None:
    """Count a message that was moved to the dead-letter queue."""
    metrics.record("pipeline.dead_letters", {"kind": str(kind)}, amount)


def count_zeros() -> None:
    """Start the counter of every kind at zero: Prometheus sees no increase in the first value of a series."""
    for kind in DeadLetterKind:
        count_dead_letter(kind, 0)


def move_to_dead_letters(message: Any, kind: DeadLetterKind, reason: str) -> None:
    """Move a message unchanged to the dead-letter queue. If the broker raises, nothing was moved."""
    headers = headers_of(message)
    source = (message.delivery_info or {}).get("routing_key")
    added = {
        REASON_HEADER: reason,
        KIND_HEADER: str(kind),
        FROM_HEADER: str(source or ""),
        ID_HEADER: str(headers.get("id") or uuid4()),
    }
    with app.producer_or_acquire() as producer:
        send_copy(producer, message, dead_letter_queue(), headers | added)


def send_copy(producer: Any, message: Any, to: Any, headers: Mapping[str, Any]) -> None:
    """Send the same message to a queue. When this returns, the broker has it."""
    body = message.body
    producer.publish(
        body.encode(errors="surrogateescape") if isinstance(body, str) else body,
        exchange=to.exchange,
        routing_key=to.routing_key,
        declare=[to],
        headers=dict(headers),
        content_type=message.content_type or _NO_TYPE,
        content_encoding=message.content_encoding or "binary",
        retry=False,
        **{name: message.properties[name] for name in _COPIED_PROPERTIES if message.properties.get(name)},
    )


def headers_of(message: Any) -> dict[str, Any]:
    """Return the headers without ``compression`` if kombu has decompressed the body."""
    headers = dict(message.headers) if isinstance(message.headers, Mapping) else {}
    if not message.errors:
        headers.pop("compression", None)
    return headers


def task_name(message: Any) -> str:
    """Return the task that a message names, shortened for display; empty if it names none."""
    try:
        task = headers_of(message).get("task") or message.payload.get("task")  # by Celery's first protocol in the body
    except Exception:  # noqa: BLE001 - it cannot be read, or is of another form
        task = None
    return str(task or "")[:_MAX_NAME]


def dead_letter_depth(timeout: float = 2.0) -> int | None:
    """Return how many messages wait for an operator; None when the broker does not answer in time."""
    found: list[int] = []
    reading = threading.Thread(target=_read_depth, args=(found, timeout), name="pipeline-dead-letters", daemon=True)
    reading.start()
    reading.join(timeout)
    return found[0] if found else None


def _read_depth(found: list[int], timeout: float) -> None:
    try:
        with app.connection_for_read(connect_timeout=timeout) as connection, connection.channel() as channel:
            found.append(int(channel.queue_declare(queue=dead_letter_queue().name, passive=True).message_count))
    except ChannelError:  # a queue without a message yet may not exist
        found.append(0)
    except Exception as error:  # noqa: BLE001 - the caller shows that there was no answer
        log.debug("the depth of the dead-letter queue could not be read: %s", error)


#: What Celery raises for a malformed message. Uncaught, it would end this worker, and then the next one.
_MALFORMED_ERRORS = (AttributeError, LookupError, TypeError, ValueError)
_REQUEUE_DELAY = 1.0  #: seconds
_ACCEPTED = {"application/json"}


def dead_letter_consumer(base: Any) -> Any:
    """Return a subclass of the consumer class of a worker that moves our messages instead of discarding them."""
    return type("DeadLetterConsumer", (DeadLetterMixin, symbol_by_name(base)), {})


class DeadLetterMixin:
    """Moves messages to the dead-letter queue instead of discarding them.

    Messages of other queues, which the app that Pipeline is installed in has for its own tasks, are left to Celery.
    """

    if TYPE_CHECKING:
        timer: Any
        connection_errors: tuple[type[Exception], ...]
        channel_errors: tuple[type[Exception], ...]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        message_limits.accept_raw_entries(dead_letter_queue().name)
        if installed().is_own:  # it counts for every message of the process
            message_limits.bound_decompression()
        super().__init__(*args, **kwargs)

    def on_decode_error(self, message: Any, exc: Exception) -> Any:
        """Move a message whose body cannot be read."""
        if not _is_ours(message):
            return super().on_decode_error(message, exc)  # type: ignore[misc]
        reason = f"content of type {_content_type(message)} cannot be read; expected JSON (serializer='json')"
        return self._dead_letter(message, DeadLetterKind.UNREADABLE, reason, exc)

    def on_unknown_message(self, body: Any, message: Any) -> Any:
        """Move a message that names no task."""
        if not _is_ours(message):
            return super().on_unknown_message(body, message)  # type: ignore[misc]
        return self._dead_letter(message, DeadLetterKind.NO_TASK, "it names no task", None)

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> Any:
        """Move a message whose task this worker does not have."""
        if not _is_ours(message):
            return super().on_unknown_task(body, message, exc)  # type: ignore[misc]
        reason = f"there is no task {task_name(message)!r}; expected pipeline.publish"
        return self._dead_letter(message, DeadLetterKind.UNKNOWN_TASK, reason, exc)

    def on_invalid_task(self, body: Any, message: Any, exc: Exception) -> Any:
        """Move a task that is malformed, or of a content type that is not accepted."""
        if not _is_ours(message):
            return super().on_invalid_task(body, message, exc)  # type: ignore[misc]
        if isinstance(exc, ContentDisallowed):
            return self.on_decode_error(message, exc)
        reason = f"the task {task_name(message)!r} has a form that no task can have"
        return self._dead_letter(message, DeadLetterKind.INVALID, reason, exc)

    def create_task_handler(self, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        """Return Celery's handler of a message, with malformed messages moved."""
        handle = super().create_task_handler(*args, **kwargs)  # type: ignore[misc]

        def received(message: Any) -> Any:
            if not _is_ours(message):
                return handle(message)
            message.accept = _ACCEPTED  # whatever else the app accepts
            message.reject_log_error = partial(self._return_message, message)
            try:
                if not message.errors:
                    if problem := message_limits.problem_of(message):
                        return self._dead_letter(message, DeadLetterKind.INVALID, problem, None)
                    message_limits.forget_time_limits(message)
            except Exception as error:  # noqa: BLE001 - whatever the parser raises, the body cannot be read
                return self.on_decode_error(message, error)
            try:
                return handle(message)
            except _MALFORMED_ERRORS as error:
                if message.acknowledged:
                    raise
                return self.on_invalid_task(None, message, error)

        return received

    def _dead_letter(self, message: Any, kind: DeadLetterKind, problem: str, cause: Exception | None) -> None:
        """Move a message and log it; if it cannot be moved, return it to its queue."""
        reason = f"{problem} ({type(cause).__name__})" if cause is not None else problem
        what = "a message of %d bytes, type %s, task %r, was refused: %s"
        about = (len(message.body or b""), _content_type(message), task_name(message), reason)
        errors = (*self.connection_errors, *self.channel_errors)
        try:
            move_to_dead_letters(message, kind, reason)
        except Exception as error:  # noqa: BLE001 - the message may be the only copy, whatever the error
            log.error(what + ". It cannot be moved to %s and goes back: %s", *about, dead_letter_queue().name, error)
            # after a pause: it is delivered again at once, and the broker may fail for a while
            self.timer.call_after(_REQUEUE_DELAY, self._return_message, (message, log, self.connection_errors, True))
        else:
            log.error(
                what + ". It was moved to %s; `pipeline dead-letters list` shows it", *about, dead_letter_queue().name
            )
            count_dead_letter(kind)
            message.ack_log_error(log, errors)

    def _return_message(self, message: Any, logger: logging.Logger, errors: Any, requeue: bool = False) -> None:
        """Reject a message as Celery does. One that Celery would drop, as for a time of start in the year 1, is moved.

        If the broker cannot take it back now, as when it is full, try again. Uncaught, its error would end this worker.
        """
        if not requeue:
            return self._dead_letter(message, DeadLetterKind.INVALID, "no worker can execute it", None)
        try:
            message.reject(requeue=requeue)
        except errors as error:
            logger.critical("a message cannot be returned over a lost connection: %r", error, exc_info=True)
        except self.channel_errors as error:
            logger.error("a message cannot be returned to its queue now; it is tried again: %s", error)
            self.timer.call_after(_REQUEUE_DELAY, self._return_message, (message, logger, errors, requeue))


def _is_ours(message: Any) -> bool:
    """Return whether a message was sent to one of our queues; in our own app every message is ours."""
    found = installed()
    return found.is_own or found.is_ours(str((message.delivery_info or {}).get("routing_key") or ""))


def _content_type(message: Any) -> str:
    return str(message.content_type or "unknown")[:100]
