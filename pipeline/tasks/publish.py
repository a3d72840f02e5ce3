"""The task by which services publish over the broker, from any Celery app: no import of ours is needed.

Here the message is the only copy of an event, so it is never dropped. While the database cannot be
used it is sent again; what can never be published, whatever is wrong with it, is moved to the queue
``pipeline.refused`` for a person to see. A message that cannot be sent on goes back to the broker.
"""

import logging
from collections.abc import Mapping
from inspect import signature
from typing import Any

from celery.exceptions import Reject
from sqlalchemy.exc import DataError, DBAPIError, TimeoutError

from pipeline.celery import app
from pipeline.client.publishing import Receipt
from pipeline.client.publishing import publish as publish_in
from pipeline.domain.errors import InvalidInputError
from pipeline.tasks import dead_letter, messages
from pipeline.tasks.dead_letter import KIND, REASON, REFUSED, Kind
from pipeline.tasks.process import host
from pipeline.tasks.redaction import options
from pipeline.telemetry.tracing import context

log = logging.getLogger(__name__)

_LONGEST_PAUSE = 60
_TRACE = ("traceparent", "tracestate")  #: headers that say whose trace an event belongs to


@app.task(name="pipeline.publish", bind=True, Request="pipeline.tasks.redaction:Counted")
def publish(self: Any, *args: Any, **kwargs: Any) -> dict[str, list[str]] | None:
    """``publish(workflow, events, replace=False)``: publish and ring. Repeating it changes nothing.

    Takes whatever comes, so that a call with wrong arguments is refused and not lost.
    """
    try:
        with context.joined(self.request.get("traceparent")):
            receipt = _published(**_named(args, kwargs))
    except DataError as error:
        _refuse(self, error)
    except (DBAPIError, TimeoutError) as error:
        log.warning("events cannot be published now; they are sent again: %s", error)
        _send(self, countdown=min(2**self.request.retries, _LONGEST_PAUSE), retries=self.request.retries + 1)
    except Exception as error:  # noqa: BLE001 - it is kept with its reason, whatever it is
        _refuse(self, error)
    else:
        return {"new": [*receipt.new], "repeated": [*receipt.repeated], "replaced": [*receipt.replaced]}
    return None


def _published(workflow: str, events: list[dict[str, Any]], replace: bool = False) -> Receipt:
    here = host()
    with here.db.transaction() as tx:
        receipt = publish_in(tx, workflow, events, replace=replace, limits=here.policy.limits)
    if receipt.new or receipt.replaced:
        messages.poke(workflow)
    return receipt


def _named(args: Any, kwargs: Any) -> dict[str, Any]:
    try:
        return signature(_published).bind(*args, **kwargs).arguments
    except TypeError as error:
        raise InvalidInputError(f"{error}; expected workflow, events and, if need be, replace.") from None


def _refuse(task: Any, error: Exception) -> None:
    words = f"{type(error).__name__}: {error}"[:1000]
    log.error("events cannot be published and were moved to %s: %s", REFUSED, words)
    _send(task, queue=REFUSED, headers={REASON: words, KIND: str(Kind.UNPUBLISHABLE)})
    dead_letter.count(Kind.UNPUBLISHABLE)


def _send(task: Any, *, headers: Mapping[str, str] | None = None, **how: Any) -> None:
    """Send the same message on, in its trace. If the broker does not take it, it keeps the one it has."""
    given = task.request
    carried = {name: given.get(name) for name in _TRACE if isinstance(given.get(name), str)} | dict(headers or {})
    named = dict(zip(("workflow", "events"), given.args or (), strict=False)) | (given.kwargs or {})
    said = options(named.get("workflow"), named.get("events"))
    try:
        with context.joined(given.get("traceparent")):  # or whoever traces messages would write its own over it
            task.apply_async(given.args, given.kwargs, ignore_result=True, headers=carried, **how, **said)
    except Exception as error:
        raise Reject(error, requeue=True) from error
