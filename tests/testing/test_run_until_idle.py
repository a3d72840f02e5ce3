"""When the test kit calls a workflow idle: nothing is left to do, whatever recurs with the clock."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pipeline import PrepareResult, Workflow
from pipeline.store.database import Database
from pipeline.testing import Does, Inline, Scripted, assert_consumed, assert_deliveries, scripted

TEN_MINUTES = timedelta(minutes=10)


@pytest.fixture
def mail() -> Scripted:
    return scripted("mail", mutations=["send"])


@pytest.mark.parametrize("minutes", [1, 5, 15, 30, 60])
def test_a_workflow_is_idle_although_its_producer_runs_at_every_slot(
    db: Database, mail: Scripted, minutes: int
) -> None:
    workflow = Workflow("shop")
    orders = workflow.topic("orders")

    @workflow.producer(every=timedelta(minutes=minutes), publishes=[orders])
    def poll(ctx: Any, state: Any) -> None:
        ctx.publish(orders, message_id="the only one", payload={})

    @workflow.effect(orders)
    def send(ctx: Any, order: Any) -> Any:
        return ctx.mail.send(order=order.message_id)

    mail.will(Does.FAILS)
    run = Inline(db, [workflow], [mail])
    run.run()
    run.run_until_idle()
    assert_consumed(run, orders)
    assert mail.times(order="the only one") == 1


def test_a_workflow_is_idle_although_its_producer_publishes_at_every_slot(db: Database, mail: Scripted) -> None:
    workflow, made = Workflow("shop"), list[str]()
    reports = workflow.topic("reports")

    @workflow.producer(every=TEN_MINUTES, publishes=[reports])
    def report(ctx: Any, state: Any) -> None:
        made.append(f"report {len(made)}")
        ctx.publish(reports, message_id=made[-1], payload={})

    @workflow.effect(reports)
    def send(ctx: Any, event: Any) -> Any:
        return ctx.mail.send(report=event.message_id)

    mail.will(Does.FAILS)
    run = Inline(db, [workflow], [mail])
    run.run()
    run.run_until_idle()
    assert_consumed(run, reports)
    assert [mail.times(report=name) for name in made] == [1] * len(made)


def waiting(workflow: Workflow, *, takes: bool) -> Any:
    """A consumer that asks to be woken in ten minutes, and takes one event at a time, or none."""
    orders, taken = workflow.topic("orders"), [datetime.min.replace(tzinfo=UTC)]

    @workflow.consumer(subscribes=[orders])
    class Wait:
        def prepare(self, ctx: Any, state: Any) -> PrepareResult:
            del state
            pending = ctx.peek(orders, limit=1)
            if not takes or not pending or ctx.now - taken[-1] < TEN_MINUTES:
                return PrepareResult.nothing(wake_at=ctx.now + TEN_MINUTES)
            taken.append(ctx.now)
            return PrepareResult(reserve=pending)

        def mutate(self, ctx: Any, prepared: Any) -> None: ...

        def next(self, ctx: Any, prepared: Any, result: Any) -> None: ...

    return orders


def test_a_workflow_is_idle_although_its_consumer_sets_a_wake_time_every_time(db: Database) -> None:
    workflow = Workflow("shop")
    orders = waiting(workflow, takes=False)
    run = Inline(db, [workflow])
    run.publish(orders, {})
    run.run()
    run.run_until_idle()
    assert_deliveries(run, orders, "pending")


def test_a_workflow_is_not_idle_while_each_wake_takes_a_waiting_event(db: Database) -> None:
    workflow = Workflow("shop")
    orders = waiting(workflow, takes=True)
    run = Inline(db, [workflow])
    run.publish(orders, *[{}] * 5)
    run.run()
    run.run_until_idle()
    assert_consumed(run, orders)


def test_a_workflow_with_repeated_transient_failures_is_not_idle(db: Database, mail: Scripted) -> None:
    workflow = Workflow("shop")
    orders = workflow.topic("orders")
    workflow.effect(orders, name="send")(lambda ctx, order: ctx.mail.send(order=order.message_id))
    mail.will(*[Does.FAILS] * 10)
    run = Inline(db, [workflow], [mail])
    run.publish(orders, {})
    run.run()
    with pytest.raises(AssertionError, match="not idle after 3 rounds"):
        run.run_until_idle(max_rounds=3)
