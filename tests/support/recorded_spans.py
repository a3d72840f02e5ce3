"""Spans that a test made, and the questions it asks about them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pipeline.telemetry import spans, spans_export


class Seen:
    """Everything that was exported."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = spans_export.tracer_provider(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("tests")

    def all(self) -> list[ReadableSpan]:
        """Every span, in the order in which they ended."""
        return list(self.exporter.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        """The spans of a name."""
        return [span for span in self.all() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        """The only span of a name."""
        (span,) = self.named(name)
        return span

    def names(self) -> list[str]:
        """The names of all spans, sorted."""
        return sorted(span.name for span in self.all())

    def shape(self) -> list[tuple[str, str | None]]:
        """Every span of a run's trace with the name of its parent; None for one that is not there."""
        by_id = {_ids(span)[1]: span.name for span in self.all()}
        return sorted(
            ((span.name, by_id.get(span.parent.span_id) if span.parent else None) for span in self.all()), key=str
        )

    def traces(self) -> set[int]:
        """How many traces there are."""
        return {_ids(span)[0] for span in self.all()}

    def text(self) -> str:
        """Everything a viewer could show of them."""
        return "\n".join(span.to_json() for span in self.all())


def trace_of(span: ReadableSpan) -> int:
    """The trace of a span."""
    return _ids(span)[0]


def span_id(span: ReadableSpan) -> int:
    """The id of a span."""
    return _ids(span)[1]


def about(span: ReadableSpan, *names: str) -> tuple[Any, ...]:
    """These attributes of a span, without our prefix."""
    found = span.attributes or {}
    return tuple(found.get(f"pipeline.{name}") for name in names)


def linked(span: ReadableSpan) -> set[tuple[int, int]]:
    """Where a span's links lead: trace and span."""
    return {(link.context.trace_id, link.context.span_id) for link in span.links}


@contextmanager
def seeing() -> Iterator[Seen]:
    """Let our spans go into memory."""
    seen = Seen()
    spans.use_provider(seen.provider)
    try:
        yield seen
    finally:
        spans.use_provider(None)


def _ids(span: ReadableSpan) -> tuple[int, int]:
    assert span.context is not None
    return span.context.trace_id, span.context.span_id
