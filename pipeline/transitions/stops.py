"""How runs stop: with a failure their worker reports, or because their worker vanished.

One transaction does everything that follows: the run's status, its inputs by the mutation boundary,
the doubt about a mutation in flight, the pause before the next attempt, the session, the block or the
maintenance flag. What follows is decided by ``domain.failures.decide``; this module writes it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from pydantic import ValidationError

from pipeline.domain.boundary import InputAction, Side, side_of
from pipeline.domain.codec import without_text
from pipeline.domain.failures import Failure, FailureKind, RunFacts, StopDecision, decide
from pipeline.domain.payloads import storable_text
from pipeline.domain.policies import FailurePolicy
from pipeline.domain.states import DeliveryStatus, MutationOutcome, MutationStatus, Phase
from pipeline.domain.values import RunFailure, RunLease
from pipeline.domain.workflows import AfterFailedMutation, OnExhausted, OnLogicError, OnUncertain
from pipeline.store.database import Transaction, encode_rows
from pipeline.store.rows import NamedRunRow, RunFactsRow, RunIdRow
from pipeline.store.schema import RunRow
from pipeline.store.writes import events as event_store
from pipeline.store.writes import handlers as handler_store
from pipeline.store.writes import mutations as mutation_store
from pipeline.store.writes import runs as run_store
from pipeline.store.writes import sessions as session_store
from pipeline.store.writes import workflows as workflow_store
from pipeline.transitions.mutations import log_mutation
from pipeline.transitions.results import BatchResult, Transition, match_results
from pipeline.transitions.workflows import block, enter_maintenance

LEASE_LAPSED = "its worker stopped extending its lease"
#: Kinds of failure that everything meets while a provider or a host is away. Wrong code is told apart by its kind.
_TELLING_KINDS = frozenset({FailureKind.TRANSIENT, FailureKind.CRASH, FailureKind.INTERNAL})
HANDLER_UNKNOWN = "every worker that received it does not know its handler"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedRun:
    """A run that was stopped, as it stood, and what followed."""

    run: RunFactsRow
    failure: Failure
    decision: StopDecision

    @property
    def run_id(self) -> UUID:
        run_id: UUID = self.run.id
        return run_id


def stop(tx: Transaction, cohort: Sequence[RunFailure], *, jitter: float = 0.0) -> BatchResult[StoppedRun]:
    """Stop runs their worker holds. ``jitter`` in [0, 1) spreads the pause before the next try."""
    rows = [{"run": item.lease.run_id, "fence": item.lease.fence} for item in cohort]
    failures = {item.lease.run_id: _storable_failure(item.failure) for item in cohort}
    workflow_store.lock_workflows_of_runs(tx, [str(row["run"]) for row in rows])
    ended = _stop(tx, tx.guarded(run_store.LOCK_TO_STOP, rows), failures, jitter)
    held = [item.lease for item in cohort]
    return match_results(
        tx, held, ended, key=lambda item: item.run_id, transition=Transition(verb="stop", phases=list(Phase))
    )


def rescue(
    tx: Transaction, ids: Sequence[UUID], *, jitter: float = 0.0, message: str = LEASE_LAPSED
) -> tuple[StoppedRun, ...]:
    """Stop runs whose lease has lapsed. One that was extended, finished or rescued meanwhile is left alone.

    So is one that another transaction is writing. Safe to run twice at once: the workflow's lock and the guard on the
    lapsed lease let one of two rescuers through, and the worker that comes back finds its run stopped.
    """
    failure = Failure(kind=FailureKind.CRASH, message=message, error_type="WorkerLost")
    workflow_store.lock_workflows_of_runs(tx, [str(run_id) for run_id in ids])
    return _stop(tx, run_store.execute_ids(tx, run_store.LOCK_LAPSED, ids), dict.fromkeys(ids, failure), jitter)


def lock_workflows(tx: Transaction, leases: Iterable[RunLease], *, committing: Iterable[RunLease] = ()) -> None:
    """Lock the workflows of runs that this transaction stops after it has written something else.

    A stop locks the workflow of its run. Called first, this keeps the lock order. Runs that the same transaction
    commits may publish: their subscriptions are locked before any workflow.
    """
    if ids := [str(lease.run_id) for lease in committing]:
        tx.all(workflow_store.SHARE_SUBSCRIPTIONS_OF_RUNS, ids=ids)
    workflow_store.lock_workflows_of_runs(tx, [str(lease.run_id) for lease in leases])


def withdraw_unclaimed(tx: Transaction, ids: Sequence[UUID]) -> tuple[NamedRunRow, ...]:
    """Stop runs that no worker claims, which frees capacity; their handlers pause before the next attempt.

    Before the mutation: the run ends and its inputs are released. After it: the run is marked for retry. No failure
    is counted, since no code failed. The pause of a handler ends with the first worker that
    takes one of its runs, or that starts and knows it.
    """
    workflow_store.lock_workflows_of_runs(tx, [str(run_id) for run_id in ids])
    unclaimed = run_store.execute_ids(tx, run_store.LOCK_UNCLAIMED, ids)
    if not unclaimed:
        return ()
    taken = tuple(
        run_store.execute_ids(tx, run_store.WITHDRAW_UNCLAIMED, [run.id for run in unclaimed], error=HANDLER_UNKNOWN)
    )
    _release_withdrawn_inputs(tx, [run for run in taken if not run.retry_pending])
    handlers = sorted({run.handler_id for run in unclaimed})
    tx.all(handler_store.LOCK_HANDLER_STATES, ids=handlers)
    tx.execute(handler_store.BACK_OFF_UNCLAIMED, ids=handlers)
    for run in taken:
        tx.log_on_commit(
            "run.stopped",
            run_id=run.id,
            workflow=run.workflow,
            handler=run.handler,
            phase=run.phase,
            status=run.status,
            side=Side.AFTER if run.retry_pending else Side.BEFORE,
        )
        labels = {"workflow": run.workflow, "handler": run.handler, "status": str(run.status)}
        tx.count_on_commit("pipeline.runs.stopped", labels)
    return taken


def _release_withdrawn_inputs(tx: Transaction, ended: Sequence[RunRow]) -> None:
    rows = [
        {
            "run": run.id,
            "handler_id": run.handler_id,
            "events": sorted({*run.event_ids, *(run.offered or ())}),
            "quarantine": False,
        }
        for run in ended
    ]
    if rows:
        event_store.release_inputs(tx, rows)


def _storable_failure(failure: Failure) -> Failure:
    """Replace characters that Postgres cannot store, so that every failure is recorded."""
    return replace(
        failure,
        message=storable_text(failure.message),
        error_type=storable_text(failure.error_type),
        frames=storable_text(failure.frames),
    )


def _stop(
    tx: Transaction, rows: Sequence[RunIdRow], failures: dict[Any, Failure], jitter: float
) -> tuple[StoppedRun, ...]:
    """Stop runs that are locked, and their workflows before them."""
    locked = [row.id for row in rows]
    if not locked:
        return ()
    is_private = tx.codecs.is_private if tx.codecs is not None else lambda _: False
    for row in run_store.execute_ids(tx, mutation_store.VOID, locked):
        log_mutation(tx, "mutation.failed", row, resolved_by=row.resolved_by)
    failures |= _shown_before_crash(tx, {run_id: failures[run_id] for run_id in locked})
    named = [{"run": run_id, "culprits": failures[run_id].culprits or failures[run_id].shown} for run_id in locked]
    stopping = [
        (run, without_text(failures[run.id]) if is_private(run.workflow) else failures[run.id])
        for run in tx.guarded(run_store.RUN_FACTS, named)
    ]
    common = _common_events(stopping)
    ended = tuple(
        StoppedRun(run=run, failure=failure, decision=_decide(run, failure, common.get(run.handler_id), jitter))
        for run, failure in stopping
    )
    _write_decisions(tx, ended, common)
    return ended


def _shown_before_crash(tx: Transaction, failures: dict[Any, Failure]) -> dict[Any, Failure]:
    """Put a repeated crash of a prepare that chooses among all events down to those that it could see."""
    crashed = [run_id for run_id, failure in failures.items() if failure.kind is FailureKind.CRASH]
    rows = run_store.execute_ids(tx, run_store.SHOWN_BEFORE_CRASH, crashed) if crashed else ()
    return {row.id: replace(failures[row.id], shown=tuple(row.shown)) for row in rows}


def _common_events(stopping: Sequence[tuple[RunFactsRow, Failure]]) -> dict[int, set[int]]:
    """The events that all failures of a handler since its last commit have in common, those of this cohort included."""
    common: dict[int, set[int]] = {}
    for run, failure in stopping:
        if failure.kind not in _TELLING_KINDS or _side(run) is not Side.BEFORE:
            continue
        blamed = _blamed_events(run, failure)
        before = blamed if run.failing_events is None else {int(event) for event in run.failing_events}
        common[run.handler_id] = common.get(run.handler_id, before) & blamed
    return common


def _side(run: RunFactsRow) -> Side:
    status = MutationStatus(run.mutation_status) if run.mutation_status else None
    return side_of(Phase(run.phase), MutationOutcome(run.mutation_outcome), status)


def _decide(run: RunFactsRow, failure: Failure, common: set[int] | None, jitter: float) -> StopDecision:
    first, since = run.input_failing_since, run.handler_failing_since
    standing = RunFacts(
        phase=Phase(run.phase),
        outcome=MutationOutcome(run.mutation_outcome),
        mutation=MutationStatus(run.mutation_status) if run.mutation_status else None,
        can_reconcile=bool(run.reconcilable),
        blamed_events=len(_blamed_events(run, failure)),
        earlier_failures=max(run.input_failures, run.attempt - 1),
        after_failed=AfterFailedMutation(run.after_failed_mutation),
        on_uncertain=OnUncertain(run.on_uncertain),
        on_logic_error=OnLogicError(run.on_logic_error),
        on_exhausted=OnExhausted(run.on_exhausted),
        slice_limit=run.input_slice_limit,
        can_be_narrowed=run.can_narrow_inputs,
        handler_failures=run.consecutive_failures if _runs_alone(run) else 0,
        has_later_commit=first is not None and (since is None or first < since),
        has_other_failures=common == set(),
    )
    return decide(failure, standing, _failure_policy(run), jitter=jitter)


def _runs_alone(run: RunFactsRow) -> bool:
    """Whether no other run of its handler runs beside it. What is narrowed down is a slice, with one place as well."""
    return run.offered is None or run.concurrency == 1


def _failure_policy(run: RunFactsRow) -> FailurePolicy:
    """The handler's policy; one that cannot be read must not keep a run from being stopped."""
    try:
        return FailurePolicy.model_validate(run.failure_policy)
    except ValidationError:
        return FailurePolicy()


def _write_decisions(tx: Transaction, ended: Sequence[StoppedRun], common: dict[int, set[int]]) -> None:
    """Write all consequences, locking run, mutation, events, handler, session and block in that order."""
    tx.guarded(run_store.STOP, [_run_row(item) for item in ended])
    _doubt(tx, ended)
    _release_inputs(tx, ended)
    _back_off(tx, ended)
    if common:
        rows = [{"handler_id": handler_id, "events": sorted(events)} for handler_id, events in sorted(common.items())]
        tx.execute(handler_store.RECORD_FAILING, rows=encode_rows(rows))
    sessions = {item.run.session_id: _session_row(item) for item in reversed(ended)}  # the first failure names it
    tx.all(session_store.LOCK_SESSIONS, ids=[str(session_id) for session_id in sessions])
    tx.all(session_store.END_SESSIONS, rows=encode_rows([*sessions.values()]))
    block(tx, [_block_row(item) for item in ended if item.decision.block])
    for workflow, reason in {
        item.run.workflow: item.failure.message for item in reversed(ended) if item.decision.maintenance
    }.items():
        enter_maintenance(tx, workflow, reason)
    for item in ended:
        tx.log_on_commit(
            "run.stopped",
            run_id=item.run_id,
            workflow=item.run.workflow,
            handler=item.run.handler,
            phase=item.run.phase,
            status=item.decision.status,
            side=item.decision.disposition.side,
        )
        if item.decision.slice_limit:
            tx.log_on_commit(
                "run.narrowed",
                run_id=item.run_id,
                workflow=item.run.workflow,
                handler=item.run.handler,
                slice_limit=item.decision.slice_limit,
            )
        labels = {"workflow": item.run.workflow, "handler": item.run.handler, "status": str(item.decision.status)}
        tx.count_on_commit("pipeline.runs.stopped", labels)


def _doubt(tx: Transaction, ended: Sequence[StoppedRun]) -> None:
    rows = [
        {
            "mutation_id": item.run.mutation_id,
            "status": item.decision.doubt,
            "error": item.failure.message,
            "quiet": item.failure.quiet_period,
        }
        for item in ended
        if item.decision.doubt
    ]
    for row in tx.guarded(mutation_store.DOUBT, rows, opened_at=tx.opened_at) if rows else ():
        escalated = row.status == MutationStatus.INDETERMINATE
        name = "mutation.escalated" if escalated else "mutation.doubted"
        log_mutation(tx, name, row)


def _release_inputs(tx: Transaction, ended: Sequence[StoppedRun]) -> None:
    """Inputs of released runs become pending; slices that were never reserved are no longer offered."""
    rows = [
        row
        for item in ended
        if item.decision.disposition.inputs is InputAction.RELEASE
        for row in (_blamed_events_row(item), _other_events_row(item))
        if row["events"]
    ]
    returned = event_store.release_inputs(tx, rows) if rows else ()
    runs = {item.run_id: item.run for item in ended}
    for row in returned:
        if row.status == DeliveryStatus.QUARANTINED:
            of = runs[row.run]
            tx.log_on_commit(
                "event.quarantined", run_id=of.id, workflow=of.workflow, handler=of.handler, event_id=row.event_id
            )


def _blamed_events_row(item: StoppedRun) -> dict[str, Any]:
    """What failed: counted if it is one event, or cannot be narrowed down."""
    failed = item.failure.kind is not FailureKind.VOID
    return {
        "run": item.run_id,
        "handler_id": item.run.handler_id,
        "events": sorted(_blamed_events(item.run, item.failure)),
        "unheld": item.run.offered is None and not item.run.event_ids,
        "quarantine": item.decision.quarantine,
        "error": item.failure.message,
        "failed": failed,
        "counts": failed and not item.decision.slice_limit,
        "suspect": item.failure.kind is FailureKind.CRASH,
        "delay": None if _runs_alone(item.run) else item.decision.delay,
        "slice_limit": item.decision.slice_limit,
    }


def _other_events_row(item: StoppedRun) -> dict[str, Any]:
    """What only happened to be there when another event was the cause: back at once, and nothing is counted."""
    return {
        "run": item.run_id,
        "handler_id": item.run.handler_id,
        "events": sorted(_inputs(item.run) - _blamed_events(item.run, item.failure)),
        "quarantine": False,
        "counts": False,
        "suspect": False,
    }


def _inputs(run: RunRow) -> set[int]:
    """What a run has reserved, or was offered and has not chosen from yet; one that sees everything owns nothing."""
    return set(run.event_ids or run.offered or ())


def _blamed_events(run: RunRow, failure: Failure) -> set[int]:
    """The events a failure is put down to: the culprits if they are known and this run's to blame, else its inputs."""
    inputs, culprits = _inputs(run), {int(event) for event in failure.culprits}
    is_choosing_among_all = run.offered is None and not run.event_ids
    if is_choosing_among_all:
        return culprits or {int(event) for event in failure.shown}
    return (culprits & inputs) or inputs


def _back_off(tx: Transaction, ended: Sequence[StoppedRun]) -> None:
    """A handler that runs alone waits as a whole; among slices only the failed inputs wait.

    Once the cause is set aside nothing is left to wait for, and the next failure is the first in a row.
    """
    rows = [
        {
            "handler_id": item.run.handler_id,
            "delay": item.decision.delay,
            "is_over": item.decision.quarantine,
        }
        for item in ended
        if _runs_alone(item.run)
        and item.decision.disposition.inputs is InputAction.RELEASE
        and item.failure.kind is not FailureKind.VOID
    ]
    if rows:
        tx.execute(handler_store.BACK_OFF, rows=encode_rows(rows))


def _run_row(item: StoppedRun) -> dict[str, Any]:
    return {
        "run": item.run_id,
        "status": item.decision.status,
        "error": item.failure.message,
        "error_type": item.failure.error_type,
        "error_frames": item.failure.frames or None,
        "retry_pending": item.decision.disposition.retry_pending,
        "delay": item.decision.delay,
        "cost": item.failure.cost,
    }


def _block_row(item: StoppedRun) -> dict[str, Any]:
    reason = item.failure.message
    return {"workflow": item.run.workflow, "run": item.run_id, "kind": item.decision.block, "reason": reason}


def _session_row(item: StoppedRun) -> dict[str, Any]:
    return {"session_id": item.run.session_id, "error": item.failure.message}
