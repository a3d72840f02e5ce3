"""Make spans that are exported in one step at their end, cheaper than the SDK's spans.

Code inside a span finds its context as the current one, so that its own spans become children; it cannot add
attributes. Ids are chosen here, because the id of a run's span is known before the span exists.
"""

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from opentelemetry import context, trace
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags, Tracer

log = logging.getLogger(__name__)

SCOPE = "pipeline"
ERROR_TYPE = "exception.type"
_UNSET = Status(StatusCode.UNSET)

_provider: Any = None  #: the provider that ``export`` made; None: the process-wide one
_cached_sink: "tuple[Any, _Sink] | None" = None


def use_provider(provider: Any) -> None:
    """Send our spans to this provider; None: to the process-wide one, if there is one."""
    global _provider
    _provider = provider


def is_on() -> bool:
    """Return whether a provider takes spans."""
    return _provider is not None or is_configured(trace.get_tracer_provider())


def is_configured(provider: object) -> bool:
    """Return whether a provider was configured: those of the bare API drop spans."""
    return not type(provider).__module__.startswith("opentelemetry.trace")


class Span:
    """A span that has not ended. ``parent`` is None for the root of a trace, which needs ``own``."""

    __slots__ = ("attributes", "context", "error_type", "kind", "links", "name", "parent", "started_at")

    def __init__(
        self,
        name: str,
        parent: SpanContext | None,
        attributes: dict[str, Any],
        *,
        links: Sequence[Link] = (),
        own: SpanContext | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> None:
        self.name, self.parent, self.attributes, self.links, self.kind = name, parent, attributes, links, kind
        if own is None:
            assert parent is not None
            own = SpanContext(parent.trace_id, secrets.randbits(64) | 1, False, parent.trace_flags)
        self.context: SpanContext = own
        self.started_at = time.time_ns()  # tracers use the machine's clock
        self.error_type: str | None = None

    def as_context(self) -> context.Context:
        """Return a context in which new spans are children of this one."""
        return trace.set_span_in_context(NonRecordingSpan(self.context))

    def link(self, of: SpanContext) -> None:
        """Link to a span of another trace."""
        self.links = [*self.links, Link(of)]

    def fail(self, error_type: str) -> None:
        """Mark it as failed with an error of this type; nothing else of the error is exported."""
        self.attributes[ERROR_TYPE] = self.error_type = error_type

    def end(self, at: int | None = None) -> None:
        """Export it, unless its trace is not sampled."""
        if self.context.trace_flags & TraceFlags.SAMPLED:
            _sink().put(self, time.time_ns() if at is None else at)

    @property
    def status(self) -> Status:
        return _UNSET if self.error_type is None else Status(StatusCode.ERROR, self.error_type)


def trace_flags(trace_id: int, name: str) -> TraceFlags:
    """Return whether a trace that begins with a run is sampled. All processes with the same sampler agree."""
    return TraceFlags(TraceFlags.SAMPLED if _sink().samples(trace_id, name) else TraceFlags.DEFAULT)


class _Sink:
    """Export spans directly to our provider, or through the tracer of another provider."""

    def __init__(self, provider: Any) -> None:
        self._accept: Callable[..., None] | None = getattr(provider, "accept", None)
        self._ids = None if self._accept else _ChosenIds.of(provider)
        self._tracer: Tracer = provider.get_tracer(SCOPE)
        sampler = getattr(self._tracer, "sampler", None)
        self._sampler = None if sampler is None or "root:AlwaysOn" in sampler.get_description() else sampler
        self._is_off = sampler is not None and sampler.get_description() == "AlwaysOffSampler"

    def samples(self, trace_id: int, name: str) -> bool:
        return self._sampler is None or self._sampler.should_sample(None, trace_id, name).decision.is_sampled()

    def put(self, span: Span, at: int) -> None:
        """Export a span. An exporter that fails must not fail the work."""
        if self._is_off:  # also for a sampled trace of the caller
            return
        try:
            self._put(span, at)
        except Exception:
            log.debug("a span could not be exported", exc_info=True)

    def _put(self, span: Span, at: int) -> None:
        if self._accept is not None:
            self._accept(span, at)
            return
        inside = context.Context()
        if span.parent is not None:
            inside = trace.set_span_in_context(NonRecordingSpan(span.parent), inside)
        token = self._ids and self._ids.context_var.set(span.context)
        try:
            sdk_span = self._tracer.start_span(
                span.name, inside, span.kind, span.attributes, span.links, start_time=span.started_at
            )
        finally:
            if self._ids and token:
                self._ids.context_var.reset(token)
        sdk_span.set_status(span.status)
        sdk_span.end(at)


class _ChosenIds:
    """Generate ids as the provider does, except for spans that have ids already."""

    def __init__(self, fallback: Any) -> None:
        self._fallback = fallback
        self.context_var: ContextVar[SpanContext | None] = ContextVar("pipeline_chosen_ids", default=None)

    @classmethod
    def of(cls, provider: Any) -> "_ChosenIds | None":
        """Replace the id generator of a provider; None if it has none."""
        if not hasattr(provider, "id_generator"):
            return None
        if not isinstance(provider.id_generator, cls):
            provider.id_generator = cls(provider.id_generator)
        found: _ChosenIds = provider.id_generator
        return found

    def generate_trace_id(self) -> int:
        chosen = self.context_var.get()
        return int(self._fallback.generate_trace_id()) if chosen is None else chosen.trace_id

    def generate_span_id(self) -> int:
        chosen = self.context_var.get()
        return int(self._fallback.generate_span_id()) if chosen is None else chosen.span_id

    def is_trace_id_random(self) -> bool:
        return self.context_var.get() is None


def _sink() -> _Sink:
    global _cached_sink
    provider = _provider if _provider is not None else trace.get_tracer_provider()
    if _cached_sink is None or _cached_sink[0] is not provider:
        _cached_sink = provider, _Sink(provider)
    return _cached_sink[1]
