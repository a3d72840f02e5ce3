"""Each phase does what it may, and nothing else: a violation fails the run, and nothing comes of it."""

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from pipeline import PrepareResult, Topic, Workflow
from pipeline.store.database import Database
from pipeline.testing import Inline, assert_consumed, assert_runs, scripted
from pipeline.workflows.contexts import MutateContext, NextContext, PrepareContext, ProducerContext
from tests.support.rule import rule
from tests.support.scripted_consumers import Shop, statuses, take_one, the_workflow

Act = Callable[[Any, "Shop"], Any]


def in_phase(phase: str, act: Act) -> Shop:
    """A shop in which a phase does something of its own before it goes on as usual."""
    shop: Shop

    def prepare(ctx: Any, _: Any) -> PrepareResult:
        return act(ctx, shop) if phase == "prepare" else take_one(ctx, shop.orders)

    def mutate(ctx: Any, prepared: Any) -> Any:
        return act(ctx, shop) if phase == "mutate" else ctx.mail.send(n=prepared.data["n"])

    def next_(ctx: Any, prepared: Any, result: Any) -> Any:
        return act(ctx, shop) if phase == "next" else None

    shop = Shop(prepare=prepare, mutate=mutate, next=next_)
    return shop


def twice(ctx: Any, _: Shop) -> None:
    ctx.mail.send(n=1)
    ctx.mail.send(n=1)


def two_kinds(ctx: Any, _: Shop) -> None:
    ctx.mail.send(n=1)
    ctx.mail.cancel(n=1)


FORBIDDEN: list[tuple[str, str, Act, str]] = [
    ("prepare", "asks for a mutation", lambda ctx, _: ctx.mail.send(n=1), "the mutation mail.send was requested"),
    ("prepare", "publishes", lambda ctx, s: ctx.publish(s.receipts, message_id="x"), "ctx.publish was used"),
    ("prepare", "consumes", lambda ctx, _: ctx.consume([1]), "ctx.consume was used"),
    ("prepare", "peeks elsewhere", lambda ctx, s: ctx.peek(s.elsewhere), "peek of topic 'elsewhere'"),
    ("prepare", "peeks where it publishes", lambda ctx, s: ctx.peek(s.receipts), "peek of topic 'receipts'"),
    ("prepare", "peeks by name", lambda ctx, _: ctx.peek("orders"), "orders. Pass the topic that"),
    ("prepare", "peeks in another workflow", lambda ctx, _: ctx.peek(Topic("other", "orders")), "peek of topic"),
    ("prepare", "gets elsewhere", lambda ctx, s: ctx.get_by_ids(s.elsewhere, [1]), "get_by_ids of topic"),
    ("prepare", "uses an unknown connector", lambda ctx, _: ctx.bank.pay(), "connectors are: mail"),
    ("prepare", "uses an unknown operation", lambda ctx, _: ctx.mail.burn(), "has no operation 'burn'"),
    ("mutate", "reads", lambda ctx, _: ctx.mail.find(n=1), "the read mail.find"),
    ("mutate", "peeks", lambda ctx, s: ctx.peek(s.orders), "ctx.peek was used"),
    ("mutate", "gets", lambda ctx, s: ctx.get_by_ids(s.orders, [1]), "ctx.get_by_ids was used"),
    ("mutate", "publishes", lambda ctx, s: ctx.publish(s.receipts, message_id="x"), "ctx.publish was used"),
    ("mutate", "asks twice", twice, "a second mutation"),
    ("mutate", "asks for two kinds", two_kinds, "a second mutation mail.cancel"),
    ("mutate", "gives wrong parameters", lambda ctx, _: ctx.mail.send(1), "positional"),
    ("mutate", "gives what is no JSON", lambda ctx, _: ctx.mail.send(n={1, 2}), "parameters of mail.send"),
    ("mutate", "returns something else", lambda ctx, _: {"sent": True}, "returned a dict"),
    ("next", "asks for a mutation", lambda ctx, _: ctx.mail.send(n=1), "mail.send(n) was called in next"),
    ("next", "reads", lambda ctx, _: ctx.mail.find(n=1), "mail.find(n) was called in next"),
    ("next", "peeks", lambda ctx, s: ctx.peek(s.orders), "ctx.peek was used"),
    ("next", "publishes elsewhere", lambda ctx, s: ctx.publish(s.elsewhere, message_id="x"), "publish to topic"),
    ("next", "publishes by name", lambda ctx, _: ctx.publish("receipts", message_id="x"), "publish to topic"),
    ("next", "publishes to its input", lambda ctx, s: ctx.publish(s.orders, message_id="x"), "publish to topic"),
]
CASES = [pytest.param(phase, act, words, id=f"{phase} {name}") for phase, name, act, words in FORBIDDEN]


def assert_harmless(shop: Shop, run: Inline, phase: str, words: str) -> None:
    """The run failed with this message; nothing was sent or published by it; its event is kept."""
    (failed,) = assert_runs(run, "failed:logic")
    assert words in str(failed.error)
    assert len(shop.mail.effects) == (1 if phase == "next" else 0)
    assert not run.events(shop.receipts)
    assert not run.events(shop.elsewhere)
    assert statuses(run, shop.orders) == ["reserved" if phase == "next" else "pending"]
    assert the_workflow(run).maintenance


@rule("L-4", "L-5", "L-6", "L-7", "L-14", "L-15", "L-16", "L-17", "L-18", "L-28", "L-29", "L-30")
@pytest.mark.parametrize(("phase", "act", "words"), CASES)
def test_a_forbidden_call_in_a_phase_is_a_logic_failure_and_does_nothing(
    db: Database, phase: str, act: Act, words: str
) -> None:
    shop = in_phase(phase, act)
    run = shop.started(db)
    run.run()
    assert_harmless(shop, run, phase, words)


VIOLATIONS = [case for case in CASES if any(part in str(case.id) for part in ("asks", "reads", "peeks", "publishes"))]


@pytest.mark.parametrize(("phase", "act", "words"), VIOLATIONS)
def test_a_violation_that_the_handler_swallows_still_fails_its_run(
    db: Database, phase: str, act: Act, words: str
) -> None:
    def quiet(ctx: Any, shop: Shop) -> Any:
        with suppress(BaseException):  # what a careless handler does
            act(ctx, shop)
        return take_one(ctx, shop.orders) if phase == "prepare" else None

    shop = in_phase(phase, quiet)
    run = shop.started(db)
    run.run()
    assert_harmless(shop, run, phase, words)


SMUGGLED: list[tuple[str, str, Act]] = [
    ("prepare", "mutate", lambda ctx, s: ctx.peek(s.orders)),
    ("prepare", "mutate", lambda ctx, s: ctx.mail.find(n=1)),
    ("prepare", "next", lambda ctx, s: ctx.mail.find(n=1)),
    ("prepare", "next", lambda ctx, s: ctx.get_by_ids(s.orders, [1])),
    ("mutate", "next", lambda ctx, s: ctx.mail.send(n=2)),
]


@pytest.mark.parametrize("swallowed", [False, True], ids=["", "swallowed"])
@pytest.mark.parametrize(("kept_in", "used_in", "act"), SMUGGLED)
def test_a_context_kept_from_an_earlier_phase_refuses_and_fails_the_run_that_used_it(
    db: Database, kept_in: str, used_in: str, act: Act, swallowed: bool
) -> None:
    kept: dict[str, Any] = {}

    def use(shop: Shop) -> None:
        try:
            act(kept[kept_in], shop)
        except Exception:
            if not swallowed:
                raise

    def prepare(ctx: Any, _: Any) -> PrepareResult:
        kept["prepare"] = ctx
        return take_one(ctx, shop.orders)

    def mutate(ctx: Any, prepared: Any) -> Any:
        kept["mutate"] = ctx
        if used_in == "mutate":
            use(shop)
        return ctx.mail.send(n=prepared.data["n"])

    def next_(ctx: Any, prepared: Any, result: Any) -> None:
        use(shop)

    shop = Shop(prepare=prepare, mutate=mutate, next=next_)
    run = shop.started(db)
    run.run()
    assert_harmless(shop, run, used_in, "after the phase had ended")


def test_a_context_kept_from_an_earlier_run_refuses(db: Database) -> None:
    kept: list[Any] = []

    def next_(ctx: Any, prepared: Any, result: Any) -> None:
        kept.append(ctx)
        kept[0].publish(shop.receipts, message_id=f"r{prepared.data['n']}")

    shop = Shop(next=next_)
    run = shop.started(db, 2)
    run.run()
    assert_runs(run, "committed", "failed:logic")
    assert [event.message_id for event in run.events(shop.receipts)] == ["r0"]


PRODUCER: list[tuple[str, Callable[[Any, Topic, Topic], Any], str]] = [
    ("asks for a mutation", lambda ctx, out, other: ctx.mail.send(n=1), "the mutation mail.send was requested"),
    ("peeks", lambda ctx, out, other: ctx.peek(out), "ctx.peek was used"),
    ("publishes elsewhere", lambda ctx, out, other: ctx.publish(other, message_id="x"), "publish to topic 'other'"),
]


@pytest.mark.parametrize(("act", "words"), [pytest.param(act, words, id=name) for name, act, words in PRODUCER])
def test_a_forbidden_call_of_a_producer_is_a_logic_failure(
    db: Database, act: Callable[[Any, Topic, Topic], Any], words: str
) -> None:
    workflow = Workflow("feed")
    out, other = workflow.topic("out"), workflow.topic("other")
    mail = scripted("mail")

    @workflow.producer(every=timedelta(hours=1), publishes=[out])
    def poll(ctx: Any, state: Any) -> None:
        ctx.publish(out, message_id="before", payload={})
        act(ctx, out, other)

    workflow.producer(cron="0 0 29 2 *", publishes=[other], name="leap day")(lambda ctx, state: None)
    run = Inline(db, [workflow], [mail])
    run.run()
    (failed,) = assert_runs(run, "failed:logic")
    assert words in str(failed.error)
    assert not mail.calls
    assert not run.events(out)
    assert not run.events(other)


@rule("L-3")
def test_prepare_may_peek_get_and_read_and_has_the_time(db: Database) -> None:
    seen: dict[str, Any] = {}

    def prepare(ctx: Any, _: Any) -> PrepareResult:
        pending = ctx.peek(shop.orders)
        again = ctx.get_by_ids(shop.orders, [event.id for event in pending])
        seen.update(pending=pending, again=again, read=ctx.mail.find(n=5), now=ctx.now)
        return PrepareResult(reserve=pending[:1], data=pending[0].payload)

    shop = Shop(prepare=prepare)
    run = shop.started(db)
    run.run()
    assert_consumed(run, shop.orders)
    assert seen["pending"] == seen["again"]
    assert seen["pending"][0].payload == {"n": 0}
    assert seen["read"] == {"n": 5}
    assert abs(seen["now"] - run.now()) < timedelta(minutes=1)


@rule("L-15", "L-27")
@pytest.mark.parametrize(
    ("kind", "offers"),
    [
        (PrepareContext, {"peek", "get_by_ids"}),
        (MutateContext, set()),
        (NextContext, {"publish"}),
        (ProducerContext, {"publish"}),
    ],
)
def test_a_context_has_exactly_the_methods_of_its_phase(kind: type, offers: set[str]) -> None:
    methods = {name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))}
    assert methods - {"close", "add_cost"} == offers
