"""Cancellations and errors that are not meant for the engine: each is the failure of the one call it came from."""

import asyncio
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pipeline.consumer_engine.asyncio_driver import AsyncioDriver, _call_result
from pipeline.consumer_engine.attempts import Invoke, current_attempt
from pipeline.consumer_engine.bounded import StepRunner
from pipeline.consumer_engine.consumer import AsyncConsumerMixin, ConsumerMixin
from pipeline.consumer_engine.errors import FetchException
from pipeline.consumer_engine.lifecycle import Ending, ItemStatus
from pipeline.consumer_engine.loop import LoopSignal
from pipeline.consumer_engine.policies import RetryPolicy
from pipeline.consumer_engine.transactions import Transaction
from tests.consumer_engine.scripted_tasks import (
    AsyncRun,
    Batches,
    Begun,
    Cut,
    Does,
    Run,
    Script,
    ThreadsRun,
    check,
    item,
    items,
    policy,
    run_script,
)
from tests.support.rule import rule
from tests.support.wait import wait_for


class Cancels(AsyncConsumerMixin):
    """Does something to the tasks of the event loop for its first item."""

    def __init__(self, act: Callable[[], Any], awaits: bool) -> None:
        self.act, self.awaits = act, awaits
        self.errors: list[str] = []

    async def process_transaction(self, transaction: Transaction) -> None:
        if transaction.transaction_id == "t-0":
            self.act()
        if self.awaits:
            await asyncio.sleep(0.01)

    async def handle_transaction_exception(self, transaction: Transaction, error: Any) -> None:
        assert error.__cause__ is not None
        self.errors.append(transaction.transaction_id)


def cancel_this() -> None:
    this = asyncio.current_task()
    assert this is not None
    this.cancel()


def cancel_the_others() -> None:
    for task in asyncio.all_tasks():
        if task is not asyncio.current_task() and "_item_task" in repr(task.get_coro()):
            task.cancel()


@rule("E-29")
@pytest.mark.parametrize("timeout", [None, 60.0])
@pytest.mark.parametrize("awaits", [False, True])
@pytest.mark.parametrize("act", [cancel_this, cancel_the_others])
def test_code_that_cancels_tasks_fails_for_its_item_at_most_and_every_item_is_settled(
    act: Callable[[], None], awaits: bool, timeout: float | None
) -> None:
    task = Cancels(act, awaits)

    async def bounded() -> Any:
        chosen = policy(concurrency=2, process=RetryPolicy(timeout=timeout))
        return await asyncio.wait_for(task.consume_transactions(source=Cut(items(4)), policy=chosen), timeout=30)

    report = asyncio.run(bounded())
    assert (report.processed, report.unfinished, report.ending) == (4, 0, Ending.NOTHING_LEFT)
    if act is cancel_this:
        assert (report.failed, task.errors) == (1, ["t-0"])
    assert len(task._state.in_flight) == 0


@pytest.mark.parametrize("timeout", [None, 60.0])
def test_a_fetch_that_cancels_itself_has_failed(timeout: float | None) -> None:
    source = Batches(Does(act=cancel_this))
    run = run_script(AsyncRun(), Script(), source, policy(fetch=RetryPolicy(timeout=timeout)))
    assert isinstance(run.error, FetchException)


@rule("E-4")
@pytest.mark.parametrize("timeout", [None, 60.0])
@check("E8")
def test_an_error_that_python_closes_generators_with_is_a_failure_when_a_task_raises_it(
    variant: Run, timeout: float | None
) -> None:
    script = Script().will_process("t-0", Does(raises=GeneratorExit()))
    run = run_script(variant, script, Cut(items(2)), policy(process=RetryPolicy(timeout=timeout)))
    assert (run.error, run.statuses) == (None, [ItemStatus.EXCEPTION, ItemStatus.SUCCESS])


def test_python_can_close_a_call_whose_event_loop_is_gone() -> None:
    @types.coroutine
    def forever() -> Iterator[None]:
        while True:
            yield

    closed = _call_result(Invoke(forever, (), 5, lambda: lambda: None))
    closed.send(None)
    closed.close()  # RuntimeError if it went on


def test_a_keyboard_interrupt_in_the_main_thread_ends_the_loop() -> None:
    with pytest.raises(KeyboardInterrupt):
        ThreadsRun().consume(
            ThreadsRun().task(Script()), source=Batches(Does(raises=KeyboardInterrupt())), policy=policy()
        )
    task = ThreadsRun().task(Script().will_process("t-0", Does(raises=KeyboardInterrupt())))
    with pytest.raises(KeyboardInterrupt):
        task.start_processing(item("t-0"))


@check("E5")
def test_no_handler_begins_for_open_items_after_the_caller_breaks_the_loop(variant: Run) -> None:
    script = Script()
    script.will_process("t-0", Does(takes=60, until=Begun(script, 2)))
    script.will_process("t-1", Does(takes=60, until=script.over, is_stubborn=True))
    task = variant.task(script)

    def refuse(_: Any) -> None:
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        variant.consume(task, source=Cut(items(2)), policy=policy(concurrency=2), on_outcome=refuse)
    wait_for(lambda: len(task._state.in_flight) == 0)
    assert [each for each in script.begun if each[1] == "t-1"] == [("process", "t-1")]


def test_async_code_of_a_threaded_task_is_cancelled_at_its_timeout() -> None:
    ends: list[str] = []

    class Mixed(ConsumerMixin):
        async def process_transaction(self, transaction: Transaction) -> None:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                ends.append(transaction.transaction_id)
                raise

    task = Mixed()
    report = task.consume_transactions(source=Cut(items(1)), policy=policy(process=RetryPolicy(timeout=0.1)))
    assert report.step_timeouts == 1
    wait_for(lambda: ends == ["t-0"])
    wait_for(lambda: len(task._state.in_flight) == 0)


def test_code_that_ignores_its_cancellation_delays_the_end_of_a_loop_only_for_a_moment() -> None:
    for chosen in (
        policy(timeout=0.1),
        policy(timeout=0.1, process=RetryPolicy(timeout=60)),
        policy(process=RetryPolicy(timeout=0.1)),
    ):
        script = Script().will_process("t-0", Does(takes=90, is_stubborn=True))

        async def timed(script: Script = script, chosen: Any = chosen) -> float:
            begun = time.monotonic()
            await asyncio.gather(
                AsyncRun().task(script).consume_transactions(source=Cut(items(1)), policy=chosen),
                return_exceptions=True,
            )
            return time.monotonic() - begun

        with ended_at_once() as loop:
            assert loop.run_until_complete(timed()) < 60


@contextmanager
def ended_at_once() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that is not waited for; what is still in it is not complained about."""
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)
    try:
        yield loop
    finally:
        for task in asyncio.all_tasks(loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()


def test_a_signal_to_a_loop_whose_event_loop_is_closed_is_ignored() -> None:
    task = AsyncRun().task(Script())

    async def made() -> AsyncioDriver:
        return AsyncioDriver(task._setup(policy(), lambda _: None))

    asyncio.run(made()).post(LoopSignal.ID_FREED)


def test_a_step_that_hangs_runs_in_a_thread_that_keeps_no_process_alive() -> None:
    seen: list[bool] = []
    StepRunner().run_bounded(lambda: seen.append(threading.current_thread().daemon), (), limit=60)
    assert seen == [True]


@pytest.mark.parametrize("timeout", [None, 60.0])
def test_an_idle_thread_keeps_nothing_of_its_last_item(timeout: float | None) -> None:
    class Payload:
        """Can be watched."""

    watched = weakref.WeakSet[Payload]()

    def made(transaction_id: str) -> Transaction:
        payload = Payload()
        watched.add(payload)
        return item(transaction_id, payload)

    seen: list[int] = []
    script = Script()
    task = ThreadsRun().task(script)
    script.results = _Nowhere()

    def observe() -> Any:
        wait_for(lambda: len(watched) == 0)
        seen.append(len(watched))

    source = Batches([made("t-0"), made("t-1")], Does(act=observe))
    task.consume_transactions(source=source, policy=policy(concurrency=2, process=RetryPolicy(timeout=timeout)))
    assert seen == [0]


class _Nowhere(dict):  # type: ignore[type-arg]
    def __setitem__(self, *_: object) -> None: ...


def test_two_threads_that_use_a_task_first_get_the_same_state() -> None:
    class Slow(dict):  # type: ignore[type-arg]
        def get(self, *_: Any) -> None:  # both have looked before one has written
            ready.wait(30)

    ready, found = threading.Barrier(2), list[Any]()
    task = ThreadsRun().task(Script())
    state = type(task)._state.fget
    assert state is not None

    class Twice:
        __dict__ = Slow()

    shared = Twice()
    threads = [threading.Thread(target=lambda: found.append(state(shared))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] is found[1]


class Cleaning(AsyncConsumerMixin):
    """Takes several turns of the event loop to clean up after its first attempt was cancelled."""

    def __init__(self, turns: int | None) -> None:
        self.turns, self.events = turns, list[str]()
        self.over = False

    async def process_transaction(self, _: Transaction) -> None:
        number = current_attempt().number
        self.events.append(f"attempt {number} begins")
        if number > 1:
            return
        try:
            await asyncio.sleep(60)
        finally:
            while self.turns is None and not self.over:
                await asyncio.sleep(0.01)
            for _turn in range(self.turns or 0):
                await asyncio.sleep(0)
            self.events.append("cleaned up")

    async def handle_transaction_success(self, _: Transaction, __: Any) -> None:
        self.events.append("success")


@rule("E-20")
def test_a_cancelled_coroutine_cleans_up_before_the_next_attempt_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.consumer_engine.asyncio_driver._CANCEL_GRACE", 60)  # as long as a busy machine needs
    events = _cleaned(Cleaning(turns=20))
    assert events == ["attempt 1 begins", "cleaned up", "attempt 2 begins", "success"]


@rule("E-20")
def test_a_clean_up_beyond_its_moment_is_abandoned_and_holds_nothing_up() -> None:
    task = Cleaning(turns=None)
    events = _cleaned(task)
    assert events == ["attempt 1 begins", "attempt 2 begins", "success"]  # it is cleaning up still


def _cleaned(task: Cleaning) -> list[str]:
    async def run() -> list[str]:
        chosen = policy(process=RetryPolicy(max_attempts=2, timeout=0.1))
        report = await task.consume_transactions(source=Cut(items(1)), policy=chosen)
        assert (report.succeeded, report.step_timeouts) == (1, 0)
        seen = list(task.events)
        task.over = True
        return seen

    return asyncio.run(run())
