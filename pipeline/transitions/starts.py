"""How runs come into being: fresh ones for what is due, and retries of stopped runs.

Both happen under the workflow's lock, where its switches and its free places are read again: no run
starts while the workflow is paused, blocked or in maintenance, and none above its concurrency.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from pipeline.domain.boundary import Side, side_of
from pipeline.domain.errors import IllegalTransitionError, InvalidInputError, NotFoundError
from pipeline.domain.ids import RunId
from pipeline.domain.scheduling import HoldReason, WorkflowFacts, hold_reason
from pipeline.domain.states import MutationOutcome, MutationStatus, Phase
from pipeline.domain.workflows import DesiredStatus, HandlerKind
from pipeline.store.database import Transaction
from pipeline.store.reads import work
from pipeline.store.schema import HandlerRow, RunRow
from pipeline.store.writes import runs as run_store
from pipeline.store.writes import sessions as session_store
from pipeline.store.writes import workflows as workflow_store

#: How far beyond what is wanted an ordered consumer searches for keys that no run holds.
_LOOK_AHEAD = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class StartResult:
    """Runs created, or the reason why there are none."""

    runs: tuple[RunRow, ...] = ()
    hold_reason: HoldReason | None = None


def start(
    tx: Transaction,
    workflow: str,
    handler: str,
    *,
    count: int = 1,
    is_unsliced: bool = False,
    slot: datetime | None = None,
) -> StartResult:
    """Create up to ``count`` runs of a handler, each with a slice of events that no other run will see.

    A workflow with one place is single-threaded: while a run waits for approval, or waits to be
    retried with a known outcome, nothing overtakes it.

    A consumer of a workflow with one place runs alone and is shown everything pending, so it gets
    one run and no slice. So does a producer, and a consumer that asked to be woken (``is_unsliced``): once
    its time has come no slice is started before that run has chosen, however much is new meanwhile. If its
    first event is being narrowed down, the run gets the slice of that event instead.
    Fewer runs than asked for means fewer slices exist.

    ``slot``: a producer starts only if this is still the slot that it runs for next.
    """
    if count < 1:
        raise InvalidInputError(f"start was asked for {count} runs of {handler!r}; expected at least 1.")
    facts, row = _workflow_facts(tx, workflow), _handler(tx, workflow, handler)
    held = hold_reason(facts)
    if held:
        return StartResult(hold_reason=held)
    if facts.concurrency == 1 and work.waiting_runs(tx, workflow):
        return StartResult(hold_reason=HoldReason.FULL)
    session_id = _open_session(tx, workflow, row.id)
    is_single, given = facts.concurrency == 1, {"workflow": workflow, "handler_id": row.id, "session_id": session_id}
    if is_unsliced or is_single or row.kind == HandlerKind.PRODUCER or (row.wake_at and row.wake_at <= tx.clock()):
        limit = work.first_slice_limit(tx, row) if row.kind == HandlerKind.CONSUMER else None
        created = _insert_slices(tx, row, given, count=1, batch=limit) if limit else ()
        created = created or tx.all(run_store.INSERT_UNSLICED, **given, is_single=is_single, slot=slot)
    else:
        created = _insert_slices(tx, row, given, count=min(count, facts.free_capacity), batch=row.batch)
    for run in created:
        tx.log_on_commit("run.started", run_id=run.id, workflow=workflow, handler=handler)
    return _start_result(tx, created, session_id)


def _insert_slices(
    tx: Transaction, handler: HandlerRow, given: dict[str, Any], *, count: int, batch: int
) -> Sequence[RunRow]:
    return tx.all(
        run_store.INSERT_SLICED,
        **given,
        count=count,
        batch=batch,
        ordered=handler.ordered,
        low_watermark=handler.low_watermark,
        window=count * batch + (_LOOK_AHEAD if handler.ordered else 0),
    )


def retry(tx: Transaction, stopped: Sequence[UUID]) -> StartResult:
    """Carry stopped runs of one workflow forward as new runs that own their inputs.

    Reservations move in the same statement, so at every instant exactly one run owns them. A run
    whose pause is not over, or that was retried meanwhile, is left out. Asking for a run
    that stands before its mutation is a bug: its inputs were released.
    """
    if not stopped:
        return StartResult()
    rows = work.runs(tx, stopped)
    workflow = _one_workflow(rows, stopped)
    facts = _workflow_facts(tx, workflow)
    _refuse_before_boundary(tx, rows)
    held = hold_reason(facts)
    if held:
        return StartResult(hold_reason=held)
    session_id = _open_session(tx, workflow, rows[0].handler_id)
    created = run_store.execute_ids(
        tx, run_store.INSERT_RETRIES, stopped, session_id=session_id, count=facts.free_capacity
    )
    for run in created:
        tx.log_on_commit("run.retried", run_id=run.id, retry_of=run.retry_of, workflow=workflow)
    return _start_result(tx, created, session_id)


def lock_workflow(tx: Transaction, workflow: str) -> None:
    """Lock the row of a workflow. Nothing starts or stops in it until this transaction ends.

    A scheduler decides afterwards what is due: facts that were read before the lock may be out of date.
    """
    if not tx.all(workflow_store.LOCK_WORKFLOWS, names=[workflow]):
        raise NotFoundError("workflow", workflow, work.workflow_names(tx))


def _workflow_facts(tx: Transaction, workflow: str) -> WorkflowFacts:
    """The workflow's switches, read after its lock is held and therefore not stale."""
    lock_workflow(tx, workflow)
    row = work.workflow_facts(tx, workflow)
    return WorkflowFacts(
        desired=DesiredStatus(row.desired),
        maintenance=row.maintenance,
        blocks=row.blocks,
        concurrency=row.concurrency,
        active_runs=row.active_runs,
    )


def _handler(tx: Transaction, workflow: str, name: str) -> HandlerRow:
    row = work.handler(tx, workflow, name)
    if row is None:
        known = [handler.name for handler in work.handlers(tx, workflow)]
        raise NotFoundError(f"handler of workflow {workflow!r} named", name, known)
    if row.retired:
        raise NotFoundError(
            f"handler of workflow {workflow!r} named",
            name,
            hint="It was retired: the workflow's code has none any more.",
        )
    return row


def _open_session(tx: Transaction, workflow: str, handler_id: int) -> UUID:
    """Open the session of a workflow if none is open. The handler has had its turn."""
    return tx.one(session_store.OPEN_SESSION, workflow=workflow, handler_id=handler_id).id


def _start_result(tx: Transaction, created: Sequence[RunRow], session_id: UUID) -> StartResult:
    """What was created; a session that got no run is as if it had never been opened."""
    if not created:
        tx.execute(session_store.DISCARD_SESSION, id=session_id)
    return StartResult(runs=tuple(created))


def _one_workflow(rows: Sequence[RunRow], asked: Sequence[UUID]) -> str:
    there = {row.id for row in rows}
    for run_id in asked:
        if run_id not in there:
            raise NotFoundError("run", run_id, hint="Nothing was changed.")
    workflows = sorted({row.workflow for row in rows})
    if len(workflows) > 1:
        raise InvalidInputError(f"Runs of one workflow at a time can be retried; these are of {', '.join(workflows)}.")
    return str(workflows[0])


def _refuse_before_boundary(tx: Transaction, rows: Sequence[RunRow]) -> None:
    carried = work.retried_run_ids(tx, [run.id for run in rows])
    ledger = {row.id: row for row in work.mutations(tx, [r.mutation_id for r in rows if r.mutation_id])}
    for run in rows:
        mutation = ledger.get(run.mutation_id) if run.mutation_id else None
        side = side_of(
            Phase(run.phase),
            MutationOutcome(run.mutation_outcome),
            MutationStatus(mutation.status) if mutation is not None else None,
        )
        keeps_inputs = run.retry_pending or run.finished_at is None or run.id in carried
        if side is Side.BEFORE and not keeps_inputs:
            raise IllegalTransitionError(
                "run",
                RunId(run.id),
                verb="retry",
                found=f"{run.phase}, {run.status}, before its mutation",
                allowed=["stopped after its mutation with its inputs kept"],
            )
