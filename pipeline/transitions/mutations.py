"""Transitions of mutations by workers: requested, sent, applied, failed.

A mutation is committed as in flight before the outside system can see it, and its verdict moves the run in
the same statement. Verdicts of the worker carry its fence; verdicts found out later find the run
stopped in doubt. "It was not found" counts only once the request can no longer be travelling.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, TypeVar
from uuid import UUID

from pipeline.domain.codec import is_sealed, seal
from pipeline.domain.errors import (
    IllegalTransitionError,
    InvalidInputError,
    NotFoundError,
    PipelineError,
    QuietPeriodError,
    StaleWriteError,
)
from pipeline.domain.operations import MAX_MESSAGE_IDS, bounded_line
from pipeline.domain.payloads import checked_json, checked_name, storable_text
from pipeline.domain.states import Fence, MutationId, MutationStatus, Phase, RunId
from pipeline.domain.values import DEFAULT_LIMITS, AppliedMutation, FailedMutation, Limits, Request, RunLease
from pipeline.domain.workflows import AfterFailedMutation
from pipeline.store.codecs import refusal
from pipeline.store.database import Transaction
from pipeline.store.reads import work
from pipeline.store.rows import FailedMutationRow, RunMutationRow, SentMutationRow
from pipeline.store.schema import MutationRow
from pipeline.store.writes import events as event_store
from pipeline.store.writes import mutations as mutation_store
from pipeline.store.writes import runs as run_store
from pipeline.transitions.results import BatchResult, Transition, match_results


def log_mutation(tx: Transaction, name: str, row: MutationRow, **more: Any) -> None:
    """Queue the line of a mutation: what it calls, for which input, and how long the call took."""
    known = row.resolved_at or row.doubted_at
    if row.message_ids:
        more = {"message_id": row.message_ids[0], "inputs": row.message_count, **more}
    if row.sent_at is not None and known is not None:
        more["duration"] = round((known - row.sent_at).total_seconds(), 3)
    tx.log_on_commit(
        name,
        run_id=row.run_id,
        mutation_id=row.id,
        workflow=row.workflow,
        operation=f"{row.connector}.{row.operation}",
        **more,
    )


def record_time_to_resolution(tx: Transaction, row: MutationRow, verdict: str) -> None:
    """Count how long a mutation was in doubt, if it was."""
    if row.doubted_at is not None:
        assert row.resolved_at is not None
        labels = {"connector": row.connector, "operation": row.operation, "verdict": verdict}
        tx.count_on_commit(
            "pipeline.mutation.time_to_resolution", labels, (row.resolved_at - row.doubted_at).total_seconds()
        )


AnyMutationRow = TypeVar("AnyMutationRow", bound=MutationRow)

IN_DOUBT = [MutationStatus.NEEDS_RECONCILE, MutationStatus.INDETERMINATE]


def begin_mutation(
    tx: Transaction, cohort: Sequence[Request], limits: Limits = DEFAULT_LIMITS
) -> BatchResult[SentMutationRow]:
    """Write each request into the ledger: in flight, or pending approval.

    The lease must still be held and is extended to cover the send deadline, so the rescuer cannot take the
    run for dead while its request may still leave.
    """
    _check_requests(cohort)
    landed = tx.guarded(mutation_store.BEGIN, [_request_row(item, limits) for item in cohort], opened_at=tx.opened_at)
    for row in landed:
        tx.log_on_commit(
            "run.mutating", run_id=row.run_id, mutation_id=row.id, workflow=row.workflow, status=row.status
        )
    move = Transition(verb="begin_mutation", phases=[Phase.PREPARED], condition=" with inputs and no open breaker")
    return match_results(tx, [item.lease for item in cohort], landed, key=lambda row: row.run_id, transition=move)


def send(
    tx: Transaction, cohort: Sequence[RunLease], bounds: Mapping[RunLease, tuple[timedelta, timedelta]] | None = None
) -> BatchResult[SentMutationRow]:
    """Put approved mutations in flight, exactly as they were approved.

    ``bounds`` are timeout and settle window as the code has them now: it may be newer than the request.
    """
    rows = [
        {"run": held.run_id, "fence": held.fence, "timeout": timeout, "settle": settle}
        for held in cohort
        for timeout, settle in [(bounds or {}).get(held, (None, None))]
    ]
    landed = tx.guarded(mutation_store.SEND, rows, opened_at=tx.opened_at)
    for row in landed:
        log_mutation(tx, "mutation.sent", row)
    move = Transition(verb="send", phases=[Phase.MUTATING], condition=" with an approved mutation")
    return match_results(tx, cohort, landed, key=lambda row: row.run_id, transition=move)


def resend(
    tx: Transaction, cohort: Sequence[RunLease], costs: Mapping[RunLease, Decimal | None] | None = None
) -> BatchResult[SentMutationRow]:
    """Attempt mutations again that are known not to have happened: counted, and with a new deadline, before they go.

    ``costs`` are those of the attempts before.
    """
    rows = [{"run": held.run_id, "fence": held.fence, "cost": (costs or {}).get(held)} for held in cohort]
    landed = tx.guarded(mutation_store.RESEND, rows, opened_at=tx.opened_at)
    for row in landed:
        log_mutation(tx, "mutation.sent", row, attempt=row.attempts)
    move = Transition(verb="resend", phases=[Phase.MUTATING], condition=" with a mutation in flight")
    return match_results(tx, cohort, landed, key=lambda row: row.run_id, transition=move)


def apply(
    tx: Transaction, cohort: Sequence[AppliedMutation], *, limits: Limits = DEFAULT_LIMITS
) -> BatchResult[MutationRow]:
    """It happened: the run's outcome is success and whatever held its workflow back is gone."""
    rows = [
        {
            "mutation_id": item.mutation_id,
            "fence": item.fence,
            "result": _sealed_result(tx, item, limits),
            "resolved_by": item.resolved_by,
            "cost": item.cost,
        }
        for item in cohort
    ]
    landed = tx.guarded(mutation_store.APPLY, rows)
    for row in landed:
        if tx.codecs is None and is_sealed(row.params):
            raise refusal(row.workflow)
        log_mutation(tx, "mutation.applied", row, resolved_by=row.resolved_by)
        record_time_to_resolution(tx, row, "applied")
    return _match_mutations(tx, {item.mutation_id: item.fence for item in cohort}, landed, "apply")


def _sealed_result(tx: Transaction, item: AppliedMutation, limits: Limits) -> Any:
    result = checked_json(item.result, what=f"result of mutation {item.mutation_id}", limit=limits.result)
    codec = None if tx.codecs is None or result is None else tx.codecs.writer(tx, item.workflow)
    return result if codec is None else seal(codec, result, "result", item.mutation_id)


def fail(tx: Transaction, cohort: Sequence[FailedMutation]) -> BatchResult[FailedMutationRow]:
    """It did not happen. Refused during the quiet period if absence is the only evidence.

    Of a run that was stopped in doubt the inputs go back at once, unless its consumer wants the same
    plan tried again. A run that is still held keeps inputs and lease until it is stopped, which its
    worker does in the same transaction; forgotten, the lease lapses and recovery stops it.
    """
    rows = [
        {
            "mutation_id": item.mutation_id,
            "fence": item.fence,
            "error": storable_text(item.error),
            "evidence": item.evidence,
            "reconcile_started_at": item.reconcile_started_at,
            "resolved_by": item.resolved_by,
        }
        for item in cohort
    ]
    landed = tx.guarded(mutation_store.FAIL, rows, host_clock=tx.host_clock())
    _release_inputs(tx, landed)
    for row in landed:
        log_mutation(tx, "mutation.failed", row, resolved_by=row.resolved_by)
        record_time_to_resolution(tx, row, "failed")
    times = {item.mutation_id: item.reconcile_started_at for item in cohort}
    return _match_mutations(tx, {item.mutation_id: item.fence for item in cohort}, landed, "fail", times)


def _release_inputs(tx: Transaction, failed: Sequence[FailedMutationRow]) -> None:
    """Release the inputs of runs that were stopped in doubt.

    After a weak verdict under a key that is honoured they stay together, also if the run that tries the plan again
    releases them later.
    """
    stopped = [row for row in failed if row.fence is None]
    weak = [row.run for row in stopped if row.keyed and not row.refused]
    if weak:
        run_store.execute_ids(tx, event_store.KEEP_TOGETHER, weak)
    rows = [
        {
            "run": row.run,
            "handler_id": row.handler_id,
            "events": row.event_ids,
            "quarantine": False,
            "counts": False,
            "suspect": False,
        }
        for row in stopped
        if row.after_failed_mutation == AfterFailedMutation.PREPARE
    ]
    if rows:
        event_store.release_inputs(tx, rows)


def _match_mutations(
    tx: Transaction,
    fences: dict[MutationId, Fence | None],
    landed: Sequence[AnyMutationRow],
    verb: str,
    started_at: Mapping[MutationId, datetime | None] | None = None,
) -> BatchResult[AnyMutationRow]:
    there = {row.id for row in landed}
    missing = [id_ for id_ in fences if id_ not in there]
    rows = {row.id: row for row in work.mutations(tx, missing)} if missing else {}
    now = min(tx.clock(), tx.host_clock()) if missing else None
    refused: dict[UUID, PipelineError] = {}
    for id_ in missing:
        row = rows.get(id_)
        if row is None:
            refused[id_] = NotFoundError("mutation", id_, hint="Nothing was changed.")
        elif (
            verb == "fail"
            and _is_in_quiet_period(row, (started_at or {}).get(id_) or now)
            and _waits_for_quiet_only(row, fences[id_])
        ):
            assert row.quiet_until is not None
            refused[id_] = QuietPeriodError(id_, row.quiet_until)
        elif fences[id_] is not None:
            held = f"fence {fences[id_]}, {MutationStatus.IN_FLIGHT}"
            found = f"fence {row.fence}, {row.status}"
            refused[id_] = StaleWriteError("mutation", id_, verb=verb, expected=held, found=found)
        else:
            refused[id_] = illegal_transition(row, verb, IN_DOUBT)
    return BatchResult(updated=tuple(landed), refused=refused)


def _is_in_quiet_period(row: MutationRow, reconcile_started_at: datetime | None) -> bool:
    return bool(row.quiet_until and reconcile_started_at and row.quiet_until > reconcile_started_at)


def _waits_for_quiet_only(row: RunMutationRow, fence: Fence | None) -> bool:
    """Whether only the quiet period stands in the way of this verdict."""
    if fence is None:
        return row.status in IN_DOUBT
    return bool(row.status == MutationStatus.IN_FLIGHT and row.fence == fence)


def illegal_transition(row: RunMutationRow, verb: str, needs: Sequence[str]) -> IllegalTransitionError:
    found = f"{row.status} (its run is {row.run_phase}, {row.run_status})"
    return IllegalTransitionError("mutation", row.id, verb=verb, found=found, allowed=needs)


def _check_requests(cohort: Sequence[Request]) -> None:
    seen: set[RunId] = set()
    for item in cohort:
        if item.lease.run_id in seen:
            raise InvalidInputError(f"Run {item.lease.run_id} asks for two mutations at once; expected one per run.")
        seen.add(item.lease.run_id)
        for name, span in (("timeout", item.timeout), ("settle", item.settle), ("key_lifetime", item.key_lifetime)):
            if span is not None and (span < timedelta(0) or (name != "settle" and not span)):
                raise InvalidInputError(
                    f"{item.connector}.{item.operation} has {name} {span}; expected a positive span."
                )


def _request_row(item: Request, limits: Limits) -> dict[str, Any]:
    what = f"params of {item.connector}.{item.operation} for run {item.lease.run_id}"
    return {
        "run": item.lease.run_id,
        "fence": item.lease.fence,
        "connector": checked_name(item.connector, what="connector"),
        "operation": checked_name(item.operation, what="operation"),
        "params": checked_json(item.params, what=what, limit=limits.params),
        "request_hash": checked_name(item.request_hash, what="request hash"),
        "effect_id": item.effect_id,
        "keyed": item.keyed,
        "key_lifetime": item.key_lifetime,
        "timeout": item.timeout,
        "settle": item.settle,
        "monitor_after": item.monitor_after,
        "reconcilable": item.reconcilable,
        "needs_approval": item.needs_approval,
        "cost": item.cost,
        "passes_breaker": item.passes_breaker,
        "headline": bounded_line(item.headline),
        "message_ids": item.message_ids[:MAX_MESSAGE_IDS],
        "message_count": len(item.message_ids),
        "four_eyes_value": item.four_eyes_value,
    }
