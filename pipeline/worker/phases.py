"""Call the handlers: from a claimed run to what the handler returned, or to a classified failure.

No transaction is open while a handler runs, and no handler can reach a context of another phase.
"""

import functools
import logging
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, Generic, TypeVar

from pipeline.consumer_engine.bounded import StepCall, StepRunner
from pipeline.domain.codec import is_sealed, opened
from pipeline.domain.errors import LogicError, PayloadError
from pipeline.domain.failures import Failure, classify
from pipeline.domain.payloads import checked_json
from pipeline.domain.scheduling import clamp_wake_at, next_slot
from pipeline.domain.states import EventId, Fence, MutationOutcome, RunId
from pipeline.domain.values import DEFAULT_LIMITS, Limits, Reservation, RunLease, RunOutput
from pipeline.domain.values import PreparedRun as Plan
from pipeline.store.database import Database
from pipeline.store.reads import work
from pipeline.store.rows import ClaimedRunRow, OfferedEvent, PendingEventRow
from pipeline.store.schema import RunRow
from pipeline.telemetry import phase_observer
from pipeline.workflows.authoring import Consumer, Producer
from pipeline.workflows.contexts import (
    CURRENT_CONTEXT,
    Context,
    ContextInputs,
    MutateContext,
    NextContext,
    PrepareContext,
    ProducerContext,
    PublishingContext,
)
from pipeline.workflows.handler_types import (
    Event,
    MutationResult,
    Prepared,
    PrepareResult,
    RequestedMutation,
    ResultStatus,
)
from pipeline.workflows.registry import Registry, first_slot

log = logging.getLogger(__name__)

T = TypeVar("T")
PendingEvent = OfferedEvent | PendingEventRow
_LIMIT_OPTION = "PIPELINE_STEP_TIME_LIMIT"
_MAX_FRAMES = 8_000  #: characters of a traceback that a run keeps

_RESULT_STATUSES = {
    MutationOutcome.SUCCESS: ResultStatus.APPLIED,
    MutationOutcome.SKIPPED: ResultStatus.SKIPPED,
    MutationOutcome.NONE: ResultStatus.NONE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MutateResult:
    """What a mutate asked for, and what it has cost."""

    request: RequestedMutation | None
    cost: Decimal | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerCall(Generic[T]):
    """A handler that is about to be called for a run, and what is made of the value that it returns."""

    run: ClaimedRunRow
    context: Context
    step: StepCall
    finish: Callable[[Any], T | Failure]
    shown: Sequence[EventId] = ()  #: of a prepare: the events that it has seen, to be named by its failure


def lease_of(run: RunRow) -> RunLease:
    """The run as its claimer holds it."""
    return RunLease(RunId(run.id), Fence(run.fence))


class Phases:
    """Runs single handlers of known workflows."""

    def __init__(
        self, db: Database, registry: Registry, *, step_limit: timedelta, limits: Limits = DEFAULT_LIMITS
    ) -> None:
        self.db, self.registry, self.step_limit, self.limits = db, registry, step_limit, limits
        self._local = threading.local()

    @property
    def steps(self) -> StepRunner:
        """The steps of this thread: in a pool of threads several phases run at once.

        A step has no span and no metric of its own. A phase calls its handler once, and the phase has both.
        """
        if not hasattr(self._local, "steps"):
            self._local.steps = StepRunner()
        steps: StepRunner = self._local.steps
        return steps

    def prepare(self, run: ClaimedRunRow, offered: Sequence[PendingEvent] | None) -> HandlerCall[Plan]:
        """Ask a consumer what it wants to do with the events it was offered; None: with all of its events."""
        consumer = self.registry.consumer(run.workflow, run.handler)
        reader = _Reader(self.db, run, offered)
        context = PrepareContext(self._context_inputs(run), consumer.subscribes, reader)

        def finish(returned: Any) -> Plan | Failure:
            try:
                plan = replace(_plan(run, consumer, returned, self.limits), cost=context.cost)
            except Exception as error:  # noqa: BLE001 - what the handler returned cannot be used: its failure
                return replace(classify(error), cost=context.cost)
            phase_observer.link_inputs(run.id, lambda: reader.reserved_rows(plan))
            return plan

        step = self._step(context, consumer.instance.prepare, run.handler_state, what=f"{run.handler}.prepare")
        return HandlerCall(run=run, context=context, step=step, finish=finish, shown=reader.shown_ids)

    def mutate(self, run: ClaimedRunRow) -> HandlerCall[MutateResult]:
        """Ask a consumer for its one mutation."""
        consumer = self.registry.consumer(run.workflow, run.handler)
        context = MutateContext(self._context_inputs(run))

        def finish(returned: Any) -> MutateResult | Failure:
            if returned is not None and returned is not context.requested:
                problem = f"{run.handler}.mutate returned a {type(returned).__name__}"
                error = LogicError(f"{problem}; expected what ctx.<connector>.<mutation>(...) returns, or nothing")
                return replace(classify(error), cost=context.cost)
            return MutateResult(request=context.requested, cost=context.cost)

        ask = functools.partial(_ask, consumer.instance.mutate)
        plan = saved_plan(run)
        step = self._step(context, ask, plan, what=f"{run.handler}.mutate", reads=(plan.data, plan.ui))
        return HandlerCall(run=run, context=context, step=step, finish=finish)

    def next(self, run: ClaimedRunRow) -> HandlerCall[RunOutput]:
        """Ask a consumer what follows."""
        consumer = self.registry.consumer(run.workflow, run.handler)
        context = NextContext(self._context_inputs(run), consumer.publishes)

        def finish(returned: Any) -> RunOutput | Failure:
            overlap = self.registry.workflows[run.workflow].overlap_reason
            if returned is not None and consumer.merge is None and overlap is not None:
                error = LogicError(
                    f"{run.handler}.next returned state and its workflow {overlap}: updates would be lost; define "
                    'merge(current, returned) on the consumer, or set concurrency=1 and on_uncertain="pause"'
                )
                return replace(classify(error), cost=context.cost)
            return self._checked_emission(run, context, returned)

        result = MutationResult(
            status=_RESULT_STATUSES[MutationOutcome(run.mutation_outcome)], value=run.mutation_result
        )
        plan, what = saved_plan(run), f"{run.handler}.next"
        reads = (plan.data, plan.ui, result.value)
        step = self._step(context, consumer.instance.next, plan, result, what=what, reads=reads)
        return HandlerCall(run=run, context=context, step=step, finish=finish)

    def merge_function(self, consumer: Consumer) -> Callable[[Any, Any], Any] | None:
        """How a consumer folds a returned state into the current one, if it does, within the limit of a step."""
        if consumer.merge is None:
            return None
        return functools.partial(
            self.steps.run, consumer.merge, limit=self.step_limit, what=f"{consumer.name}.merge", option=_LIMIT_OPTION
        )

    def produce(self, run: ClaimedRunRow, slot: datetime) -> HandlerCall[RunOutput]:
        """Ask a producer for events."""
        producer = self.registry.producer(run.workflow, run.handler)
        context = ProducerContext(self._context_inputs(run), producer.publishes)

        def finish(returned: Any) -> RunOutput | Failure:
            return self._checked_emission(run, context, returned, next_run_at=slot_after(producer, slot, run.now))

        step = self._step(context, producer.function, run.handler_state, what=run.handler)
        return HandlerCall(run=run, context=context, step=step, finish=finish)

    def answer(self, call: HandlerCall[T]) -> T | Failure:
        """Call one handler. Return what came of it."""
        ((_, answer),) = self.answers([call], ends_at=time.monotonic())
        return answer

    def answers(self, calls: Sequence[HandlerCall[T]], *, ends_at: float) -> list[tuple[HandlerCall[T], T | Failure]]:
        """Call handlers one after the other until ``ends_at`` on the monotonic clock, the first at any time.

        Return those that were called, each with what came of it.
        """
        count = self.steps.attempt_each([call.step for call in calls], ends_at=ends_at)
        answers: list[T | Failure] = list(map(self._answer, calls[:count]))
        return list(zip(calls, answers, strict=False))

    def _context_inputs(self, run: ClaimedRunRow) -> ContextInputs:
        return ContextInputs(now=run.now, connectors=self.registry.connectors, limits=self.limits)

    def _checked_emission(
        self, run: ClaimedRunRow, context: PublishingContext, state: Any, next_run_at: datetime | None = None
    ) -> RunOutput | Failure:
        published = context.published
        try:
            checked_json(state, what=f"state returned by {run.handler}", limit=self.limits.state)
        except PayloadError as error:
            return replace(classify(error), cost=context.cost)
        if (here := phase_observer.publisher_traceparent()) is not None:
            published = [replace(event, traceparent=here) for event in published]
        return RunOutput(
            lease=lease_of(run),
            events=tuple(published),
            state=state,
            has_state=state is not None,
            next_run_at=next_run_at,
            cost=context.cost,
        )

    def _step(
        self, context: Context, function: Any, *args: Any, what: str, reads: Sequence[Any] | None = None
    ) -> StepCall:
        """The call of a handler, in which its context is the current one. When it has ended, the context is closed.

        If a value that it ``reads``, by default its arguments, cannot be opened, the step fails with that.
        """
        if any(map(is_sealed, args if reads is None else reads)):
            function = functools.partial(_require_opened, args if reads is None else reads)
        token = CURRENT_CONTEXT.set(context)
        try:
            limit = self.step_limit.total_seconds()
            return StepCall(
                function, (context, *args), limit=limit, what=what, on_end=context.close, option=_LIMIT_OPTION
            )
        finally:
            CURRENT_CONTEXT.reset(token)

    def _answer(self, call: HandlerCall[T]) -> T | Failure:
        """What came of a handler that was called; a violation counts even when the handler swallowed it."""
        failed = call.context.violation or call.step.error
        with phase_observer.in_span(call.run, call.step.seconds):
            if failed is None:
                return call.finish(call.step.value)
        failure = classify(failed)
        where = "".join(traceback.format_tb(failed.__traceback__))  # its message may quote a payload
        log.warning(
            "%s failed with %s; `pipeline runs` has its message\n%s", call.step.what, type(failed).__qualname__, where
        )
        return replace(
            failure,
            message=self._redact(failure.message),
            frames=self._redact(where)[-_MAX_FRAMES:],
            cost=call.context.cost,
            shown=tuple(call.shown),
        )

    def _redact(self, text: str) -> str:
        """Text without the credentials of any connector: a read may have put them there."""
        for connector in self.registry.connectors.values():
            text = connector.scrub(text)
        return text


class _Reader:
    """How a prepare reads: its slice, which came with the claim, or a statement for each read."""

    def __init__(self, db: Database, run: ClaimedRunRow, offered: Sequence[PendingEvent] | None) -> None:
        self.db, self.run, self.offered = db, run, offered
        self.shown_ids: list[EventId] = []  #: what was shown to a prepare that chooses among all events
        self._rows: Sequence[Any] = self.offered or ()

    def peek(self, topic: str, limit: int) -> Sequence[Any]:
        if self.offered is not None:
            return [row for row in self.offered if row.topic == topic][:limit]
        with self.db.autocommit() as tx:
            rows = work.reservable_events(
                tx, self.run, topic, limit=limit, low_watermark=self.run.low_watermark, ordered=self.run.ordered
            )
        self.shown_ids += (EventId(row.id) for row in rows)
        self._rows = [*self._rows, *rows]
        return rows

    def reserved_rows(self, plan: Plan) -> Sequence[Any]:
        """Those of the events it has shown that a plan reserves."""
        ids = {id_ for reservation in plan.reservations for id_ in reservation.ids}
        return [row for row in self._rows if row.id in ids]

    def get(self, topic: str, ids: Sequence[int]) -> Sequence[Any]:
        with self.db.autocommit() as tx:
            return work.delivered_events(tx, self.run.handler_id, topic, ids)


def offered_events(run: ClaimedRunRow) -> Sequence[OfferedEvent] | None:
    """The events that a run was offered; None for a run that chooses among all events of its consumer."""
    if run.offered_events is None:
        return None
    rows = map(OfferedEvent._make, run.offered_events)
    return [row._replace(created_at=datetime.fromisoformat(str(row.created_at))) for row in rows]


def saved_plan(run: RunRow) -> Prepared:
    """The saved plan as handlers see it."""
    saved = run.prepare_result or {}
    ids = tuple(EventId(event) for event in run.event_ids)
    return Prepared(data=saved.get("data"), ui=saved.get("ui"), event_ids=ids)


def slot_after(producer: Producer, slot: datetime, now: datetime) -> datetime:
    """When a producer runs next: the first slot after now, however many were missed."""
    if producer.every is not None:
        return next_slot(slot, producer.every, now)
    assert producer.cron is not None
    return first_slot(producer.cron, now)


def _require_opened(values: Sequence[Any], *_: Any) -> None:
    """Take the place of a handler whose values cannot be opened."""
    for value in values:
        opened(value)


def _ask(mutate: Callable[..., Any], context: MutateContext, prepared: Prepared) -> Any:
    """Call a mutate. Async code may await the request that it returns; here that would start an event loop for it."""
    returned = mutate(context, prepared)
    return None if returned is context.requested else returned


def _plan(run: ClaimedRunRow, consumer: Consumer, returned: Any, limits: Limits) -> Plan:
    if not isinstance(returned, PrepareResult):
        raise LogicError(
            f"{consumer.name}.prepare returned a {type(returned).__name__}; expected a PrepareResult "
            "(PrepareResult.nothing() when there is nothing to do)"
        )
    _check_types(consumer.name, returned)
    if not isinstance(returned.reserve, list | tuple):
        found = type(returned.reserve).__name__
        raise LogicError(
            f"{consumer.name}.prepare reserves a {found}; expected a list of events that ctx.peek returned"
        )
    topics = {topic.name for topic in consumer.subscribes}
    reserved: dict[str, list[EventId]] = {}
    for event in returned.reserve:
        if not isinstance(event, Event) or event.topic not in topics:
            raise LogicError(f"{consumer.name}.prepare reserves {event!r}; expected events that ctx.peek returned")
        reserved.setdefault(event.topic, []).append(event.id)
    for what, value in (("data", returned.data), ("ui", returned.ui)):
        checked_json(value, what=f"{what} of {consumer.name}.prepare", limit=limits.prepare_result)
    wake_at = returned.wake_at and clamp_wake_at(returned.wake_at, run.now, consumer.wake)
    asks = consumer.requires_approval if returned.approval is None else returned.approval
    return Plan(
        lease=lease_of(run),
        reservations=tuple(Reservation(topic=topic, ids=tuple(ids)) for topic, ids in reserved.items()),
        data=returned.data,
        ui=returned.ui,
        wake_at=wake_at,
        needs_approval=asks,
    )


def _check_types(name: str, returned: PrepareResult) -> None:
    if returned.wake_at is not None and getattr(returned.wake_at, "tzinfo", None) is None:
        raise LogicError(f"{name}.prepare returned wake_at={returned.wake_at!r}; expected a datetime with a time zone")
    if returned.approval not in (None, True, False):
        raise LogicError(f"{name}.prepare returned approval={returned.approval!r}; expected True, False or None")
