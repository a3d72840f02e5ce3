"""Switches of a workflow (pause, blocks, maintenance) and the sessions that group its runs.

The operator's pause and the system's blocks are kept apart: neither overwrites the other. Maintenance is
set with the failure that causes it, together with the task that asks an operator to correct the code.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any
from uuid import UUID

from pipeline.domain.errors import InvalidInputError, NotFoundError, UnresolvedError
from pipeline.domain.states import SessionId
from pipeline.domain.values import Actor
from pipeline.domain.workflows import CLEARED_BY_RESUME, BlockKind, DesiredStatus, HandlerKind, SessionResult
from pipeline.store.database import Transaction
from pipeline.store.reads import work
from pipeline.store.writes import events as event_store
from pipeline.store.writes import handlers as handler_store
from pipeline.store.writes import runs as run_store
from pipeline.store.writes import sessions as session_store
from pipeline.store.writes import workflows as workflow_store
from pipeline.transitions import audit


def clear_unclaimed(tx: Transaction, workflow: str, names: Collection[str]) -> None:
    """Let unclaimed handlers run again, since a worker that knows them has started."""
    ids = sorted(row.id for row in work.handlers(tx, workflow) if row.name in names and row.retry_at is not None)
    if ids:
        tx.execute(handler_store.CLEAR_UNCLAIMED, ids=ids)


def pause(tx: Transaction, workflow: str, by: Actor) -> None:
    """Pause a workflow for an operator. Active runs go on; no new run starts."""
    _lock(tx, workflow)
    if tx.first(workflow_store.SET_DESIRED, name=workflow, desired=DesiredStatus.PAUSED):
        audit.record(tx, by, "workflow.pause", workflow=workflow)
        tx.log_on_commit("workflow.paused", workflow=workflow, actor=by.name)


def resume(tx: Transaction, workflow: str, by: Actor, *, forget_failures: bool = False) -> None:
    """Resume a workflow for an operator and close the blocks that an operator lifts. Runs, events and counts stay.

    ``forget_failures``: the operator also says that the cause was corrected. Otherwise the next failure is counted as
    one more of the old ones, and may block the workflow again at once. Refused, with the mutations named, while an
    unknown outcome holds the workflow back.
    """
    _lock(tx, workflow)
    unresolved = work.blocking_mutations(tx, workflow)
    if unresolved:
        raise UnresolvedError(workflow, unresolved)
    tx.first(workflow_store.SET_DESIRED, name=workflow, desired=DesiredStatus.ACTIVE)
    audit.record(tx, by, "workflow.resume", workflow=workflow)
    if forget_failures:
        _reset_failures(tx, workflow, unblocked=sorted(CLEARED_BY_RESUME))
        audit.record(tx, by, "workflow.forget_failures", workflow=workflow)
    else:
        unblock(tx, workflow, sorted(CLEARED_BY_RESUME))
    tx.log_on_commit("workflow.resumed", workflow=workflow, actor=by.name)


def block(tx: Transaction, causes: Sequence[Mapping[str, Any]]) -> None:
    """Hold workflows back, each for a ``run``, a ``kind`` and a ``reason``. The same cause twice is one block."""
    for row in tx.guarded(workflow_store.INSERT_BLOCKS, causes) if causes else ():
        tx.log_on_commit("workflow.blocked", workflow=row.workflow, run_id=row.run_id, kind=row.kind)


def unblock(tx: Transaction, workflow: str, kinds: Sequence[BlockKind]) -> None:
    """Lift a workflow's blocks of these kinds."""
    for row in tx.all(workflow_store.CLOSE_BLOCKS, workflow=workflow, kinds=[kind.value for kind in kinds]):
        tx.log_on_commit("workflow.unblocked", workflow=workflow, run_id=row.run_id, kind=row.kind)


def enter_maintenance(tx: Transaction, workflow: str, reason: str, by: Actor | None = None) -> None:
    """Start nothing until the code has changed, and open the task that asks for it.

    A request of an operator is kept in the audit.
    """
    _lock(tx, workflow)
    if tx.first(workflow_store.ENTER_MAINTENANCE, name=workflow, reason=reason):
        open_maintenance_task(tx, workflow)
        if by is not None:
            audit.record(tx, by, "workflow.enter_maintenance", workflow=workflow)
        tx.log_on_commit("workflow.maintenance_entered", workflow=workflow)


def open_maintenance_task(tx: Transaction, workflow: str) -> bool:
    """Open the maintenance task of a workflow; False if it is open already, or not needed."""
    return tx.first(workflow_store.OPEN_MAINTENANCE_TASK, name=workflow) is not None


def exit_maintenance(tx: Transaction, workflow: str, by: Actor) -> None:
    """End maintenance, since the code was corrected. Runs that wait for a retry go first."""
    _lock(tx, workflow)
    if tx.first(workflow_store.EXIT_MAINTENANCE, name=workflow):
        _reset_failures(tx, workflow)
        audit.record(tx, by, "workflow.exit_maintenance", workflow=workflow)
        tx.log_on_commit("workflow.maintenance_exited", workflow=workflow, actor=by.name)


def run_producer(tx: Transaction, workflow: str, handler: str, by: Actor) -> None:
    """Let a producer run now for an operator. Its schedule goes on after that run."""
    _lock(tx, workflow)
    if tx.first(handler_store.RUN_PRODUCER_NOW, workflow=workflow, name=handler) is None:
        producers = [row.name for row in work.handlers(tx, workflow) if row.kind == HandlerKind.PRODUCER]
        raise NotFoundError(f"producer of workflow {workflow!r} named", handler, producers)
    audit.record(tx, by, f"producer.run {handler}", workflow=workflow)


def raise_watermarks(tx: Transaction) -> None:
    """Let claims start behind what is long done.

    A watermark rises only to a horizon that was noted earlier, and only once every transaction that
    could still publish an id below it has ended: a slow publisher's event is never passed over.
    What a dump brought along from a cluster that was further on is noted anew, or forgotten.
    """
    row = tx.one(handler_store.HORIZON)
    if not row.is_first:
        raise InvalidInputError("raise_watermarks must be the first act of its transaction; nothing was changed.")
    tx.all(handler_store.LOCK_ALL_HANDLERS)
    tx.execute(handler_store.RAISE_WATERMARKS)
    tx.execute(handler_store.SET_HORIZON, horizon=row.last_value)
    tx.execute(handler_store.CLEAR_FOREIGN_SNAPSHOTS)


def _reset_failures(tx: Transaction, workflow: str, *, unblocked: Sequence[BlockKind] = ()) -> None:
    """Reset the failures of waiting runs, events and handlers, and lift these blocks: the cause was corrected."""
    tx.execute(run_store.RESET_RUN_FAILURES, workflow=workflow)
    if unblocked:
        unblock(tx, workflow, unblocked)
    tx.execute(event_store.RESET_EVENT_FAILURES, workflow=workflow)
    tx.execute(handler_store.RESET_HANDLER_FAILURES, workflow=workflow)


def _lock(tx: Transaction, workflow: str) -> None:
    if not tx.all(workflow_store.LOCK_WORKFLOWS, names=[workflow]):
        raise NotFoundError("workflow", workflow, work.workflow_names(tx))


def finish_sessions(tx: Transaction, ids: Sequence[UUID]) -> tuple[SessionId, ...]:
    """End sessions in which no run is left to go on, with their count and cost; leave the others open.

    A run that stopped has ended its session as failed already, so what is open here went well. A session whose
    workflow another transaction holds stays open too.
    """
    asked = [str(id_) for id_ in ids]
    wanted = [str(row.id) for row in tx.all(session_store.LOCK_WORKFLOWS_OF_SESSIONS, ids=asked)]
    tx.all(session_store.LOCK_SESSIONS, ids=wanted)
    finished = tx.all(session_store.FINISH_SESSIONS, ids=wanted)
    for row in finished:
        tx.log_on_commit("session.finished", session_id=row.id, workflow=row.workflow, result=SessionResult.COMPLETED)
    return tuple(SessionId(row.id) for row in finished)
