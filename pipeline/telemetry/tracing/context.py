"""Parse W3C trace contexts, and compute the trace of a run from its row.

The span id of a run is the lower half of the run's id. Its trace id is the one of the row's traceparent, or the run's
id itself. So every process finds the run's trace without a lookup, and a run's id can be pasted into a trace viewer.
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
#: In the flags of a retry's row (`81`): its trace began with a run, so the sampler decides and not the flags.
_TRACE_OF_RUN = 0x80

#: The runs of the current code, so that their log lines name their traces.
_BOUND_RUNS: ContextVar[Mapping[UUID, SpanContext] | None] = ContextVar("pipeline_bound_runs", default=None)


def parse_traceparent(traceparent: str | None) -> SpanContext | None:
    """Parse a traceparent; None if it is missing or malformed."""
    match = _TRACEPARENT.fullmatch(traceparent) if traceparent else None
    if match is None:
        return None
    trace_id, span_id, flags = (int(part, 16) for part in match.groups())
    found = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))
    return found if found.is_valid else None


def format_traceparent(of: SpanContext) -> str:
    """Format a context as a traceparent."""
    return f"00-{of.trace_id:032x}-{of.span_id:016x}-{of.trace_flags & 0xFF:02x}"


def current_traceparent() -> str | None:
    """Return the current traceparent; None outside of any trace."""
    found = trace.get_current_span().get_span_context()
    return format_traceparent(found) if found.is_valid else None


def run_span_context(run: Any, flags: TraceFlags = _SAMPLED) -> SpanContext:
    """Return the context of a run's own span. ``flags`` apply if its trace began with a run."""
    number: int = run.id.int
    outer = parse_traceparent(run.traceparent)
    if outer is None:
        return SpanContext(number, number & _HALF, is_remote=True, trace_flags=flags)
    if not outer.trace_flags & _TRACE_OF_RUN:
        flags = outer.trace_flags
    return SpanContext(outer.trace_id, number & _HALF, is_remote=True, trace_flags=flags)


def own_trace_id(run: Any) -> int | None:
    """Return the trace id of a run whose trace began with it or with its retried run; else None."""
    outer = parse_traceparent(run.traceparent)
    if outer is None:
        number: int = run.id.int
        return number
    return outer.trace_id if outer.trace_flags & _TRACE_OF_RUN else None


def child_context(of: SpanContext) -> context.Context:
    """Return a context in which new spans are children of this one."""
    return trace.set_span_in_context(NonRecordingSpan(of), context.Context())


@contextmanager
def join_trace(traceparent: str | None) -> Iterator[None]:
    """Run the block in the trace of a caller, if there is one."""
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
    """Restore the current span after the block.

    Celery's instrumentation leaves the span of a message current when the message could not be sent.
    """
    token = context.attach(context.get_current())
    try:
        yield
    finally:
        context.detach(token)


@contextmanager
def bind_runs(runs: Iterable[tuple[UUID, SpanContext]]) -> Iterator[None]:
    """Let log lines about these runs name their traces inside the block."""
    token = _BOUND_RUNS.set({**(_BOUND_RUNS.get() or {}), **dict(runs)})
    try:
        yield
    finally:
        _BOUND_RUNS.reset(token)


def bound_run(run_id: object) -> SpanContext | None:
    """Return the context of a bound run."""
    runs = _BOUND_RUNS.get()
    return runs.get(run_id) if runs is not None and isinstance(run_id, UUID) else None
