"""When handlers are called: on their schedule, when they asked to be woken, and never in a busy loop."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pipeline import PrepareResult, WakePolicy, Workflow
from pipeline.domain.errors import TransientError
from pipeline.domain.policies import Backoff, FailurePolicy
from pipeline.store.database import Database, Statement
from pipeline.testing import Inline, assert_consumed, assert_runs
from pipeline.worker.crash_points import CrashPoint
from tests.support.scripted_consumers import Shop

HOUR = timedelta(hours=1)
PATIENT = FailurePolicy(backoff=Backoff(base=timedelta(minutes=10)))
_HANDLER = Statement[Any]("SELECT * FROM pipeline.handlers WHERE name = :name")


def the_handler(run: Inline, name: str) -> Any:
    with run.db.transaction() as tx:
        return tx.first(_HANDLER, name=name)


def a_feed(**schedule: Any) -> tuple[Workflow, list[datetime]]:
    workflow, times = Workflow("feed"), []

    @workflow.producer(**schedule)
    def poll(ctx: Any, state: Any) -> dict[str, int]:
        times.append(ctx.now)
        return {"runs": (state or {"runs": 0})["runs"] + 1}

    return workflow, times


def test_missed_slots_of_an_interval_are_one_run_and_the_grid_is_kept(db: Database) -> None:
    workflow, times = a_feed(every=HOUR)
    run = Inline(db, [workflow])
    run.run()
    first = the_handler(run, "poll").next_run_at
    run.run()
    assert len(times) == 1
    run.advance(timedelta(hours=5, minutes=30))
    run.run()
    assert len(times) == 2
    assert (the_handler(run, "poll").next_run_at - first) % HOUR == timedelta(0)
    assert the_handler(run, "poll").next_run_at > run.now()
    assert run.state(workflow, "poll") == {"runs": 2}


def test_missed_slots_of_a_cron_are_one_run(db: Database) -> None:
    workflow, times = a_feed(cron="0 * * * *")
    with db.transaction() as tx:
        begun = tx.clock().astimezone(UTC)
    db.advance_clock(timedelta(minutes=30 - begun.minute))  # no hour begins during the test
    run = Inline(db, [workflow])
    run.run()
    assert not times
    run.advance(timedelta(hours=7))
    run.run()
    run.run()
    assert len(times) == 1
    slot = the_handler(run, "poll").next_run_at.astimezone(UTC)
    assert (slot.minute, slot.second) == (0, 0)
    assert timedelta(0) < slot - run.now() <= HOUR


def test_a_producer_that_fails_for_now_runs_again_and_keeps_its_state(db: Database) -> None:
    workflow, fails = Workflow("feed"), [TransientError("not now")]
    out = workflow.topic("out")

    @workflow.producer(every=HOUR, publishes=[out], failures=PATIENT)
    def poll(ctx: Any, state: Any) -> None:
        ctx.publish(out, message_id="one", payload={})
        if fails:
            raise fails.pop()

    run = Inline(db, [workflow])
    run.run()
    assert not run.events(out)
    run.advance(timedelta(minutes=11))
    run.run()
    assert_runs(run, "paused:transient", "committed")
    assert len(run.events(out)) == 1


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        pytest.param(timedelta(seconds=1), timedelta(seconds=30), id="too soon"),
        pytest.param(timedelta(minutes=5), timedelta(minutes=5), id="as asked"),
        pytest.param(timedelta(days=9), timedelta(hours=24), id="too late"),
    ],
)
def test_a_prepare_is_woken_at_its_wake_time_within_bounds(db: Database, asked: timedelta, expected: timedelta) -> None:
    called: list[datetime] = []

    def prepare(ctx: Any, _: Any) -> PrepareResult:
        called.append(ctx.now)
        return PrepareResult.nothing(wake_at=ctx.now + asked if len(called) == 1 else None)

    shop = Shop(prepare=prepare)
    run = shop.started(db)
    run.run()
    assert the_handler(run, "Send").wake_at == called[0] + expected
    run.advance(expected / 3)
    run.run()
    assert len(called) == 1
    run.advance(expected)
    run.run()
    assert len(called) == 2
    assert the_handler(run, "Send").wake_at is None


def test_a_consumer_chooses_its_own_bounds_for_waking(db: Database) -> None:
    shop = Shop(
        prepare=lambda ctx, _: PrepareResult.nothing(wake_at=ctx.now + timedelta(days=30)),
        wake=WakePolicy(latest=timedelta(days=2)),
    )
    run = shop.started(db)
    run.run()
    wake_at = the_handler(run, "Send").wake_at
    assert timedelta(days=1, hours=23) < wake_at - run.now() <= timedelta(days=2)


def test_an_empty_prepare_is_not_called_again_until_something_new_arrives(db: Database) -> None:
    shown: list[int] = []

    def prepare(ctx: Any, _: Any) -> PrepareResult:
        pending = ctx.peek(shop.orders)
        shown.append(len(pending))
        return PrepareResult(reserve=pending, data={"n": 0}) if len(pending) == 3 else PrepareResult.nothing()

    shop = Shop(prepare=prepare)
    run = shop.started(db, 1)
    for _ in range(3):
        run.run()
    run.publish(shop.orders, {"n": 1})
    run.run()
    run.publish(shop.orders, {"n": 2})
    run.run()
    assert shown == [1, 2, 3]
    assert_consumed(run, shop.orders)


class Holding:
    """A consumer of several places that declines its orders until a time, and takes those it is shown afterwards."""

    def __init__(self, db: Database, orders: int, *, shows: int, batch: int = 1) -> None:
        self.seen: list[list[int]] = []
        self.shows = shows
        self.shop = Shop(prepare=self.prepare, mutate=lambda *_: None, next=lambda *_: None, concurrency=4, batch=batch)
        self.run = self.shop.inline(db)
        self.until = self.run.now() + HOUR
        self.run.publish(self.shop.orders, *({"n": n} for n in range(orders)))
        self.run.run()
        self.run.advance(HOUR + timedelta(minutes=1))
        self.seen.clear()

    def prepare(self, ctx: Any, _: Any) -> PrepareResult:
        pending = ctx.peek(self.shop.orders, limit=self.shows)
        self.seen.append([event.payload["n"] for event in pending])
        if ctx.now < self.until:
            return PrepareResult.nothing(wake_at=self.until)
        return PrepareResult(reserve=pending)


def test_a_consumer_is_woken_at_its_time_though_new_events_never_cease(db: Database) -> None:
    """For every run another event arrives, so that there is never a moment with nothing to do."""
    waiting = Holding(db, 1, shows=1)
    run, orders = waiting.run, waiting.shop.orders
    run.publish(orders, *({"n": n} for n in range(1, 11)))

    def arrive(point: CrashPoint) -> None:
        if point is CrashPoint.PREPARE_RAN and [0] not in waiting.seen and len(waiting.seen) < 60:
            run.publish(orders, {"n": 10 + len(waiting.seen)})

    with run.on_crash_points(arrive):
        run.run()
    assert waiting.seen.index([0]) < 10, waiting.seen
    assert_consumed(run, orders)


def test_nothing_that_a_woken_run_was_shown_is_offered_to_another_before_it_has_chosen(db: Database) -> None:
    waiting = Holding(db, 3, shows=10, batch=10)
    run, orders, late = waiting.run, waiting.shop.orders, [3, 4, 5]

    def arrive(point: CrashPoint) -> None:
        if point is CrashPoint.PREPARE_RAN and late:
            run.publish(orders, {"n": late.pop(0)})
            run.scheduler.schedule(["shop"])

    with run.on_crash_points(arrive):
        run.run()
    assert waiting.seen[0] == [0, 1, 2]
    assert sorted(n for shown in waiting.seen for n in shown) == list(range(6)), "two runs never see the same event"
    assert {row.status for row in run.runs()} == {"committed"}
    assert_consumed(run, orders)


def test_events_that_a_woken_run_left_are_offered_again_after_it_took_something(db: Database) -> None:
    waiting = Holding(db, 5, shows=1)
    waiting.run.run()
    assert_consumed(waiting.run, waiting.shop.orders)
    assert sorted(n for shown in waiting.seen for n in shown) == list(range(5))
