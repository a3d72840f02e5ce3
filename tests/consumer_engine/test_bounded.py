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

from pipeline.consumer_engine.bounded import ConcurrentCalls, FinishedCall, StepRunner, TimedOutError
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
