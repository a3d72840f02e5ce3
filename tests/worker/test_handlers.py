"""Handlers of every kind, and handlers that misbehave: each classified, visible, and harmless to the others."""

# ruff: noqa: ARG002 - the host decides which arguments a handler takes

import asyncio
import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import text

from pipeline import Applied, Call, Connector, NotFound, PrepareResult, Verdict, Workflow, mutation, read
from pipeline.domain.errors import PayloadError
from pipeline.domain.policies import Backoff, FailurePolicy
from pipeline.store.database import Database
from pipeline.testing import Does, Inline, assert_consumed, assert_runs
from pipeline.testing.inline import describe_state
from pipeline.worker.settings import WorkerPolicy
from tests.support.scripted_consumers import Shop, each_once, statuses, take_one, the_workflow

QUICK = WorkerPolicy(step_limit=timedelta(seconds=1))
PATIENT = FailurePolicy(backoff=Backoff(base=timedelta(minutes=10)))


class Clouds(Connector):
    """A connector whose operations are coroutines."""

    name = "clouds"

    def __init__(self) -> None:
        self.sent: Counter[int] = Counter()
        self.times_out = False

    @read
    async def find(self, *, n: int) -> int:
        await asyncio.sleep(0)
        return n * 10

    @mutation(timeout=timedelta(seconds=5))
    async def send(self, call: Call, *, n: int) -> dict[str, int]:
        await asyncio.sleep(0)
        self.sent[n] += 1
        if self.times_out:
            raise TimeoutError("read timed out")
        return {"n": n}

    @send.reconcile
    async def look(self, call: Call, *, n: int) -> Verdict:
        await asyncio.sleep(0)
        return Applied({"n": n}) if self.sent[n] else NotFound()


class AsyncSend:
    """A consumer whose phases are coroutines."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    async def prepare(self, ctx: Any, state: Any) -> PrepareResult:
        pending = ctx.peek(self.topic, limit=1)
        if not pending:
            return PrepareResult.nothing()
        found = await ctx.clouds.find(n=pending[0].payload["n"])
        return PrepareResult(reserve=pending, data={"n": found})

    async def mutate(self, ctx: Any, prepared: Any) -> Any:
        return await ctx.clouds.send(n=prepared.data["n"])

    async def next(self, ctx: Any, prepared: Any, result: Any) -> None:
        await asyncio.sleep(0)
        self.seen.append(result.value)

    topic: Any = None


@pytest.mark.parametrize("times_out", [False, True], ids=["answers", "times out after applying"])
def test_phases_and_operations_may_be_coroutines(db: Database, times_out: bool) -> None:
    workflow, clouds = Workflow("sky", concurrency=4), Clouds()
    clouds.times_out = times_out
    orders = workflow.topic("orders")
    AsyncSend.topic = orders
    workflow.consumer(subscribes=[orders])(AsyncSend)
    run = Inline(db, [workflow], [clouds])
    run.publish(orders, {"n": 1}, {"n": 2})
    run.run()
    assert_consumed(run, orders)
    assert clouds.sent == {10: 1, 20: 1}
    assert sorted(value["n"] for value in workflow.consumers["AsyncSend"].instance.seen) == [10, 20]


def test_a_handler_that_is_not_async_reads_through_a_connector_that_is(db: Database) -> None:
    def prepare(ctx: Any, _: Any) -> PrepareResult:
        plan = take_one(ctx, shop.orders)
        return replace(plan, data={"n": ctx.clouds.find(n=plan.data["n"] + 1)})

    shop = Shop(prepare=prepare)
    run = shop.started(db, 1, connectors=[Clouds()])
    run.run()
    assert_runs(run, "committed")
    assert shop.mail.times(n=10) == 1


def test_a_mutate_that_is_not_async_starts_no_event_loop(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(asyncio, "run", made.append)
    run = Shop().started(db, 2)
    run.run()
    assert_runs(run, "committed", "committed")
    assert made == []


def odd(value: Any) -> Callable[..., Any]:
    return lambda *_: value


WRONG: list[tuple[str, str, Any, str]] = [
    ("prepare", "nothing", None, "returned a NoneType; expected a PrepareResult"),
    ("prepare", "a dict", {"reserve": []}, "returned a dict"),
    ("prepare", "reserves a number", PrepareResult(reserve=[7]), "expected events that ctx.peek returned"),  # type: ignore[list-item]
    ("prepare", "a set as data", PrepareResult(data={"x": {1}}), "is a set"),
    ("prepare", "NaN", PrepareResult(data=float("nan")), "JSON does not have"),
    ("prepare", "NUL", PrepareResult(ui={"title": "a\0b"}), "NUL"),
    ("prepare", "a number as key", PrepareResult(data={1: 2}), "not storable text"),
    ("prepare", "too much", PrepareResult(data="x" * 2_000_000), "bytes"),
    ("prepare", "words as a time", PrepareResult(wake_at="tomorrow"), "wake_at"),  # type: ignore[arg-type]
    ("prepare", "a time without a zone", PrepareResult(wake_at=datetime(2030, 1, 1)), "with a time zone"),  # noqa: DTZ001
    ("prepare", "words as approval", PrepareResult(approval="yes"), "approval"),  # type: ignore[arg-type]
    ("mutate", "words", "sent", "returned a str"),
    ("next", "a set as state", {1, 2}, "is a set"),
    ("next", "too much state", "x" * 70_000, "bytes"),
    ("next", "an object as state", object(), "is a object"),
]


@pytest.mark.parametrize(
    ("phase", "value", "words"), [pytest.param(p, v, w, id=f"{p} returns {name}") for p, name, v, w in WRONG]
)
def test_a_handler_that_returns_the_wrong_type_fails_with_a_plain_message(
    db: Database, phase: str, value: Any, words: str
) -> None:
    shop = Shop(**{phase: odd(value)})
    run = shop.started(db)
    run.run()
    (failed,) = assert_runs(run, "failed:logic")
    assert words in str(failed.error)
    assert not run.events(shop.receipts)
    assert len(shop.mail.effects) == (phase == "next")
    assert the_workflow(run).maintenance


def fake(ctx: Any, shop: Shop, **changes: Any) -> PrepareResult:
    return PrepareResult(reserve=[replace(ctx.peek(shop.orders)[0], **changes)], data={"n": 0})


RESERVATIONS: list[tuple[str, Callable[[Any, Shop], PrepareResult], str]] = [
    ("does not exist", lambda ctx, shop: fake(ctx, shop, id=10**12), "there is no such event"),
    ("has an impossible id", lambda ctx, shop: fake(ctx, shop, id=-1), "there is no such event"),
    ("is on a topic it does not listen to", lambda ctx, shop: fake(ctx, shop, topic="elsewhere"), "ctx.peek returned"),
]


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize(
    ("prepare", "words"), [pytest.param(prepare, words, id=name) for name, prepare, words in RESERVATIONS]
)
def test_an_event_that_cannot_be_reserved_is_named(
    db: Database, prepare: Callable[[Any, Shop], PrepareResult], words: str, concurrency: int
) -> None:
    shop = Shop(prepare=lambda ctx, _: prepare(ctx, shop), concurrency=concurrency)
    run = shop.started(db)
    run.run()
    (failed,) = assert_runs(run, "failed:logic")
    assert words in str(failed.error)
    assert statuses(run, shop.orders) == ["pending"]
    assert not shop.mail.calls


def test_an_event_that_was_consumed_already_cannot_be_reserved_again(db: Database) -> None:
    kept: list[Any] = []

    def prepare(ctx: Any, _: Any) -> PrepareResult:
        kept.extend(ctx.peek(shop.orders, limit=1))
        return PrepareResult(reserve=kept[:1], data={"n": 0})

    shop = Shop(prepare=prepare, failures=PATIENT)
    run = shop.started(db, 2)
    run.run()
    first, refused = run.runs()
    assert (first.status, refused.phase) == ("committed", "preparing")
    assert "it is consumed" in str(refused.error)
    assert statuses(run, shop.orders) == ["consumed", "pending"]
    assert each_once(shop, [0])


def test_an_event_offered_to_another_run_cannot_be_reserved(db: Database) -> None:
    kept: list[Any] = []

    def prepare(ctx: Any, _: Any) -> PrepareResult:
        kept.extend(ctx.peek(shop.orders, limit=1))
        return PrepareResult(reserve=kept[:2], data=kept[-1].payload)

    shop = Shop(prepare=prepare, concurrency=4)
    run = shop.started(db, 2)
    run.run()
    assert any("cannot reserve" in (row.error or "") for row in run.runs())
    assert Counter(effect.params["n"] for effect in shop.mail.effects).most_common(1)[0][1] == 1, describe_state(run)


RAISED = [
    pytest.param(SystemExit(1), "paused:transient", id="SystemExit"),
    pytest.param(KeyboardInterrupt(), "paused:transient", id="KeyboardInterrupt"),
    pytest.param(GeneratorExit(), "paused:transient", id="GeneratorExit"),
    pytest.param(OSError("disk full"), "paused:transient", id="OSError"),
    pytest.param(KeyError("email"), "failed:logic", id="KeyError"),
    pytest.param(MemoryError(), "failed:internal", id="MemoryError"),
    pytest.param(PayloadError("x", "y", "z"), "failed:logic", id="an error of this package"),
]


@pytest.mark.parametrize("phase", ["prepare", "mutate", "next"])
@pytest.mark.parametrize(("error", "status"), RAISED)
def test_whatever_a_handler_raises_is_classified_and_the_worker_lives(
    db: Database, phase: str, error: BaseException, status: str
) -> None:
    def raises(*_: Any) -> Any:
        raise error

    shop = Shop(**{phase: raises}, failures=PATIENT)
    run = shop.started(db)
    run.run()
    (failed,) = assert_runs(run, status)
    assert failed.error_type == type(error).__name__
    assert len(shop.mail.effects) == (phase == "next")


class StopNowError(BaseException):
    """The host wants the worker to stop."""


def test_an_interruption_of_the_worker_is_not_taken_for_the_handler_s_failure(db: Database) -> None:
    inside, done = threading.Event(), threading.Event()

    def prepare(ctx: Any, _: Any) -> PrepareResult:
        inside.set()
        done.wait(25)
        return take_one(ctx, shop.orders)

    def stop(*_: Any) -> None:
        raise StopNowError

    def interrupt() -> None:
        inside.wait(60)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    shop = Shop(prepare=prepare)
    run = shop.started(db)
    before = signal.signal(signal.SIGUSR1, stop)
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        with pytest.raises(StopNowError):
            run.run()
    finally:
        signal.signal(signal.SIGUSR1, before)
        done.set()
    assert_runs(run, "active")
    run.run_until_idle()
    assert_consumed(run, shop.orders)


@pytest.mark.parametrize("phase", ["prepare", "mutate", "next"])
def test_a_handler_that_hangs_is_abandoned_and_its_late_result_is_dropped(db: Database, phase: str) -> None:
    go_on = threading.Event()
    hung: list[str] = []

    def hangs(usual: Callable[..., Any]) -> Callable[..., Any]:
        def handler(ctx: Any, *args: Any) -> Any:
            if not hung:
                hung.append(phase)
                go_on.wait(60)
            return usual(ctx, *args)

        return handler

    usual: dict[str, Callable[..., Any]] = {
        "prepare": lambda ctx, _: take_one(ctx, shop.orders),
        "mutate": lambda ctx, prepared: ctx.mail.send(n=prepared.data["n"]),
        "next": lambda *_: None,
    }
    shop = Shop(**{phase: hangs(usual[phase])}, failures=PATIENT)
    run = shop.started(db, 1, policy=QUICK)
    run.run()
    (stopped,) = assert_runs(run, "paused:transient")
    assert stopped.error_type == "TimedOutError"
    go_on.set()
    run.run_until_idle()
    assert_consumed(run, shop.orders)
    assert each_once(shop, [0])


@pytest.mark.parametrize("does", [Does.HANGS, Does.CRASHES, Does.TIMES_OUT_AFTER])
def test_a_connector_that_does_not_answer_is_reconciled_and_its_effect_happens_once(db: Database, does: Does) -> None:
    shop = Shop()
    type(shop.mail).operations()["send"].timeout = timedelta(seconds=1)
    shop.mail.will(does)
    run = shop.started(db)
    run.run()
    run.run_until_idle()
    assert_consumed(run, shop.orders)
    assert each_once(shop, [0])
    assert len(shop.mail.reconciled_keys) == 1


def test_a_result_that_cannot_be_stored_is_described_because_it_happened(db: Database) -> None:
    results: list[Any] = []
    shop = Shop(next=lambda ctx, prepared, result: results.append(result.value))

    class Odd(Connector):
        name = "mail"

        @mutation()
        def send(self, call: Call, *, n: int) -> Any:
            return {n}

    run = Inline(db, [shop.workflow], [Odd()])
    run.publish(shop.orders, {"n": 1})
    run.run()
    assert_consumed(run, shop.orders)
    assert "is a set" in results[0]["unstorable"]


class Order(BaseModel):
    """What is published on the typed topic."""

    number: int
    email: str


def test_models_are_checked_when_they_are_published_and_shown_when_they_are_peeked(db: Database) -> None:
    workflow = Workflow("typed")
    orders, done = workflow.topic("orders", schema=Order), workflow.topic("done", schema=Order)
    shown: list[Any] = []

    @workflow.consumer(subscribes=[orders], publishes=[done])
    class Copy:
        def prepare(self, ctx: Any, state: Any) -> PrepareResult:
            pending = ctx.peek(orders)
            shown.extend(event.payload for event in pending)
            return PrepareResult(reserve=pending)

        def mutate(self, ctx: Any, prepared: Any) -> None: ...

        def next(self, ctx: Any, prepared: Any, result: Any) -> None:
            ctx.publish(done, message_id="good", payload=shown[0])
            if len(shown) > 1:
                ctx.publish(done, message_id="bad", payload={"number": "many"})

    run = Inline(db, [workflow])
    run.publish(orders, Order(number=1, email="a@example.org"))
    run.run()
    assert shown == [Order(number=1, email="a@example.org")]
    assert [event.payload for event in run.events(done)] == [{"number": 1, "email": "a@example.org"}]
    run.publish(orders, Order(number=2, email="b@example.org"))
    run.run()
    failed = run.runs()[-1]
    assert (failed.status, failed.error_type) == ("failed:logic", "ValidationError")


def test_a_payload_that_no_longer_fits_its_model_fails_the_run_that_peeks_it(db: Database) -> None:
    workflow = Workflow("typed")
    orders = workflow.topic("orders", schema=Order)
    workflow.effect(orders)(lambda ctx, order: None)
    run = Inline(db, [workflow])
    with db.transaction() as tx:  # published before the topic had a model
        tx.execute(text("UPDATE pipeline.topics SET schema = NULL"))
    run.publish(orders, {"number": 1})
    run.run()
    assert_runs(run, "failed:logic")


def test_an_effect_is_one_event_and_at_most_one_mutation(db: Database) -> None:
    shop = Shop()
    workflow = Workflow("crm", concurrency=4)
    paid = workflow.topic("paid", schema=Order)

    @workflow.effect(paid)
    def update_crm(ctx: Any, order: Any) -> Any:
        if order.payload.number == 2:
            return None
        return ctx.mail.send(n=order.payload.number, to=order.payload.email)

    run = Inline(db, [workflow], [shop.mail])
    run.publish(paid, *(Order(number=n, email="a@example.org") for n in (1, 2, 3)))
    run.run()
    assert_consumed(run, paid, by="update_crm")
    assert each_once(shop, [1, 3])
