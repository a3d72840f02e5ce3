"""What a topic's model means for handlers and publishers: the same payload everywhere, and nothing lost on the way."""

# ruff: noqa: ARG002 - the host decides which arguments a handler takes

from collections.abc import Callable
from typing import Any, Self

import pytest
from pydantic import BaseModel, Field, SecretStr, field_validator, model_validator
from sqlalchemy import create_engine

from pipeline import PrepareResult, Topic, Workflow
from pipeline.admin import attention
from pipeline.admin.resolutions import Resolutions
from pipeline.admin.runs import detail
from pipeline.client.publishing import publish
from pipeline.domain.errors import PayloadError
from pipeline.domain.values import Actor
from pipeline.store.database import Database
from pipeline.testing import Inline, scripted
from pipeline.transitions import events, workflows
from tests.support.payload_models import Aliased, Computed
from tests.support.scripted_consumers import at_once, statuses, take_one


class Cents(BaseModel):
    """Changes what it is given, and would change it again."""

    cents: int

    @field_validator("cents")
    @classmethod
    def hundredfold(cls, given: int) -> int:
        return given * 100


class Counted(BaseModel):
    """Changes what it is given in its place."""

    total: int

    @model_validator(mode="before")
    @classmethod
    def read(cls, given: dict[str, Any]) -> dict[str, Any]:
        given["total"] += 1
        return given


class Secret(BaseModel):
    """Not written as it is, on purpose."""

    token: SecretStr


class Hidden(BaseModel):
    """Not written at all, on purpose."""

    email: str = Field(exclude=True)


class Patch(BaseModel):
    """Distinguishes given fields from missing ones."""

    name: str | None = None
    phone: str | None = None


@pytest.mark.parametrize(
    ("model", "published", "read", "sent"),
    [
        (Cents, {"cents": 12}, lambda p: p.cents, 1200),
        (Counted, {"total": 3}, lambda p: p.total, 4),
        (Aliased, {"orderId": "1"}, lambda p: p.order_id, "1"),
        (Secret, {"token": "abc"}, lambda p: p.token.get_secret_value(), "abc"),
        (Hidden, {"email": "a@b"}, lambda p: p.email, "a@b"),
        (Computed, {"a": 1}, lambda p: p.b, 2),
        (Patch, {"phone": "7"}, lambda p: p.model_dump(exclude_unset=True), {"phone": "7"}),
    ],
)
def test_an_effect_gets_the_same_event_as_a_consumer_with_three_phases(
    db: Database, model: type[BaseModel], published: Any, read: Callable[[Any], Any], sent: Any
) -> None:
    workflow = Workflow("shop")
    topic = workflow.topic("orders", schema=model)
    workflow.consumer(subscribes=[topic])(_in_three_phases(topic, read))
    seen: list[Any] = []

    @workflow.effect(topic)
    def in_one(ctx: Any, event: Any) -> Any:
        seen.append(event)
        return ctx.mail.send(x=read(event.payload))

    run = Inline(db, [workflow], connectors=[mail := scripted("mail", mutations=["send"])])
    run.publish(topic, published)
    run.run()
    assert [effect.params for effect in mail.effects] == [{"x": sent}] * 2
    (event,) = run.events(topic)
    assert event.payload == published
    assert (seen[0].created_at, seen[0].message_id) == (event.created_at, "m1")


def _in_three_phases(topic: Topic, read: Callable[[Any], Any]) -> type:
    class InThree:
        def prepare(self, ctx: Any, state: Any) -> PrepareResult:
            pending = ctx.peek(topic, limit=1)
            return PrepareResult(reserve=pending, data=[read(event.payload) for event in pending])

        def mutate(self, ctx: Any, prepared: Any) -> Any:
            return ctx.mail.send(x=prepared.data[0]) if prepared.data else None

        def next(self, ctx: Any, prepared: Any, result: Any) -> None:
            return None

    return InThree


def a_chain(payload: Any) -> tuple[Workflow, Topic, Topic]:
    """A consumer that publishes the given payload to a topic with its model."""
    workflow = Workflow("shop")
    first, second = workflow.topic("first"), workflow.topic("second", schema=type(payload))

    @workflow.consumer(subscribes=[first], publishes=[second])
    class On:
        def prepare(self, ctx: Any, state: Any) -> PrepareResult:
            return take_one(ctx, first)

        def mutate(self, ctx: Any, prepared: Any) -> Any:
            return ctx.mail.send(x=1)

        def next(self, ctx: Any, prepared: Any, result: Any) -> None:
            ctx.publish(second, message_id="m", payload=payload)

    return workflow, first, second


def test_a_model_with_aliases_is_published_by_them_from_everywhere(db: Database, database_url: str) -> None:
    workflow, first, second = a_chain(Aliased(orderId="1"))
    run = Inline(db, [workflow], connectors=[scripted("mail", mutations=["send"])])
    run.publish(first, {"n": 1})
    run.publish(second, Aliased(orderId="2"), prefix="kit")
    engine = create_engine(database_url.replace("postgresql://", "postgresql+psycopg2://"))
    with engine.begin() as connection:
        publish(connection, "shop", [{"topic": "second", "message_id": "client", "payload": Aliased(orderId="3")}])
    engine.dispose()
    run.run()
    assert {event.payload["orderId"] for event in run.events(second)} == {"1", "2", "3"}


@pytest.mark.parametrize(
    "payload",
    [Secret(token=SecretStr("s3cret")), Hidden(email="s3cret"), Cents(cents=12)],
    ids=lambda p: type(p).__name__,
)
def test_a_model_that_would_not_come_back_is_refused_everywhere_before_it_is_lost(
    db: Database, database_url: str, payload: BaseModel
) -> None:
    workflow, first, second = a_chain(payload)
    run = Inline(db, [workflow], connectors=[mail := scripted("mail", mutations=["send"])])
    with pytest.raises(PayloadError, match="payload of 'm1'"):
        run.publish(second, payload)
    engine = create_engine(database_url.replace("postgresql://", "postgresql+psycopg2://"))
    with engine.connect() as connection, pytest.raises(PayloadError, match="payload of 'client'"):
        publish(connection, "shop", [{"topic": "second", "message_id": "client", "payload": payload}])
    engine.dispose()
    run.publish(first, {"n": 1})
    run.run()
    (stopped,) = run.runs()
    assert (stopped.phase, stopped.status, stopped.retry_pending) == ("emitting", "failed:logic", True)
    assert "would be lost or changed" in str(stopped.error)
    assert "s3cret" not in str(stopped.error)
    assert (run.events(second), len(mail.effects)) == ([], 1), "mended code carries it forward, the mutation stays one"


class Span(BaseModel):
    """Has a validator that a schema cannot express."""

    first: int
    last: int

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.first > self.last:
            raise ValueError("first is after last")
        return self


BAD, GOOD = {"first": 2, "last": 1}, {"first": 1, "last": 2}


def the_spans(db: Database, **options: Any) -> tuple[Inline, Topic]:
    """An effect on spans, a bad one before two good ones."""
    batch = options.pop("batch", 1)
    workflow = Workflow("shop", **options)
    spans = workflow.topic("spans", schema=Span)

    @workflow.effect(spans, batch=batch, failures=at_once())
    def send(ctx: Any, event: Any) -> Any:
        return ctx.mail.send(x=event.payload.first)

    run = Inline(db, [workflow], connectors=[scripted("mail", mutations=["send"])])
    run.publish(spans, BAD, GOOD, GOOD)
    return run, spans


@pytest.mark.parametrize("options", [{}, {"concurrency": 4}, {"concurrency": 4, "batch": 10}], ids=str)
def test_an_event_that_the_model_refuses_is_quarantined_alone(db: Database, options: dict[str, Any]) -> None:
    run, spans = the_spans(db, on_logic_error="quarantine", **options)
    run.run_until_idle()
    assert statuses(run, spans) == ["quarantined", "consumed", "consumed"]
    bad = run.deliveries(spans)[0]
    assert "does not fit Span: $: Value error, first is after last; skip that event" in str(bad.error)
    assert {mutation.status for mutation in run.ledger()} == {"applied"}


def test_an_event_that_the_model_refuses_is_named_as_the_cause_of_the_hold(db: Database) -> None:
    run, spans = the_spans(db)
    run.run()
    (bad, *_) = run.events(spans)
    what = f"event {bad.id} ('m1') of topic 'spans' does not fit Span: $: Value error, first is after last"
    instead = "skip that event, or deploy a model that takes it"
    (told,) = [item for item in attention.items(Resolutions(db)) if item.kind == "maintenance"]
    assert told.reason == f"{what}; {instead}; deploy fixed code, or fix the cause and end maintenance by hand"
    (stopped,) = run.runs()
    advice = detail(db, str(stopped.id)).advice
    assert advice.text.startswith("The event that the error names cannot be used. Skip it")
    assert advice.commands == (
        "pipeline quarantine list --workflow shop --handler send --waiting",
        'pipeline maintenance exit shop -m "why"',
    )
    with db.transaction() as tx:
        by = Actor(name="ada", reason="bad span")
        events.skip(tx, "shop", "send", bad.id, by)
        workflows.exit_maintenance(tx, "shop", by)
    run.run()
    assert statuses(run, spans) == ["skipped", "consumed", "consumed"]
