"""Steps outside of a loop: the same attempts, limits and spans, behind the same words as before."""

import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pipeline.consumer_engine.errors import ExceptionType
from pipeline.consumer_engine.executor import StepExecutor
from pipeline.consumer_engine.policies import RetryPolicy
from pipeline.consumer_engine.steps import TimedOutError
from pipeline.consumer_engine.telemetry import Telemetry
from pipeline.worker.phases import NO_TELEMETRY
from tests.support.rule import rule

SOON = timedelta(seconds=30)


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(params=["heard", "unheard"])
def executor(request: pytest.FixtureRequest, spans: InMemorySpanExporter) -> Iterator[StepExecutor]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    made = StepExecutor(Telemetry(provider) if request.param == "heard" else Telemetry())
    yield made
    made.close()


@rule("E-3", "E-20")
def test_a_step_behaves_the_same_whether_anybody_listens_or_not(
    executor: StepExecutor, spans: InMemorySpanExporter, request: pytest.FixtureRequest
) -> None:
    failing = ValueError("no")

    def fail() -> None:
        raise failing

    never = threading.Event()
    assert executor.attempt(lambda a: a + 1, 1, limit=SOON, what="SendReceipt.prepare") == (2, None)
    assert executor.attempt(fail, limit=SOON, what="SendReceipt.mutate") == (None, failing)
    value, error = executor.attempt(never.wait, limit=timedelta(seconds=0.1), what="SendReceipt.next")
    assert (value, type(error)) == (None, TimedOutError)
    assert "SendReceipt.next did not return within 0.1 s" in str(error)
    assert executor.run(lambda: 7, limit=SOON, what="merge") == 7
    never.set()
    shown = [(span.name, dict(span.attributes or {})["task.class"]) for span in spans.get_finished_spans()]
    if "unheard" in request.node.name:
        assert shown == []
    else:
        assert shown[:2] == [("prepare.attempt", "SendReceipt"), ("prepare", "SendReceipt")]
        assert len(shown) == 8


def test_a_step_can_be_attempted_by_a_policy(executor: StepExecutor) -> None:
    calls: list[int] = []

    def third_time() -> str:
        calls.append(1)
        if len(calls) < 3:
            raise OSError("busy")
        return "done"

    ended = executor.run_attempts(third_time, retry=RetryPolicy(max_attempts=5, backoff=0.01), what="Poll.read")
    assert (ended.value, ended.attempts, ended.failure) == ("done", 3, None)
    calls.clear()
    ended = executor.run_attempts(third_time, retry=RetryPolicy(max_attempts=2), what="Poll.read")
    assert isinstance(ended.error, OSError)
    assert ended.failure is not None
    assert ended.failure.category is ExceptionType.SYSTEM


@rule("E-34")
def test_words_are_cleaned_of_credentials_before_a_span_shows_them(
    spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))

    def fail() -> None:
        raise ValueError("GET https://shop/?token=hunter2 -> 500")

    def cleaned(words: str) -> str:
        return words.replace("hunter2", "***")

    executor = StepExecutor(Telemetry(provider), redact=cleaned)
    executor.attempt(fail, limit=SOON, what="SendReceipt.prepare")
    executor.close()
    told = [span.to_json() for span in spans.get_finished_spans()]
    assert len(told) == 2
    assert all("token=***" in words and "hunter2" not in words for words in told)
    # The phases and the reconciler make no spans here at all: theirs have no words of errors in them.
    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", lambda: provider)
    counted = StepExecutor(NO_TELEMETRY)
    counted.attempt(fail, limit=SOON, what="SendReceipt.prepare")
    counted.close()
    assert len(spans.get_finished_spans()) == 2


def test_a_step_without_any_time_is_late_whether_anybody_listens_or_not(executor: StepExecutor) -> None:
    never = threading.Event()
    for seconds in (0, -1):
        _, error = executor.attempt(never.wait, limit=timedelta(seconds=seconds), what="Poll.read")
        assert isinstance(error, TimedOutError)
    never.set()
