"""The task by which services publish over the broker, from any Celery app: no import of ours is needed.

Here the message is the only copy of an event, so it is never dropped: while the database is away it is
sent again, and what cannot be published is moved to the queue ``pipeline.refused`` for a person to see.
"""

import logging
from typing import Any

from sqlalchemy.exc import InterfaceError, OperationalError

from pipeline.celery import app
from pipeline.client.publishing import publish as publish_in
from pipeline.domain.errors import PipelineError
from pipeline.tasks import chains
from pipeline.tasks.host import host
from pipeline.tasks.shown import options
from pipeline.telemetry import contexts

log = logging.getLogger(__name__)

REFUSED = "pipeline.refused"
_LONGEST_PAUSE = 60


@app.task(name="pipeline.publish", bind=True, max_retries=None, Request="pipeline.tasks.shown:Counted")
def publish(self: Any, workflow: str, events: list[dict[str, Any]], replace: bool = False) -> None:
    """Publish events to topics of a workflow and ring for it. Repeating it changes nothing."""
    try:
        with contexts.joined(self.request.get("traceparent")), host().db.transaction() as tx:
            receipt = publish_in(tx, workflow, events, replace=replace)
    except (OperationalError, InterfaceError) as error:
        pause = min(2**self.request.retries, _LONGEST_PAUSE)
        raise self.retry(exc=error, countdown=pause, **options(workflow, events)) from error
    except (PipelineError, TypeError) as error:
        log.exception("events of workflow %r cannot be published; they were moved to %s", workflow, REFUSED)
        kept = {"workflow": workflow, "events": events, "replace": replace}
        why = {"refused": str(error)[:1000]}
        app.send_task("pipeline.publish", kwargs=kept, queue=REFUSED, headers=why, **options(workflow, events))
        return
    if receipt.new or receipt.replaced:
        chains.poke(workflow)
