"""Send the wake-up messages of a cohort, chained in the order of its phases.

A message that cannot be sent is not an error: the run is in Postgres and the next tick dispatches it again.
"""

import hashlib
import logging
from collections.abc import Collection, Iterable, Sequence
from typing import Any
from uuid import UUID

from celery import chain
from kombu.exceptions import ChannelError, OperationalError

from pipeline.background.messages import DispatchMessage, ReconcileMessage
from pipeline.celery import RECONCILE_QUEUE, SCHEDULE_QUEUE, SEND_OPTIONS, app, installed
from pipeline.client.publishing import PUBLISH_QUEUE
from pipeline.config import MAX_QUEUE_PREFIX
from pipeline.domain.states import PhaseTask, chained_tasks
from pipeline.telemetry import spans

log = logging.getLogger(__name__)

_MAX_HOPS = 8
_MAX_QUEUE_NAME = 255  #: bytes, in AMQP
#: Messages in a queue of reconcile attempts above which none is added: no worker reads it, and the sweep goes on.
_MAX_WAITING = 1000


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
        with spans.preserve_context():
            chain(*signatures).apply_async(**SEND_OPTIONS)
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
        with spans.preserve_context():
            app.send_task("pipeline.schedule", args=(workflow,), expires=60, **SEND_OPTIONS)
    except OperationalError as error:
        log.warning("the broker cannot be reached; the next tick finds the work of %r: %s", workflow, error)
        return False
    return True


def dispatch_reconcile(mutation_ids: Sequence[str]) -> bool:
    """Send the task that reconciles these mutations. False: the broker is away, and the sweep sends it later."""
    try:
        with spans.preserve_context():
            app.send_task("pipeline.reconcile", args=([*mutation_ids],), expires=300, **SEND_OPTIONS)
    except OperationalError as error:
        count = len(mutation_ids)
        log.warning("the broker cannot be reached; the sweep reconciles %d mutations later: %s", count, error)
        return False
    return True


def redispatch_reconcile(message: ReconcileMessage) -> None:
    """Send a reconcile attempt to the workers that know its workflow. If it is lost, the sweep sends it again."""
    queue = _reconcile_queue(message.workflow, message.version)
    until = message.deferred_until.isoformat()
    if _is_full(queue.name):
        return
    try:
        with spans.preserve_context():
            app.send_task(
                "pipeline.reconcile", args=([message.mutation_id], until), queue=queue, expires=300, **SEND_OPTIONS
            )
    except OperationalError as error:
        log.warning("the broker cannot be reached; the sweep reconciles %s later: %s", message.mutation_id, error)


def consume_more_queues(workflows: Iterable[tuple[str, int]]) -> None:
    """Let this worker read what other services send, and the reconcile attempts of its workflows.

    A worker that does not read the queue of the sweeps reads neither. These queues are not in the table of queues
    before a worker starts, so `celery purge` does not empty them.
    """
    queues = app.amqp.queues
    if f"{installed().prefix}.{SCHEDULE_QUEUE}" in queues.consume_from:
        queues.select_add(publish_queue())
        for name, version in workflows:
            queues.select_add(_reconcile_queue(name, version))


def publish_queue() -> Any:
    """Return the queue of what other services send."""
    return installed().queue(PUBLISH_QUEUE)


def _reconcile_queue(workflow: str, version: int) -> Any:
    """The queue that workers with this version of a workflow read. A name that is too long is replaced by its hash."""
    name = f"{workflow}.{version}"
    if len(name.encode()) > _MAX_QUEUE_NAME - MAX_QUEUE_PREFIX - len(f".{RECONCILE_QUEUE}."):
        name = hashlib.sha256(name.encode()).hexdigest()
    # not from the table of queues: in it, the queue would become one that this worker reads
    return installed().queue(f"{RECONCILE_QUEUE}.{name}")


def _is_full(queue: str) -> bool:
    with app.connection_for_write(connect_timeout=2) as connection:
        try:
            return queue_depth(connection, queue) >= _MAX_WAITING
        except connection.connection_errors:
            return False  # sending says that the broker is away


def queue_depth(connection: Any, queue: str) -> int:
    """How many messages wait in a queue."""
    with connection.channel() as channel:
        try:
            return int(channel.queue_declare(queue=queue, passive=True).message_count)
        except ChannelError:  # a queue that is empty may not exist
            return 0


def queue_lengths(names: Collection[str]) -> dict[str, int] | None:
    """How many messages wait in these queues and in those of every worker; None while the broker is away."""
    with app.connection_for_read(connect_timeout=2) as connection:
        try:
            return {name: queue_depth(connection, name) for name in sorted({*names, *app.amqp.queues})}
        except connection.connection_errors:
            return None


def dispatch_sweep(name: str) -> None:
    """Send the task of a sweep."""
    with spans.preserve_context():
        app.send_task(f"pipeline.sweep.{name}", expires=60, **SEND_OPTIONS)
