"""An ordered key whose head is declined waits, delays no other key, and continues in order."""

from datetime import timedelta
from typing import Any

import pytest

from pipeline import PrepareResult, Workflow
from pipeline.domain.states import MutationId
from pipeline.store.database import Database
from pipeline.testing import Does, Inline, scripted
from pipeline.testing.inline import TESTER
from pipeline.transitions import resolution
from tests.support.scripted_consumers import Shop, statuses, take_one

HOUR = timedelta(hours=1)


class Window:
    """A consumer that wants nothing of key ``shut`` until the test opens the window."""

    def __init__(self, **options: Any) -> None:
        self.is_open, self.seen = False, list[list[int]]()
        self.shop = Shop(
            ordered=True, concurrency=2, mutate=lambda ctx, prepared: None, prepare=self._prepare, **options
        )

    def _prepare(self, ctx: Any, _: Any) -> PrepareResult:
        pending = ctx.peek(self.shop.orders, limit=10)
        self.seen.append([event.payload["n"] for event in pending])
        wanted = [event for event in pending if self.is_open or event.key != "shut"][:1]
        if not wanted:
            return PrepareResult.nothing(wake_at=ctx.now + HOUR)
        return PrepareResult(reserve=wanted, data=wanted[0].payload)


def numbers(*given: int) -> list[dict[str, int]]:
    return [{"n": n} for n in given]


@pytest.mark.parametrize(("batch", "events"), [(1, 1), (1, 2), (3, 3), (3, 4), (3, 9)])
def test_a_key_whose_head_is_declined_is_offered_once_however_many_events_wait(
    db: Database, batch: int, events: int
) -> None:
    window = Window(batch=batch)
    run = window.shop.inline(db)
    run.publish(window.shop.orders, *numbers(*range(events)), key="shut")
    run.run(max_messages=20)
    assert window.seen == [list(range(min(batch, events)))]
    run.sweeps.tick()
    assert not run.messages


@pytest.mark.parametrize("batch", [1, 3])
def test_a_declined_key_continues_in_order_at_its_wake_time(db: Database, batch: int) -> None:
    window = Window(batch=batch)
    run = window.shop.inline(db)
    run.publish(window.shop.orders, *numbers(1, 2, 3, 4), key="shut")
    run.run(max_messages=20)
    run.advance(HOUR)
    run.run(max_messages=20)
    window.is_open = True
    run.advance(HOUR)
    run.run(max_messages=60)
    assert statuses(run, window.shop.orders) == ["consumed"] * 4
    inputs = [list(row.event_ids) for row in run.runs() if row.event_ids]
    assert inputs == sorted(inputs)


def test_a_slice_that_is_not_full_is_offered_again_with_later_events(db: Database) -> None:
    window = Window(batch=3)
    run = window.shop.inline(db)
    for n in range(5):
        run.publish(window.shop.orders, *numbers(n), key="shut")
        run.run(max_messages=20)
    assert window.seen == [[0], [0, 1], [0, 1, 2]], "an event that no slice has room for is no news"


def test_another_key_is_served_behind_a_long_declined_one_and_behind_a_held_one(db: Database) -> None:
    window = Window()
    run = window.shop.inline(db)
    run.publish(window.shop.orders, *numbers(*range(1100)), key="shut")
    run.run(max_messages=20)
    run.publish(window.shop.orders, *numbers(2000, 2001), key="other")
    run.run(max_messages=20)
    assert window.seen == [[0], [2000], [2001]]


@pytest.mark.broken_on_purpose
def test_an_event_of_an_unsubscribed_topic_does_not_hold_its_key(db: Database) -> None:
    def release(version: int, *names: str) -> Workflow:
        workflow = Workflow("shop", version=version, concurrency=2)
        topics = [workflow.topic(name) for name in ("left", "kept")]
        listened = [topic for topic in topics if topic.name in names]

        class Send:
            def prepare(self, ctx: Any, _: Any) -> PrepareResult:
                found = [event for topic in listened for event in ctx.peek(topic, limit=1)]
                return PrepareResult(reserve=found[:1]) if found else PrepareResult.nothing()

            def mutate(self, ctx: Any, prepared: Any) -> None: ...

            def next(self, ctx: Any, prepared: Any, result: Any) -> None: ...

        workflow.consumer(subscribes=listened, publishes=[t for t in topics if t not in listened], ordered=True)(Send)
        return workflow

    first = release(1, "left", "kept")
    run = Inline(db, [first])
    run.publish(first.topics["left"], {"n": 1}, key="k")
    second = release(2, "kept")
    run = Inline(db, [second])
    run.publish(second.topics["kept"], {"n": 2}, {"n": 3}, key="k")
    run.run(max_messages=20)
    assert statuses(run, second.topics["kept"]) == ["consumed"] * 2
    assert statuses(run, second.topics["left"]) == ["pending"], "the doctor shows it; nothing is dropped"


def test_a_skipped_event_holds_its_key_until_next_has_run(db: Database) -> None:
    mail = scripted("mail", timeout=timedelta(seconds=30), can_reconcile=False)
    mail.will(Does.TIMES_OUT_BEFORE)
    workflow = Workflow("shop", concurrency=2, on_uncertain="contain")
    orders, told = workflow.topic("orders"), workflow.topic("told")

    class Send:
        def prepare(self, ctx: Any, _: Any) -> PrepareResult:
            return take_one(ctx, orders)

        def mutate(self, ctx: Any, prepared: Any) -> Any:
            return ctx.mail.send(n=prepared.data["n"])

        def next(self, ctx: Any, prepared: Any, result: Any) -> None:
            ctx.publish(told, message_id=f"{prepared.data['n']}:{result.status}")

    workflow.consumer(subscribes=[orders], publishes=[told], ordered=True)(Send)
    run = Inline(db, [workflow], [mail])
    run.publish(orders, *numbers(1, 2), key="k")
    run.run()
    with db.transaction() as tx:
        resolution.skip(tx, MutationId(run.ledger()[0].id), TESTER)
    run.pick_next = lambda waiting: waiting - 1  # what was sent last arrives first
    run.run()
    assert [event.message_id for event in run.events(told)] == ["1:skipped", "2:applied"]
