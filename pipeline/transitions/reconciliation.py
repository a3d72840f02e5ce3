"""Reconcile attempts that could not be made or gave no verdict: postponed, and escalated to an operator in the end."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from uuid import UUID

from pipeline.domain.payloads import storable_text
from pipeline.domain.states import MutationId, RunId
from pipeline.domain.values import Actor
from pipeline.domain.workflows import BlockKind, OnUncertain
from pipeline.store.database import Transaction, encode_rows
from pipeline.store.reads import work
from pipeline.store.rows import BookedMutationRow
from pipeline.store.schema import MutationRow
from pipeline.store.writes import mutations as mutation_store
from pipeline.store.writes import runs as run_store
from pipeline.store.writes import workflows as workflow_store
from pipeline.transitions import audit
from pipeline.transitions.mutations import log_mutation

_DEFER_FOR = timedelta(seconds=30)  #: until another worker may try
_ESCALATE_AFTER = timedelta(hours=1)  #: without a reconcile attempt
_SWEEP = "reconcile"


def defer(tx: Transaction, row: MutationRow, reason: str) -> datetime | None:
    """Defer a reconcile attempt that this process cannot make. After an hour without one, escalate.

    Return until when it is deferred. A worker that is given this time may make the attempt before. None: it was
    escalated, or another worker booked or deferred it since ``row`` was read.

    The hour counts from the first deferral after the last attempt, or from the doubt if there was no attempt. An
    attempt in the quiet period is not counted, but it was one: it put the next attempt off to the end of the period.
    """
    since = row.reconcile_deferred_since
    was_early = row.next_reconcile_at != row.doubted_at
    if since is None and not row.reconcile_attempts and not was_early:
        since = row.doubted_at
    if since is not None and tx.clock() - since > _ESCALATE_AFTER:
        escalate(tx, [row.id], reason)
        return None
    deferred = tx.first(mutation_store.DEFER, id=row.id, after=_DEFER_FOR, next_reconcile_at=row.next_reconcile_at)
    if deferred is None:
        return None
    if row.reconcile_deferred_since is None:
        by = Actor(name=_SWEEP, reason=reason, evidence={"reconcile_attempts": row.reconcile_attempts})
        audit.record(
            tx, by, "mutation.reconcile_deferred", workflow=row.workflow, run_id=row.run_id, mutation_id=row.id
        )
    return deferred.next_reconcile_at


def add_cost(tx: Transaction, mutation_id: MutationId, cost: Decimal) -> None:
    """Add what a reconcile attempt in the background has cost to the run of its mutation."""
    tx.execute(run_store.ADD_COST, mutation_id=mutation_id, cost=cost)


def book(
    tx: Transaction,
    attempts: Sequence[tuple[MutationId, int, timedelta]],
    *,
    deferred_until: datetime | None = None,
) -> tuple[BookedMutationRow, ...]:
    """Book the next reconcile attempt before this one begins: (mutation, attempts so far, delay).

    A reconcile that takes its worker down has then already been counted and cannot spin. What is
    missing from the result was booked by another worker or is no longer in doubt.

    An attempt that was deferred until ``deferred_until`` counts as due. Booking changes that time: one worker gets it.
    """
    rows = [{"mutation_id": id_, "attempts": count, "delay": delay} for id_, count, delay in attempts]
    host_clock = tx.host_clock()
    return tuple(tx.guarded(mutation_store.BOOK, rows, deferred_until=deferred_until, host_clock=host_clock))


def postpone(
    tx: Transaction, mutation_id: MutationId, *, after: timedelta | None = None, until_quiet: bool = False
) -> None:
    """Postpone the next attempt: to the time that the connector named, or to the end of the quiet period."""
    tx.execute(
        mutation_store.POSTPONE, id=mutation_id, after=after, until_quiet=until_quiet, host_clock=tx.host_clock()
    )


def escalate(tx: Transaction, ids: Sequence[UUID], reason: str, *, detail: str = "") -> tuple[MutationRow, ...]:
    """Give mutations to an operator. The workflow waits, or only the events of the run do.

    ``detail`` is text of the outside system: it is kept in the ledger, and never logged.
    """
    reason = storable_text(reason)
    kept = storable_text(f"{reason}: {detail}") if detail else reason
    workflow_store.lock_workflows_of_runs(tx, _run_ids(tx, ids))
    landed = run_store.execute_ids(tx, mutation_store.ESCALATE, ids, reason=kept)
    blocks = [
        {"workflow": row.workflow, "run": row.run_id, "kind": BlockKind.RECONCILIATION, "reason": kept}
        for row in landed
        if _pauses_on_uncertain(tx, row.workflow)
    ]
    tx.all(workflow_store.INSERT_BLOCKS, rows=encode_rows(blocks))
    for row in landed:
        log_mutation(tx, "mutation.escalated", row, reason=reason)
    return tuple(landed)


def _run_ids(tx: Transaction, ids: Sequence[UUID]) -> list[str]:
    return [str(RunId(row.run_id)) for row in work.mutations(tx, ids)]


def _pauses_on_uncertain(tx: Transaction, workflow: str) -> bool:
    row = work.workflow(tx, workflow)
    return row is not None and row.on_uncertain == OnUncertain.PAUSE
