"""Whom a consumer asks for items and whom it tells that they are done; and what it refuses before it asks."""

import asyncio
import functools
from typing import Any

import pytest

from pipeline.consumer_engine.consumer import AsyncConsumerMixin, ConsumerMixin
from pipeline.consumer_engine.transactions import Transaction
from pipeline.domain.errors import InvalidInputError
from tests.consumer_engine.scripted_tasks import AsyncRun, Cut, Run, Script, check, item, items, policy, run_script


class Acked(Cut):
    """A source that can acknowledge, and nothing more."""

    def __init__(self, count: int = 1) -> None:
        super().__init__(items(count))
        self.acked: list[str] = []

    def ack_transaction(self, transaction: Transaction, /) -> None:
        self.acked.append(transaction.transaction_id)


class Empty(Acked):
    """A source that is false, because it counts what it has now."""

    def __len__(self) -> int:
        return 0


class Threaded(ConsumerMixin):
    def process_transaction(self, transaction: Transaction) -> Any: ...


class Awaited(AsyncConsumerMixin):
    async def process_transaction(self, transaction: Transaction) -> Any: ...


def bare(variant: Run) -> Any:
    """A task that only processes, and leaves the rest to the engine."""
    return Awaited() if isinstance(variant, AsyncRun) else Threaded()


@check("E3")
def test_an_item_is_acknowledged_only_at_the_source_that_gave_it_out(variant: Run) -> None:
    given, own = Acked(), Acked()
    alone, other = bare(variant), bare(variant)
    other.source = own
    for task in (alone, other):
        given.line = items(1)
        assert variant.consume(task, source=given, policy=policy()).succeeded == 1
    assert (given.acked, own.acked) == (["t-0", "t-0"], [])
    variant.process(other, item("t-9"))
    other.source = None
    variant.process(other, item("t-8"))
    assert own.acked == ["t-9"]


@check("E3")
def test_a_source_of_length_0_is_still_the_source(variant: Run) -> None:
    source, own = Empty(), Acked()
    task = bare(variant)
    task.source = own
    assert variant.consume(task, source=source, policy=policy()).succeeded == 1
    assert (source.acked, own.asked) == (["t-0"], [])


def test_a_handler_that_is_called_directly_acknowledges_at_the_source_of_its_task() -> None:
    threaded, awaited = Threaded(), Awaited()
    threaded.source = awaited.source = source = Acked()
    threaded.handle_transaction_success(item("t-0"), None)
    asyncio.run(awaited.handle_transaction_success(item("t-1"), None))
    assert source.acked == ["t-0", "t-1"]


class Sync:
    def fetch_transactions(self, _: int, /) -> Any:
        return []


class Async:
    async def fetch_transactions_async(self, _: int, /) -> Any:
        return []


@check("E3")
def test_a_task_that_cannot_work_is_refused_before_anything_is_fetched(variant: Run) -> None:
    is_async = isinstance(variant, AsyncRun)
    wrong: Any = Sync() if is_async else Async()
    unwritten: Any = AsyncConsumerMixin() if is_async else ConsumerMixin()
    source = Acked()

    async def listener(_: Any) -> None: ...

    refused: list[tuple[Any, dict[str, Any], str]] = [
        (bare(variant), {"source": wrong}, "ConsumerMixin" if is_async else "AsyncConsumerMixin"),
        (bare(variant), {"source": "x"}, "is of type str; expected an object with fetch_transactions"),
        (bare(variant), {}, "has no source"),
        (unwritten, {"source": source}, "process_transaction"),
        (bare(variant), {"source": source, "on_outcome": listener}, "on_outcome"),
    ]
    for task, arguments, expected in refused:
        with pytest.raises(InvalidInputError, match=expected):
            variant.consume(task, **{"policy": policy(), **arguments})
    assert source.asked == []
    plain: Any = Async() if is_async else Sync()
    with pytest.raises(InvalidInputError, match=r"steps\.fetch\.extra.*topic") as caught:
        variant.consume(bare(variant), source=plain, policy=policy(extra={"topic": "hunter2"}))
    assert "hunter2" not in str(caught.value)


HOOKS: dict[str, Any] = {
    "process_transaction": lambda: None,
    "handle_transaction_success": lambda _: None,
    "handle_transaction_exception": None,
}


@check("E3")
@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_with_other_arguments_is_refused_before_anything_is_fetched(variant: Run, name: str) -> None:
    task, source = variant.task(Script()), Acked()
    setattr(task, name, HOOKS[name])
    with pytest.raises(InvalidInputError, match=rf"{name} of \w+ cannot be called with \(transaction"):
        variant.consume(task, source=source, policy=policy())
    with pytest.raises(InvalidInputError, match=rf"{name} of \w+ cannot be called with \(transaction"):
        variant.process(task, item("t-0"))
    assert source.asked == []


@check("E3")
@pytest.mark.parametrize("table", [{}, {"loop": {"limit": 1}}])
def test_a_table_is_refused_as_a_policy_and_as_an_item(variant: Run, table: Any) -> None:
    task, source = variant.task(Script()), Acked()
    with pytest.raises(InvalidInputError, match="is of type dict; expected a ConsumerPolicy"):
        variant.consume(task, source=source, policy=table)
    with pytest.raises(InvalidInputError, match="is of type dict; expected a Transaction"):
        variant.process(task, table)
    task.policy = table
    for act in (lambda: variant.consume(task, source=source), lambda: variant.process(task, item("t-0"))):
        with pytest.raises(InvalidInputError, match="is of type dict; expected a ConsumerPolicy"):
            act()
    assert source.asked == []


@check("E3")
def test_a_single_item_of_a_task_that_cannot_work_is_refused_each_time_for_the_same_reason(variant: Run) -> None:
    task: Any = AsyncConsumerMixin() if isinstance(variant, AsyncRun) else ConsumerMixin()
    for _ in range(2):
        with pytest.raises(InvalidInputError, match="has no process_transaction"):
            variant.process(task, item("t-0"))


def _threaded(function: Any) -> Any:
    @functools.wraps(function)
    async def wrapper(*args: Any) -> Any:
        return await asyncio.to_thread(function, *args)

    return wrapper


def _blocking(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


async def _fine(transaction: Transaction) -> None: ...


class _Called:
    async def __call__(self, transaction: Transaction) -> None: ...


@pytest.mark.parametrize(
    ("hook", "is_fine"),
    [
        (_threaded(lambda _: None), True),
        (functools.partial(_fine), True),
        (_Called(), True),
        (_blocking(_fine), False),
    ],
    ids=["async around plain", "partial", "object", "plain around async"],
)
def test_async_code_is_known_by_its_outermost_function(hook: Any, is_fine: bool) -> None:
    task: Any = Awaited()
    task.process_transaction = hook
    run = run_script(AsyncRun(), Script(), Cut(items(1)), policy(), task=task)
    assert (run.error is None, run.report.succeeded) == (is_fine, int(is_fine))


def test_the_arguments_of_a_source_are_not_shown_when_it_is_refused() -> None:
    class Plain(Cut):
        def fetch_transactions_async(self, _: int, /, **__: Any) -> Any:
            return []

    run = run_script(AsyncRun(), Script(), Plain([]), policy(extra={"password": "hunter2"}))
    assert "fetch_transactions_async" in str(run.error)
    assert "hunter2" not in str(run.error)


def test_a_task_with_threads_does_not_await_inside_a_running_loop() -> None:
    class Later:
        async def fetch_transactions(self, _: int, /) -> Any:
            return []

    async def inside() -> None:
        task: Any = Threaded()
        with pytest.raises(InvalidInputError, match="in a running event loop"):
            task.consume_transactions(source=Later())
        task.process_transaction = Awaited().process_transaction
        with pytest.raises(InvalidInputError, match="in a running event loop"):
            task.start_processing(item("t-0"))

    asyncio.run(inside())
    assert Threaded().consume_transactions(source=Later()).processed == 0  # type: ignore[arg-type]
