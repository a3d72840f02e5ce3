"""Which trace something belongs to: as W3C writes it, and for a run as a function of its row.

A run's own span has an id that everybody can work out: the lower half of the run's id. Its trace is the
one that the row names, and where it names none, the run's id itself. So a phase, a sweep or a person
lands in the run's trace without asking anybody, and a run's id can be pasted into a trace viewer.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from uuid import UUID

from opentelemetry import context, trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_HALF = (1 << 64) - 1
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
#: In the flags of a retry's row (`81`): its trace began with a run, so the sampler is asked and not whoever wrote them.
_TRACE_OF_RUN = 0x80

#: The runs that are being worked on here, so that the lines about them name their traces.
_BOUND_RUNS: ContextVar[Mapping[UUID, SpanContext] | None] = ContextVar("pipeline_bound_runs", default=None)


def parse_traceparent(traceparent: str | None) -> SpanContext | None:
    """The context that a traceparent names; None for nothing, and for what is no traceparent."""
    match = _TRACEPARENT.fullmatch(traceparent) if traceparent else None
    if match is None:
        return None
    trace_id, span_id, flags = (int(part, 16) for part in match.groups())
    found = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))
    return found if found.is_valid else None


def format_traceparent(of: SpanContext) -> str:
    """A context as a traceparent."""
    return f"00-{of.trace_id:032x}-{of.span_id:016x}-{of.trace_flags & 0xFF:02x}"


def current_traceparent() -> str | None:
    """The traceparent of whatever runs here; None outside of any trace."""
    found = trace.get_current_span().get_span_context()
    return format_traceparent(found) if found.is_valid else None


def run_span_context(run: Any, flags: TraceFlags = _SAMPLED) -> SpanContext:
    """The context of a run's own span. ``flags`` hold where its trace began with a run."""
    number: int = run.id.int
    outer = parse_traceparent(run.traceparent)
    if outer is None:
        return SpanContext(number, number & _HALF, is_remote=True, trace_flags=flags)
    if not outer.trace_flags & _TRACE_OF_RUN:
        flags = outer.trace_flags
    return SpanContext(outer.trace_id, number & _HALF, is_remote=True, trace_flags=flags)


def own_trace_id(run: Any) -> int | None:
    """The trace of a run, if that began with it or with a run that it carries on; None: somebody else began it."""
    outer = parse_traceparent(run.traceparent)
    if outer is None:
        number: int = run.id.int
        return number
    return outer.trace_id if outer.trace_flags & _TRACE_OF_RUN else None


def child_context(of: SpanContext) -> context.Context:
    """A context in which new spans are children of this one."""
    return trace.set_span_in_context(NonRecordingSpan(of), context.Context())


@contextmanager
def join_trace(traceparent: str | None) -> Iterator[None]:
    """Go on in the trace that a caller named, if it named one."""
    found = parse_traceparent(traceparent)
    if found is None:
        yield
        return
    token = context.attach(child_context(found))
    try:
        yield
    finally:
        context.detach(token)


@contextmanager
def preserve_context() -> Iterator[None]:
    """Whatever happens in here, afterwards the current span is the one of before.

    The instrumentation of Celery leaves the span of a message behind that could not be sent.
    """
    token = context.attach(context.get_current())
    try:
        yield
    finally:
        context.detach(token)


@contextmanager
def bind_runs(runs: Iterable[tuple[UUID, SpanContext]]) -> Iterator[None]:
    """Lines about these runs name their traces meanwhile."""
    token = _BOUND_RUNS.set({**(_BOUND_RUNS.get() or {}), **dict(runs)})
    try:
        yield
    finally:
        _BOUND_RUNS.reset(token)


def bound_run(run_id: object) -> SpanContext | None:
    """The context of a run that is being worked on here."""
    runs = _BOUND_RUNS.get()
    return runs.get(run_id) if runs is not None and isinstance(run_id, UUID) else None
