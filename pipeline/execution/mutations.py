"""The ledger's verbs: asked for, sent, applied, failed, doubted, escalated, settled by a person.

A mutation is committed as in flight before the world can see it, and its verdict moves the run in
the same statement. Verdicts of the worker carry its fence; verdicts found out later find the run
stopped in doubt. "It was not found" counts only once the request can no longer be travelling.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import Row

from pipeline.domain.errors import (
    IllegalTransitionError,
    InvalidInputError,
    PipelineError,
    QuietPeriodError,
    StaleWriteError,
    UnknownError,
)
from pipeline.domain.ids import Fence, MutationId, RunId
from pipeline.domain.limits import DEFAULT_LIMITS, Limits
from pipeline.domain.mutations import Evidence, MutationStatus, Resolver
from pipeline.domain.payloads import checked_json, checked_name, mended_text
from pipeline.domain.runs import Phase
from pipeline.domain.values import Applied, Failed, Held, Person, Request
from pipeline.domain.workflows import AfterFailedMutation, BlockKind, OnUncertain
from pipeline.execution import audit, surfacing
from pipeline.execution.certainty import certain
from pipeline.execution.landing import Landing, Move, land
from pipeline.store import events as event_store
from pipeline.store import mutations as store
from pipeline.store import runs as run_store
from pipeline.store import views
from pipeline.store import workflows as workflow_store
from pipeline.store.database import Transaction, encoded

_DOUBTED = [MutationStatus.NEEDS_RECONCILE, MutationStatus.INDETERMINATE]


def begin_mutation(tx: Transaction, cohort: Sequence[Request], limits: Limits = DEFAULT_LIMITS) -> Landing[Row[Any]]:
    """Write each request into the ledger: in flight, or pending a person's approval.

    The lease must still be held and is extended to cover the send deadline, so nobody can take the
    run for dead while its request may still leave.
    """
    _refuse_doubled(cohort)
    landed = store.guarded(tx, store.BEGIN, [_request_row(item, limits) for item in cohort])
    for row in landed:
        tx.announce("run.mutating", run_id=row.run_id, mutation_id=row.id, workflow=row.workflow, status=row.status)
    move = Move(verb="begin_mutation", phases=[Phase.PREPARED], also=" with inputs")
    return land(tx, [item.held for item in cohort], landed, key=lambda row: row.run_id, move=move)


def send(
    tx: Transaction, cohort: Sequence[Held], bounds: Mapping[Held, tuple[timedelta, timedelta]] | None = None
) -> Landing[Row[Any]]:
    """Put approved mutations in flight, exactly as they were approved.

    ``bounds`` are timeout and settle window as the code has them now: it may be newer than the request.
    """
    rows = [
        {"run": held.run_id, "fence": held.fence, "timeout": timeout, "settle": settle}
        for held in cohort
        for timeout, settle in [(bounds or {}).get(held, (None, None))]
    ]
    landed = store.guarded(tx, store.SEND, rows)
    for row in landed:
        tx.announce("mutation.sent", run_id=row.run_id, mutation_id=row.id, workflow=row.workflow)
    move = Move(verb="send", phases=[Phase.MUTATING], also=" with an approved mutation")
    return land(tx, cohort, landed, key=lambda row: row.run_id, move=move)


def resend(tx: Transaction, cohort: Sequence[Held]) -> Landing[Row[Any]]:
    """Attempt mutations again that are known not to have happened: counted, and with a new deadline, before they go."""
    landed = store.guarded(tx, store.RESEND, [{"run": held.run_id, "fence": held.fence} for held in cohort])
    for row in landed:
        tx.announce("mutation.sent", run_id=row.run_id, mutation_id=row.id, workflow=row.workflow, attempt=row.attempts)
    move = Move(verb="resend", phases=[Phase.MUTATING], also=" with a mutation in flight")
    return land(tx, cohort, landed, key=lambda row: row.run_id, move=move)


def apply(
    tx: Transaction,
    cohort: Sequence[Applied],
    *,
    by: Resolver = Resolver.CALL,
    limits: Limits = DEFAULT_LIMITS,
) -> Landing[Row[Any]]:
    """It happened: the run's outcome is success and whatever held its workflow back is gone."""
    rows = [
        {
            "mutation_id": item.mutation_id,
            "fence": item.fence,
            "result": checked_json(item.result, what=f"result of mutation {item.mutation_id}", limit=limits.result),
        }
        for item in cohort
    ]
    landed = store.guarded(tx, store.APPLY, rows, resolved_by=by)
    for row in landed:
        tx.announce("mutation.applied", run_id=row.run_id, mutation_id=row.id, workflow=row.workflow, resolved_by=by)
        certain(tx, row, "applied")
    return _land(tx, {item.mutation_id: item.fence for item in cohort}, landed, "apply")


def fail(tx: Transaction, cohort: Sequence[Failed], *, by: Resolver = Resolver.CALL) -> Landing[Row[Any]]:
    """It did not happen. Refused during the quiet period when that rests on absence alone.

    Of a run that was stopped in doubt the inputs go back at once, unless its consumer wants the same
    plan tried again. A run that is still held keeps inputs and lease until it is stopped, which its
    worker does in the same transaction; forgotten, the lease lapses and recovery stops it.
    """
    rows = [
        {
            "mutation_id": item.mutation_id,
            "fence": item.fence,
            "error": mended_text(item.error),
            "evidence": item.evidence,
            "asked_at": item.asked_at,
        }
        for item in cohort
    ]
    landed = store.guarded(tx, store.FAIL, rows, resolved_by=by)
    _release_inputs(tx, landed)
    for row in landed:
        tx.announce("mutation.failed", run_id=row.run_id, mutation_id=row.id, workflow=row.workflow, resolved_by=by)
        certain(tx, row, "failed")
    times = {item.mutation_id: item.asked_at for item in cohort}
    return _land(tx, {item.mutation_id: item.fence for item in cohort}, landed, "fail", times)


def book(tx: Transaction, looks: Sequence[tuple[MutationId, int, timedelta]]) -> tuple[Row[Any], ...]:
    """Book the next look before this one begins: (mutation, attempts so far, delay).

    A reconcile that takes its worker down has then already been counted and cannot spin. What is
    missing from the answer was booked by somebody else or is no longer in doubt.
    """
    rows = [{"mutation_id": id_, "attempts": attempts, "delay": delay} for id_, attempts, delay in looks]
    return tuple(store.guarded(tx, store.BOOK, rows))


def postpone(
    tx: Transaction, mutation_id: MutationId, *, after: timedelta | None = None, until_quiet: bool = False
) -> None:
    """Look later: when the outside system wants to be asked again, or when not finding it proves something."""
    tx.run(store.POSTPONE, id=mutation_id, after=after, until_quiet=until_quiet)


def watch(tx: Transaction, mutation_id: MutationId, pause: timedelta, *, counts: bool = True) -> Row[Any] | None:
    """Take the look that is due at a mutation settled on weak evidence, and book another in case it tells nothing."""
    return tx.first(store.WATCH, id=mutation_id, pause=pause, counts=counts)


def watched(tx: Transaction, mutation_id: MutationId, following: timedelta | None) -> None:
    """It was not there. Look again after the next span, or no more."""
    tx.run(store.WATCHED, id=mutation_id, next=following)


def surface(
    tx: Transaction, mutation_id: MutationId, result: Any, by: Person, *, is_own: bool = False
) -> Row[Any] | None:
    """It was found, though it was settled as not having happened. Nothing is undone: people are told.

    The audit names both sides: what surfaced, and the run that owns the inputs now and may have done it again.
    ``is_own`` says whether it is known to be this mutation's effect, and not that of the other.
    """
    kept = checked_json(result, what=f"result of mutation {mutation_id}", limit=DEFAULT_LIMITS.result)
    row = tx.first(store.SURFACE, id=mutation_id, result=json.dumps(kept))
    if row is None:
        return None
    evidence = surfacing.sides(tx, row, kept, is_own=is_own)
    told = replace(by, reason=f"{by.reason}: {evidence['means']}", evidence=evidence)
    audit.record(tx, told, "mutation.surfaced", **_subject(row))
    instead = evidence["instead_run"]
    tx.announce("mutation.surfaced", run_id=row.run_id, mutation_id=row.id, workflow=row.workflow, instead=instead)
    return row


def acknowledge(tx: Transaction, mutation_id: MutationId, by: Person) -> Row[Any]:
    """A person has dealt with an effect that surfaced late; the doctor speaks of it no more."""
    row = tx.first(store.ACKNOWLEDGE, id=mutation_id, by=by.name)
    if row is None:
        raise _illegal(_found(tx, mutation_id), "acknowledge", ["surfaced, and not acknowledged yet"])
    tx.announce("mutation.acknowledged", run_id=row.run_id, mutation_id=row.id, workflow=row.workflow, actor=by.name)
    audit.record(tx, by, "mutation.acknowledge", **_subject(row))
    return row


def escalate(tx: Transaction, ids: Sequence[UUID], reason: str, *, said: str = "") -> tuple[Row[Any], ...]:
    """Nobody can know: a person must settle it. The workflow waits, or only the run's events do.

    ``said`` are words of the outside world: the person finds them in the ledger, and nobody in the log.
    """
    reason = mended_text(reason)
    kept = mended_text(f"{reason}: {said}") if said else reason
    tx.all(workflow_store.LOCK_OF_RUNS, ids=_run_ids(tx, ids))
    landed = run_store.by_ids(tx, store.ESCALATE, ids, reason=kept)
    blocks = [
        {"workflow": row.workflow, "run": row.run_id, "kind": BlockKind.RECONCILIATION, "reason": kept}
        for row in landed
        if _pauses(tx, row.workflow)
    ]
    tx.all(workflow_store.INSERT_BLOCKS, rows=encoded(blocks))
    for row in landed:
        tx.announce("mutation.escalated", run_id=row.run_id, mutation_id=row.id, workflow=row.workflow, reason=reason)
    return tuple(landed)


def happened(tx: Transaction, mutation_id: MutationId, by: Person, result: Any = None) -> Row[Any]:
    """A person asserts that it happened, and with which result."""
    item = Applied(mutation_id=mutation_id, result=result)
    row = apply(tx, [item], by=Resolver.PERSON).only()
    audit.record(tx, by, "mutation.happened", **_subject(row))
    return row


def did_not_happen(tx: Transaction, mutation_id: MutationId, by: Person) -> Row[Any]:
    """A person asserts that it did not happen. Refused while the request may still be travelling."""
    error = by.reason or f"{by.name} says it did not happen"
    item = Failed(mutation_id=mutation_id, error=error, evidence=Evidence.ABSENCE)
    row = fail(tx, [item], by=Resolver.PERSON).only()
    audit.record(tx, by, "mutation.did_not_happen", **_subject(row))
    return row


def skip(tx: Transaction, mutation_id: MutationId, by: Person) -> Row[Any]:
    """A person goes on without it: its events are skipped and ``next`` runs with that status."""
    row = _skip(tx, mutation_id, by, "skip", _DOUBTED)
    tx.announce("mutation.skipped", run_id=row.run_id, mutation_id=row.id, workflow=row.workflow, actor=by.name)
    certain(tx, row, "skipped")
    audit.record(tx, by, "mutation.skip", **_subject(row))
    return row


def reject(tx: Transaction, mutation_id: MutationId, by: Person) -> Row[Any]:
    """A person refuses a request, or takes an approval back while it was not sent: it is skipped."""
    row = _skip(tx, mutation_id, by, "reject", [MutationStatus.PENDING])
    tx.announce("mutation.rejected", run_id=row.run_id, mutation_id=row.id, workflow=row.workflow, actor=by.name)
    audit.record(tx, by, "mutation.reject", **_subject(row))
    return row


def approve(tx: Transaction, mutation_id: MutationId, by: Person, *, request_hash: str) -> Row[Any]:
    """A person allows exactly the request with this hash; the run goes back to the mutate task."""
    asked = checked_name(request_hash, what="request hash")
    row = tx.first(store.APPROVE, id=mutation_id, request_hash=asked, approved_by=by.name)
    if row is None:
        found = _found(tx, mutation_id)
        if found.status == MutationStatus.PENDING and found.request_hash != request_hash:
            raise StaleWriteError("mutation", mutation_id, asked="approve", held=request_hash, found=found.request_hash)
        raise _illegal(found, "approve", [f"{MutationStatus.PENDING} and not approved yet"])
    tx.announce("mutation.approved", run_id=row.run_id, mutation_id=row.id, workflow=row.workflow, actor=by.name)
    audit.record(tx, by, "mutation.approve", **_subject(row))
    return row


def try_again(tx: Transaction, mutation_id: MutationId, by: Person, *, can_look: bool = False) -> Row[Any]:
    """A person asks the background to look again, with a fresh budget; ``can_look``: its operation can by now."""
    row = tx.first(store.TRY_AGAIN, id=mutation_id, can_look=can_look)
    tx.run(workflow_store.FORGET_NOTICE, kind="indeterminate", subject=f"mutation {mutation_id}")
    if row is None:
        found = _found(tx, mutation_id)
        needs = [f"{MutationStatus.INDETERMINATE} and of an operation that can reconcile, as far as is known here"]
        raise _illegal(found, "try again", needs)
    tx.announce("mutation.asked_again", run_id=row.run_id, mutation_id=row.id, workflow=row.workflow, actor=by.name)
    audit.record(tx, by, "mutation.try_again", **_subject(row))
    return row


def _skip(tx: Transaction, mutation_id: MutationId, by: Person, verb: str, needs: Sequence[MutationStatus]) -> Row[Any]:
    found = _found(tx, mutation_id)
    if found.status not in needs:
        raise _illegal(found, verb, needs)
    row = tx.first(store.SKIP, id=mutation_id, error=mended_text(by.reason or f"{verb} by {by.name}"))
    if row is None:
        raise _illegal(_found(tx, mutation_id), verb, needs)
    run_store.by_ids(tx, event_store.SKIP_INPUTS, [row.run_id])
    return row


def _release_inputs(tx: Transaction, failed: Sequence[Row[Any]]) -> None:
    rows = [
        {
            "run": row.run,
            "handler_id": row.handler_id,
            "events": row.event_ids,
            "quarantine": False,
            "counts": False,
            "suspect": False,
        }
        for row in failed
        if row.fence is None and row.after_failed_mutation == AfterFailedMutation.PREPARE
    ]
    if rows:
        event_store.hand_back(tx, rows)


def _land(
    tx: Transaction,
    asked: dict[MutationId, Fence | None],
    landed: Sequence[Row[Any]],
    verb: str,
    times: Mapping[MutationId, datetime | None] | None = None,
) -> Landing[Row[Any]]:
    there = {row.id for row in landed}
    missing = [id_ for id_ in asked if id_ not in there]
    rows = {row.id: row for row in views.mutations(tx, missing)} if missing else {}
    now = tx.clock() if missing else None
    refused: dict[UUID, PipelineError] = {}
    for id_ in missing:
        row = rows.get(id_)
        if row is None:
            refused[id_] = UnknownError("mutation", id_, hint="Nothing was changed.")
        elif verb == "fail" and _is_quiet(row, (times or {}).get(id_) or now) and _counts(row, asked[id_]):
            refused[id_] = QuietPeriodError(id_, row.quiet_until)
        elif asked[id_] is not None:
            held = f"fence {asked[id_]}, {MutationStatus.IN_FLIGHT}"
            found = f"fence {row.fence}, {row.status}"
            refused[id_] = StaleWriteError("mutation", id_, asked=verb, held=held, found=found)
        else:
            refused[id_] = _illegal(row, verb, _DOUBTED)
    return Landing(landed=tuple(landed), refused=refused)


def _is_quiet(row: Row[Any], asked_at: datetime | None) -> bool:
    return bool(row.quiet_until and asked_at and row.quiet_until > asked_at)


def _counts(row: Row[Any], fence: Fence | None) -> bool:
    """Whether only the quiet period stands in the way of this verdict."""
    if fence is None:
        return row.status in _DOUBTED
    return bool(row.status == MutationStatus.IN_FLIGHT and row.fence == fence)


def _found(tx: Transaction, mutation_id: MutationId) -> Row[Any]:
    rows = views.mutations(tx, [mutation_id])
    if not rows:
        raise UnknownError("mutation", mutation_id, hint="Nothing was changed.")
    return rows[0]


def _illegal(row: Row[Any], verb: str, needs: Sequence[str]) -> IllegalTransitionError:
    found = f"{row.status} (its run is {row.run_phase}, {row.run_status})"
    return IllegalTransitionError("mutation", row.id, asked=verb, found=found, allowed=needs)


def _run_ids(tx: Transaction, ids: Sequence[UUID]) -> list[str]:
    return [str(RunId(row.run_id)) for row in views.mutations(tx, ids)]


def _pauses(tx: Transaction, workflow: str) -> bool:
    row = views.workflow(tx, workflow)
    return row is not None and row.on_uncertain == OnUncertain.PAUSE


def _subject(row: Row[Any]) -> dict[str, Any]:
    return {"workflow": row.workflow, "run_id": row.run_id, "mutation_id": row.id}


def _refuse_doubled(cohort: Sequence[Request]) -> None:
    seen: set[RunId] = set()
    for item in cohort:
        if item.held.run_id in seen:
            raise InvalidInputError(f"Run {item.held.run_id} asks for two mutations at once; expected one per run.")
        seen.add(item.held.run_id)
        for name, span in (("timeout", item.timeout), ("settle", item.settle)):
            if span < timedelta(0) or (name == "timeout" and not span):
                raise InvalidInputError(
                    f"{item.connector}.{item.operation} has {name} {span}; expected a positive span."
                )


def _request_row(item: Request, limits: Limits) -> dict[str, Any]:
    what = f"params of {item.connector}.{item.operation} for run {item.held.run_id}"
    return {
        "run": item.held.run_id,
        "fence": item.held.fence,
        "connector": checked_name(item.connector, what="connector"),
        "operation": checked_name(item.operation, what="operation"),
        "params": checked_json(item.params, what=what, limit=limits.params),
        "request_hash": checked_name(item.request_hash, what="request hash"),
        "idempotency_key": checked_name(item.idempotency_key, what="idempotency key"),
        "timeout": item.timeout,
        "settle": item.settle,
        "watch": item.watch,
        "reconcilable": item.reconcilable,
        "needs_approval": item.needs_approval,
    }
