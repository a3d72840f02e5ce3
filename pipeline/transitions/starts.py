"""How runs come into being: fresh ones for what is due, and retries of stopped runs.

Both happen under the workflow's lock, where its switches and its free places are read again: no run
starts while the workflow is paused, blocked or in maintenance, and none above its concurrency.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from pipeline.domain.boundary import Side, side_of
from pipeline.domain.errors import IllegalTransitionError, InvalidInputError, NotFoundError
from pipeline.domain.scheduling import HoldReason, WorkflowFacts, hold_reason
from pipeline.domain.states import MutationOutcome, MutationStatus, Phase, RunId
from pipeline.domain.workflows import HandlerKind
from pipeline.store.database import Transaction
from pipeline.store.reads import work
from pipeline.store.rows import HandlerFactsRow, StartedRunRow
from pipeline.store.schema import RunRow
from pipeline.store.writes import runs as run_store
from pipeline.store.writes import workflows as workflow_store

#: How far beyond what is wanted an ordered consumer searches for keys that no run holds.
_LOOK_AHEAD = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class StartResult:
    """Runs created, or the reason why there are none."""

    started: tuple[StartedRunRow, ...] = ()
    hold_reason: HoldReason | None = None

    @property
    def runs(self) -> tuple[RunRow, ...]:
        """The runs, without what only their messages need."""
        return self.started

    @property
    def has_more(self) -> bool:
        """Whether the handler may have more to start, given a free place."""
        return any(run.has_more for run in self.started)


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedWorkflow:
    """A workflow whose lock this transaction holds, with the facts that were read under it."""

    name: str
    facts: WorkflowFacts
    handlers: Sequence[HandlerFactsRow]


def start(
    tx: Transaction,
    workflow: str | LockedWorkflow,
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
    ``workflow``: its name. If this transaction has locked it already, the result of that: then this is one statement.
    """
    if count < 1:
        raise InvalidInputError(f"start was asked for {count} runs of {handler!r}; expected at least 1.")
    locked = lock_workflow(tx, workflow) if isinstance(workflow, str) else workflow
    row = next((row for row in locked.handlers if row.name == handler), None)
    if row is None:
        raise _refused_handler(tx, locked.name, handler)
    held = hold_reason(locked.facts)
    if held:
        return StartResult(hold_reason=held)
    is_single = locked.facts.concurrency == 1
    if is_unsliced or is_single or row.kind == HandlerKind.PRODUCER or (row.wake_at and row.wake_at <= row.now):
        created = _insert_slices(tx, row, count=1, batch=row.slice_limit) if row.slice_limit else ()
        created = created or tx.all(
            run_store.INSERT_UNSLICED, workflow=locked.name, handler_id=row.id, is_single=is_single, slot=slot
        )
    else:
        created = _insert_slices(tx, row, count=min(count, locked.facts.free_capacity), batch=row.batch)
    for run in created:
        tx.log_on_commit("run.started", run_id=run.id, workflow=locked.name, handler=handler)
    return StartResult(started=tuple(created))


def _insert_slices(tx: Transaction, handler: HandlerFactsRow, *, count: int, batch: int) -> Sequence[StartedRunRow]:
    """Insert a run for each of the first slices. One event more than they hold tells whether there are more."""
    return tx.all(
        run_store.INSERT_SLICED,
        workflow=handler.workflow,
        handler_id=handler.id,
        count=count,
        batch=batch,
        ordered=handler.ordered,
        low_watermark=handler.low_watermark,
        window=count * batch + 1 + (_LOOK_AHEAD if handler.ordered else 0),
    )


def retry(tx: Transaction, stopped: Sequence[UUID], *, locked: LockedWorkflow | None = None) -> StartResult:
    """Carry stopped runs of one workflow forward as new runs that own their inputs.

    Reservations move in the same statement, so at every instant exactly one run owns them. A run
    whose pause is not over, or that was retried meanwhile, is left out. Asking for a run
    that stands before its mutation is a bug: its inputs were released.

    ``locked``: the workflow, if this transaction has read these runs under its lock. Then this is one statement.
    """
    if not stopped:
        return StartResult()
    if locked is None:
        rows = work.runs(tx, stopped)
        locked = lock_workflow(tx, _one_workflow(rows, stopped))
        _refuse_before_boundary(tx, rows)
        handler_id = rows[0].handler_id
    else:
        handler_id = next(row.id for row in locked.handlers if str(stopped[0]) in row.retryable)
    held = hold_reason(locked.facts, is_retry=True)
    if held:
        return StartResult(hold_reason=held)
    given = {"workflow": locked.name, "handler_id": handler_id, "count": locked.facts.free_capacity}
    created = run_store.execute_ids(tx, run_store.INSERT_RETRIES, stopped, **given)
    for run in created:
        tx.log_on_commit("run.retried", run_id=run.id, retry_of=run.retry_of, workflow=locked.name)
    return StartResult(started=tuple(created))


def lock_workflow(tx: Transaction, workflow: str) -> LockedWorkflow:
    """Lock the row of a workflow, then read what is due in it: one statement with a snapshot from after the lock.

    Nothing starts or stops in the workflow until this transaction ends. Facts that were read before the lock may be
    out of date.
    """
    handlers = tx.all(workflow_store.LOCK_AND_READ_FACTS, workflow=workflow)
    row = handlers[0] if handlers else work.workflow_facts(tx, workflow)
    if row is None:
        raise NotFoundError("workflow", workflow, work.workflow_names(tx))
    return LockedWorkflow(name=workflow, facts=WorkflowFacts.of(row), handlers=handlers)


def _refused_handler(tx: Transaction, workflow: str, name: str) -> NotFoundError:
    """The error that says why a handler which is not current cannot start."""
    what, known = f"handler of workflow {workflow!r} named", [row.name for row in work.handlers(tx, workflow)]
    if name not in known:
        return NotFoundError(what, name, known)
    return NotFoundError(what, name, hint="It was retired: the workflow's code has none any more.")


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
