"""Every due handler of a workflow gets its turn, whatever the others do."""

from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest

from pipeline import PrepareResult, Workflow
from pipeline.domain.errors import TransientError
from pipeline.store.database import Database
from pipeline.testing import Inline, assert_consumed
from pipeline.worker.crash_points import CrashPoint
from tests.support.scripted_consumers import at_once

HOUR = timedelta(hours=1)
MOST = 40  #: calls after which nothing arrives any more


class House:
    """A workflow that records which of its handlers was called when."""

    def __init__(self, **switches: Any) -> None:
        self.workflow = Workflow("house", **switches)
        self.calls: list[str] = []
        self.fails = 0

    def consumer(self, name: str, *, keeps: Any = None, retries: bool = False, wakes: bool = False) -> Any:
        """A consumer that takes its newest event and declines one with the payload ``keeps``."""
        topic = self.workflow.topic(f"for_{name}")

        def prepare(_: Any, ctx: Any, __: Any) -> PrepareResult:
            self.calls.append(name)
            pending = [event for event in ctx.peek(topic) if event.payload != keeps]
            wake_at = ctx.now + HOUR if wakes else None
            return PrepareResult(reserve=pending[-1:]) if pending else PrepareResult.nothing(wake_at=wake_at)

        def next_(_: Any, *__: Any) -> None:
            self.calls.append(name)
            if retries and len(self.calls) < MOST:
                raise TransientError("not now")

        members = {"prepare": prepare, "mutate": lambda *_: None, "next": next_ if retries else lambda *_: None}
        policy: Any = {"failures": at_once(max_failures=1000)} if retries else {}
        self.workflow.consumer(subscribes=[topic], **policy)(type(name, (), members))
        return topic

    def producer(self, name: str) -> None:
        def produce(ctx: Any, state: Any) -> None:
            self.calls.append(name)

        produce.__name__ = name
        self.workflow.producer(every=HOUR)(produce)

    def longest_wait(self, name: str, until: int = MOST) -> int:
        """The most calls of others between two calls of a handler."""
        heard = [at for at, called in enumerate(self.calls[:until]) if called == name]
        edges = [-1, *heard, min(until, len(self.calls))]
        return max(after - before - 1 for before, after in pairwise(edges))


def run_while(run: Inline, house: House, *topics: Any) -> None:
    """Run the workflow. While it runs, there is always another event of these topics."""

    def arrive(point: CrashPoint) -> None:
        if point is CrashPoint.PREPARE_RAN and len(house.calls) < MOST:
            for topic in topics:
                run.publish(topic, {"n": len(house.calls)})

    with run.on_crash_points(arrive):
        run.run()


def test_a_consumer_that_keeps_one_declined_event_does_not_starve_another(db: Database) -> None:
    house = House()
    keeping, other = house.consumer("keeping", keeps="old"), house.consumer("other")
    run = Inline(db, [house.workflow])
    run.publish(keeping, "old")
    run.run()
    house.calls.clear()
    run.publish(keeping, {"n": 0})
    run.publish(other, {"n": 0})
    run_while(run, house, keeping, other)
    assert house.longest_wait("other") <= 1, house.calls
    assert house.longest_wait("keeping") <= 1, house.calls


def test_a_producer_runs_under_a_backlog(db: Database) -> None:
    house = House()
    busy = house.consumer("busy")
    house.producer("poll")
    run = Inline(db, [house.workflow])
    run.publish(busy, *({"n": n} for n in range(30)))
    run.run()
    assert "poll" in house.calls[:2], house.calls
    run.advance(HOUR)
    house.calls.clear()
    run.publish(busy, *({"n": n} for n in range(30)))
    run.run()
    assert "poll" in house.calls[:2], house.calls
    assert_consumed(run, busy)


def test_a_wake_gets_its_turn_under_a_backlog(db: Database) -> None:
    house = House()
    busy, woken = house.consumer("busy", keeps="old"), house.consumer("woken", keeps="later", wakes=True)
    run = Inline(db, [house.workflow])
    run.publish(busy, "old")
    run.publish(woken, "later")
    run.run()
    run.advance(HOUR)
    house.calls.clear()
    run.publish(busy, *({"n": n} for n in range(30)))
    run.run()
    assert "woken" in house.calls[:2], house.calls


@pytest.mark.parametrize("concurrency", [2, 4])
def test_retries_that_never_cease_leave_others_their_turn(db: Database, concurrency: int) -> None:
    house = House(concurrency=concurrency)
    failing, other = house.consumer("failing", retries=True), house.consumer("other")
    run = Inline(db, [house.workflow])
    run.publish(failing, *({"n": n} for n in range(concurrency)))
    run.publish(other, *({"n": n} for n in range(3)))
    run.run_until_idle()
    assert_consumed(run, other)
    assert "other" in house.calls[: 4 * concurrency], house.calls


def test_with_concurrency_one_a_retry_is_not_overtaken(db: Database) -> None:
    house = House()
    failing, other = house.consumer("failing", retries=True), house.consumer("other")
    run = Inline(db, [house.workflow])
    run.publish(failing, {"n": 0})
    run.publish(other, {"n": 0})
    run.run_until_idle()
    first = house.calls.index("failing")
    assert "other" not in house.calls[first : MOST - 1]
    assert_consumed(run, other)


def test_a_handler_that_starts_goes_behind_the_others_of_its_workflow(db: Database) -> None:
    house = House()
    topics = [house.consumer(name) for name in ("a", "b", "c")]
    run = Inline(db, [house.workflow])
    for topic in topics:
        run.publish(topic, *({"n": n} for n in range(4)))
    run.run()
    assert house.calls[:9] == house.calls[:3] * 3
    assert set(house.calls[:3]) == {"a", "b", "c"}
