"""Make the spans of workers and sweeps, in the traces of the runs they are about.

The span id of a run is the lower half of the run's id. Its trace id is the one of the row's traceparent, or the run's
id itself. So every process finds the run's trace without a lookup, and a run's id can be pasted into a trace viewer.

Spans carry ids, names, counts and kinds only; never payloads, parameters, results or error messages. Without a
provider, one check per cohort is the whole cost.

A span is exported in one step at its end, which is cheaper than a span of the SDK. Code inside a span finds its context
as the current one, so that its own spans become children; it cannot add attributes. Ids are chosen here, because the id
of a run's span is known before the span exists.
"""

import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any
from uuid import UUID

from opentelemetry import context, trace
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags, Tracer

from pipeline.telemetry.metrics import is_configured

_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_HALF = (1 << 64) - 1
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
#: In the flags of a retry's row (`81`): its trace began with a run, so the sampler decides and not the flags.
_TRACE_OF_RUN = 0x80

#: The runs of the current code, so that their log lines name their traces.
_BOUND_RUNS: ContextVar[Mapping[UUID, SpanContext] | None] = ContextVar("pipeline_bound_runs", default=None)


def parse_traceparent(traceparent: object) -> SpanContext | None:
    """Parse a traceparent; None if it is missing or malformed, which a message from outside may have as any value."""
    match = _TRACEPARENT.fullmatch(traceparent) if isinstance(traceparent, str) else None
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


RUN, RESCUE, RECONCILE, RESOLVE = "run", "rescue", "reconcile", "resolve"

RUN_ID, WORKFLOW, HANDLER = "pipeline.run.id", "pipeline.workflow", "pipeline.handler"
ATTEMPT, COHORT_SIZE, HANDLER_SECONDS = "pipeline.run.attempt", "pipeline.cohort.size", "pipeline.handler.seconds"
STATUS, PHASE, RETRY_OF = "pipeline.run.status", "pipeline.run.phase", "pipeline.run.retry_of"
OUTCOME, SIDE = "pipeline.mutation.outcome", "pipeline.mutation.side"
CONNECTOR, OPERATION, CALL_ATTEMPT = "pipeline.connector", "pipeline.operation", "pipeline.call.attempt"
MUTATION_ID, VERDICT, RECONCILE_ATTEMPT = "pipeline.mutation.id", "pipeline.call.verdict", "pipeline.reconcile.attempt"
ACTOR, RESOLUTION, FAILURE_KIND = "pipeline.actor", "pipeline.resolution", "pipeline.failure.kind"

_ABOUT = (RUN_ID, HANDLER, ATTEMPT)
_CALL = (CONNECTOR, OPERATION)
#: Every span: its parent, its meaning, its attributes. `{connector}.{operation}` stands for their names.
SPANS: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    RUN: (
        "the publisher of its first event, or the run that it retries; else it begins a trace, named by the run's id",
        "a run from its start to its commit or stop; made when it has ended",
        (*_ABOUT, RETRY_OF, PHASE, STATUS, OUTCOME, FAILURE_KIND, ERROR_TYPE),
    ),
    **{
        name: (
            f"`{RUN}`",
            what,
            (HANDLER, HANDLER_SECONDS, FAILURE_KIND, ERROR_TYPE),
        )
        for name, what in {
            "prepare": "from the call of the handler until its plan is saved; linked to the publishers of its inputs",
            "mutate": "from the call of the handler until the outcome is in the ledger, or there is nothing to send",
            "next": "from the call of the handler until the commit",
            "produce": "from the call of the producer until the commit",
        }.items()
    },
    "{connector}.{operation}": (
        "`mutate`",
        "one attempt of a mutation at the outside system",
        (MUTATION_ID, CALL_ATTEMPT, VERDICT, ERROR_TYPE),
    ),
    "{connector}.{operation}.reconcile": (
        "`mutate`",
        "the reconcile attempt at once after a call whose outcome is unknown",
        (MUTATION_ID, CALL_ATTEMPT, VERDICT, ERROR_TYPE),
    ),
    "{connector}.{operation}.read": ("`prepare` or `produce`", "a handler reads", (ERROR_TYPE,)),
    RECONCILE: (
        f"`{RUN}`",
        "a background reconcile attempt for a mutation in doubt, or for one that is monitored",
        (*_CALL, RUN_ID, MUTATION_ID, WORKFLOW, RECONCILE_ATTEMPT, VERDICT, ERROR_TYPE),
    ),
    RESCUE: (f"`{RUN}`", "a sweep stopped a run whose worker vanished", (*_ABOUT, PHASE, STATUS, SIDE)),
    RESOLVE: (
        f"`{RUN}`",
        "an operator resolved a mutation",
        (RUN_ID, MUTATION_ID, WORKFLOW, ACTOR, RESOLUTION, ERROR_TYPE),
    ),
}

_NO_SPAN_CONTEXT: AbstractContextManager[None] = nullcontext()


def context_of(run: Any) -> SpanContext:
    """Return the context of a run's own span. The sampler decides about a trace that a run began."""
    began = own_trace_id(run)
    return run_span_context(run) if began is None else run_span_context(run, trace_flags(began, RUN))


def activate(span: Span | None) -> AbstractContextManager[Any]:
    """Make this span current inside the block, without ending it."""
    return _NO_SPAN_CONTEXT if span is None else _ActiveSpan(span)


class _ActiveSpan:
    """Attach and detach the context of a span."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def __enter__(self) -> None:
        self._token = context.attach(self._span.as_context())

    def __exit__(self, *_: object) -> None:
        context.detach(self._token)


def end_span(span: Span | None, verdict: str | None = None, error: BaseException | None = None) -> None:
    """End the span of a call or a read, or of one that timed out."""
    if span is not None:
        if verdict is not None:
            span.attributes[VERDICT] = str(verdict)
        if error is not None:
            span.fail(type(error).__qualname__)
        span.end()


def record_committed(rows: Sequence[Any], claimed: Mapping[UUID, Any]) -> None:
    """Make the spans of runs that have just committed."""
    for row in rows:
        if row.finished_at is not None:
            _record_run(row, {**_run_attributes(claimed[row.id]), STATUS: row.status}, row.finished_at)


def record_stopped(items: Sequence[Any]) -> None:
    """Make the spans of runs that were just stopped."""
    for item in items:
        kind, error_type = str(item.failure.kind), item.failure.error_type
        about = {
            **_run_attributes(item.run),
            STATUS: str(item.decision.status),
            PHASE: item.run.phase,
            FAILURE_KIND: kind,
        }
        _record_run(item.run, about, item.run.now, error_type)


def record_rescued(items: Sequence[Any]) -> None:
    """Make the spans of runs that the rescue sweep has stopped."""
    if not items or not is_on():
        return
    links = links_to(trace.get_current_span().get_span_context())
    for item in items:
        about = {
            **_run_attributes(item.run),
            PHASE: item.run.phase,
            STATUS: str(item.decision.status),
            SIDE: str(item.decision.disposition.side),
        }
        Span(RESCUE, context_of(item.run), about, links=links).end()
    record_stopped(items)


@contextmanager
def bind_started_runs(rows: Sequence[Any]) -> Iterator[None]:
    """Let log lines about these runs name their traces inside the block."""
    with bind_runs((row.id, context_of(row)) for row in rows) if rows and is_on() else _NO_SPAN_CONTEXT:
        yield


@contextmanager
def resolution_span(name: str, mutation: Any, about: Mapping[str, Any]) -> Iterator[Callable[[str, Any], None]]:
    """Make the span of a reconcile attempt or an operator's resolution. Yields a setter of attributes.

    ``mutation`` is a row of the ledger with its run's ``traceparent``.
    """
    if not is_on():
        yield _ignore
        return
    run = _RunReference(mutation.run_id, mutation.traceparent)
    given = {RUN_ID: str(mutation.run_id), MUTATION_ID: str(mutation.id), WORKFLOW: mutation.workflow, **about}
    links = links_to(trace.get_current_span().get_span_context())
    span = Span(name, context_of(run), given, links=links)
    with bind_runs([(run.id, context_of(run))]), activate(span):
        try:
            yield span.attributes.__setitem__
        except BaseException as error:
            span.fail(type(error).__qualname__)
            raise
        finally:
            span.end()


class _RunReference:
    """The fields of a run's row that its trace context needs."""

    def __init__(self, run_id: UUID, traceparent: str | None) -> None:
        self.id, self.traceparent = run_id, traceparent


def _record_run(row: Any, about: dict[str, Any], at: Any, error_type: str | None = None) -> None:
    """Make the span of a whole run, with the id that its phases name as parent."""
    about[OUTCOME] = row.mutation_outcome
    if row.retry_of is not None:
        about[RETRY_OF] = str(row.retry_of)
    span = Span(RUN, parse_traceparent(row.traceparent), about, own=context_of(row))
    span.started_at = _nanoseconds(row.created_at)
    if error_type is not None:
        span.fail(error_type)
    span.end(_nanoseconds(at))


def _run_attributes(run: Any) -> dict[str, Any]:
    handler = f"{run.workflow}.{run.handler}"
    about = {RUN_ID: str(run.id), HANDLER: handler}
    return about if run.attempt == 1 else {**about, ATTEMPT: run.attempt}


def links_to(of: SpanContext) -> list[Link]:
    """Return a link to a span; none if the context is invalid."""
    return [Link(of)] if of.is_valid else []


def _nanoseconds(at: Any) -> int:
    return int(at.timestamp() * 1_000_000) * 1000


def _ignore(_name: str, _value: Any) -> None:
    return
