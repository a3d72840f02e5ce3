"""A declaration that cannot work is refused where it stands, with file and line."""

# ruff: noqa: ARG002 - the host decides which arguments a handler takes

import inspect
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from pydantic import BaseModel

from pipeline import DeclarationError, FailurePolicy, PrepareResult, Topic, Workflow

Declare = Callable[[Workflow, Topic], object]


class Whole:
    """A consumer with nothing wrong."""

    def prepare(self, ctx: Any, state: Any) -> PrepareResult:
        return PrepareResult.nothing()

    def mutate(self, ctx: Any, prepared: Any) -> Any:
        return ctx.mail.send(n=1)

    def next(self, ctx: Any, prepared: Any, result: Any) -> None:
        return None


def without(phase: str) -> type:
    return type("Partial", (), {name: value for name, value in vars(Whole).items() if name != phase})


def changed(**members: Any) -> type:
    return type("Changed", (Whole,), members)


class NeedsArguments(Whole):
    def __init__(self, mailer: Any) -> None:
        self.mailer = mailer


def a_poll(ctx: Any, state: Any) -> None: ...


class OfFunctions(BaseModel):
    act: Callable[[], None]


class OfTheUnknown(BaseModel):
    other: "Unknown"  # type: ignore[name-defined] # noqa: F821 - the case under test


HOUR = timedelta(hours=1)
FOREIGN = Workflow("foreign").topic("orders")

CONSUMERS: list[tuple[str, Declare, str]] = [
    ("a topic of another workflow", lambda w, t: w.consumer(subscribes=[FOREIGN])(Whole), "is not a topic of"),
    ("a topic by name", lambda w, t: w.consumer(subscribes=["orders"])(Whole), "is not a topic of"),  # type: ignore[list-item]
    ("an undeclared output", lambda w, t: w.consumer(subscribes=[t], publishes=[FOREIGN])(Whole), "is not a topic"),
    ("no list", lambda w, t: w.consumer(subscribes=t)(Whole), "a list of topics is expected"),  # type: ignore[arg-type]
    ("text for a list", lambda w, t: w.consumer(subscribes="orders")(Whole), "a list of topics"),  # type: ignore[arg-type]
    ("nothing for a list", lambda w, t: w.consumer(subscribes=None)(Whole), "a list of topics"),  # type: ignore[arg-type]
    ("no topic", lambda w, t: w.consumer(subscribes=[])(Whole), "subscribes to nothing"),
    (
        "a generator of nothing",
        lambda w, t: w.consumer(subscribes=(x for x in [t][1:]))(Whole),
        "subscribes to nothing",
    ),
    ("no prepare", lambda w, t: w.consumer(subscribes=[t])(without("prepare")), "no method 'prepare'"),
    ("no mutate", lambda w, t: w.consumer(subscribes=[t])(without("mutate")), "no method 'mutate'"),
    ("no next", lambda w, t: w.consumer(subscribes=[t])(without("next")), "no method 'next'"),
    (
        "too few parameters",
        lambda w, t: w.consumer(subscribes=[t])(changed(next=lambda self, ctx: None)),
        "next cannot be called with 3 arguments",
    ),
    (
        "too many parameters",
        lambda w, t: w.consumer(subscribes=[t])(changed(prepare=lambda self, ctx, state, more: None)),
        "prepare cannot be called with 2 arguments",
    ),
    ("an unknown option", lambda w, t: w.consumer(subscribes=[t], retries=3)(Whole), "unknown option 'retries'"),  # type: ignore[call-arg]
    ("an option of another type", lambda w, t: w.consumer(subscribes=[t], batch="5")(Whole), "expected int"),  # type: ignore[arg-type]
    ("truth as a number", lambda w, t: w.consumer(subscribes=[t], batch=True)(Whole), "expected int"),
    ("a policy as a number", lambda w, t: w.consumer(subscribes=[t], failures=3)(Whole), "expected FailurePolicy"),  # type: ignore[arg-type]
    ("a batch without end", lambda w, t: w.consumer(subscribes=[t], batch=10**10)(Whole), "at most 100000"),
    (
        "a merge that is not given what was returned",
        lambda w, t: w.consumer(subscribes=[t])(changed(merge=lambda self, current: current)),
        "Changed.merge cannot be called with 2 arguments",
    ),
    ("a merge that is none", lambda w, t: w.consumer(subscribes=[t])(changed(merge=5)), "merge cannot be called"),
    ("an empty batch", lambda w, t: w.consumer(subscribes=[t], batch=0)(Whole), "batch=0"),
    ("no such place", lambda w, t: w.consumer(subscribes=[t], start_at="middle")(Whole), "middle"),
    ("no such choice", lambda w, t: w.consumer(subscribes=[t], after_failed_mutation="x")(Whole), "'x'"),
    ("a function", lambda w, t: w.consumer(subscribes=[t])(a_poll), "a consumer is a class"),  # type: ignore[type-var]
    ("a class that needs arguments", lambda w, t: w.consumer(subscribes=[t])(NeedsArguments), "without arguments"),
    ("a name that is none", lambda w, t: w.consumer(subscribes=[t], name="a\0b")(Whole), "control characters"),
]
PRODUCERS: list[tuple[str, Declare, str]] = [
    ("no schedule", lambda w, t: w.producer()(a_poll), "either every="),
    ("two schedules", lambda w, t: w.producer(every=HOUR, cron="* * * * *")(a_poll), "and not both"),
    ("no pause", lambda w, t: w.producer(every=timedelta(0))(a_poll), "positive timedelta"),
    ("a negative pause", lambda w, t: w.producer(every=-HOUR)(a_poll), "positive timedelta"),
    ("a number for a pause", lambda w, t: w.producer(every=5)(a_poll), "positive timedelta"),  # type: ignore[arg-type]
    ("a cron that is none", lambda w, t: w.producer(cron="often")(a_poll), "cannot be read"),
    ("a cron out of range", lambda w, t: w.producer(cron="61 * * * *")(a_poll), "cannot be read"),
    ("a day that never comes", lambda w, t: w.producer(cron="0 0 30 2 *")(a_poll), "cron"),
    (
        "a subscription",
        lambda w, t: w.producer(every=HOUR, subscribes=[t])(a_poll),  # type: ignore[call-arg]
        "unknown option 'subscribes'; known are: cron, every, failures, name, publishes",
    ),
    ("an undeclared output", lambda w, t: w.producer(every=HOUR, publishes=[FOREIGN])(a_poll), "is not a topic"),
    ("another signature", lambda w, t: w.producer(every=HOUR)(lambda ctx: None), "2 arguments"),
]
EFFECTS: list[tuple[str, Declare, str]] = [
    ("another signature", lambda w, t: w.effect(t)(lambda ctx: None), "2 arguments"),
    ("an unknown option", lambda w, t: w.effect(t, publishes=[t])(a_poll), "unknown option 'publishes'"),  # type: ignore[call-arg]
    ("a foreign topic", lambda w, t: w.effect(FOREIGN)(a_poll), "is not a topic of"),
]
WORKFLOWS: list[tuple[str, Declare, str]] = [
    ("an empty name", lambda w, t: Workflow(" "), "not a name"),
    ("no concurrency", lambda w, t: Workflow("x", concurrency=0), "at least 1"),
    ("concurrency in words", lambda w, t: Workflow("x", concurrency="many"), "expected int"),  # type: ignore[arg-type]
    ("more at once than there will be", lambda w, t: Workflow("x", concurrency=200_000), "at most 100000"),
    ("a date as a version", lambda w, t: Workflow("x", version=20261116001), "version=20261116001; expected at most"),
    (
        "a model of functions",
        lambda w, t: w.topic("x", schema=OfFunctions),
        "topic 'x', OfFunctions, cannot be written",
    ),
    ("a model of the unknown", lambda w, t: w.topic("x", schema=OfTheUnknown), "OfTheUnknown, cannot be written"),
    ("no such reach of doubt", lambda w, t: Workflow("x", on_uncertain="ignore"), "ignore"),
    ("no such reach of errors", lambda w, t: Workflow("x", on_logic_error="ignore"), "ignore"),
    ("a topic twice", lambda w, t: w.topic("orders"), "declared twice"),
    ("a topic without a name", lambda w, t: w.topic(""), "not a name"),
    ("a topic name that is none", lambda w, t: w.topic(["x"]), "not a name"),  # type: ignore[arg-type]
    ("a schema that is none", lambda w, t: w.topic("x", schema=dict), "pydantic model"),  # type: ignore[arg-type]
]
ALL = [
    pytest.param(declare, words, id=f"{kind}: {name}")
    for kind, cases in (("consumer", CONSUMERS), ("producer", PRODUCERS), ("effect", EFFECTS), ("workflow", WORKFLOWS))
    for name, declare, words in cases
]


@pytest.mark.parametrize(("declare", "words"), ALL)
def test_a_declaration_that_cannot_work_is_refused_where_it_stands(declare: Declare, words: str) -> None:
    workflow = Workflow("shop")
    orders = workflow.topic("orders")
    with pytest.raises(DeclarationError, match=words) as refused:
        declare(workflow, orders)
    lines, first = inspect.getsourcelines(declare)
    file, line = refused.value.where.rsplit(":", 1)
    assert file == __file__
    assert first <= int(line) < first + max(len(lines), 4)
    assert not workflow.consumers
    assert not workflow.producers


@pytest.mark.parametrize("again", ["consumer", "producer", "effect"])
def test_a_name_can_be_taken_once(again: str) -> None:
    workflow = Workflow("shop")
    orders = workflow.topic("orders")
    workflow.consumer(subscribes=[orders], name="taken")(Whole)
    declare: dict[str, Callable[[], object]] = {
        "consumer": lambda: workflow.consumer(subscribes=[orders], name="taken")(Whole),
        "producer": lambda: workflow.producer(every=HOUR, name="taken")(a_poll),
        "effect": lambda: workflow.effect(orders, name="taken")(a_poll),
    }
    with pytest.raises(DeclarationError, match="already"):
        declare[again]()


def state_next(self: Any, ctx: Any, prepared: Any, result: Any) -> dict[str, int]:
    return {"n": 1}


def any_next(self: Any, ctx: Any, prepared: Any, result: Any) -> Any:
    return None


def test_state_with_parallel_runs_needs_a_merge() -> None:
    workflow = Workflow("shop", concurrency=2)
    orders = workflow.topic("orders")
    with pytest.raises(DeclarationError, match=r"returns state and its workflow runs 2 at once.*define merge"):
        workflow.consumer(subscribes=[orders])(changed(next=state_next))
    merged = changed(next=state_next, merge=lambda self, current, returned: returned)
    workflow.consumer(subscribes=[orders])(merged)


def test_a_merge_that_is_switched_off_is_no_merge() -> None:
    workflow = Workflow("shop", concurrency=2)
    with pytest.raises(DeclarationError, match="define merge"):
        workflow.consumer(subscribes=[workflow.topic("orders")])(changed(next=state_next, merge=None))


def test_topics_may_be_given_by_a_generator() -> None:
    workflow = Workflow("shop")
    topics = [workflow.topic(name) for name in ("orders", "bills")]
    workflow.consumer(subscribes=(topic for topic in topics), publishes=iter(topics))(Whole)
    workflow.producer(every=HOUR, publishes=(topic for topic in topics))(a_poll)
    assert workflow.consumers["Whole"].subscribes == workflow.consumers["Whole"].publishes == tuple(topics)
    assert workflow.producers["a_poll"].publishes == tuple(topics)


def test_a_next_that_may_return_anything_is_not_taken_to_return_state() -> None:
    workflow = Workflow("shop", concurrency=2)
    workflow.consumer(subscribes=[workflow.topic("orders")])(changed(next=any_next))


def test_state_with_one_run_at_a_time_needs_no_merge() -> None:
    workflow = Workflow("shop")
    workflow.consumer(subscribes=[workflow.topic("orders")])(changed(next=state_next))


class CodeAfter(Whole):
    def mutate(self, ctx: Any, prepared: Any) -> Any:
        asked = ctx.mail.send(n=1)
        prepared.data["sent"] = True
        return asked


class CodeAfterInside(Whole):
    async def mutate(self, context: Any, prepared: Any) -> Any:
        if prepared.data:
            await context.mail.send(n=1)
            prepared.data["sent"] = True


class AsksAndReturns(Whole):
    def mutate(self, ctx: Any, prepared: Any) -> Any:
        asked = ctx.mail.send(n=1)
        return asked  # noqa: RET504 - the case under test


def effect_with_code_after(ctx: Any, order: Any) -> None:
    ctx.mail.send(n=1)
    order.payload["sent"] = True


class CodeAfterATry(Whole):
    def mutate(self, ctx: Any, prepared: Any) -> Any:
        try:
            asked: Any = ctx.mail.send(n=1)
        except ValueError:
            raise
        prepared.data.clear()
        return asked


class CodeAfterABranch(Whole):
    async def mutate(self, ctx: Any, prepared: Any) -> Any:
        if prepared.data:
            await ctx.mail.send(n=1)
        else:
            return
        prepared.data.clear()


class AsksInABranchThatReturns(Whole):
    def mutate(self, ctx: Any, prepared: Any) -> Any:
        if prepared.data:
            asked = ctx.mail.send(n=1)
            return asked  # noqa: RET504 - the case under test
        prepared.data.clear()
        return None


class ReturnsADict(Whole):
    def next(self, ctx: Any, prepared: Any, result: Any):  # type: ignore[no-untyped-def] # as people write it
        return {"count": 1}


def test_without_an_annotation_the_return_type_of_next_is_not_guessed() -> None:
    workflow = Workflow("shop", concurrency=2)
    workflow.consumer(subscribes=[workflow.topic("orders")])(ReturnsADict)  # its first run that returns state fails


def test_state_of_a_workflow_that_contains_doubts_needs_a_merge_too() -> None:
    workflow = Workflow("shop", on_uncertain="contain")
    with pytest.raises(
        DeclarationError,
        match="returns state and its workflow continues while an outcome is in doubt, which would lose",
    ):
        workflow.consumer(subscribes=[workflow.topic("orders")])(changed(next=state_next))


@pytest.mark.parametrize("cls", [CodeAfter, CodeAfterInside, CodeAfterATry, CodeAfterABranch])
def test_code_after_the_request_is_warned_of_where_the_consumer_is_declared(cls: type) -> None:
    workflow = Workflow("shop")
    with pytest.warns(UserWarning, match=r"mutate has code after it requested") as warned:
        workflow.consumer(subscribes=[workflow.topic("orders")])(cls)
    assert warned[0].filename == __file__


def test_code_after_the_request_of_an_effect_is_warned_of() -> None:
    workflow = Workflow("shop")
    with pytest.warns(UserWarning, match="effect_with_code_after has code after"):
        workflow.effect(workflow.topic("orders"))(effect_with_code_after)


@pytest.mark.parametrize("cls", [Whole, AsksAndReturns, AsksInABranchThatReturns])
def test_asking_last_is_not_warned_of(cls: type) -> None:
    workflow = Workflow("shop")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        workflow.consumer(subscribes=[workflow.topic("orders")], failures=FailurePolicy())(cls)
