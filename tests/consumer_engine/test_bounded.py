"""Steps and calls: bounded in time whatever user code does, and nothing left over afterwards."""

import asyncio
import contextvars
import multiprocessing
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pipeline.consumer_engine.bounded import (
    ConcurrentCalls,
    FinishedCall,
    StepCall,
    StepRunner,
    StepSeries,
    TimedOutError,
)
from pipeline.domain.errors import TransientError
from tests.support.rule import rule
from tests.support.wait import wait_for

SOON = timedelta(seconds=30)
VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


@pytest.fixture
def steps() -> Any:
    made = StepRunner()
    yield made
    made.close()


@pytest.fixture
def never() -> Any:
    """A wait that ends with the test."""
    gate = threading.Event()
    yield gate
    gate.set()


def test_a_step_returns_the_awaited_value_of_its_function(steps: StepRunner) -> None:
    async def later(value: int) -> int:
        await asyncio.sleep(0)
        return value

    assert steps.run(lambda value: value + 1, 1, limit=SOON, what="it") == 2
    assert steps.run(later, 3, limit=SOON, what="it") == 3


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
def test_a_step_raises_what_its_function_raises_and_the_next_step_works(
    steps: StepRunner, error: BaseException
) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)):
        steps.run(fail, limit=SOON, what="it")
    assert steps.run(lambda: "fine", limit=SOON, what="it") == "fine"


def test_a_step_that_hangs_is_abandoned_at_its_limit(steps: StepRunner, never: threading.Event) -> None:
    begun = time.monotonic()
    with pytest.raises(TimedOutError, match=r"send did not return within 0\.05 s"):
        steps.run(never.wait, limit=timedelta(seconds=0.05), what="send")
    assert time.monotonic() - begun < 20
    assert steps.run(lambda: "next", limit=SOON, what="it") == "next"
    assert isinstance(TimedOutError(""), TransientError)


@pytest.mark.parametrize("seconds", [0, -1])
def test_a_step_with_a_limit_of_zero_times_out(steps: StepRunner, never: threading.Event, seconds: int) -> None:
    _, error = steps.attempt(never.wait, limit=timedelta(seconds=seconds), what="Poll.read")
    assert isinstance(error, TimedOutError)


@rule("E-34")
def test_a_step_makes_no_span_that_could_show_the_text_of_its_error(
    steps: StepRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", lambda: provider)
    failing = ValueError("GET https://shop/?token=hunter2 -> 500")

    def fail() -> None:
        raise failing

    assert steps.attempt(fail, limit=SOON, what="SendReceipt.prepare") == (None, failing)
    assert spans.get_finished_spans() == ()


def test_a_step_has_the_context_of_its_caller(steps: StepRunner) -> None:
    VARIABLE.set("mine")
    assert steps.run(VARIABLE.get, limit=SOON, what="it") == "mine"


def test_steps_one_after_the_other_share_a_thread_that_ends_with_them() -> None:
    steps = StepRunner()
    names = {steps.run(threading.get_ident, limit=SOON, what="it") for _ in range(20)}
    assert len(names) == 1
    steps.close()
    wait_for(lambda: names.isdisjoint({thread.ident for thread in threading.enumerate()}))


def test_a_child_of_a_fork_runs_steps_in_a_thread_of_its_own_at_once(steps: StepRunner) -> None:
    assert steps.run(lambda: "parent", limit=SOON, what="it") == "parent"

    def child() -> None:
        assert steps.run(lambda: "child", limit=SOON, what="it") == "child"

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0
    assert steps.run(lambda: "parent", limit=SOON, what="it") == "parent"


def series_call(function: Any, *args: Any, limit: float = 30, on_end: Any = lambda: None) -> StepCall:
    return StepCall(function, args, limit=limit, what="it", on_end=on_end)


def test_the_calls_of_a_series_run_in_order_in_one_thread_each_in_its_own_context(steps: StepRunner) -> None:
    seen: list[tuple[str, int]] = []
    made: list[StepCall] = []
    for name in ("a", "b", "c"):
        VARIABLE.set(name)
        made.append(series_call(lambda: seen.append((VARIABLE.get(), threading.get_ident()))))
    assert steps.attempt_each(made, ends_at=time.monotonic() + 30) == 3
    assert [name for name, _ in seen] == ["a", "b", "c"]
    assert len({thread for _, thread in seen}) == 1
    assert seen[0][1] != threading.get_ident()


def test_an_error_in_a_series_is_kept_and_the_others_go_on(steps: StepRunner) -> None:
    async def later() -> str:
        await asyncio.sleep(0)
        return "awaited"

    ended: list[str] = []
    made = [series_call(lambda: 1 / 0, on_end=lambda: ended.append("a")), series_call(later), series_call(int, "7")]
    assert steps.attempt_each(made, ends_at=time.monotonic() + 30) == 3
    assert isinstance(made[0].error, ZeroDivisionError)
    assert [call.value for call in made] == [None, "awaited", 7]
    assert ended == ["a"]


@pytest.mark.parametrize("hanging", [0, 1, 2])
def test_a_call_of_a_series_that_hangs_is_abandoned_once_and_the_others_go_on(
    steps: StepRunner, never: threading.Event, hanging: int
) -> None:
    ended: list[int] = []
    made = [series_call(lambda n=n: n, on_end=lambda n=n: ended.append(n)) for n in range(3)]
    made[hanging] = series_call(never.wait, 60, limit=0.05, on_end=lambda: ended.append(hanging))
    assert steps.attempt_each(made, ends_at=time.monotonic() + 30) == 3
    never.set()  # its late result is dropped
    assert isinstance(made[hanging].error, TimedOutError)
    assert made[hanging].value is None
    assert ended == [0, 1, 2]
    assert [call.value for call in made if call.error is None] == [n for n in range(3) if n != hanging]


def test_a_series_makes_its_first_call_and_none_that_begins_after_its_end(
    steps: StepRunner, never: threading.Event
) -> None:
    assert steps.attempt_each([series_call(int), series_call(int)], ends_at=time.monotonic() - 1) == 1
    hung = series_call(never.wait, 60, limit=0.05)
    assert steps.attempt_each([hung, series_call(int)], ends_at=time.monotonic() - 1) == 1
    assert steps.attempt_each([], ends_at=time.monotonic()) == 0


def test_a_series_whose_waiting_thread_is_interrupted_begins_no_other_call(
    steps: StepRunner, never: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, made = threading.Event(), []

    def interrupted(self: StepSeries) -> bool:
        began.wait(30)
        raise KeyboardInterrupt

    def hang() -> None:
        began.set()
        never.wait(60)
        made.append(threading.current_thread())

    monkeypatch.setattr(StepSeries, "wait", interrupted)
    calls = [series_call(hang), series_call(made.append, "second")]
    with pytest.raises(KeyboardInterrupt):
        steps.attempt_each(calls, ends_at=time.monotonic() + 30)
    never.set()
    wait_for(lambda: made and not made[0].is_alive())
    assert len(made) == 1


def everything(calls: ConcurrentCalls) -> list[FinishedCall]:
    found: list[FinishedCall] = []
    while calls:
        found += calls.wait(1.0)
    return found


def test_calls_run_concurrently_and_all_their_results_arrive() -> None:
    calls = ConcurrentCalls()
    together = threading.Barrier(10, timeout=30)
    for key in range(10):
        calls.start(key, lambda: together.wait() and None, ends_at=time.monotonic() + 30)
    assert {item.key for item in everything(calls)} == set(range(10))
    calls.close()


def test_a_call_that_fails_returns_its_error() -> None:
    calls = ConcurrentCalls()
    calls.start("a", lambda: 1 / 0, ends_at=time.monotonic() + 30)
    (item,) = everything(calls)
    assert isinstance(item.error, ZeroDivisionError)
    calls.close()


def test_a_call_past_its_deadline_is_reported_and_its_late_result_dropped(never: threading.Event) -> None:
    calls = ConcurrentCalls()
    calls.start("slow", never.wait, ends_at=time.monotonic() + 0.05)
    (item,) = everything(calls)
    assert isinstance(item.error, TimedOutError)
    never.set()
    calls.start("slow", lambda: "the new one", ends_at=time.monotonic() + 30)
    assert [again.value for again in everything(calls)] == ["the new one"]
    calls.close()


def test_threads_are_kept_for_later_calls_and_end_when_closed() -> None:
    before = threading.active_count()
    calls = ConcurrentCalls()
    for _ in range(50):
        for key in range(4):
            calls.start(key, lambda: None, ends_at=time.monotonic() + 30)
        everything(calls)
    assert threading.active_count() - before <= 4
    calls.close()
    wait_for(lambda: threading.active_count() <= before)


def test_the_thread_of_an_unclosed_step_runner_ends_with_it() -> None:
    steps = StepRunner()
    thread = steps.run(threading.current_thread, limit=SOON, what="it")
    del steps
    wait_for(lambda: not thread.is_alive())


def test_the_threads_of_unclosed_calls_end_with_them() -> None:
    calls = ConcurrentCalls()
    calls.start("it", threading.current_thread, ends_at=time.monotonic() + 30)
    (finished,) = calls.wait(30)
    del calls
    wait_for(lambda: not finished.value.is_alive())
