"""Observe the phases of runs: make a span and measure the seconds for each run.

One observer covers a phase of all runs that one message claimed, and is current until the phase ends. While neither
spans nor metrics are on, there is no observer.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar
from uuid import UUID

from opentelemetry import context, trace
from opentelemetry.trace import SpanKind

from pipeline.telemetry import metrics, spans
from pipeline.telemetry.spans import Span

T = TypeVar("T")


class PhaseObserver:
    """Observe one phase of runs that were claimed together, each until its result is recorded."""

    def __init__(self, phase: str, runs: Sequence[Any]) -> None:
        self.phase, self.runs, self.started_at = phase, {run.id: run for run in runs}, time.monotonic()
        self.is_timed, self.is_traced = metrics.is_on(), spans.is_on()
        self.untimed = set(self.runs) if self.is_timed else set[UUID]()
        self.contexts = {run.id: spans.context_of(run) for run in runs} if self.is_traced else {}
        self.spans: dict[UUID, Span] = {}
        self.kept_open = set[UUID]()
        task = trace.get_current_span()
        self._links = spans.links_to(task.get_span_context()) if self.is_traced else []
        if self.is_traced and task.is_recording():  # Celery's instrumentation keeps it open until the task ends
            task.set_attribute(spans.COHORT_SIZE, len(runs))
            for of in self.contexts.values():
                task.add_link(of)

    def span_of(self, run_id: UUID) -> Span:
        """Return the span of a run's phase; start it if it has not started."""
        span = self.spans.get(run_id)
        if span is None:
            run = self.runs[run_id]
            about = {spans.HANDLER: f"{run.workflow}.{run.handler}"}
            span = self.spans[run_id] = Span(self.phase, self.contexts[run_id], about, links=self._links)
        return span

    @contextmanager
    def in_span(self, run_id: UUID) -> Iterator[None]:
        """Make the span of a run's phase the current one."""
        token = context.attach(self.span_of(run_id).as_context())
        try:
            yield
        finally:
            context.detach(token)

    def count_seconds(self, run_ids: Iterable[UUID], result: str) -> None:
        """Record the seconds of these runs, once. A run that was handed back or rescued is not in ``run_ids``."""
        seconds = time.monotonic() - self.started_at
        for run_id in self.untimed.intersection(run_ids):
            self.untimed.remove(run_id)
            labels = {"workflow": self.runs[run_id].workflow, "phase": self.phase, "result": result}
            metrics.record("pipeline.phase.duration", labels, seconds)


_OBSERVER: ContextVar[PhaseObserver | None] = ContextVar("pipeline_phase_observer", default=None)


@contextmanager
def observe(phase: str, claimed: Sequence[Any], *, task: str, ignored: int) -> Iterator[None]:
    """Observe a phase of the runs that a message claimed. It could not claim ``ignored`` others."""
    if ignored and metrics.is_on():
        metrics.record("pipeline.deliveries.ignored", {"task": task}, ignored)
    if not claimed or not (metrics.is_on() or spans.is_on()):
        yield
        return
    if metrics.is_on():
        metrics.record("pipeline.cohort.size", {"phase": phase}, len(claimed))
    observer = PhaseObserver(phase, claimed)
    token = _OBSERVER.set(observer)
    try:
        with spans.bind_runs(observer.contexts.items()) if observer.is_traced else nullcontext():
            yield
    finally:
        for run_id in observer.spans.keys() - observer.kept_open:
            observer.spans[run_id].end()
        _OBSERVER.reset(token)


def keep_open(run_ids: Iterable[UUID]) -> None:
    """Keep the spans of these runs open when their task ends, until ``end_kept_open``."""
    observer = _OBSERVER.get()
    if observer is not None:
        observer.kept_open.update(run_ids)


def end_kept_open() -> None:
    """End the spans that outlived their task, in a copy of the task's context."""
    observer = _OBSERVER.get()
    for run_id in observer.spans.keys() & observer.kept_open if observer is not None else ():
        observer.spans[run_id].end()  # type: ignore[union-attr]


def record_finished(run_ids: Iterable[UUID], committed: Sequence[Any] = ()) -> None:
    """Record runs whose results are written, and make the spans of ``committed`` runs."""
    observer = _OBSERVER.get()
    if observer is not None:
        observer.count_seconds(run_ids, "done")
        if observer.is_traced:
            spans.record_committed(committed, observer.runs)


def record_failed(ended: Sequence[Any]) -> None:
    """Record runs that were stopped in the phase, with the reason on their spans."""
    observer = _OBSERVER.get()
    if observer is None:
        return
    observer.count_seconds((item.run_id for item in ended), "failed")
    if observer.is_traced:
        for item in ended:
            if item.run_id in observer.spans:
                observer.spans[item.run_id].attributes[spans.FAILURE_KIND] = str(item.failure.kind)
                observer.spans[item.run_id].fail(item.failure.error_type)
        spans.record_stopped(ended)


def is_timed() -> bool:
    """Return whether the current phase is timed."""
    observer = _OBSERVER.get()
    return observer is not None and observer.is_timed


def _tracing_observer() -> PhaseObserver | None:
    """Return the current observer, if it makes spans."""
    observer = _OBSERVER.get()
    return observer if observer is not None and observer.is_traced else None


def make_in_span(make_call: Callable[[Any], T], run: Any) -> T:
    """Make the call of a handler with the span of its run as the current one, if spans are on."""
    observer = _tracing_observer()
    if observer is None:
        return make_call(run)
    with observer.in_span(run.id):
        return make_call(run)


def in_span(run: Any, handler_seconds: float) -> AbstractContextManager[object]:
    """Make the span of a run the current one again, after its handler has taken so long."""
    observer = _tracing_observer()
    if observer is None:
        return nullcontext()
    observer.span_of(run.id).attributes[spans.HANDLER_SECONDS] = handler_seconds
    return observer.in_span(run.id)


def publisher_traceparent() -> str | None:
    """Return the trace context for published events: the phase that publishes them."""
    return spans.current_traceparent() if _tracing_observer() is not None else None


def link_inputs(run_id: UUID, inputs: Callable[[], Sequence[Any]]) -> None:
    """Link the span of this phase to the spans that published its inputs."""
    observer = _tracing_observer()
    if observer is None:
        return
    span = observer.span_of(run_id)
    for traceparent in dict.fromkeys(row.traceparent for row in inputs()):
        of = spans.parse_traceparent(traceparent)
        if of is not None and of.trace_id != span.context.trace_id:  # no link within one trace
            span.link(of)


def start_call(run_id: UUID, mutation: Any, *, is_reconcile: bool) -> Span | None:
    """Start the span of one attempt of a mutation, or of the reconcile attempt after it."""
    observer = _tracing_observer()
    if observer is None:
        return None
    name = f"{mutation.connector}.{mutation.operation}{'.reconcile' if is_reconcile else ''}"
    about = {spans.MUTATION_ID: str(mutation.id), spans.CALL_ATTEMPT: mutation.attempts}
    return Span(name, observer.span_of(run_id).context, about, kind=SpanKind.CLIENT)


def start_read(connector: str, operation: str) -> Span | None:
    """Start the span of a handler's read from an outside system."""
    if _tracing_observer() is None:
        return None
    above = trace.get_current_span().get_span_context()
    return Span(f"{connector}.{operation}.read", above, {}, kind=SpanKind.CLIENT) if above.is_valid else None
