"""Spans in the shape of the specification, and metrics with bounded labels.

Of an item only its id is shown, of a source only that it was called. Without an exporter, nothing is
built. Spans count attempts from 0, as the specification does.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from opentelemetry import metrics, trace
from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import INVALID_SPAN, Link, Span, Status, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pipeline.consumer_engine.errors import ExceptionType, error_message
from pipeline.consumer_engine.lifecycle import Step
from pipeline.consumer_engine.policies import RetryPolicy
from pipeline.consumer_engine.transactions import Transaction
from pipeline.telemetry import metrics as table

SCOPE = "pipeline.consumer_engine"

LOOP_SPAN, ITEM_SPAN = "consume_transactions", "start_processing"
#: The span of a step, around the spans of its attempts, which are attributes ``<step>.attempt``.
STEP_SPANS: Mapping[Step, str] = {
    Step.FETCH: "fetch_transactions",
    Step.PROCESS: "process",
    Step.SUCCESS: "handle_success",
    Step.EXCEPTION: "handle_exception",
}
_MAX_MESSAGE = 500
_NO_SPAN: AbstractContextManager[Span] = nullcontext(INVALID_SPAN)


class Telemetry:
    """The destination of spans and metrics: the given providers, or those of the process."""

    def __init__(
        self, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
    ) -> None:
        self._tracers, self._meters = tracer_provider, meter_provider
        self._lock = threading.Lock()
        self._cached_recorders: tuple[MeterProvider, dict[str, Any]] | None = None

    def observer(self, task: str) -> "Observer":
        """Return the observer of one loop of a task."""
        tracers = self._tracers or trace.get_tracer_provider()
        meters = self._meters or metrics.get_meter_provider()
        tracer = trace.get_tracer(SCOPE, tracer_provider=tracers) if table.is_configured(tracers) else None
        return Observer(task, tracer, self._current_recorders(meters) if table.is_configured(meters) else None)

    def _current_recorders(self, provider: MeterProvider) -> dict[str, Any]:
        with self._lock:
            if self._cached_recorders is None or self._cached_recorders[0] is not provider:
                meter = metrics.get_meter(SCOPE, meter_provider=provider)
                created = table.recorders(meter, table.metrics_with_prefix("pipeline.consumer_engine."))
                self._cached_recorders = provider, created
            return self._cached_recorders[1]


PROCESS_WIDE = Telemetry()


class Observer:
    """Spans and metrics of one loop."""

    def __init__(self, task: str, tracer: trace.Tracer | None, recorders: dict[str, Any] | None) -> None:
        self.task, self._tracer, self._recorders = task, tracer, recorders
        self._labels = {"task": task}
        self.is_traced, self.is_metered = tracer is not None, recorders is not None

    def count(self, name: str, value: float = 1, **labels: str) -> None:
        """Add to a metric, or record a value of it."""
        if self._recorders is not None:
            self._recorders[name](value, {**self._labels, **labels})

    def loop(self) -> AbstractContextManager[Span]:
        """Open the span of a whole loop."""
        return self._span(LOOP_SPAN, {"task.class": self.task})

    def item(self, transaction: Transaction) -> AbstractContextManager[Span]:
        """Open the span of one item. The trace that made the item is linked, not joined."""
        if self._tracer is None:
            return _NO_SPAN
        attributes = {"task.class": self.task, "transaction_id": transaction.transaction_id}
        return self._span(ITEM_SPAN, attributes, _links(transaction.traceparent))

    def step(self, step: str, retry: RetryPolicy, transaction_id: str | None) -> AbstractContextManager[Span]:
        """Open the span of a step, around its attempts."""
        if self._tracer is None:
            return _NO_SPAN
        name = STEP_SPANS[Step(step)] if step in STEP_SPANS else step
        return self._span(name, self._step_attributes(step, retry, transaction_id))

    def attempt(
        self, step: str, retry: RetryPolicy, transaction_id: str | None, number: int
    ) -> AbstractContextManager[Span]:
        """Open the span of one attempt, ``number`` counted from 1."""
        if self._tracer is None:
            return _NO_SPAN
        attributes = self._step_attributes(step, retry, transaction_id)
        return self._span(f"{step}.attempt", {**attributes, "attempt": number - 1})

    def mark_ended(self, span: Span, status: str, failure: BaseException | None) -> None:
        """Set on the span of an item how it ended."""
        span.set_attribute("status", status)
        if failure is not None:
            self.mark_failed(span, failure)

    def mark_failed(self, span: Span, failure: BaseException) -> None:
        """Set on a span why it failed: type and message of the error, never its traceback."""
        if not span.is_recording():
            return
        message, raised = error_message(failure)[:_MAX_MESSAGE], failure.__cause__ or failure
        attributes = {
            "exception.type": type(raised).__qualname__,
            "exception.message": message,
            "exception.category": str(getattr(failure, "category", ExceptionType.SYSTEM)),
        }
        span.set_attributes(attributes)
        span.set_status(Status(StatusCode.ERROR, message))

    def _step_attributes(self, step: str, retry: RetryPolicy, transaction_id: str | None) -> dict[str, Any]:
        known: dict[str, Any] = {
            "task.class": self.task,
            "step": str(step),
            "max_attempts": retry.max_attempts,
            "retry.timeout": retry.timeout,
            "retry.backoff": retry.backoff,
            "retry.backoff_multiplier": retry.backoff_multiplier,
            "retry.backoff_cap": retry.backoff_cap,
            "transaction_id": transaction_id,
        }
        return {name: value for name, value in known.items() if value is not None}

    @contextmanager
    def _span(self, name: str, attributes: Mapping[str, Any], links: list[Link] | None = None) -> Iterator[Span]:
        if self._tracer is None:
            yield INVALID_SPAN
            return
        with self._tracer.start_as_current_span(
            name, attributes=attributes, links=links, record_exception=False, set_status_on_exception=False
        ) as span:
            yield span


def _links(traceparent: str | None) -> list[Link]:
    if not traceparent:
        return []
    context = trace.get_current_span(TraceContextTextMapPropagator().extract({"traceparent": traceparent}))
    origin = context.get_span_context()
    return [Link(origin)] if origin.is_valid else []
