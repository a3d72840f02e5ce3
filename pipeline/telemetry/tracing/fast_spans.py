"""Spans that are put down when they have ended, in one go: a fraction of the work of spans that are kept open.

Code that runs inside one finds its context as the current one, so that its own spans are children; it
cannot add anything to it. Ids are chosen here, because the span of a run has one that others know before.
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

_provider: Any = None  #: the provider that `setup` made; else the one of the process counts
_cached_sink: "tuple[Any, _Sink] | None" = None


def use_provider(provider: Any) -> None:
    """Send our spans to this provider; None: to that of the process, if somebody sets one up."""
    global _provider
    _provider = provider


def is_on() -> bool:
    """Whether anybody listens."""
    return _provider is not None or is_configured(trace.get_tracer_provider())


def is_configured(provider: object) -> bool:
    """Whether somebody set up a provider: those of the bare API belong to nobody."""
    return not type(provider).__module__.startswith("opentelemetry.trace")


class Span:
    """A span on its way. ``parent`` is None for one that begins its trace, and then ``own`` is given."""

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
        self.started_at = time.time_ns()  # tracers everywhere go by the clock of the machine
        self.error_type: str | None = None

    def as_context(self) -> context.Context:
        """A context in which new spans are children of this one."""
        return trace.set_span_in_context(NonRecordingSpan(self.context))

    def link(self, of: SpanContext) -> None:
        """Lead to another trace as well."""
        self.links = [*self.links, Link(of)]

    def fail(self, error_type: str) -> None:
        """It ended with an error of this type, of which nothing else is told."""
        self.attributes[ERROR_TYPE] = self.error_type = error_type

    def end(self, at: int | None = None) -> None:
        """Put it down, unless its trace is not recorded."""
        if self.context.trace_flags & TraceFlags.SAMPLED:
            _sink().put(self, time.time_ns() if at is None else at)

    @property
    def status(self) -> Status:
        return _UNSET if self.error_type is None else Status(StatusCode.ERROR, self.error_type)


def trace_flags(trace_id: int, name: str) -> TraceFlags:
    """Whether a trace that begins with a run is recorded: the same in every process with the same sampler."""
    return TraceFlags(TraceFlags.SAMPLED if _sink().samples(trace_id, name) else TraceFlags.DEFAULT)


class _Sink:
    """Where spans are put down: straight into a provider of ours, or through the tracer of somebody else's."""

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
        """Put a span down. Whatever listens there may fail: the work that is told of has happened all the same."""
        if self._is_off:  # whatever the caller's trace says
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
            made = self._tracer.start_span(
                span.name, inside, span.kind, span.attributes, span.links, start_time=span.started_at
            )
        finally:
            if self._ids and token:
                self._ids.context_var.reset(token)
        made.set_status(span.status)
        made.end(at)


class _ChosenIds:
    """Ids as a provider makes them, but for spans that have ids already."""

    def __init__(self, usual: Any) -> None:
        self._fallback = usual
        self.context_var: ContextVar[SpanContext | None] = ContextVar("pipeline_chosen_ids", default=None)

    @classmethod
    def of(cls, provider: Any) -> "_ChosenIds | None":
        """The ids of a provider, which it takes from here from now on; None when it has none to take."""
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
