"""Spans of the tasks themselves, and tracing in every process of a worker that does work.

A task carries runs of several traces, so it begins a trace of its own and is linked: to the message that
rang for it, and to its runs, whose phases are linked back. What a task raises may quote a payload; of
that only the kind is shown.
"""

from typing import Any

from celery import signals
from opentelemetry import trace
from opentelemetry.trace import Status, StatusCode

from pipeline.telemetry.tracing import export


def start_tracing(endpoint: str, *, forks: bool = False) -> None:
    """Trace this process. One that forks its workers traces only what it does itself."""
    provider = export.start(endpoint, process_wide=not forks)
    if provider is None or forks:
        return
    from opentelemetry.instrumentation.celery import CeleryInstrumentor

    instrumentor: Any = CeleryInstrumentor()  # type: ignore[no-untyped-call]
    if instrumentor.is_instrumented_by_opentelemetry:
        return
    instrumentor.instrument(tracer_provider=provider, use_span_links=True)
    signals.task_failure.disconnect(instrumentor._trace_failure)
    signals.task_retry.disconnect(instrumentor._trace_retry)
    signals.task_failure.connect(_mark_failed)


def stop_tracing() -> None:
    """Let the last spans of this process out."""
    export.stop()


def _mark_failed(exception: BaseException | None = None, **_: Any) -> None:
    """Say on the span of a task of which kind its error was."""
    words = type(exception).__qualname__
    span = trace.get_current_span()
    span.set_attribute("exception.type", words)
    span.set_status(Status(StatusCode.ERROR, words))
