"""The spans of the runtime, in the traces of the runs they are about.

Nothing of a payload, a parameter, a result or an error's words is ever on a span: ids, names, counts
and kinds only. When nobody listens, one look per cohort finds that out and nothing else happens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from uuid import UUID

from opentelemetry import context, trace
from opentelemetry.trace import Link, SpanContext

from pipeline.telemetry.tracing import context as tracing_context
from pipeline.telemetry.tracing import fast_spans
from pipeline.telemetry.tracing.context import parse_traceparent, run_span_context
from pipeline.telemetry.tracing.fast_spans import ERROR_TYPE, Span, is_configured, is_on, use_provider

__all__ = ["is_configured", "is_on", "use_provider"]

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
#: Every span of ours: its parent, what it is about, its attributes. `{connector}.{operation}` stands for their names.
SPANS: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    RUN: (
        "whoever published its first event, or the run it carries on; else it begins a trace, named by the run's id",
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
        "the look at once after a call whose outcome is unknown",
        (MUTATION_ID, CALL_ATTEMPT, VERDICT, ERROR_TYPE),
    ),
    "{connector}.{operation}.read": ("`prepare` or `produce`", "a handler reads", (ERROR_TYPE,)),
    RECONCILE: (
        f"`{RUN}`",
        "a look in the background at a mutation in doubt, or at one that is watched",
        (*_CALL, RUN_ID, MUTATION_ID, WORKFLOW, RECONCILE_ATTEMPT, VERDICT, ERROR_TYPE),
    ),
    RESCUE: (f"`{RUN}`", "a sweep stopped a run whose worker vanished", (*_ABOUT, PHASE, STATUS, SIDE)),
    RESOLVE: (
        f"`{RUN}`",
        "a person settled a mutation",
        (RUN_ID, MUTATION_ID, WORKFLOW, ACTOR, RESOLUTION, ERROR_TYPE),
    ),
}

_NO_SPAN_CONTEXT: AbstractContextManager[None] = nullcontext()


def context_of(run: Any) -> SpanContext:
    """The context of a run's own span. A trace that a run began is recorded if the sampler says so."""
    began = tracing_context.own_trace_id(run)
    return run_span_context(run) if began is None else run_span_context(run, fast_spans.trace_flags(began, RUN))


def activate(span: Span | None) -> AbstractContextManager[Any]:
    """Code in here finds this span as its current one. Its end comes later, and not from here."""
    return _NO_SPAN_CONTEXT if span is None else _ActiveSpan(span)


class _ActiveSpan:
    """The current context, for a while."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def __enter__(self) -> None:
        self._token = context.attach(self._span.as_context())

    def __exit__(self, *_: object) -> None:
        context.detach(self._token)


def end_span(span: Span | None, verdict: str | None = None, error: BaseException | None = None) -> None:
    """A call or a read has ended, or its time has."""
    if span is not None:
        if verdict is not None:
            span.attributes[VERDICT] = str(verdict)
        if error is not None:
            span.fail(type(error).__qualname__)
        span.end()


def record_committed(rows: Sequence[Any], claimed: Mapping[UUID, Any]) -> None:
    """Make the spans of runs that have committed just now."""
    for row in rows:
        if row.finished_at is not None:
            _record_run(row, {**_run_attributes(claimed[row.id]), STATUS: row.status}, row.finished_at)


def record_stopped(items: Sequence[Any]) -> None:
    """Make the spans of runs that were stopped just now."""
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
    """A sweep has stopped runs whose worker vanished."""
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
    """Lines about these runs name their traces meanwhile."""
    with tracing_context.bind_runs((row.id, context_of(row)) for row in rows) if rows and is_on() else _NO_SPAN_CONTEXT:
        yield


@contextmanager
def resolution_span(name: str, mutation: Any, about: Mapping[str, Any]) -> Iterator[Callable[[str, Any], None]]:
    """The span of somebody who settles a mutation: a look, or a person. Yields a way to add to it.

    ``mutation`` is a row of the ledger with its run's ``traceparent``.
    """
    if not is_on():
        yield _ignore
        return
    run = _RunReference(mutation.run_id, mutation.traceparent)
    given = {RUN_ID: str(mutation.run_id), MUTATION_ID: str(mutation.id), WORKFLOW: mutation.workflow, **about}
    links = links_to(trace.get_current_span().get_span_context())
    span = Span(name, context_of(run), given, links=links)
    with tracing_context.bind_runs([(run.id, context_of(run))]), activate(span):
        try:
            yield span.attributes.__setitem__
        except BaseException as error:
            span.fail(type(error).__qualname__)
            raise
        finally:
            span.end()


class _RunReference:
    """As much of a run's row as its context needs."""

    def __init__(self, run_id: UUID, traceparent: str | None) -> None:
        self.id, self.traceparent = run_id, traceparent


def _record_run(row: Any, about: dict[str, Any], at: Any, error_type: str | None = None) -> None:
    """The span of a whole run, with the ids by which its phases know it already."""
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
    """Links of a span to another; none to what is no span."""
    return [Link(of)] if of.is_valid else []


def _nanoseconds(at: Any) -> int:
    return int(at.timestamp() * 1_000_000) * 1000


def _ignore(_name: str, _value: Any) -> None:
    return
