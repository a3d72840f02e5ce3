"""A failure that names no event is narrowed down: the culprit ends alone in quarantine, the others are done."""

from collections import Counter
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from pipeline import PrepareResult
from pipeline.admin import runs as admin_runs
from pipeline.domain.errors import TransientError
from pipeline.store.database import Database
from pipeline.testing import CrashPoint, Inline, WorkerCrash, assert_deliveries
from pipeline.transitions import workflows
from tests.factories import SOMEBODY
from tests.support.scripted_consumers import Shop, at_once, blocks, statuses, the_workflow

CULPRIT = 7
ERRORS = [RuntimeError("no answer"), KeyError("customer"), TransientError("try later"), MemoryError("too large")]


class Batches:
    """A shop whose runs take everything they are shown. A phase fails if the culprit is among it."""

    def __init__(
        self, error: Exception | None, phase: str = "mutate", *, bad: Any = (CULPRIT,), **options: Any
    ) -> None:
        self.error, self.phase, self.bad = error, phase, bad
        self.tries: list[list[int]] = []
        given: dict[str, Any] = {"batch": 20, "failures": at_once(), "on_logic_error": "quarantine"} | options
        self.shop = Shop(prepare=self._prepare, mutate=self._mutate, next=lambda *_: None, **given)

    def _prepare(self, ctx: Any, _: Any) -> PrepareResult:
        pending = ctx.peek(self.shop.orders, limit=20)
        numbers = [event.payload["n"] for event in pending]
        if self.phase == "prepare":
            self._fail(numbers)
        return PrepareResult(reserve=pending, data=numbers) if pending else PrepareResult.nothing()

    def _mutate(self, ctx: Any, prepared: Any) -> Any:
        if self.phase == "mutate":
            self._fail(prepared.data)
        return ctx.mail.send(n=prepared.data)

    def _fail(self, numbers: list[int]) -> None:
        if numbers:
            self.tries.append(numbers)
        if self.error is not None and set(numbers) & set(self.bad):
            raise self.error

    def done(self) -> list[int]:
        """The orders that had an effect, each as often as it had one."""
        return sorted(n for effect in self.shop.mail.effects for n in effect.params["n"])


def failures_by_order(run: Inline, shop: Shop) -> list[int]:
    return [row.failures for row in run.deliveries(shop.orders)]


@pytest.mark.parametrize("phase", ["prepare", "mutate"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("concurrency", [1, 4])
def test_the_one_event_that_fails_is_quarantined_alone_and_the_others_are_done(
    db: Database, concurrency: int, error: Exception, phase: str
) -> None:
    batches = Batches(error, phase, concurrency=concurrency)
    run = batches.shop.started(db, 20)
    run.run()
    others = [n for n in range(20) if n != CULPRIT]
    assert batches.done() == others
    assert [n for n, status in enumerate(statuses(run, batches.shop.orders)) if status != "consumed"] == [CULPRIT]
    allowed = 3 if isinstance(error, KeyError) else 5
    assert failures_by_order(run, batches.shop) == [allowed if n == CULPRIT else 0 for n in range(20)]
    assert (blocks(run), the_workflow(run).maintenance) == ([], False)
    (culprit,) = [row for row in run.deliveries(batches.shop.orders) if row.status == "quarantined"]
    assert str(error).strip("'") in (culprit.error or "")
    alone = [numbers for numbers in batches.tries if numbers == [CULPRIT]]
    narrowed = [numbers for numbers in batches.tries if CULPRIT in numbers and len(numbers) > 1]
    assert len(alone) == allowed
    assert len(narrowed) <= 5, "halves of 20 events need five rounds"


@pytest.mark.parametrize("concurrency", [1, 4])
def test_two_events_that_fail_among_others_are_both_quarantined(db: Database, concurrency: int) -> None:
    batches = Batches(RuntimeError("no answer"), bad=(3, 12), concurrency=concurrency)
    run = batches.shop.started(db, 20)
    run.run()
    assert [n for n, status in enumerate(statuses(run, batches.shop.orders)) if status == "quarantined"] == [3, 12]
    assert batches.done() == [n for n in range(20) if n not in (3, 12)]
    assert blocks(run) == []


@pytest.mark.parametrize("batch", [1, 20])
def test_while_everything_fails_the_workflow_is_blocked_and_nothing_is_quarantined(db: Database, batch: int) -> None:
    batches = Batches(RuntimeError("provider away"), bad=range(40), batch=batch, concurrency=4)
    run = batches.shop.started(db, 40)
    run.run()
    assert set(blocks(run)) == {"internal"}
    assert Counter(statuses(run, batches.shop.orders)) == {"pending": 40}
    batches.error = None
    with run.db.transaction() as tx:
        workflows.resume(tx, "shop", SOMEBODY)
    run.run()
    assert batches.done() == list(range(40))
    assert_deliveries(run, batches.shop.orders, "consumed")


@pytest.mark.parametrize("concurrency", [1, 4])
def test_wrong_code_that_fails_on_every_event_sets_all_of_them_aside(db: Database, concurrency: int) -> None:
    batches = Batches(KeyError("customer"), "prepare", bad=range(10), concurrency=concurrency)
    run = batches.shop.started(db, 10)
    run.run()
    assert Counter(statuses(run, batches.shop.orders)) == {"quarantined": 10}
    assert (blocks(run), the_workflow(run).maintenance) == ([], False), "only the quarantine tells it"


@pytest.mark.parametrize("concurrency", [1, 4])
def test_failures_of_every_kind_are_one_count_and_the_last_kind_decides_its_limit(
    db: Database, concurrency: int
) -> None:
    batches = Batches(TransientError("try later"), "prepare", bad=range(1), concurrency=concurrency)
    fail = batches._fail

    def fail_otherwise_the_third_time(numbers: list[int]) -> None:
        if numbers and len(batches.tries) == 2:
            batches.error = KeyError("customer")
        fail(numbers)

    batches._fail = fail_otherwise_the_third_time  # type: ignore[method-assign]
    run = batches.shop.started(db, 1)
    run.run()
    assert len(batches.tries) == 3
    assert statuses(run, batches.shop.orders) == ["quarantined"]


def test_with_concurrency_1_an_outage_sets_at_most_one_event_aside(db: Database) -> None:
    batches = Batches(RuntimeError("provider away"), bad=range(40))
    run = batches.shop.started(db, 40)
    run.run()
    assert blocks(run) == ["internal"]
    assert Counter(statuses(run, batches.shop.orders)) == {"pending": 39, "quarantined": 1}


@pytest.mark.parametrize("concurrency", [1, 4])
def test_the_only_event_there_is_is_quarantined_and_the_next_one_that_fails_blocks(
    db: Database, concurrency: int
) -> None:
    batches = Batches(RuntimeError("provider away"), bad=range(2), concurrency=concurrency)
    run = batches.shop.started(db, 1)
    run.run()
    assert (statuses(run, batches.shop.orders), blocks(run)) == (["quarantined"], [])
    run.publish(batches.shop.orders, {"n": 1})
    run.run()
    assert (statuses(run, batches.shop.orders), blocks(run)) == (["quarantined", "pending"], ["internal"])


@pytest.mark.parametrize("concurrency", [1, 4])
def test_an_author_who_wants_a_block_gets_it_for_the_event_that_fails(db: Database, concurrency: int) -> None:
    batches = Batches(RuntimeError("no answer"), concurrency=concurrency, on_exhausted="block")
    run = batches.shop.started(db, 20)
    run.run()
    assert blocks(run) == ["internal"]
    consumed = 19 if concurrency > 1 else CULPRIT  # with one place no event overtakes the one that fails
    assert Counter(statuses(run, batches.shop.orders)) == {"consumed": consumed, "pending": 20 - consumed}
    (blocked,) = [row for row in run.runs() if row.status == "failed:internal"]
    advice = admin_runs.detail(db, str(blocked.id)).advice
    culprit = run.events(batches.shop.orders)[CULPRIT].id
    assert f"pipeline quarantine add {culprit} --workflow shop --handler Send" in advice.commands[0]


@pytest.mark.parametrize("concurrency", [1, 4])
def test_an_ordered_key_waits_while_its_head_is_narrowed_down(db: Database, concurrency: int) -> None:
    batches = Batches(RuntimeError("no answer"), bad=(1,), concurrency=concurrency, ordered=True)
    run = batches.shop.inline(db)
    run.publish(batches.shop.orders, *({"n": n} for n in range(6)), key="ada")
    run.run()
    assert statuses(run, batches.shop.orders) == ["consumed", "quarantined", *["consumed"] * 4]
    order = [n for effect in batches.shop.mail.effects for n in effect.params["n"]]
    assert order == [0, 2, 3, 4, 5]
    first_of_others = min(number for number, tried in enumerate(batches.tries) if tried[0] > 1)
    last_of_culprit = max(number for number, tried in enumerate(batches.tries) if tried[0] <= 1)
    assert last_of_culprit < first_of_others, "what is behind the culprit waits"


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_consumer_that_needs_its_events_together_gets_them_together_again(db: Database, concurrency: int) -> None:
    fails = [RuntimeError("no answer")]

    def prepare(ctx: Any, _: Any) -> PrepareResult:
        pending = ctx.peek(shop.orders, limit=4)
        if len(pending) < 4:
            return PrepareResult.nothing()
        return PrepareResult(reserve=pending, data=[event.payload["n"] for event in pending])

    def mutate(ctx: Any, prepared: Any) -> Any:
        if fails:
            raise fails.pop()
        return ctx.mail.send(n=prepared.data)

    options: dict[str, Any] = {"batch": 4, "failures": at_once(), "on_logic_error": "quarantine"}
    shop = Shop(prepare=prepare, mutate=mutate, next=lambda *_: None, concurrency=concurrency, **options)
    run = shop.started(db, 4)
    run.run()
    assert_deliveries(run, shop.orders, "consumed")
    fails += [RuntimeError("no answer")] * 100
    run.publish(shop.orders, *({"n": n} for n in range(4, 8)))
    run.run()
    assert statuses(run, shop.orders)[4:] == ["quarantined"] * 4, "they cannot be told apart"


@pytest.mark.parametrize("concurrency", [1, 4])
def test_an_event_that_kills_its_process_while_prepare_sees_many_is_quarantined(db: Database, concurrency: int) -> None:
    batches = Batches(None, "prepare", concurrency=concurrency)
    run = batches.shop.started(db, 20)

    def die(point: CrashPoint) -> None:
        if point is CrashPoint.PREPARE_RAN and CULPRIT in batches.tries[-1]:
            raise WorkerCrash(point)

    with run.on_crash_points(die):
        for _ in range(12):
            with suppress(WorkerCrash):
                run.run()
            batches.tries.append([])
            run.start_worker()
            run.advance(timedelta(minutes=15))
            run.sweeps.rescue()
    run.run_until_idle()
    assert [n for n, status in enumerate(statuses(run, batches.shop.orders)) if status != "consumed"] == [CULPRIT]
    assert statuses(run, batches.shop.orders)[CULPRIT] == "quarantined"
    assert blocks(run) == []
