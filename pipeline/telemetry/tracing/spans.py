"""The spans of the runtime, in the traces of the runs they are about.

Nothing of a payload, a parameter, a result or an error's words is ever on a span: ids, names, counts
and kinds only. When nobody listens, one look per cohort finds that out and nothing else happens.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any
from uuid import UUID

from opentelemetry import context, trace
from opentelemetry.trace import Link, SpanContext, SpanKind

from pipeline.telemetry.tracing import context as tracing_context
from pipeline.telemetry.tracing import fast_spans
from pipeline.telemetry.tracing.context import of_run, parsed
from pipeline.telemetry.tracing.fast_spans import ERROR_TYPE, Span, is_heard, is_on, use

__all__ = ["is_heard", "is_on", "use"]

RUN, RESCUE, RECONCILE, ANSWER = "run", "rescue", "reconcile", "answer"
PHASES = ("prepare", "mutate", "next", "produce")

RUN_ID, WORKFLOW, HANDLER = "pipeline.run.id", "pipeline.workflow", "pipeline.handler"
ATTEMPT, COHORT, SECONDS = "pipeline.run.attempt", "pipeline.cohort.size", "pipeline.handler.seconds"
STATUS, PHASE, RETRY_OF = "pipeline.run.status", "pipeline.run.phase", "pipeline.run.retry_of"
OUTCOME, SIDE = "pipeline.mutation.outcome", "pipeline.mutation.side"
CONNECTOR, OPERATION, TRY = "pipeline.connector", "pipeline.operation", "pipeline.call.attempt"
MUTATION_ID, VERDICT, LOOK = "pipeline.mutation.id", "pipeline.call.verdict", "pipeline.look.number"
ACTOR, WORDS, KIND = "pipeline.actor", "pipeline.answer", "pipeline.failure.kind"

_ABOUT = (RUN_ID, HANDLER, ATTEMPT)
_CALL = (CONNECTOR, OPERATION)
#: Every span of ours: its parent, what it is about, its attributes. `{connector}.{operation}` stands for their names.
SPANS: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    RUN: (
        "whoever published its first event, or the run it carries on; else it begins a trace, named by the run's id",
        "a run from its start to its commit or stop; made when it has ended",
        (*_ABOUT, RETRY_OF, PHASE, STATUS, OUTCOME, KIND, ERROR_TYPE),
    ),
    **{
        name: (
            f"`{RUN}`",
            what,
            (HANDLER, SECONDS, KIND, ERROR_TYPE),
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
        (MUTATION_ID, TRY, VERDICT, ERROR_TYPE),
    ),
    "{connector}.{operation}.reconcile": (
        "`mutate`",
        "the look at once after a call whose outcome is unknown",
        (MUTATION_ID, TRY, VERDICT, ERROR_TYPE),
    ),
    "{connector}.{operation}.read": ("`prepare` or `produce`", "a handler reads", (ERROR_TYPE,)),
    RECONCILE: (
        f"`{RUN}`",
        "a look in the background at a mutation in doubt, or at one that is watched",
        (*_CALL, RUN_ID, MUTATION_ID, WORKFLOW, LOOK, VERDICT, ERROR_TYPE),
    ),
    RESCUE: (f"`{RUN}`", "a sweep stopped a run whose worker vanished", (*_ABOUT, PHASE, STATUS, SIDE)),
    ANSWER: (f"`{RUN}`", "a person settled a mutation", (RUN_ID, MUTATION_ID, WORKFLOW, ACTOR, WORDS, ERROR_TYPE)),
}

_NOTHING: AbstractContextManager[None] = nullcontext()


def context_of(run: Any) -> SpanContext:
    """The context of a run's own span. A trace that a run began is recorded if the sampler says so."""
    began = tracing_context.began_with(run)
    return of_run(run) if began is None else of_run(run, fast_spans.flags(began, RUN))


class Cohort:
    """The spans of one phase of runs that travel together: open until what they did is recorded."""

    def __init__(self, phase: str, runs: Sequence[Any]) -> None:
        self.phase, self.runs = phase, {run.id: run for run in runs}
        self.contexts = {run.id: context_of(run) for run in runs}
        self.spans: dict[UUID, Span] = {}
        self._task = trace.get_current_span()
        self._links = _links(self._task.get_span_context())
        self._token = _COHORT.set(self)
        self._known = tracing_context.known(self.contexts.items())
        self._known.__enter__()
        if self._task.is_recording():  # it is its instrumentation's, and open until the task has ended
            self._task.set_attribute(COHORT, len(runs))
            for of in self.contexts.values():
                self._task.add_link(of)

    def of(self, run_id: UUID) -> Span:
        """The span of a run's phase, which begins now if it has not."""
        span = self.spans.get(run_id)
        if span is None:
            run = self.runs[run_id]
            about = {HANDLER: f"{run.workflow}.{run.handler}"}
            span = self.spans[run_id] = Span(self.phase, self.contexts[run_id], about, links=self._links)
        return span

    def called(self, handler: Callable[[Any], Any], run: Any) -> Any:
        """Call a handler with its span as the current one."""
        span = self.of(run.id)
        token = context.attach(span.inside())
        begun = time.monotonic()
        try:
            return handler(run)
        finally:
            span.attributes[SECONDS] = time.monotonic() - begun
            context.detach(token)

    def close(self) -> None:
        """The phase is over for all of them."""
        for span in self.spans.values():
            span.end()
        self._known.__exit__(None, None, None)
        _COHORT.reset(self._token)


class _Nobody:
    """In the place of a cohort's spans when nobody listens."""

    def close(self) -> None:
        return


_NOBODY = _Nobody()
_COHORT: ContextVar[Cohort | None] = ContextVar("pipeline_cohort", default=None)


def watch(phase: str, runs: Sequence[Any]) -> Cohort | _Nobody:
    """Begin the spans of a phase, to be closed when it is over."""
    return Cohort(phase, runs) if runs and is_on() else _NOBODY


def watched(handler: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same call, seen as a span of its run when somebody listens."""
    cohort = _COHORT.get()
    return handler if cohort is None else lambda run: cohort.called(handler, run)


def is_watched() -> bool:
    """Whether the phase that runs here has spans."""
    return _COHORT.get() is not None


def here() -> str | None:
    """What events that are published here are linked to: the phase that publishes them."""
    return tracing_context.current() if is_watched() else None


def linked(run_id: UUID, rows: Sequence[Any]) -> None:
    """Link the span of this phase to those that published its inputs."""
    cohort = _COHORT.get()
    assert cohort is not None
    span = cohort.of(run_id)
    for traceparent in dict.fromkeys(row.traceparent for row in rows):
        of = parsed(traceparent)
        if of is not None and of.trace_id != span.context.trace_id:  # in the same trace it is found anyway
            span.link(of)


def call(run_id: UUID, mutation: Any, *, looks: bool) -> Span | None:
    """Begin the span of one attempt of a mutation, or of the look after it."""
    cohort = _COHORT.get()
    if cohort is None:
        return None
    name = f"{mutation.connector}.{mutation.operation}{'.reconcile' if looks else ''}"
    about = {MUTATION_ID: str(mutation.id), TRY: mutation.attempts}
    return Span(name, cohort.of(run_id).context, about, kind=SpanKind.CLIENT)


def inside(span: Span | None) -> AbstractContextManager[Any]:
    """Code in here finds this span as its current one. Its end comes later, and not from here."""
    return _NOTHING if span is None else _Inside(span)


class _Inside:
    """The current context, for a while."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def __enter__(self) -> None:
        self._token = context.attach(self._span.inside())

    def __exit__(self, *_: object) -> None:
        context.detach(self._token)


def ended(span: Span | None, verdict: str | None = None, error: BaseException | None = None) -> None:
    """A call or a read has ended, or its time has."""
    if span is not None:
        if verdict is not None:
            span.attributes[VERDICT] = str(verdict)
        if error is not None:
            span.fail(type(error).__qualname__)
        span.end()


def read(connector: str, operation: str) -> Span | None:
    """Begin the span of a handler that reads from an outside system."""
    if not is_watched():
        return None
    above = trace.get_current_span().get_span_context()
    return Span(f"{connector}.{operation}.read", above, {}, kind=SpanKind.CLIENT) if above.is_valid else None


def over(rows: Sequence[Any]) -> None:
    """Make the spans of runs that have committed just now."""
    cohort = _COHORT.get()
    for row in rows if cohort is not None else ():
        if row.finished_at is not None:
            assert cohort is not None
            _run(row, {**_described(cohort.runs[row.id]), STATUS: row.status}, row.finished_at)


def stopped(items: Sequence[Any]) -> None:
    """Make the spans of runs that were stopped just now, and say on their phases why."""
    cohort = _COHORT.get()
    if cohort is None and not (items and is_on()):
        return
    for item in items:
        kind, error_type = str(item.failure.kind), item.failure.error_type
        if cohort is not None and item.run.id in cohort.spans:
            cohort.spans[item.run.id].attributes[KIND] = kind
            cohort.spans[item.run.id].fail(error_type)
        about = {**_described(item.run), STATUS: str(item.consequence.status), PHASE: item.run.phase, KIND: kind}
        _run(item.run, about, item.run.now, error_type)


def rescued(items: Sequence[Any]) -> None:
    """A sweep has stopped runs whose worker vanished."""
    if not items or not is_on():
        return
    links = _links(trace.get_current_span().get_span_context())
    for item in items:
        about = {
            **_described(item.run),
            PHASE: item.run.phase,
            STATUS: str(item.consequence.status),
            SIDE: str(item.consequence.disposition.side),
        }
        Span(RESCUE, context_of(item.run), about, links=links).end()
    stopped(items)


@contextmanager
def started(rows: Sequence[Any]) -> Iterator[None]:
    """Lines about these runs name their traces meanwhile."""
    with tracing_context.known((row.id, context_of(row)) for row in rows) if rows and is_on() else _NOTHING:
        yield


@contextmanager
def settling(name: str, mutation: Any, about: Mapping[str, Any]) -> Iterator[Callable[[str, Any], None]]:
    """The span of somebody who settles a mutation: a look, or a person. Yields a way to add to it.

    ``mutation`` is a row of the ledger with its run's ``traceparent``.
    """
    if not is_on():
        yield _ignore
        return
    run = _RunOf(mutation.run_id, mutation.traceparent)
    given = {RUN_ID: str(mutation.run_id), MUTATION_ID: str(mutation.id), WORKFLOW: mutation.workflow, **about}
    links = _links(trace.get_current_span().get_span_context())
    span = Span(name, context_of(run), given, links=links)
    with tracing_context.known([(run.id, context_of(run))]), inside(span):
        try:
            yield span.attributes.__setitem__
        except BaseException as error:
            span.fail(type(error).__qualname__)
            raise
        finally:
            span.end()


class _RunOf:
    """As much of a run's row as its context needs."""

    def __init__(self, run_id: UUID, traceparent: str | None) -> None:
        self.id, self.traceparent = run_id, traceparent


def _run(row: Any, about: dict[str, Any], at: Any, error_type: str | None = None) -> None:
    """The span of a whole run, with the ids by which its phases know it already."""
    about[OUTCOME] = row.mutation_outcome
    if row.retry_of is not None:
        about[RETRY_OF] = str(row.retry_of)
    span = Span(RUN, parsed(row.traceparent), about, own=context_of(row))
    span.begun = _nanoseconds(row.created_at)
    if error_type is not None:
        span.fail(error_type)
    span.end(_nanoseconds(at))


def _described(run: Any) -> dict[str, Any]:
    handler = f"{run.workflow}.{run.handler}"
    about = {RUN_ID: str(run.id), HANDLER: handler}
    return about if run.attempt == 1 else {**about, ATTEMPT: run.attempt}


def _links(of: SpanContext) -> list[Link]:
    return [Link(of)] if of.is_valid else []


def _nanoseconds(at: Any) -> int:
    return int(at.timestamp() * 1_000_000) * 1000


def _ignore(_name: str, _value: Any) -> None:
    return
