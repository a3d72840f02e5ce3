"""Send the wake-up messages of a cohort, chained in the order of its phases.

A message that cannot be sent is not an error: the run is in Postgres and the next tick dispatches it again.
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
    """Send the task of these runs, chained with the tasks of the later phases; False if the broker is away.

    Each task claims its runs anew.
    """
    ids = list(message.run_ids)
    reprs = {"argsrepr": describe_ids(ids), "kwargsrepr": message.description or "{}"}
    signatures = [
        app.signature(task.value, args=(ids, hops), immutable=True, options=reprs)
        for task in chained_tasks(message.task)
    ]
    try:
        with context.preserve_context():
            chain(*signatures).apply_async()
    except OperationalError as error:
        log.warning("the broker cannot be reached; the next tick redispatches %d runs: %s", len(ids), error)
        return False
    return True


def describe_ids(ids: Sequence[str]) -> str:
    """Describe the runs of a message for tools that show messages: one whole id, and how many."""
    return f"run {ids[0]}" if len(ids) == 1 else f"{len(ids)} runs from {ids[0]}"


def redispatch_unknown(task: PhaseTask, ids: Sequence[UUID], hops: int) -> None:
    """Dispatch runs with an unknown handler again: another worker may know it. After some hops the tick does."""
    if ids and hops < _MAX_HOPS:
        dispatch(DispatchMessage(task=task, run_ids=tuple(str(id_) for id_ in ids)), hops + 1)


def wake_workflow(workflow: str) -> bool:
    """Tell a worker that a workflow may have work. False: the broker is away, and the next tick finds the work."""
    try:
        with context.preserve_context():
            app.send_task("pipeline.schedule", args=(workflow,), expires=60)
    except OperationalError as error:
        log.warning("the broker cannot be reached; the next tick finds the work of %r: %s", workflow, error)
        return False
    return True


def dispatch_reconcile(mutation_id: str) -> None:
    """Send the task that reconciles one mutation."""
    with context.preserve_context():
        app.send_task("pipeline.reconcile", args=(mutation_id,), expires=300)


def dispatch_sweep(name: str) -> None:
    """Send the task of a sweep."""
    with context.preserve_context():
        app.send_task("pipeline.sweep", args=(name,), expires=60)
