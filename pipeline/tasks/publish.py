"""The task by which services publish over the broker, from any Celery app without an import of ours.

Here the message is the only copy of an event, so it is never dropped:

- While the database cannot be used, the message is sent again.
- A message that can never be published is moved to the queue of dead letters for an operator.
- A message that cannot be sent on goes back to the broker.
"""

import logging
from collections.abc import Mapping, Sized
from inspect import signature
from typing import Any

from celery.exceptions import Reject
from celery.worker.request import Request
from sqlalchemy.exc import DataError, DBAPIError, TimeoutError

from pipeline.celery import PipelineTask, app
from pipeline.client.publishing import Receipt, publish_in_transaction
from pipeline.domain.errors import InvalidInputError
from pipeline.tasks import dead_letter, messages
from pipeline.tasks.dead_letter import KIND_HEADER, REASON_HEADER, DeadLetterKind
from pipeline.tasks.process import current_process
from pipeline.telemetry import spans

log = logging.getLogger(__name__)

_LONGEST_PAUSE = 60
_TRACE_HEADERS = ("traceparent", "tracestate")  #: headers of the trace that an event belongs to


@app.task(
    name="pipeline.publish",
    bind=True,
    base=PipelineTask,
    shared=False,
    Request="pipeline.tasks.publish:RedactedRequest",
)
def publish(self: Any, *args: Any, **kwargs: Any) -> dict[str, list[str]] | None:
    """Publish and wake the workflow: ``publish(workflow, events, replace=False)``. Repeating it changes nothing.

    It accepts any arguments, so that a call with wrong ones becomes a dead letter and is not lost.
    """
    try:
        with spans.join_trace(self.request.get("traceparent")):
            receipt = _publish(**_bound_arguments(args, kwargs))
    except DataError as error:
        _dead_letter(self, error)
    except (DBAPIError, TimeoutError) as error:
        log.warning("events cannot be published now; they are sent again: %s", error)
        retries = _retries(self.request.retries)
        _resend(self, queue=messages.publish_queue(), countdown=min(2**retries, _LONGEST_PAUSE), retries=retries + 1)
    except Exception as error:  # noqa: BLE001 - the message is kept with the reason, whatever the error
        _dead_letter(self, error)
    else:
        return {"new": [*receipt.new], "repeated": [*receipt.repeated], "replaced": [*receipt.replaced]}
    return None


def _publish(workflow: str, events: list[dict[str, Any]], replace: bool = False) -> Receipt:
    here = current_process()
    with here.db.transaction() as tx:
        receipt = publish_in_transaction(
            tx, workflow, events, replace=replace, limits=here.policy.limits, sealed_only=True
        )
    if receipt.new or receipt.replaced:
        messages.wake_workflow(workflow)
    return receipt


def _retries(given: object) -> int:
    """Return how often a message was sent again. The sender of the message may have written anything there."""
    return given if isinstance(given, int) and 0 <= given < _LONGEST_PAUSE else 0


def _bound_arguments(args: Any, kwargs: Any) -> dict[str, Any]:
    try:
        return signature(_publish).bind(*args, **kwargs).arguments
    except TypeError as error:
        raise InvalidInputError(f"{error}; expected workflow, events and, if need be, replace.") from None


def _dead_letter(task: Any, error: Exception) -> None:
    reason, queue = f"{type(error).__name__}: {error}"[:1000], dead_letter.dead_letter_queue()
    log.error("events cannot be published and were moved to %s: %s", queue.name, reason)
    _resend(task, queue=queue, headers={REASON_HEADER: reason, KIND_HEADER: str(DeadLetterKind.UNPUBLISHABLE)})
    dead_letter.count_dead_letter(DeadLetterKind.UNPUBLISHABLE)


def _resend(task: Any, *, headers: Mapping[str, str] | None = None, **how: Any) -> None:
    """Send the same message on, in its trace. If the broker refuses it, the received message is requeued."""
    given = task.request
    carried = {name: given.get(name) for name in _TRACE_HEADERS if isinstance(given.get(name), str)} | dict(
        headers or {}
    )
    named = dict(zip(("workflow", "events"), given.args or (), strict=False)) | (given.kwargs or {})
    summary = publish_repr(named.get("workflow"), named.get("events"))
    try:
        with spans.join_trace(given.get("traceparent")):  # else an instrumentation of messages would replace it
            task.apply_async(given.args, given.kwargs, headers=carried, **how, **summary)
    except Exception as error:
        raise Reject(error, requeue=True) from error


def publish_summary(workflow: object, events: object) -> str:
    """Describe a publish: how many events, and for which workflow."""
    count = len(events) if isinstance(events, Sized) else 0
    return f"{count} event{'' if count == 1 else 's'} for {str(workflow)[:100]}"


def publish_repr(workflow: object, events: object) -> dict[str, str]:
    """Return the description of a publish for its own message."""
    return {"argsrepr": "()", "kwargsrepr": publish_summary(workflow, events)}


class RedactedRequest(Request):  # type: ignore[misc]  # celery ships no types
    """A received publish that Celery's events, Flower and logs show without payloads.

    The sender of a message describes its arguments, by Celery's default with a piece of the payloads. The worker
    replaces that description before it shows it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        given = dict(zip(("workflow", "events"), self._args or (), strict=False)) | (self._kwargs or {})
        summary = publish_repr(given.get("workflow"), given.get("events"))
        self._argsrepr, self._kwargsrepr = summary["argsrepr"], summary["kwargsrepr"]
        self._request_dict.update(summary)
