"""A task in one function behaves as a class with the same hooks."""

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from pipeline.cli.consume import find_task
from pipeline.consumer_engine import (
    AsyncConsumerMixin,
    ConsumerMixin,
    ConsumerPolicy,
    ExceptionType,
    ItemOutcome,
    LoopReport,
    Transaction,
    TransactionException,
    consume,
)
from pipeline.domain.errors import InvalidInputError
from tests.consumer_engine.scripted_tasks import Cut, item, items
from tests.support.rule import rule

SETTINGS: dict[str, Any] = {"batch": 4, "concurrency": 2, "attempts": 3, "timeout": 60}


class Kept(Cut):
    """A source that wants its items acknowledged."""

    def __init__(self, count: int) -> None:
        super().__init__(items(count))
        self.acknowledged: list[str] = []

    def ack_transaction(self, transaction: Transaction, /) -> None:
        self.acknowledged.append(transaction.transaction_id)


def run(task: Any, **arguments: Any) -> LoopReport:
    report: Any = task.consume_transactions(**arguments)
    ended: LoopReport = asyncio.run(report) if inspect.iscoroutine(report) else report
    return ended


def make(variant: str, source: Any, calls: list[str]) -> Any:
    def work(transaction: Transaction) -> str:
        calls.append(transaction.transaction_id)
        if transaction.transaction_id == "t-1" and calls.count("t-1") < 3:
            raise OSError("busy")
        if transaction.transaction_id == "t-2":
            raise TransactionException("wrong", ExceptionType.BUSINESS)
        return transaction.transaction_id.upper()

    if variant == "threads":

        @consume(source, **SETTINGS)
        def shout(transaction: Transaction) -> str:
            """Do the work."""
            return work(transaction)

        return shout

    @consume(source, **SETTINGS)
    async def shout_async(transaction: Transaction) -> str:
        """Do the work."""
        return work(transaction)

    return shout_async


@rule("E-4", "E-10")
@pytest.mark.parametrize("variant", ["threads", "asyncio"])
def test_a_function_is_a_task_with_attempts_and_the_default_handlers(variant: str) -> None:
    source, calls = Kept(4), list[str]()
    task = make(variant, source, calls)
    assert issubclass(type(task), ConsumerMixin if variant == "threads" else AsyncConsumerMixin)
    assert type(task).__name__ == ("shout" if variant == "threads" else "shout_async")  # the label of its metrics
    assert task.__doc__ == "Do the work."
    report = run(task)
    assert (report.succeeded, report.failed) == (3, 1)
    assert sorted(calls) == ["t-0", "t-1", "t-1", "t-1", "t-2", "t-3"]
    assert sorted(source.acknowledged) == ["t-0", "t-1", "t-3"]
    assert source.asked[0] == 4
    one: Any = task(item("t-9"))  # a plain call of the function, for a test of it
    assert (asyncio.run(one) if inspect.iscoroutine(one) else one) == "T-9"


@rule("E-10", "E-15")
@pytest.mark.parametrize("variant", ["threads", "asyncio"])
def test_its_handlers_are_functions_too(variant: str) -> None:
    source, calls, seen = Kept(4), list[str](), list[tuple[str, str]]()
    task = make(variant, source, calls)

    def settle(transaction: Transaction, result: str) -> Any:
        seen.append(("success", result))
        return task.acknowledge(transaction)

    def refuse(transaction: Transaction, error: TransactionException) -> None:
        seen.append((error.category, transaction.transaction_id))

    async def settle_async(transaction: Transaction, result: str) -> None:
        await settle(transaction, result)

    async def refuse_async(transaction: Transaction, error: TransactionException) -> None:
        refuse(transaction, error)

    assert task.on_success(settle if variant == "threads" else settle_async) in (settle, settle_async)
    task.on_exception(refuse if variant == "threads" else refuse_async)
    assert run(task).succeeded == 3
    assert sorted(seen) == [("business", "t-2"), ("success", "T-0"), ("success", "T-1"), ("success", "T-3")]
    assert sorted(source.acknowledged) == ["t-0", "t-1", "t-3"]


def test_a_source_is_built_once_at_its_first_use() -> None:
    built: list[Kept] = []

    def build() -> Kept:
        built.append(Kept(2))
        return built[-1]

    task = make("threads", build, [])
    assert built == []
    with ThreadPoolExecutor(4) as pool:
        assert {id(each) for each in pool.map(lambda _: task.source, range(8))} == {id(built[0])}
    assert (run(task).succeeded, run(task).fetched, len(built)) == (2, 0, 1)
    assert run(task, source=Kept(1)).succeeded == 1  # another one for one loop


def test_a_plain_handler_of_an_async_function_and_no_source_are_refused_in_a_sentence() -> None:
    task = make("asyncio", Kept(1), [])
    task.on_success(lambda transaction, result: None)
    with pytest.raises(InvalidInputError, match="is not async; expected `async def`"):
        run(task)
    with pytest.raises(InvalidInputError, match="has no source"):
        run(make("threads", None, []))


def test_a_bare_consume_is_refused_in_a_sentence() -> None:
    with pytest.raises(InvalidInputError, match=r"was given the function .*takes arguments; .*@consume\(source\)"):
        consume(lambda transaction: None)


def test_the_short_form_of_a_policy_says_the_same_as_the_long_one() -> None:
    assert ConsumerPolicy.of() == ConsumerPolicy()
    made = ConsumerPolicy.of(**SETTINGS, backoff=0.5, limit=9, streaming=True, continuous=True)
    assert made.model_dump(exclude_defaults=True) == {
        "loop": {
            "batch": {"size": 4},
            "concurrency": {"value": 2},
            "transaction_timeout": 60,
            "limit": 9,
            "streaming": True,
            "continuous": True,
        },
        "steps": {"process": {"retry": {"max_attempts": 3, "backoff": 0.5, "backoff_cap": 30}}},
    }
    chosen = ConsumerPolicy.of(limit=1)

    @consume(Kept(3), policy=chosen)
    def work(transaction: Transaction) -> None:
        """Do the work."""

    assert work.policy is chosen
    assert run(work).fetched == 1


def test_the_command_finds_a_function() -> None:
    assert find_task("examples.paid_orders:check_order").policy.loop.streaming


def _generator(transaction: Transaction) -> Any:
    yield transaction


async def _async_generator(transaction: Transaction) -> Any:
    yield transaction


@pytest.mark.parametrize("function", [_generator, _async_generator])
def test_a_generator_function_is_refused_because_its_body_would_not_run(function: Any) -> None:
    source = Kept(2)
    with pytest.raises(InvalidInputError, match="is a generator function"):
        run(consume(source)(function))
    assert (source.asked, source.acknowledged) == ([], [])


def _work(transaction: Transaction) -> None:
    """Do the work."""


def test_a_class_without_arguments_is_built_as_the_source() -> None:
    class Two(Kept):
        def __init__(self) -> None:
            super().__init__(2)

    assert run(consume(Two)(_work)).succeeded == 2


def test_an_attribute_error_in_the_function_that_builds_a_source_is_shown() -> None:
    def build() -> Kept:
        raise AttributeError("no such setting")

    with pytest.raises(InvalidInputError, match="could not be built: no such setting"):
        run(consume(build)(_work))


@pytest.mark.parametrize(
    ("decorate", "said"),
    [
        (lambda: consume(Kept(1))(Kept), "decorates something of type type; expected a function"),  # type: ignore[arg-type]
        (lambda: consume(Kept(1))(partial(_work)), "decorates something of type partial"),
        (lambda: consume(Kept(1), policy=ConsumerPolicy(), batch=5, limit=2), "policy= and batch=, limit="),
        (lambda: consume(Kept(1), batch=0), r"^The policy cannot be used: batch \(loop.batch.size\): .*, got 0"),
        (lambda: consume(Kept(1), timeout=0, backoff="x"), r"timeout \(.*\): .*; backoff \(.*\): "),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused_in_a_sentence(decorate: Callable[[], Any], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        decorate()


@rule("E-10")
@pytest.mark.parametrize("variant", ["threads", "asyncio"])
def test_a_default_success_handler_with_nothing_to_do_counts_as_an_attempt(variant: str) -> None:
    task, outcomes = make(variant, Cut(items(1)), []), list[ItemOutcome]()
    assert run(task, policy=ConsumerPolicy(), on_outcome=outcomes.append).succeeded == 1
    assert dict(outcomes[0].attempts) == {"process": 1, "success": 1}
    assert outcomes[0].value == "T-0"
