"""Spans and metrics: the tree of the specification, context that reaches everything, and nothing secret."""

import logging
import re
import threading
from collections import Counter
from contextvars import ContextVar
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pipeline.consumer_engine.errors import ExceptionType, TransactionException
from pipeline.consumer_engine.lifecycle import Step
from pipeline.consumer_engine.policies import EmptyQueuePolicy, RetryPolicy
from pipeline.consumer_engine.telemetry import STEP_SPANS, Telemetry
from pipeline.telemetry.metrics import metrics_with_prefix
from tests.consumer_engine.scripted_tasks import (
    Batches,
    Cut,
    Does,
    Run,
    Script,
    ScriptRun,
    check,
    item,
    items,
    policy,
    run_script,
    with_time,
)
from tests.support.rule import rule

VARIABLE: ContextVar[str] = ContextVar("variable", default="unset")
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


#: The labels of each metric beside the task.
LABELS = {
    each.name: [label for label in each.labels if label != "task"]
    for each in metrics_with_prefix("pipeline.consumer_engine.")
}


class Watch:
    """Providers of a test's own, and what came to them."""

    def __init__(self) -> None:
        self._spans, self._metrics = InMemorySpanExporter(), InMemoryMetricReader()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._spans))
        self._meters = MeterProvider(metric_readers=[self._metrics])
        self.telemetry = Telemetry(provider, self._meters)

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._spans.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]

    def values(self, name: str) -> dict[tuple[str, ...], float]:
        """The sums of a metric by the values of its labels beside the task's."""
        data = self._metrics.get_metrics_data()
        found: dict[tuple[str, ...], float] = {}
        for metric in [m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics] if data else []:
            for point in metric.data.data_points if metric.name == name else ():
                labels: Any = dict(point.attributes or {})
                assert labels.pop("task") in ("Threaded", "Awaited")
                assert set(labels) == set(LABELS[name])
                value: Any = point
                key = tuple(labels[label] for label in LABELS[name])
                found[key] = float(value.sum if hasattr(value, "sum") else value.value)
        return found

    def close(self) -> None:
        self._meters.shutdown()


@pytest.fixture
def watch() -> Any:
    made = Watch()
    yield made
    made.close()


def parent_of(span: ReadableSpan, spans: list[ReadableSpan]) -> str | None:
    return next((each.name for each in spans if span.parent and each.context.span_id == span.parent.span_id), None)


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@rule("E-3", "E-38")
@pytest.mark.parametrize("streaming", [False, True])
@check("E24")
def test_spans_form_the_tree_of_the_specification_in_both_modes(variant: Run, watch: Watch, streaming: bool) -> None:
    script = Script().will_process("t-1", Does(raises=ValueError("no")))
    limits: dict[str, Any] = {"streaming": True, "limit": 2} if streaming else {}
    run_script(variant, script, Cut(items(2)), policy(**limits), watch.telemetry)
    tree = Counter((parent_of(span, watch.spans), span.name) for span in watch.spans)
    fetches = 1 if streaming else 2
    assert tree == Counter(
        {
            (None, "consume_transactions"): 1,
            ("consume_transactions", "fetch_transactions"): fetches,
            ("fetch_transactions", "fetch.attempt"): fetches,
            ("consume_transactions", "start_processing"): 2,
            ("start_processing", "process"): 2,
            ("process", "process.attempt"): 2,
            ("start_processing", "handle_success"): 1,
            ("handle_success", "success.attempt"): 1,
            ("start_processing", "handle_exception"): 1,
            ("handle_exception", "exception.attempt"): 1,
        }
    )
    assert len({span.context.trace_id for span in watch.spans}) == 1


@rule("E-21", "E-22", "E-23")
@check("E24")
def test_every_attempt_has_a_span_with_its_number_and_its_failure(variant: Run, watch: Watch) -> None:
    script = Script().will_process("t-0", Does(raises=ValueError("first")), Does(raises=ValueError("second")), Does())
    retry = RetryPolicy(max_attempts=3, timeout=60, backoff=0.01, backoff_multiplier=3, backoff_cap=2)
    run_script(variant, script, Cut(items(1)), policy(process=retry), watch.telemetry)
    tried = sorted(watch.named("process.attempt"), key=lambda span: span.start_time or 0)
    assert [attributes(span)["attempt"] for span in tried] == [0, 1, 2]
    assert attributes(tried[1]) == {
        "task.class": "Threaded" if variant.name == "threads" else "Awaited",
        "step": "process",
        "attempt": 1,
        "max_attempts": 3,
        "retry.timeout": 60.0,
        "retry.backoff": 0.01,
        "retry.backoff_multiplier": 3.0,
        "retry.backoff_cap": 2.0,
        "transaction_id": "t-0",
        "exception.type": "ValueError",
        "exception.message": "second",
        "exception.category": "system",
    }
    assert [span.status.is_ok for span in tried] == [False, False, True]
    assert len({span.parent.span_id for span in tried if span.parent}) == 1  # all under the one step
    (step,) = watch.named("process")
    assert step.status.is_ok
    assert "transaction_id" not in attributes(watch.named("fetch.attempt")[0])


@rule("E-32", "E-35")
@check("E24")
def test_concurrent_items_have_their_own_spans_and_no_span_stays_current(variant: Run, watch: Watch) -> None:
    script = Script(always={Step.PROCESS: Does(takes=0.02)})
    run_script(variant, script, Cut(items(12)), policy(concurrency=4), watch.telemetry)
    by_id = {span.context.span_id: span for span in watch.spans}
    for span in watch.spans:
        own = attributes(span).get("transaction_id")
        above = by_id[span.parent.span_id] if span.parent else None
        if own is not None and above is not None and above.name != "consume_transactions":
            assert attributes(above)["transaction_id"] == own
    assert trace.get_current_span() is trace.INVALID_SPAN


@rule("E-9", "E-22")
@pytest.mark.parametrize("timeout", [None, 60.0])
@check("E25")
def test_code_finds_the_span_of_its_attempt_and_the_context_of_its_caller(
    variant: Run, watch: Watch, timeout: float | None
) -> None:
    seen: list[tuple[int, str]] = []

    def observe() -> None:
        seen.append((trace.get_current_span().get_span_context().span_id, VARIABLE.get()))

    retry = RetryPolicy(max_attempts=2, timeout=timeout)
    script = Script(always={Step.SUCCESS: Does(act=observe)}).will_process(
        "t-0", Does(act=observe, raises=ValueError("x")), Does(act=observe)
    )
    budgets = policy(process=retry, success=retry, fetch=retry)
    token = VARIABLE.set("mine")
    try:
        run_script(variant, script, Batches(Does(act=observe, returns=items(1))), budgets, watch.telemetry)
    finally:
        VARIABLE.reset(token)
    names = {span.context.span_id: span.name for span in watch.spans}
    assert [(names[span], value) for span, value in seen] == [
        ("fetch.attempt", "mine"),
        ("process.attempt", "mine"),
        ("process.attempt", "mine"),
        ("success.attempt", "mine"),
    ]


@rule("E-35")
@check("E25")
def test_a_context_variable_of_one_item_is_not_visible_to_the_next(variant: Run) -> None:
    seen: list[str] = []

    def leave() -> None:
        seen.append(VARIABLE.get())
        VARIABLE.set("left by another")

    script = Script(always={Step.PROCESS: Does(act=leave)})
    run_script(variant, script, Cut(items(3)), policy(concurrency=1))
    assert seen == ["unset"] * 3


@check("E24")
def test_the_trace_that_made_an_item_is_linked(variant: Run, watch: Watch) -> None:
    batch = [item("t-0", traceparent=TRACEPARENT), item("t-1", traceparent="not one")]
    run_script(variant, Script(), Batches(batch), policy(), watch.telemetry)
    linked = {attributes(span)["transaction_id"]: span.links for span in watch.named("start_processing")}
    assert [f"{link.context.trace_id:032x}" for link in linked["t-0"]] == [TRACEPARENT.split("-")[1]]
    assert list(linked["t-1"]) == []


@rule("E-34")
@check("E26")
def test_nothing_secret_is_in_spans_metrics_or_logs(
    variant: Run, watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "hunter2"
    batch = [item(f"t-{n}", {"card": secret}, metadata={"token": secret}, source="shop") for n in range(7)]
    script = Script(always={Step.SUCCESS: Does(returns=secret)}).will_process("t-0", Does(raises=ValueError("no")))
    script.will_process("t-1", Does(takes=0.2)).will_process("t-2", Does(returns=secret))
    chosen = policy(size=2, extra={"password": secret, "name": secret}, process=RetryPolicy(timeout=0.1))
    run = run_script(variant, script, Batches(batch), chosen, watch.telemetry)
    assert (run.error, run.source.extra[0]["password"]) == (None, secret)
    texts = [span.to_json() for span in watch.spans] + [str(watch.values(name)) for name in LABELS]
    texts += [str(record.__dict__) for record in caplog.records] + [str(run.report), repr(run.outcomes[0].error)]
    assert len(caplog.records) > 2
    assert [text for text in texts if secret in text] == []


@rule("E-3")
@check("E14", "E27")
def test_metrics_count_what_happened_with_labels_from_small_sets(variant: Run) -> None:
    watch = with_time(
        lambda bound: counted(variant, bound),
        lambda watch: sum(watch.values("pipeline.consumer_engine.timeouts").values()) == 2,
    )
    assert watch.values("pipeline.consumer_engine.transactions") == {
        ("success",): 5,
        ("exception",): 1,
        ("timeout",): 1,
    }
    assert watch.values("pipeline.consumer_engine.timeouts") == {
        ("step", "success"): 1,
        ("transaction", "process"): 1,
    }
    assert watch.values("pipeline.consumer_engine.retries") == {("process",): 2, ("success",): 1}
    assert watch.values("pipeline.consumer_engine.backoff") == {("process",): pytest.approx(0.03)}
    assert watch.values("pipeline.consumer_engine.attempts") == {
        ("fetch", "returned"): 2,
        ("process", "returned"): 5,
        ("process", "system"): 2,
        ("process", "business"): 1,
        ("process", "timeout"): 1,
        ("success", "returned"): 5,
        ("success", "timeout"): 1,
        ("exception", "returned"): 2,
    }
    assert watch.values("pipeline.consumer_engine.in_flight") == {(): 0}
    assert watch.values("pipeline.consumer_engine.oversize_batches") == {(): 1}
    assert watch.values("pipeline.consumer_engine.deferred") == {(): 1}
    assert watch.values("pipeline.consumer_engine.batch.size") == {(): 7}
    assert watch.values("pipeline.consumer_engine.step.duration").keys() == {(step.value,) for step in Step}
    assert watch.values("pipeline.consumer_engine.transaction.duration").keys() == {
        ("success",),
        ("exception",),
        ("timeout",),
    }


def counted(variant: Run, bound: float) -> Watch:
    """Five items that succeed, one of them in the end; one that fails, and one that takes too long."""
    script = Script().will_process("t-0", Does(raises=OSError("busy")), Does(raises=OSError("busy")), Does())
    script.will_process("t-1", Does(raises=TransactionException("no", ExceptionType.BUSINESS)))
    script.will_process("t-2", Does(takes=60)).will(Step.SUCCESS, "t-3", Does(takes=60), Does())
    chosen = policy(
        size=6,
        transaction_timeout=4 * bound,
        process=RetryPolicy(max_attempts=3, backoff=0.01),
        success=RetryPolicy(max_attempts=2, timeout=bound),
        concurrency=2,
    )
    watch = Watch()
    run_script(variant, script, Batches([*items(5), item("t-4"), item("t-5")]), chosen, watch.telemetry)
    return watch


@rule("E-3")
@check("E15", "E27")
def test_pauses_and_loop_timeouts_are_counted_and_in_flight_returns_to_0(
    variant: Run,
) -> None:
    def pauses_of(bound: float) -> tuple[Watch, ScriptRun]:
        watch, script = Watch(), Script().will_process("t-0", Does(takes=60))
        chosen = policy(streaming=True, timeout=bound, empty=EmptyQueuePolicy(backoff=0.05))
        return watch, run_script(variant, script, Batches([], items(1)), chosen, watch.telemetry)

    watch, _ = with_time(pauses_of, lambda made: made[1].script.count(Step.PROCESS) == 1)
    assert watch.values("pipeline.consumer_engine.timeouts") == {("loop", "loop"): 1}
    assert watch.values("pipeline.consumer_engine.backoff") == {("empty",): pytest.approx(0.05)}
    assert watch.values("pipeline.consumer_engine.transactions") == {("unfinished",): 1}
    if variant.name == "asyncio":
        assert watch.values("pipeline.consumer_engine.in_flight") == {(): 0}


@check("E24")
def test_no_context_is_detached_where_it_was_not_attached(
    variant: Run, watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    """OpenTelemetry complains in its log when a span is closed in another context than it was opened in."""
    script = Script(always={Step.PROCESS: Does(takes=0.3)})
    run_script(variant, script, Cut(items(6)), policy(concurrency=3, timeout=0.1), watch.telemetry)
    run_script(variant, script, Cut(items(3)), policy(concurrency=3, transaction_timeout=0.1), watch.telemetry)
    threading.Event().wait(0.5)
    assert [record for record in caplog.records if record.name.startswith("opentelemetry")] == []


def test_the_names_of_spans_and_metrics_are_those_of_the_reference(project: Any) -> None:
    page = (project / "docs/reference/engine.md").read_text(encoding="utf-8")
    wanted = {*LABELS, *STEP_SPANS.values(), *(f"{step}.attempt" for step in Step), "consume_transactions"}
    assert wanted - set(re.findall(r"`([\w. ]+)`", page)) == set()


def test_nothing_is_built_without_a_provider() -> None:
    observer = Telemetry().observer("Task")
    assert (observer.is_traced, observer.is_metered) == (False, False)
