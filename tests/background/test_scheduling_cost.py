"""How many statements it takes to start what is due, and to see that nothing is."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from pipeline import PrepareResult, Workflow
from pipeline.domain.errors import TransientError
from pipeline.store.database import Database
from pipeline.testing import Inline, assert_consumed
from pipeline.transitions import workflows
from tests.factories import SOMEBODY
from tests.support.counted_statements import counted_statements
from tests.support.scripted_consumers import Shop, at_once
from tests.support.table_reads import open_session, rows


def costs(run: Inline, act: Callable[[], object]) -> list[int]:
    """How many statements each transaction of an act ran."""
    with counted_statements(run.db) as transactions:
        act()
    return [len(statements) for statements in transactions]


def quick(**options: Any) -> Shop:
    return Shop(mutate=lambda *_: None, next=lambda *_: None, **options)


def finish(run: Inline) -> list[int]:
    """Deliver messages until a run has ended; return what scheduling costs then."""
    measured: list[list[int]] = []
    schedule_due = run.scheduler.schedule_due
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            run.scheduler,
            "schedule_due",
            lambda workflows, *, ended: measured.append(costs(run, lambda: schedule_due(workflows, ended=ended))),
        )
        while not measured:
            run.deliver(run.messages.popleft())
    return measured[0]


@pytest.mark.parametrize("concurrency", [1, 2, 3, 400])
def test_a_wake_up_starts_a_run_in_two_statements_of_one_transaction(db: Database, concurrency: int) -> None:
    run = quick(concurrency=concurrency).started(db, 1)
    assert costs(run, lambda: run.scheduler.schedule(["shop"])) == [2]
    assert len(run.messages) == 1
    assert costs(run, lambda: run.scheduler.schedule(["shop"])) == [1], "nothing is due any more"


@pytest.mark.parametrize("concurrency", [2, 5, 64])
def test_a_pass_comes_after_another_only_if_more_can_start(db: Database, concurrency: int) -> None:
    run = quick(concurrency=concurrency).started(db, 2 * concurrency)
    assert costs(run, lambda: run.scheduler.schedule(["shop"])) == [2, 2], "each cohort has half the places"
    assert sum(len(message.run_ids) for message in run.messages) == concurrency
    assert costs(run, lambda: run.scheduler.schedule(["shop"])) == [1], "it is full"


def test_what_a_handler_waits_for_in_order_is_found_behind_the_window(db: Database) -> None:
    shop = quick(concurrency=4, ordered=True)
    run = shop.inline(db)
    run.publish(shop.orders, *({"n": n} for n in range(1100)), key="crowd")
    run.publish(shop.orders, {"n": -1}, key="other", prefix="other")
    run.scheduler.schedule(["shop"])
    assert sum(len(message.run_ids) for message in run.messages) == 2


def test_each_due_handler_costs_two_statements(db: Database) -> None:
    workflow = Workflow("house", concurrency=10)
    topics = [workflow.topic(name) for name in ("a", "b", "c")]
    for topic in topics:
        workflow.effect(topic, name=topic.name)(lambda ctx, event: None)
    run = Inline(db, [workflow])
    for topic in topics[:2]:
        run.publish(topic, {"n": 1})
    assert costs(run, lambda: run.scheduler.schedule(["house"])) == [2, 2]


def test_a_retry_is_started_in_two_statements(db: Database) -> None:
    fails = [TransientError("not now")]

    def next_(*_: Any) -> None:
        if fails:
            raise fails.pop()

    run = Shop(mutate=lambda *_: None, next=next_, failures=at_once(max_failures=10)).started(db, 1)
    run.scheduler.schedule(["shop"])
    assert finish(run) == [1, 2]
    assert len(run.messages) == 1


@pytest.mark.parametrize("concurrency", [1, 5])
def test_the_end_of_a_run_asks_once_and_without_a_lock(db: Database, concurrency: int) -> None:
    run = quick(concurrency=concurrency).started(db, 1)
    run.scheduler.schedule(["shop"])
    with db.transaction() as holder:
        holder.execute(text("SELECT FROM pipeline.workflows FOR NO KEY UPDATE"))
        assert finish(run) == [1]


def test_workflows_of_a_cohort_are_asked_for_at_once(db: Database) -> None:
    shops = [Workflow(name) for name in ("a", "b", "c")]
    topics = [workflow.topic("in") for workflow in shops]
    for workflow, topic in zip(shops, topics, strict=True):
        workflow.effect(topic, name="take")(lambda ctx, event: None)
    run = Inline(db, shops)
    assert costs(run, lambda: run.scheduler.schedule_due({"a", "b", "c"}, ended=1)) == [1]
    run.publish(topics[1], {"n": 1})
    assert costs(run, lambda: run.scheduler.schedule_due({"a", "b", "c"}, ended=1)) == [1, 2]
    assert costs(run, lambda: run.scheduler.schedule_due({"a", "b"}, ended=1)) == [1, 1], (
        "b is locked at once, and is full"
    )


def test_behind_a_backlog_the_end_of_a_run_starts_the_next_in_two_statements(db: Database) -> None:
    shop = quick()
    run = shop.started(db, 4)
    run.scheduler.schedule(["shop"])
    assert [finish(run) for _ in range(4)] == [[1, 2], [2], [2], [1]]
    assert finish_is_cheap_again(run, shop)
    assert_consumed(run, shop.orders)


def finish_is_cheap_again(run: Inline, shop: Shop) -> bool:
    """After the backlog the end of a run asks without a lock again."""
    run.publish(shop.orders, {"n": 9})
    run.scheduler.schedule(["shop"])
    return finish(run) == [1]


def test_a_workflow_that_is_held_is_not_locked_at_the_end_of_a_run_or_on_the_tick(db: Database) -> None:
    run = quick(concurrency=2).started(db, 3)
    run.scheduler.schedule(["shop"])
    with db.transaction() as tx:
        workflows.pause(tx, "shop", SOMEBODY)
    assert finish(run) == [1]
    with counted_statements(db) as transactions:
        run.sweeps.tick()
    assert not any("is_locking => true" in statement for part in transactions for statement in part)


def test_no_session_is_opened_for_nothing(db: Database) -> None:
    """A consumer that was woken is due, and another run of it is still choosing."""
    shop = quick(prepare=lambda ctx, _: PrepareResult.nothing(wake_at=ctx.now + timedelta(hours=1)), concurrency=2)
    run = shop.started(db, 1)
    run.run()
    run.sweeps.sessions()
    assert open_session(db, "shop") is None
    run.advance(timedelta(hours=2))
    run.scheduler.schedule(["shop"])
    assert open_session(db, "shop") is not None
    before = rows(db, "SELECT * FROM pipeline.sessions")
    run.scheduler.schedule(["shop"])
    assert rows(db, "SELECT * FROM pipeline.sessions") == before


def test_behind_a_backlog_few_places_wait_for_others(db: Database) -> None:
    run = Shop(concurrency=16).started(db, 40)
    run.scheduler.gather_time = timedelta(minutes=5)
    run.scheduler.schedule(["shop"])
    run.deliver(run.messages.popleft())
    run.scheduler._backlogged.add("shop")
    assert costs(run, lambda: run.scheduler.schedule_due({"shop"}, ended=1)) == [], "asks and starts nothing"
    assert costs(run, lambda: run.scheduler.schedule_due({"shop"}, ended=2)), "an eighth of the places is worth a start"
    run.scheduler.gather_time = timedelta(0)
    assert costs(run, lambda: run.scheduler.schedule_due({"shop"}, ended=1)), "after a while one place is worth it"
