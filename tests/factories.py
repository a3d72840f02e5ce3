"""Make rows in any state through the transitions, so that no factory makes an impossible row."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

from pipeline.domain.failures import Failure, FailureKind
from pipeline.domain.policies import Backoff, FailurePolicy
from pipeline.domain.states import EventId, Evidence, Fence, Phase, PhaseTask, RunId
from pipeline.domain.values import (
    Actor,
    AppliedMutation,
    FailedMutation,
    HandlerSpec,
    NewEvent,
    PreparedRun,
    Request,
    Reservation,
    RunFailure,
    RunLease,
    RunOutput,
    TopicSpec,
    WorkflowSpec,
)
from pipeline.domain.workflows import HandlerKind
from pipeline.store.database import Database, Statement, Transaction
from pipeline.store.reads import work
from pipeline.transitions import events, mutations, registration, runs, starts, stops

_DELIVERY = Statement[Any]("""
SELECT d.* FROM pipeline.deliveries d JOIN pipeline.handlers h ON h.id = d.handler_id
WHERE d.event_id = :event_id AND h.name = :handler AND h.workflow = :workflow
""")

LEASE = timedelta(seconds=60)
TIMEOUT = timedelta(seconds=20)
SOMEBODY = Actor(name="ada", reason="checked the provider's log")
IN, OUT = "orders.paid", "receipts.sent"
NO_PAUSE = FailurePolicy(backoff=Backoff(base=timedelta(0), cap=timedelta(0)))


def a_workflow(
    db: Database, name: str = "billing", *, consumers: Sequence[str] = ("send",), **options: Any
) -> WorkflowSpec:
    """A registered workflow: consumers of IN that may publish to OUT, and a producer."""
    handler_options = {
        key: options.pop(key)
        for key in ("batch", "ordered", "after_failed_mutation", "failures", "start_at")
        if key in options
    }
    spec = WorkflowSpec(
        name=name,
        topics=(TopicSpec(name=IN), TopicSpec(name=OUT)),
        handlers=(
            *(HandlerSpec(name=consumer, subscribes=(IN,), **handler_options) for consumer in consumers),
            HandlerSpec(name="poll", kind=HandlerKind.PRODUCER),
        ),
        **options,
    )
    with db.transaction() as tx:
        registration.register(tx, spec)
    return spec


def some_events(
    db: Database, *message_ids: str, workflow: str = "billing", key: str | None = None, payload: Any = None
) -> list[EventId]:
    """Published events, pending for every consumer."""
    new = [
        NewEvent(topic=IN, message_id=message_id, payload=payload or {"n": n}, key=key)
        for n, message_id in enumerate(message_ids)
    ]
    with db.transaction() as tx:
        published = events.publish(tx, workflow, new).new
    return [published[IN, message_id] for message_id in message_ids]


def a_run(
    db: Database, phase: Phase = Phase.PENDING, *, workflow: str = "billing", handler: str = "send", **request: Any
) -> Any:
    """A run that was led to this phase and is held by a worker there (``committed``: finished)."""
    with db.transaction() as tx:
        (run,) = starts.start(tx, workflow, handler).runs
    for step in _ROAD[: _STEPS[phase]]:
        with db.transaction() as tx:
            step(tx, run, request)
        run = the_run(db, run.id)
    assert run.phase == phase
    return run


def the_run(db: Database, run_id: UUID) -> Any:
    """A run as it is now."""
    with db.transaction() as tx:
        (row,) = work.runs(tx, [run_id])
    return row


def the_mutation(db: Database, mutation_id: UUID) -> Any:
    """A mutation as it is now."""
    with db.transaction() as tx:
        (row,) = work.mutations(tx, [mutation_id])
    return row


def held(run: Any) -> RunLease:
    """The run as the worker that claimed it last holds it."""
    return RunLease(RunId(run.id), Fence(run.fence))


def a_failure(kind: FailureKind = FailureKind.LOGIC, message: str = "division by zero") -> Failure:
    return Failure(kind=kind, message=message, error_type="ZeroDivisionError")


def stopped(db: Database, run: Any, kind: FailureKind = FailureKind.LOGIC) -> Any:
    """The run, stopped by its worker with this kind of failure."""
    with db.transaction() as tx:
        stops.stop(tx, [RunFailure(lease=held(run), failure=a_failure(kind))]).only()
    return the_run(db, run.id)


def a_request(run: Any, **options: Any) -> Request:
    defaults: dict[str, Any] = {
        "connector": "mail",
        "operation": "send",
        "params": {"to": "someone@example.org"},
        "request_hash": "abc",
        "effect_id": run.id,
        "timeout": TIMEOUT,
        "reconcilable": True,
        "headline": "Mail to someone@example.org",
        "message_ids": tuple(message_id for _, message_id in getattr(run, "inputs", None) or ()),
    }
    return Request(lease=held(run), **{**defaults, **options})


def applied(db: Database, run: Any, result: Any = None) -> Any:
    """The run after its mutation was applied."""
    with db.transaction() as tx:
        item = AppliedMutation(mutation_id=run.mutation_id, result=result, fence=run.fence)
        mutations.apply(tx, [item]).only()
    return the_run(db, run.id)


def refused(db: Database, run: Any, kind: FailureKind = FailureKind.LOGIC) -> Any:
    """The run after the outside system refused its mutation: failed and stopped in one transaction."""
    with db.transaction() as tx:
        item = FailedMutation(
            mutation_id=run.mutation_id, error="422", evidence=Evidence.DEFINITE, fence=Fence(run.fence)
        )
        mutations.fail(tx, [item]).only()
        stops.stop(tx, [RunFailure(lease=held(run), failure=a_failure(kind))]).only()
    return the_run(db, run.id)


def carried_forward(db: Database, run: Any) -> Any:
    """The new run that carries a stopped one forward."""
    with db.transaction() as tx:
        (retry,) = starts.retry(tx, [run.id]).runs
    return retry


def committed(db: Database, run: Any, *, published: Sequence[NewEvent] = (), **emitted: Any) -> Any:
    """The run, claimed for ``next`` if it has no holder, and committed."""
    if run.lease_expires_at is None:
        run = claimed_next(db, run)
    with db.transaction() as tx:
        runs.commit(tx, [RunOutput(lease=held(run), events=tuple(published), **emitted)]).only()
    return the_run(db, run.id)


def claimed_next(db: Database, run: Any) -> Any:
    with db.transaction() as tx:
        (row,) = runs.claim(tx, PhaseTask.NEXT, [run.id], lease_duration=LEASE, worker="w").claimed
    return row


def event_status(db: Database, event_id: EventId, handler: str = "send", workflow: str = "billing") -> str:
    """Where an event stands for a consumer."""
    return str(a_delivery(db, event_id, handler, workflow).status)


def a_delivery(db: Database, event_id: EventId, handler: str = "send", workflow: str = "billing") -> Any:
    with db.transaction() as tx:
        row = tx.first(_DELIVERY, event_id=event_id, handler=handler, workflow=workflow)
    assert row is not None, f"event {event_id} was not delivered to {handler}"
    return row


def _prepare(tx: Transaction, run: Any, _: dict[str, Any]) -> None:
    runs.claim(tx, PhaseTask.PREPARE, [run.id], lease_duration=LEASE, worker="w")


def _reserve(tx: Transaction, run: Any, _: dict[str, Any]) -> None:
    batch = len(run.offered) if run.offered else 1
    ids = tuple(EventId(row.id) for row in work.reservable_events(tx, run, IN, limit=batch))
    pinned = PreparedRun(lease=held(run), reservations=(Reservation(topic=IN, ids=ids),) if ids else ())
    runs.finish_prepare(tx, [pinned]).only()
    if ids:
        runs.claim(tx, PhaseTask.MUTATE, [run.id], lease_duration=LEASE, worker="w")


def _mutate(tx: Transaction, run: Any, request: dict[str, Any]) -> None:
    if run.event_ids:
        mutations.begin_mutation(tx, [a_request(run, **request)]).only()


def _apply(tx: Transaction, run: Any, _: dict[str, Any]) -> None:
    mutations.apply(tx, [AppliedMutation(mutation_id=run.mutation_id, result={"ok": True}, fence=run.fence)]).only()


def _emit(tx: Transaction, run: Any, _: dict[str, Any]) -> None:
    assert runs.claim(tx, PhaseTask.NEXT, [run.id], lease_duration=LEASE, worker="w").claimed


def _commit(tx: Transaction, run: Any, _: dict[str, Any]) -> None:
    runs.commit(tx, [RunOutput(lease=held(run))]).only()


_ROAD = (_prepare, _reserve, _mutate, _apply, _emit, _commit)
_STEPS = {phase: number for number, phase in enumerate(Phase)}
