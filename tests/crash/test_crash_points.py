"""A worker may die at any named point, and a broker may do what it likes: every effect happens once."""

import itertools
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import pytest

from pipeline import Workflow
from pipeline.background.messages import DispatchMessage
from pipeline.store.database import Database, Statement
from pipeline.testing import Does, Inline, assert_consumed, scripted
from pipeline.testing.inline import describe_state
from pipeline.worker.crash_points import CrashPoint
from pipeline.worker.settings import WorkerPolicy
from tests.support.scripted_consumers import Shop, each_once

_SHAPE = Statement[Any]("""
SELECT 'run', r.phase, r.status, r.mutation_outcome, count(*) FROM pipeline.runs r GROUP BY 2, 3, 4
UNION ALL SELECT 'mutation', status, connector, operation, count(*) FROM pipeline.mutations GROUP BY 2, 3, 4
UNION ALL SELECT 'delivery', status, '', '', count(*) FROM pipeline.deliveries GROUP BY 2
UNION ALL SELECT 'event', topic, message_id, payload::text, 1 FROM pipeline.events
UNION ALL SELECT 'handler', name, state::text, consecutive_failures::text, 1 FROM pipeline.handlers
ORDER BY 1, 2, 3, 4, 5
""")
CONSUMER_POINTS = [point for point in CrashPoint if point not in (CrashPoint.PRODUCE_CLAIMED, CrashPoint.PRODUCED)]
SIZES = [pytest.param(1, id="alone"), pytest.param(8, id="in a cohort")]


def shape(run: Inline) -> list[tuple[Any, ...]]:
    """The state of the database, without ids and times."""
    with run.db.transaction() as tx:
        return [tuple(row) for row in tx.all(_SHAPE)]


def assert_done(shop: Shop, run: Inline, orders: int) -> None:
    """Every order consumed, every mail sent once, every receipt published once."""
    assert_consumed(run, shop.orders)
    assert each_once(shop, range(orders)), f"{shop.mail.effects}\n{describe_state(run)}"
    assert sorted(event.payload["n"] for event in run.events(shop.receipts)) == list(range(orders))


@pytest.mark.parametrize("redeliver", [False, True], ids=["message lost", "message redelivered"])
@pytest.mark.parametrize("concurrency", SIZES)
@pytest.mark.parametrize("point", CONSUMER_POINTS)
def test_a_crash_at_any_point_neither_loses_nor_repeats_anything(
    db: Database, point: CrashPoint, concurrency: int, redeliver: bool
) -> None:
    shop = Shop(concurrency=concurrency)
    run = shop.started(db, 3)
    with run.crash_at(point, redeliver=redeliver):
        run.run()
    run.run()
    run.run_until_idle()
    assert_done(shop, run, 3)


@pytest.mark.parametrize("point", CONSUMER_POINTS)
def test_a_second_crash_at_the_same_point_is_survived_as_well(db: Database, point: CrashPoint) -> None:
    shop = Shop(concurrency=8)
    run = shop.started(db, 3)
    with run.crash_at(point):
        run.run()
    run.publish(shop.orders, {"n": 3})
    with run.crash_at(point):
        run.run()
        run.run_until_idle()
    run.run_until_idle()
    assert_done(shop, run, 4)


@pytest.mark.parametrize("point", [CrashPoint.PRODUCE_CLAIMED, CrashPoint.PRODUCED, CrashPoint.STARTED])
def test_a_producer_that_dies_publishes_each_thing_once(db: Database, point: CrashPoint) -> None:
    workflow = Workflow("feed")
    items = workflow.topic("items")

    @workflow.producer(every=timedelta(days=30), publishes=[items])
    def poll(ctx: Any, state: Any) -> dict[str, int]:
        seen = (state or {"seen": 0})["seen"]
        ctx.publish(items, message_id=f"item:{seen}", payload={"n": seen})
        return {"seen": seen + 1}

    run = Inline(db, [workflow])
    with run.crash_at(point):
        run.run()
    run.run_until_idle()
    assert [event.message_id for event in run.events(items)] == ["item:0"]
    assert run.state(workflow, "poll") == {"seen": 1}


def test_a_crash_in_the_call_leaves_in_doubt_only_mutations_in_flight(db: Database) -> None:
    shop = Shop(concurrency=8, on_uncertain="contain")
    run = shop.started(db, 6, policy=WorkerPolicy(mutation_concurrency=2))
    with run.crash_at(CrashPoint.CALLED):
        run.run()
    assert sum(row.status == "in_flight" for row in run.ledger()) <= 2
    run.run_until_idle()
    assert_done(shop, run, 6)


def every_message_twice(message: DispatchMessage) -> Iterable[DispatchMessage]:
    return (message, message)


@pytest.mark.parametrize("concurrency", SIZES)
def test_every_message_delivered_twice_leaves_the_database_as_once(db: Database, concurrency: int) -> None:
    shop = Shop(concurrency=concurrency)
    run = shop.started(db, 5)
    seen = set()
    while run.messages or run.scheduler.schedule(["shop"]).counts:
        message = run.messages.popleft()
        run.deliver(message)
        before, waiting = shape(run), list(run.messages)
        run.deliver(message)
        assert shape(run) == before, message
        run.messages.clear()
        run.messages.extend(waiting)
        seen.add(message.task)
    assert seen == {"pipeline.prepare", "pipeline.mutate", "pipeline.next"}
    assert_done(shop, run, 5)


@pytest.mark.parametrize("concurrency", SIZES)
def test_doubled_and_reordered_messages_change_nothing(db: Database, concurrency: int) -> None:
    shop = Shop(concurrency=concurrency)
    run = shop.started(db, 5)
    run.broker = every_message_twice
    run.pick_next = lambda waiting: waiting - 1
    run.run()
    assert_done(shop, run, 5)
    assert len(run.runs()) == 5


@pytest.mark.parametrize("lost", range(2, 5))
def test_lost_messages_cost_time_and_nothing_else(db: Database, lost: int) -> None:
    shop = Shop(concurrency=8)
    run = shop.started(db, 5, max_cohort_size=2)
    count = itertools.count(1)
    run.broker = lambda message: () if next(count) % lost == 0 else (message,)
    run.run()
    run.run_until_idle(max_rounds=60)
    assert_done(shop, run, 5)


def test_a_broker_that_loses_everything_until_it_recovers_loses_no_event(db: Database) -> None:
    shop = Shop(concurrency=8)
    run = shop.started(db, 5)
    run.broker = lambda _: ()
    run.run()
    assert not shop.mail.calls
    run.broker = lambda message: (message,)
    run.run_until_idle()
    assert_done(shop, run, 5)


@pytest.mark.parametrize("does", [Does.TIMES_OUT_AFTER, Does.TIMES_OUT_BEFORE, Does.FAILS, Does.CRASHES])
@pytest.mark.parametrize("point", [CrashPoint.CALLED, CrashPoint.OUTCOME_SAVED, CrashPoint.IN_FLIGHT])
def test_a_crash_after_an_unknown_outcome_still_makes_one_effect(db: Database, does: Does, point: CrashPoint) -> None:
    shop = Shop(concurrency=8)
    run = shop.started(db, 2)
    shop.mail.will(does, when=lambda params: params["n"] == 1)
    with run.crash_at(point):
        run.run()
    run.run_until_idle()
    assert_done(shop, run, 2)


def test_without_a_reconcile_a_crash_in_the_call_is_indeterminate(db: Database) -> None:
    mail = scripted("mail", can_reconcile=False)
    shop = Shop(concurrency=8, on_uncertain="contain")
    shop.mail = mail
    run = shop.started(db, 2)
    with run.crash_at(CrashPoint.CALLED):
        run.run()
    run.run_until_idle()
    assert {row.status for row in run.ledger()} == {"indeterminate"}
    assert each_once(shop, range(2))
