"""Ringing doorbells: the messages of a cohort, chained in the order of its phases.

A message that cannot be sent is not an error: the run is in Postgres and the next tick rings again.
"""

import logging
from collections.abc import Sequence
from uuid import UUID

from celery import chain
from kombu.exceptions import OperationalError

from pipeline.background.messages import DispatchMessage
from pipeline.celery import app
from pipeline.domain.states import PhaseTask, chained_tasks
from pipeline.telemetry.tracing import context

log = logging.getLogger(__name__)

_MAX_HOPS = 8


def dispatch(message: DispatchMessage, hops: int = 0) -> bool:
    """Ring for these runs; the phases that follow are chained, and each of them claims anew. False: nobody heard."""
    ids = list(message.run_ids)
    shown = {"argsrepr": describe_ids(ids), "kwargsrepr": message.description or "{}"}
    given = [
        app.signature(task.value, args=(ids, hops), immutable=True, options=shown)
        for task in chained_tasks(message.task)
    ]
    try:
        with context.preserve_context():
            chain(*given).apply_async()
    except OperationalError as error:
        log.warning("the broker cannot be reached; the next tick redispatches %d runs: %s", len(ids), error)
        return False
    return True


def describe_ids(ids: Sequence[str]) -> str:
    """The runs of a message for whoever watches messages: one whole id, which can be looked up, and how many."""
    return f"run {ids[0]}" if len(ids) == 1 else f"{len(ids)} runs from {ids[0]}"


def redispatch_unknown(task: PhaseTask, ids: Sequence[UUID], hops: int) -> None:
    """Ring once more for runs that this worker does not know: another on the same queue may. Then the tick does."""
    if ids and hops < _MAX_HOPS:
        dispatch(DispatchMessage(task=task, run_ids=tuple(str(id_) for id_ in ids)), hops + 1)


def wake_workflow(workflow: str) -> bool:
    """Tell a worker that a workflow may have work. False: the broker is away, and the next tick finds it."""
    try:
        with context.preserve_context():
            app.send_task("pipeline.schedule", args=(workflow,), expires=60)
    except OperationalError as error:
        log.warning("the broker cannot be reached; the next tick finds the work of %r: %s", workflow, error)
        return False
    return True


def dispatch_reconcile(mutation_id: str) -> None:
    """Ring for the reconciliation of one mutation."""
    with context.preserve_context():
        app.send_task("pipeline.reconcile", args=(mutation_id,), expires=300)


def dispatch_sweep(name: str) -> None:
    """Ring for a sweep."""
    with context.preserve_context():
        app.send_task("pipeline.sweep", args=(name,), expires=60)
