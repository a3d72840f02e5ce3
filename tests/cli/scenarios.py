"""What the command line is shown in these tests, reached through the verbs."""

from datetime import timedelta
from typing import Any

from pipeline.domain.failures import Failure, FailureKind
from pipeline.domain.ids import EventId, MutationId
from pipeline.domain.states import Evidence, Phase
from pipeline.domain.values import Actor, FailedMutation, HandlerSpec, NewEvent, RunFailure, TopicSpec, WorkflowSpec
from pipeline.domain.workflows import HandlerKind
from pipeline.store.database import Database
from pipeline.transitions import events, late_effects, mutations, registration, stops
from tests.factories import IN, OUT, SOMEBODY, a_run, committed, held, some_events, stopped, the_mutation, the_run


def a_done_order(db: Database, message_id: str = "order-1", workflow: str = "billing") -> Any:
    """An order whose mail was sent and whose receipt was published; the run that did it."""
    some_events(db, message_id, workflow=workflow)
    run = a_run(db, Phase.EMITTING, workflow=workflow)
    receipt = NewEvent(topic=OUT, message_id=f"receipt of {message_id}", payload={})
    return committed(db, run, published=[receipt])


def a_question(db: Database, message_id: str = "order-1", **request: Any) -> Any:
    """A mutation that nobody can know about."""
    some_events(db, message_id)
    run = a_run(db, Phase.MUTATING, reconcilable=False, **request)
    stopped(db, run, FailureKind.TRANSIENT)
    row = the_mutation(db, run.mutation_id)
    assert row.status == "indeterminate"
    return row


def a_request_to_allow(db: Database, message_id: str = "order-1") -> Any:
    """A mutation that waits to be allowed."""
    some_events(db, message_id)
    run = a_run(db, Phase.MUTATING, needs_approval=True)
    assert run.status == "paused:approval"
    return the_mutation(db, run.mutation_id)


def a_late_effect(db: Database, message_id: str = "order-1") -> Any:
    """A mutation that happened after all; its event is pending again."""
    row = a_question(db, message_id)
    later = Database(db.engine, clock_offset=timedelta(hours=1))
    with later.transaction() as tx:
        item = FailedMutation(mutation_id=MutationId(row.id), error="not found", evidence=Evidence.ABSENCE)
        mutations.fail(tx, [item]).only()
        surfaced = late_effects.record_late_effect(tx, MutationId(row.id), {"id": "late"}, SOMEBODY)
    assert surfaced is not None
    return surfaced


def an_event_aside(db: Database, message_id: str = "order-1", reason: str = "no such customer") -> EventId:
    """An event that was set aside."""
    (event,) = some_events(db, message_id)
    with db.transaction() as tx:
        events.quarantine(tx, "billing", "send", event, Actor(name="ada", reason=reason))
    return event


def a_blocked_workflow(db: Database, message_id: str = "order-1") -> Any:
    """A run whose credentials were refused; it holds its workflow back."""
    some_events(db, message_id)
    run = a_run(db, Phase.PREPARED)
    failure = Failure(kind=FailureKind.AUTH, message="the mail server said 401")
    with db.transaction() as tx:
        stops.stop(tx, [RunFailure(lease=held(run), failure=failure)]).only()
    return the_run(db, run.id)


def without_handlers(db: Database, name: str = "billing") -> None:
    """The workflow as code has it that lost its consumer."""
    spec = WorkflowSpec(
        name=name,
        topics=(TopicSpec(name=IN), TopicSpec(name=OUT)),
        handlers=(HandlerSpec(name="poll", kind=HandlerKind.PRODUCER),),
    )
    with db.transaction() as tx:
        registration.register(tx, spec)
