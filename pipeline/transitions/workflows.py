"""A workflow's switches, and bringing its tables in line with its code.

A person's wish and the system's blocks are kept apart: neither overwrites the other. Maintenance is
set with the failure that causes it; the task that asks somebody to mend the code follows.
"""

from collections.abc import Collection, Sequence
from uuid import UUID

from pipeline.domain.errors import InvalidInputError, UnknownError, UnresolvedError
from pipeline.domain.values import Person
from pipeline.domain.workflows import CLEARED_BY_RESUME, BlockKind, Desired
from pipeline.store.database import Transaction, encoded
from pipeline.store.reads import work
from pipeline.store.writes import events as event_store
from pipeline.store.writes import handlers as handler_store
from pipeline.store.writes import runs as run_store
from pipeline.store.writes import workflows as workflow_store
from pipeline.transitions import audit


def heard(tx: Transaction, workflow: str, names: Collection[str]) -> None:
    """A worker that knows these handlers has begun: what rested because nobody took its runs is due again."""
    ids = sorted(row.id for row in work.handlers(tx, workflow) if row.name in names and row.retry_at is not None)
    if ids:
        tx.all(handler_store.LOCK_STATES, ids=ids)
        tx.run(handler_store.HEARD, ids=ids)


def pause(tx: Transaction, workflow: str, by: Person) -> None:
    """A person pauses a workflow. Runs in the air go on; no new one starts."""
    _lock(tx, workflow)
    if tx.first(workflow_store.SET_DESIRED, name=workflow, desired=Desired.PAUSED):
        audit.record(tx, by, "workflow.pause", workflow=workflow)
        tx.announce("workflow.paused", workflow=workflow, actor=by.name)


def resume(tx: Transaction, workflow: str, by: Person) -> None:
    """A person resumes a workflow: lifts what only waited for a person, and forgets every failure so far.

    Refused, with the mutations named, while an unknown outcome holds the workflow back.
    """
    _lock(tx, workflow)
    unresolved = work.blocking_mutations(tx, workflow)
    if unresolved:
        raise UnresolvedError(workflow, unresolved)
    tx.first(workflow_store.SET_DESIRED, name=workflow, desired=Desired.ACTIVE)
    unblock(tx, workflow, sorted(CLEARED_BY_RESUME))
    _forgive(tx, workflow)
    audit.record(tx, by, "workflow.resume", workflow=workflow)
    tx.announce("workflow.resumed", workflow=workflow, actor=by.name)


def block(tx: Transaction, workflow: str, run_id: UUID, kind: BlockKind, reason: str) -> None:
    """Hold a workflow back for one cause. The same cause twice is one block."""
    row = {"workflow": workflow, "run": run_id, "kind": kind, "reason": reason}
    if tx.all(workflow_store.INSERT_BLOCKS, rows=encoded([row])):
        tx.announce("workflow.blocked", workflow=workflow, run_id=run_id, kind=kind)


def unblock(tx: Transaction, workflow: str, kinds: Sequence[BlockKind]) -> None:
    """Lift a workflow's blocks of these kinds."""
    for row in tx.all(workflow_store.CLOSE_BLOCKS, workflow=workflow, kinds=[kind.value for kind in kinds]):
        tx.announce("workflow.unblocked", workflow=workflow, run_id=row.run_id, kind=row.kind)


def enter_maintenance(tx: Transaction, workflow: str, reason: str, by: Person | None = None) -> None:
    """Start nothing until the code has changed. What a person asks for is kept in the audit."""
    _lock(tx, workflow)
    if tx.first(workflow_store.ENTER_MAINTENANCE, name=workflow, reason=reason):
        if by is not None:
            audit.record(tx, by, "workflow.enter_maintenance", workflow=workflow)
        tx.announce("workflow.maintenance_entered", workflow=workflow)


def open_maintenance_task(tx: Transaction, workflow: str) -> bool:
    """Ask somebody to mend a workflow in maintenance; False if that was done already, or is not needed."""
    return tx.first(workflow_store.OPEN_TASK, name=workflow) is not None


def exit_maintenance(tx: Transaction, workflow: str, by: Person) -> None:
    """The code was mended. What waited to be carried forward is still waiting and goes on first."""
    _lock(tx, workflow)
    if tx.first(workflow_store.EXIT_MAINTENANCE, name=workflow):
        _forgive(tx, workflow)
        audit.record(tx, by, "workflow.exit_maintenance", workflow=workflow)
        tx.announce("workflow.maintenance_exited", workflow=workflow, actor=by.name)


def raise_watermarks(tx: Transaction) -> None:
    """Let claims start behind what is long done.

    A watermark rises only to a horizon that was noted earlier, and only once every transaction that
    could still publish an id below it has ended: a slow publisher's event is never passed over.
    What a dump brought along from a cluster that was further on is noted anew, or forgotten.
    """
    row = tx.first(handler_store.HORIZON)
    assert row is not None
    if not row.is_first:
        raise InvalidInputError("raise_watermarks must be the first act of its transaction; nothing was changed.")
    tx.all(handler_store.LOCK_HANDLERS)
    tx.run(handler_store.RAISE_WATERMARKS)
    tx.run(handler_store.SET_HORIZON, horizon=row.last_value)
    tx.run(handler_store.FORGET_STRANGE_SNAPSHOTS)


def _forgive(tx: Transaction, workflow: str) -> None:
    """Whoever mended the cause gets the whole budget again, for handlers, for waiting runs and for events."""
    for statement in (handler_store.FORGIVE, run_store.FORGIVE_RUNS, event_store.FORGIVE_EVENTS):
        tx.run(statement, workflow=workflow)


def _lock(tx: Transaction, workflow: str) -> None:
    if not tx.all(workflow_store.LOCK, names=[workflow]):
        raise UnknownError("workflow", workflow, work.workflow_names(tx))
