"""States of the database for tests of the command line, reached through transitions."""

from datetime import timedelta
from typing import Any

from pipeline.domain.failures import Failure, FailureKind
from pipeline.domain.states import EventId, Evidence, MutationId, Phase
from pipeline.domain.values import Actor, FailedMutation, HandlerSpec, NewEvent, RunFailure, TopicSpec, WorkflowSpec
from pipeline.domain.workflows import HandlerKind
from pipeline.store.database import Database
from pipeline.transitions import events, late_effects, mutations, registration, stops
from tests.factories import IN, OUT, SOMEBODY, a_run, committed, held, some_events, stopped, the_mutation, the_run


def a_done_order(db: Database, message_id: str = "order-1", workflow: str = "billing") -> Any:
    """Create a committed run of an order, with its mail sent and its receipt published."""
    some_events(db, message_id, workflow=workflow)
    run = a_run(db, Phase.EMITTING, workflow=workflow)
    receipt = NewEvent(topic=OUT, message_id=f"receipt of {message_id}", payload={})
    return committed(db, run, published=[receipt])


def an_indeterminate_mutation(db: Database, message_id: str = "order-1", **request: Any) -> Any:
    """Create an indeterminate mutation."""
    some_events(db, message_id)
    run = a_run(db, Phase.MUTATING, reconcilable=False, **request)
    stopped(db, run, FailureKind.TRANSIENT)
    row = the_mutation(db, run.mutation_id)
    assert row.status == "indeterminate"
    return row


def a_pending_approval(db: Database, message_id: str = "order-1") -> Any:
    """Create a mutation that waits for approval."""
    some_events(db, message_id)
    run = a_run(db, Phase.MUTATING, needs_approval=True)
    assert run.status == "paused:approval"
    return the_mutation(db, run.mutation_id)


def a_late_effect(db: Database, message_id: str = "order-1") -> Any:
    """Create a mutation with a late effect; its event is pending again."""
    row = an_indeterminate_mutation(db, message_id)
    later = Database(db.engine, clock_offset=timedelta(hours=1))
    with later.transaction() as tx:
        item = FailedMutation(mutation_id=MutationId(row.id), error="not found", evidence=Evidence.ABSENCE)
        mutations.fail(tx, [item]).only()
        surfaced = late_effects.record_late_effect(tx, MutationId(row.id), {"id": "late"}, SOMEBODY)
    assert surfaced is not None
    return surfaced


def a_quarantined_event(db: Database, message_id: str = "order-1", reason: str = "no such customer") -> EventId:
    """Quarantine an event."""
    (event,) = some_events(db, message_id)
    with db.transaction() as tx:
        events.quarantine(tx, "billing", "send", event, Actor(name="ada", reason=reason))
    return event


def a_blocked_workflow(db: Database, message_id: str = "order-1") -> Any:
    """Create a run whose credentials were refused, which blocks its workflow."""
    some_events(db, message_id)
    run = a_run(db, Phase.PREPARED)
    failure = Failure(kind=FailureKind.AUTH, message="the mail server said 401")
    with db.transaction() as tx:
        stops.stop(tx, [RunFailure(lease=held(run), failure=failure)]).only()
    return the_run(db, run.id)


def without_handlers(db: Database, name: str = "billing") -> None:
    """Register the workflow without its consumer."""
    spec = WorkflowSpec(
        name=name,
        topics=(TopicSpec(name=IN), TopicSpec(name=OUT)),
        handlers=(HandlerSpec(name="poll", kind=HandlerKind.PRODUCER),),
    )
    with db.transaction() as tx:
        registration.register(tx, spec)
