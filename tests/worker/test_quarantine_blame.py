"""Which events a failure counts against: those that fail often are quarantined, and no other waits or counts."""

from collections import Counter
from typing import Any

import pytest

from pipeline import PrepareResult
from pipeline.domain.errors import EventError, TransientError
from pipeline.store.database import Database
from pipeline.testing import Inline, assert_deliveries
from tests.support.scripted_consumers import Shop, at_once, blocks, the_workflow

Tries = Counter[int]


def a_shop(failing: Any, tries: Tries, **options: Any) -> Shop:
    """Its mutate calls ``failing`` with the number of an order and how often that has been tried."""

    def mutate(ctx: Any, prepared: Any) -> Any:
        n = prepared.data["n"]
        tries[n] += 1
        failing(n, tries[n])
        return ctx.mail.send(n=n)

    return Shop(mutate=mutate, on_logic_error="quarantine", **options)


def failure_counts(run: Inline, shop: Shop) -> list[int]:
    """How many failed runs are recorded for each order."""
    return [row.failures for row in run.deliveries(shop.orders)]


@pytest.mark.parametrize("concurrency", [1, 4])
def test_every_event_gets_its_own_runs_before_it_is_quarantined(db: Database, concurrency: int) -> None:
    tries: Tries = Counter()

    def failing(n: int, _: int) -> None:
        raise KeyError(n)

    shop = a_shop(failing, tries, concurrency=concurrency, failures=at_once(quarantine_after=3))
    run = shop.started(db, 3)
    run.run()
    assert tries == {0: 3, 1: 3, 2: 3}
    assert_deliveries(run, shop.orders, "quarantined")


def test_after_a_quarantine_the_next_failure_is_the_first_in_a_row(db: Database) -> None:
    tries: Tries = Counter()

    def failing(n: int, count: int) -> None:
        if n < 2:
            raise KeyError(n)
        if n == 2 and count == 1:
            raise TransientError("one hiccup")

    shop = a_shop(failing, tries, failures=at_once(quarantine_after=3, max_failures=4))
    run = shop.started(db, 4)
    run.run()
    assert tries == {0: 3, 1: 3, 2: 2, 3: 1}
    assert_deliveries(run, shop.orders, "quarantined", "quarantined", "consumed", "consumed")
    assert blocks(run) == []


def test_failures_of_prepare_before_do_not_count_against_the_event_that_wrong_code_meets(db: Database) -> None:
    tries: Tries = Counter()
    down = [TransientError("not now")] * 3

    def prepare(ctx: Any, _: Any) -> PrepareResult:
        if down:
            raise down.pop()
        pending = ctx.peek(shop.orders)[:1]
        return PrepareResult(reserve=pending, data=pending[0].payload) if pending else PrepareResult.nothing()

    def failing(n: int, count: int) -> None:
        if count < 3:
            raise KeyError(n)

    shop = a_shop(failing, tries, prepare=prepare, failures=at_once(quarantine_after=3))
    run = shop.started(db, 2)
    run.run()
    assert_deliveries(run, shop.orders, "consumed")


@pytest.mark.parametrize("concurrency", [1, 4])
def test_an_event_that_prepare_names_is_counted_and_quarantined_and_the_others_continue(
    db: Database, concurrency: int
) -> None:
    named: Tries = Counter()

    def prepare(ctx: Any, _: Any) -> PrepareResult:
        pending = ctx.peek(shop.orders)
        for event in pending:
            if event.payload["n"] in (1, 2):
                named[event.payload["n"]] += 1
                raise EventError(event.id, "no such customer")
        return PrepareResult(reserve=pending[:1], data=pending[0].payload) if pending else PrepareResult.nothing()

    shop = Shop(
        prepare=prepare,
        concurrency=concurrency,
        batch=10,
        on_logic_error="quarantine",
        failures=at_once(quarantine_after=3),
    )
    run = shop.started(db, 4)
    run.run()
    assert named == {1: 3, 2: 3}
    assert_deliveries(run, shop.orders, "consumed", "quarantined", "quarantined", "consumed")
    assert failure_counts(run, shop) == [0, 3, 3, 0]
    assert not the_workflow(run).maintenance


@pytest.mark.parametrize("concurrency", [1, 4])
def test_of_the_events_of_a_run_only_the_one_that_mutate_names_is_quarantined(db: Database, concurrency: int) -> None:
    def prepare(ctx: Any, _: Any) -> PrepareResult:
        pending = ctx.peek(shop.orders)
        return PrepareResult(reserve=pending, data={str(event.payload["n"]): event.id for event in pending})

    def mutate(ctx: Any, prepared: Any) -> None:
        if "1" in prepared.data:
            raise EventError(prepared.data["1"], "no such customer")

    shop = Shop(
        prepare=prepare,
        mutate=mutate,
        next=lambda *_: None,
        concurrency=concurrency,
        batch=10,
        on_logic_error="quarantine",
        failures=at_once(quarantine_after=2),
    )
    run = shop.started(db, 3)
    run.run()
    assert_deliveries(run, shop.orders, "consumed", "quarantined", "consumed")
    assert failure_counts(run, shop) == [0, 2, 0]


def test_offered_events_that_a_run_did_not_take_are_not_quarantined_with_it(db: Database) -> None:
    tries: Tries = Counter()

    def prepare(ctx: Any, _: Any) -> PrepareResult:
        last = sorted(ctx.peek(shop.orders), key=lambda event: -event.payload["n"])[:1]
        return PrepareResult(reserve=last, data=last[0].payload if last else None)

    def failing(n: int, _: int) -> None:
        if n == 2:
            raise KeyError(n)

    shop = a_shop(failing, tries, prepare=prepare, concurrency=2, batch=10, failures=at_once(quarantine_after=1))
    run = shop.started(db, 3)
    run.run()
    assert_deliveries(run, shop.orders, "consumed", "consumed", "quarantined")
