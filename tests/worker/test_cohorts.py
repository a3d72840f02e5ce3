"""Runs travel together and stay independent: whatever one of them does, the others commit, and nothing is repeated."""

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from threading import Event
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from pipeline import PrepareResult
from pipeline.domain.errors import LogicError, TransientError
from pipeline.domain.policies import Backoff, FailurePolicy
from pipeline.domain.values import Limits
from pipeline.store.database import Database
from pipeline.store.reads import work
from pipeline.testing import Does, Inline, assert_consumed
from pipeline.testing.inline import describe_state
from pipeline.worker.crash_points import CrashPoint
from pipeline.worker.settings import WorkerPolicy
from tests.support.scripted_consumers import Shop, at_once, each_once, statuses, take_one, the_workflow
from tests.support.worker_clock import Clock

SHORT, LONG = timedelta(seconds=1), timedelta(seconds=25)
PATIENT = FailurePolicy(backoff=Backoff(base=timedelta(minutes=10)))
SIZE = 50
BAD = set(range(0, SIZE, 5))
GOOD = set(range(SIZE)) - BAD


def shop_with_failing_orders(
    phase: str, fail: Callable[[], Any], calls: Counter[tuple[str, int]], **options: Any
) -> Shop:
    """A shop in which a phase does something bad to every fifth order."""
    shop: Shop

    def entered(name: str, n: int) -> None:
        calls[name, n] += 1
        if name == phase and n in BAD:
            fail()

    def prepare(ctx: Any, _: Any) -> PrepareResult:
        plan = take_one(ctx, shop.orders)
        entered("prepare", plan.data["n"])
        return plan

    def mutate(ctx: Any, prepared: Any) -> Any:
        entered("mutate", prepared.data["n"])
        return ctx.mail.send(n=prepared.data["n"])

    def next_(ctx: Any, prepared: Any, result: Any) -> None:
        entered("next", prepared.data["n"])
        ctx.publish(shop.receipts, message_id=f"r{prepared.data['n']}", payload=prepared.data)

    shop = Shop(
        prepare=prepare, mutate=mutate, next=next_, concurrency=2 * SIZE, on_logic_error="quarantine", **options
    )
    return shop


def raiser(error: BaseException) -> Callable[[], Any]:
    def fail() -> None:
        raise error

    return fail


FAILURES = [
    pytest.param(LogicError("wrong"), id="logic"),
    pytest.param(TransientError("not now"), id="transient"),
    pytest.param(ZeroDivisionError("division by zero"), id="a bug"),
    pytest.param(SystemExit(3), id="SystemExit"),
    pytest.param(KeyboardInterrupt(), id="KeyboardInterrupt"),
]


@pytest.mark.parametrize("error", FAILURES)
@pytest.mark.parametrize("phase", ["prepare", "mutate", "next"])
def test_every_fifth_run_fails_and_the_others_commit_with_nothing_repeated(
    db: Database, phase: str, error: BaseException
) -> None:
    calls: Counter[tuple[str, int]] = Counter()
    shop = shop_with_failing_orders(phase, raiser(error), calls)
    run = shop.started(db, SIZE)
    run.run()
    assert {event.payload["n"] for event in run.events(shop.receipts)} == GOOD, describe_state(run)
    assert all(calls[name, n] == 1 for name in ("prepare", "mutate", "next") for n in GOOD)
    sent = set(range(SIZE)) if phase == "next" else GOOD
    assert each_once(shop, sorted(sent))
    consumed = {row.payload["n"] for row in run.deliveries(shop.orders) if row.status == "consumed"}
    assert consumed == GOOD


def test_the_whole_cohort_is_one_message_per_phase(db: Database) -> None:
    shop = shop_with_failing_orders("never", raiser(LogicError("")), Counter())
    run = shop.started(db, SIZE, policy=WorkerPolicy(straggler_wait=timedelta(minutes=5)))
    delivered = []
    run.broker = lambda message: (delivered.append((message.task, len(message.run_ids))) or message,)  # type: ignore[func-returns-value]
    run.run()
    assert delivered == [("pipeline.prepare", SIZE), ("pipeline.mutate", SIZE), ("pipeline.next", SIZE)]
    assert_consumed(run, shop.orders)


@pytest.mark.parametrize(
    "does",
    [Does.REFUSES, Does.FAILS, Does.DENIES, Does.TIMES_OUT_AFTER, Does.TIMES_OUT_BEFORE, Does.CRASHES, Does.HANGS],
)
def test_every_fifth_call_fails_and_the_others_commit(
    db: Database, does: Does, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    calls: Counter[tuple[str, int]] = Counter()
    shop = shop_with_failing_orders("never", raiser(LogicError("")), calls, failures=at_once())
    shop.mail.will(*[does] * len(BAD), when=lambda params: params["n"] in BAD)
    type(shop.mail).operations()["send"].timeout = LONG
    run = shop.started(db, SIZE)

    def hang(point: CrashPoint) -> None:
        """Those that hang outlive their deadline once every other call is through."""
        through = sum(row.status == "applied" for row in run.ledger()) if point is CrashPoint.OUTCOME_SAVED else 0
        if does is Does.HANGS and through == len(GOOD):
            clock.advance(run, LONG)

    with run.on_crash_points(hang):
        run.run()
    shop.mail._never.set()
    done = {event.payload["n"] for event in run.events(shop.receipts)}
    assert done >= GOOD, describe_state(run)
    assert all(calls[name, n] == 1 for name in ("prepare", "mutate", "next") for n in GOOD)
    assert all(shop.mail.times(n=n) == 1 for n in GOOD)
    assert all(shop.mail.times(n=n) <= 1 for n in BAD)


def test_runs_that_failed_for_now_succeed_later_and_each_effect_still_happened_once(db: Database) -> None:
    calls: Counter[tuple[str, int]] = Counter()

    def once() -> None:
        if max(calls["next", n] for n in BAD) == 1:
            raise TransientError("not now")

    shop = shop_with_failing_orders("next", once, calls)
    run = shop.started(db, SIZE)
    run.run()
    run.run_until_idle()
    assert_consumed(run, shop.orders)
    assert each_once(shop, range(SIZE))


def test_a_handler_that_hangs_past_its_limit_delays_no_other_run(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    never = Event()
    calls: Counter[tuple[str, int]] = Counter()
    shop = shop_with_failing_orders("prepare", lambda: never.wait(60), calls, failures=PATIENT)
    run = shop.started(db, 12, policy=WorkerPolicy(step_limit=LONG))
    phases = run.runner.phases
    prepare = phases.prepare

    def hurried(row: Any, offered: Any) -> Any:
        """Only who hangs has little time."""
        phases.step_limit = SHORT if offered[0].payload["n"] in BAD else LONG
        try:
            return prepare(row, offered)
        finally:
            phases.step_limit = LONG

    monkeypatch.setattr(phases, "prepare", hurried)
    run.run()
    never.set()
    hung = [row for row in run.runs() if row.status == "paused:transient"]
    assert len(hung) == 3
    assert all(
        "did not return within 1 s (PIPELINE_STEP_TIME_LIMIT); it was abandoned" in str(row.error) for row in hung
    )
    assert {event.payload["n"] for event in run.events(shop.receipts)} == GOOD & set(range(12))


def test_a_merge_that_raises_fails_its_own_run_only(db: Database) -> None:
    def merge(current: Any, returned: Any) -> Any:
        if returned["n"] == 2:
            raise LogicError("cannot fold two")
        return {"sum": (current or {"sum": 0})["sum"] + returned["n"]}

    shop = Shop(next=lambda _, prepared, __: prepared.data, merge=merge, concurrency=8)
    run = shop.started(db, 5)
    run.run()
    assert Counter(row.status for row in run.runs()) == {"committed": 4, "failed:logic": 1}
    assert run.state(shop.workflow, "Send") == {"sum": 0 + 1 + 3 + 4}
    assert Counter(statuses(run, shop.orders)) == {"consumed": 4, "reserved": 1}
    assert the_workflow(run).maintenance


def test_a_merge_that_hangs_past_its_limit_holds_no_row_and_fails_its_own_run_only(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = Event()

    async def merge(current: Any, returned: Any) -> Any:
        if returned["n"] == 2:
            never.wait(60)
        return {"sum": (current or {"sum": 0})["sum"] + returned["n"]}

    shop = Shop(next=lambda _, prepared, __: prepared.data, merge=merge, concurrency=8, failures=PATIENT)
    run = shop.started(db, 5, policy=WorkerPolicy(step_limit=LONG))
    phases = run.runner.phases
    of = phases.merge_function

    def hurried(consumer: Any) -> Any:
        def fold(current: Any, returned: Any) -> Any:
            phases.step_limit = SHORT if returned["n"] == 2 else LONG
            fold = of(consumer)
            assert fold is not None
            return fold(current, returned)

        return fold

    monkeypatch.setattr(phases, "merge_function", hurried)
    run.run()
    never.set()
    assert Counter(row.status for row in run.runs()) == {"committed": 4, "paused:transient": 1}
    (hung,) = [row for row in run.runs() if row.status == "paused:transient"]
    assert "Send.merge did not return within 1 s (PIPELINE_STEP_TIME_LIMIT)" in str(hung.error)
    assert run.state(shop.workflow, "Send") == {"sum": 0 + 1 + 3 + 4}


LARGE = "x" * 600_000


@pytest.mark.parametrize(
    ("phase", "change"),
    [
        pytest.param("prepare", {"data": {"n": 2, "x": LARGE}, "ui": {"x": LARGE}}, id="a plan over its limit in sum"),
        pytest.param("prepare", {"data": {"n": 2, "x": "x" * 5000}}, id="a plan over the installation's limit"),
        pytest.param("next", {"payload": {"x": "x" * 5000}}, id="a payload over the installation's limit"),
        pytest.param("next", {"title": "x" * 20_000}, id="a title that is too long"),
    ],
)
def test_an_unstorable_value_fails_its_own_run_only(db: Database, phase: str, change: dict[str, Any]) -> None:
    def prepare(ctx: Any, _: Any) -> PrepareResult:
        plan = take_one(ctx, shop.orders)
        bad = phase == "prepare" and plan.data["n"] == 2
        return PrepareResult(**{"reserve": plan.reserve, "data": plan.data, **change}) if bad else plan

    def next_(ctx: Any, prepared: Any, result: Any) -> None:
        bad = phase == "next" and prepared.data["n"] == 2
        said = {"message_id": f"r{prepared.data['n']}", "payload": {}}
        ctx.publish(shop.receipts, **{**said, **change} if bad else said)

    shop = Shop(prepare=prepare, next=next_, concurrency=8)
    limits = Limits() if LARGE in str(change) else Limits(prepare_result=4000, payload=4000)
    run = shop.started(db, 5, policy=WorkerPolicy(limits=limits))
    run.run()
    assert Counter(row.status for row in run.runs()) == {"committed": 4, "failed:logic": 1}, describe_state(run)
    (failed,) = (row for row in run.runs() if row.status == "failed:logic")
    assert failed.error_type == "PayloadError"


class Flaky(Database):
    """A database that a test can make unreachable."""

    down = False

    def transaction(self, *, is_autocommit: bool = False) -> Any:
        if self.down:
            raise OperationalError("SELECT 1", {}, Exception("the server closed the connection"))
        return super().transaction(is_autocommit=is_autocommit)


@pytest.mark.parametrize("phase", ["prepare", "mutate", "next"])
def test_runs_whose_outcome_could_not_be_written_are_not_kept_alive_by_the_heartbeat(db: Database, phase: str) -> None:
    flaky = Flaky(db.engine)

    def breaks(*_: Any) -> None:
        flaky.down = True

    calls: Counter[tuple[str, int]] = Counter()
    shop = shop_with_failing_orders(phase, breaks, calls)
    run = shop.started(flaky, 3)
    with pytest.raises(OperationalError):
        run.run()
    flaky.down = False
    run.advance(timedelta(seconds=50))
    run.leases.heartbeat()
    run.advance(timedelta(seconds=30))
    assert run.sweeps.rescue().counts == {"rescued": 3}
    _finish(run, shop)


def _finish(run: Inline, shop: Shop) -> None:
    """What was rescued can go on with healthy code."""
    healthy = shop_with_failing_orders("never", raiser(LogicError("")), Counter())
    healthy.mail = shop.mail
    again = healthy.inline(run.db)
    again.run()
    again.run_until_idle()
    assert_consumed(again, healthy.orders)
    assert each_once(healthy, range(3))


def test_a_slow_handler_gets_small_cohorts_after_its_first_runs(db: Database) -> None:
    shop = Shop(concurrency=64)
    run = shop.started(db, 20)
    run.scheduler.per_run = run.runner.durations.per_run
    handler = next(row.id for row in _handlers(run) if row.name == "Send")
    run.runner.durations.record(handler, "prepare", run.policy.lease.total_seconds() / 16)
    run.scheduler.schedule(["shop"])
    assert {len(message.run_ids) for message in run.messages} == {4}, "a quarter of a lease at most"
    run.run()
    assert_consumed(run, shop.orders)


def _handlers(run: Any) -> Any:
    with run.db.transaction() as tx:
        return work.handlers(tx, "shop")
