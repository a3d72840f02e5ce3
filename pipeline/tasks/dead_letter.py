"""Messages that no worker can work on: kept in a queue for a person, never dropped, their bodies never shown.

A message may be the only copy of an event. So what cannot be read, is no task, or names a task that nobody has,
is moved as it came, with the reason in its headers. No worker reads that queue.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any
from uuid import uuid4

from celery.worker.consumer import Consumer
from kombu.exceptions import ChannelError, ContentDisallowed

from pipeline.celery import app
from pipeline.telemetry import metrics

log = logging.getLogger(__name__)

DEAD_LETTER_QUEUE = "pipeline.dead_letters"
REASON_HEADER, KIND_HEADER, FROM_HEADER, ID_HEADER = (
    "dead-letter-reason",
    "dead-letter-kind",
    "dead-letter-from",
    "dead-letter-id",
)  #: headers in which a worker says why
DEAD_LETTER_HEADERS = (REASON_HEADER, KIND_HEADER, FROM_HEADER, ID_HEADER)
_COPIED_PROPERTIES = ("correlation_id", "reply_to", "delivery_mode")  #: properties that travel with a message
_NO_TYPE = "application/data"  #: what kombu takes a message for that names no type
_MAX_NAME = 100  #: letters of a name from outside


class DeadLetterKind(StrEnum):
    """Why a message was refused, in a word."""

    UNPUBLISHABLE = "unpublishable"  #: a publish whose events cannot be published
    UNREADABLE = "unreadable"  #: its content type is not accepted, or its body is not what the type says
    INVALID = "invalid"  #: a task that we have, in a form that it cannot have
    UNKNOWN_TASK = "unknown task"
    NO_TASK = "no task"  #: it names no task at all


def count_dead_letter(kind: DeadLetterKind, amount: int = 1) -> None:
    """Count a message that was refused."""
    metrics.record("pipeline.dead_letters", {"kind": str(kind)}, amount)


def count_zeros() -> None:
    """Begin every kind at zero: whoever watches a counter sees its first step only from there."""
    for kind in DeadLetterKind:
        count_dead_letter(kind, 0)


def move_to_dead_letters(message: Any, kind: DeadLetterKind, reason: str) -> None:
    """Move a message to the queue as it came. Raises what the broker does; then nothing was moved."""
    headers = headers_of(message)
    came = (message.delivery_info or {}).get("routing_key")
    said = {
        REASON_HEADER: reason,
        KIND_HEADER: str(kind),
        FROM_HEADER: str(came or ""),
        ID_HEADER: str(headers.get("id") or uuid4()),
    }
    with app.producer_or_acquire() as producer:
        # made here: the table of queues would make it one of those that this worker knows
        send_copy(producer, message, app.amqp.queues.new_missing(DEAD_LETTER_QUEUE), headers | said)


def send_copy(producer: Any, message: Any, to: Any, headers: Mapping[str, Any]) -> None:
    """The same message into a queue. When this returns, the broker has it."""
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
    """The headers of a message, true for the body that it has now: kombu has unpacked it, if it could."""
    headers = dict(message.headers) if isinstance(message.headers, Mapping) else {}
    if not message.errors:
        headers.pop("compression", None)
    return headers


def task_name(message: Any) -> str:
    """The task that a message names, as it may be shown; empty if it names none."""
    try:
        task = headers_of(message).get("task") or message.payload.get("task")  # by Celery's first protocol in the body
    except Exception:  # noqa: BLE001 - it cannot be read, or is of another form
        task = None
    return str(task or "")[:_MAX_NAME]


def dead_letter_depth(timeout: float = 2.0) -> int | None:
    """How many messages wait for a person; None when the broker does not say so in time."""
    found: list[int] = []
    asking = threading.Thread(target=_read_depth, args=(found, timeout), name="pipeline-dead-letters", daemon=True)
    asking.start()
    asking.join(timeout)
    return found[0] if found else None


def _read_depth(found: list[int], patience: float) -> None:
    try:
        with app.connection_for_read(connect_timeout=patience) as connection, connection.channel() as channel:
            found.append(int(channel.queue_declare(queue=DEAD_LETTER_QUEUE, passive=True).message_count))
    except ChannelError:  # a queue that nobody wrote to may not exist
        found.append(0)
    except Exception as error:  # noqa: BLE001 - whoever asked says that there was no answer
        log.debug("the broker was not asked: %s", error)


#: What a message of no possible form makes Celery raise; it would end the worker, and then the next one.
_MALFORMED_ERRORS = (AttributeError, LookupError, TypeError, ValueError)
_REQUEUE_DELAY = 1.0  #: seconds


class DeadLetterConsumer(Consumer):  # type: ignore[misc]  # celery ships no types
    """Celery's consumer, except that it discards nothing."""

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        """A body that cannot be read."""
        words = f"content of type {_content_type(message)} cannot be read; expected JSON (serializer='json')"
        self._dead_letter(message, DeadLetterKind.UNREADABLE, words, exc)

    def on_unknown_message(self, body: Any, message: Any) -> None:  # noqa: ARG002 - as Celery calls it
        """A message that names no task."""
        self._dead_letter(message, DeadLetterKind.NO_TASK, "it names no task", None)

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:  # noqa: ARG002
        """A task that is not there, or not yet."""
        words = f"there is no task {task_name(message)!r}; expected pipeline.publish"
        self._dead_letter(message, DeadLetterKind.UNKNOWN_TASK, words, exc)

    def on_invalid_task(self, body: Any, message: Any, exc: Exception) -> None:  # noqa: ARG002
        """A task in a form that it cannot have, or of a content type that is not accepted."""
        if isinstance(exc, ContentDisallowed):
            self.on_decode_error(message, exc)
        else:
            words = f"the task {task_name(message)!r} has a form that no task can have"
            self._dead_letter(message, DeadLetterKind.INVALID, words, exc)

    def create_task_handler(self, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        """What is called with every message."""
        handle = super().create_task_handler(*args, **kwargs)

        def received(message: Any) -> Any:
            try:
                return handle(message)
            except _MALFORMED_ERRORS as error:
                if message.acknowledged:
                    raise
                return self.on_invalid_task(None, message, error)

        return received

    def _dead_letter(self, message: Any, kind: DeadLetterKind, words: str, cause: Exception | None) -> None:
        """Move it and say so; if it cannot be moved, hand it back."""
        why = f"{words} ({type(cause).__name__})" if cause is not None else words
        what = "a message of %d bytes, type %s, task %r, was refused: %s"
        about = (len(message.body or b""), _content_type(message), task_name(message), why)
        errors = (*self.connection_errors, *self.channel_errors)
        try:
            move_to_dead_letters(message, kind, why)
        except Exception as error:  # noqa: BLE001 - the message is the only copy, whatever the broker says
            log.error(what + ". It cannot be moved to %s and goes back: %s", *about, DEAD_LETTER_QUEUE, error)
            # later: it comes again at once, and the broker may be in trouble for a while
            self.timer.call_after(_REQUEUE_DELAY, message.reject_log_error, (log, errors, True))
        else:
            log.error(what + ". It was moved to %s; `pipeline dead-letters list` shows it", *about, DEAD_LETTER_QUEUE)
            count_dead_letter(kind)
            message.ack_log_error(log, errors)


def _content_type(message: Any) -> str:
    return str(message.content_type or "unknown")[:100]
