"""Messages that no worker can work on: kept in a queue for a person, never dropped, their bodies never shown.

A message may be the only copy of an event. So what cannot be read, is no task, or names a task that nobody has,
is moved as it came, with the reason in its headers. No worker reads that queue.
"""

import logging
import threading
from collections.abc import Mapping
from enum import StrEnum
from typing import Any
from uuid import uuid4

from kombu.exceptions import ChannelError

from pipeline.celery import app
from pipeline.telemetry import metrics

log = logging.getLogger(__name__)

REFUSED = "pipeline.refused"
REASON, KIND, FROM, ID = "refused", "refused-kind", "refused-from", "refused-id"  #: headers in which a worker says why
OURS = (REASON, KIND, FROM, ID)
_KEPT = ("correlation_id", "reply_to", "delivery_mode")  #: properties that travel with a message
_NO_TYPE = "application/data"  #: what kombu takes a message for that names no type
_LONGEST = 100  #: letters of a name from outside


class Kind(StrEnum):
    """Why a message was refused, in a word."""

    UNPUBLISHABLE = "unpublishable"  #: a publish whose events cannot be published
    UNREADABLE = "unreadable"  #: its content type is not accepted, or its body is not what the type says
    INVALID = "invalid"  #: a task that we have, in a form that it cannot have
    UNKNOWN_TASK = "unknown task"
    NO_TASK = "no task"  #: it names no task at all


def count(kind: Kind, amount: int = 1) -> None:
    """Count a message that was refused."""
    metrics.note("pipeline.publish.refused", {"kind": str(kind)}, amount)


def count_none() -> None:
    """Begin every kind at zero: whoever watches a counter sees its first step only from there."""
    for kind in Kind:
        count(kind, 0)


def keep(message: Any, kind: Kind, words: str) -> None:
    """Move a message to the queue as it came. Raises what the broker does; then nothing was moved."""
    headers = given(message)
    came = (message.delivery_info or {}).get("routing_key")
    said = {REASON: words, KIND: str(kind), FROM: str(came or ""), ID: str(headers.get("id") or uuid4())}
    with app.producer_or_acquire() as producer:
        # made here: the table of queues would make it one of those that this worker knows
        send(producer, message, app.amqp.queues.new_missing(REFUSED), headers | said)


def send(producer: Any, message: Any, to: Any, headers: Mapping[str, Any]) -> None:
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
        **{name: message.properties[name] for name in _KEPT if message.properties.get(name)},
    )


def given(message: Any) -> dict[str, Any]:
    """The headers of a message, true for the body that it has now: kombu has unpacked it, if it could."""
    headers = dict(message.headers) if isinstance(message.headers, Mapping) else {}
    if not message.errors:
        headers.pop("compression", None)
    return headers


def named(message: Any) -> str:
    """The task that a message names, as it may be shown; empty if it names none."""
    try:
        task = given(message).get("task") or message.payload.get("task")  # by Celery's first protocol in the body
    except Exception:  # noqa: BLE001 - it cannot be read, or is of another form
        task = None
    return str(task or "")[:_LONGEST]


def depth(patience: float = 2.0) -> int | None:
    """How many messages wait for a person; None when the broker does not say so in time."""
    found: list[int] = []
    asking = threading.Thread(target=_ask, args=(found, patience), name="pipeline-refused", daemon=True)
    asking.start()
    asking.join(patience)
    return found[0] if found else None


def _ask(found: list[int], patience: float) -> None:
    try:
        with app.connection_for_read(connect_timeout=patience) as connection, connection.channel() as channel:
            found.append(int(channel.queue_declare(queue=REFUSED, passive=True).message_count))
    except ChannelError:  # a queue that nobody wrote to may not exist
        found.append(0)
    except Exception as error:  # noqa: BLE001 - whoever asked says that there was no answer
        log.debug("the broker was not asked: %s", error)
