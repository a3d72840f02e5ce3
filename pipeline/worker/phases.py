"""Call the handlers: from a claimed run to what the handler returned, or to a classified failure.

No transaction is open while a handler runs, and no handler can reach a context of another phase.
"""

import functools
import logging
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from pipeline.consumer_engine.bounded import StepRunner
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

PendingEvent = OfferedEvent | PendingEventRow

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

    def prepare(self, run: ClaimedRunRow, offered: Sequence[PendingEvent] | None) -> Plan | Failure:
        """Ask a consumer what it wants to do with the events it was offered; None: with all of its events."""
        consumer = self.registry.consumer(run.workflow, run.handler)
        reader = _Reader(self.db, run, offered)
        context = PrepareContext(self._context_inputs(run), consumer.subscribes, reader)
        returned = self._call_handler(
            context, consumer.instance.prepare, run.handler_state, what=f"{run.handler}.prepare"
        )
        if isinstance(returned, Failure):
            return replace(returned, shown=tuple(reader.shown_ids))
        try:
            plan = replace(_plan(run, consumer, returned, self.limits), cost=context.cost)
        except Exception as error:  # noqa: BLE001 - what the handler returned cannot be used: its failure
            return replace(classify(error), cost=context.cost)
        phase_observer.link_inputs(run.id, lambda: reader.reserved_rows(plan))
        return plan

    def mutate(self, run: ClaimedRunRow) -> MutateResult | Failure:
        """Ask a consumer for its one mutation."""
        consumer = self.registry.consumer(run.workflow, run.handler)
        context = MutateContext(self._context_inputs(run))
        returned = self._call_handler(context, consumer.instance.mutate, saved_plan(run), what=f"{run.handler}.mutate")
        if isinstance(returned, Failure):
            return returned
        if returned is not None and returned is not context.requested:
            problem = f"{run.handler}.mutate returned a {type(returned).__name__}"
            error = LogicError(f"{problem}; expected what ctx.<connector>.<mutation>(...) returns, or nothing")
            return replace(classify(error), cost=context.cost)
        return MutateResult(request=context.requested, cost=context.cost)

    def next(self, run: ClaimedRunRow) -> RunOutput | Failure:
        """Ask a consumer what follows."""
        consumer = self.registry.consumer(run.workflow, run.handler)
        context = NextContext(self._context_inputs(run), consumer.publishes)
        result = MutationResult(
            status=_RESULT_STATUSES[MutationOutcome(run.mutation_outcome)], value=run.mutation_result
        )
        returned = self._call_handler(
            context, consumer.instance.next, saved_plan(run), result, what=f"{run.handler}.next"
        )
        if isinstance(returned, Failure):
            return returned
        overlap = self.registry.workflows[run.workflow].overlap_reason
        if returned is not None and consumer.merge is None and overlap is not None:
            error = LogicError(
                f"{run.handler}.next returned state and its workflow {overlap}: updates would be lost; define "
                'merge(current, returned) on the consumer, or set concurrency=1 and on_uncertain="pause"'
            )
            return replace(classify(error), cost=context.cost)
        return self._checked_emission(run, context, returned)

    def merge_function(self, consumer: Consumer) -> Callable[[Any, Any], Any] | None:
        """How a consumer folds a returned state into the current one, if it does, within the limit of a step."""
        if consumer.merge is None:
            return None
        return functools.partial(self.steps.run, consumer.merge, limit=self.step_limit, what=f"{consumer.name}.merge")

    def produce(self, run: ClaimedRunRow, slot: datetime) -> RunOutput | Failure:
        """Ask a producer for events."""
        producer = self.registry.producer(run.workflow, run.handler)
        context = ProducerContext(self._context_inputs(run), producer.publishes)
        returned = self._call_handler(context, producer.function, run.handler_state, what=run.handler)
        if isinstance(returned, Failure):
            return returned
        return self._checked_emission(run, context, returned, next_run_at=slot_after(producer, slot, run.now))

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

    def _call_handler(self, context: Context, function: Any, *args: Any, what: str) -> Any:
        """The handler's answer, or its failure; a violation counts even when the handler swallowed it."""
        token = CURRENT_CONTEXT.set(context)
        try:
            returned, error = self.steps.attempt(function, context, *args, limit=self.step_limit, what=what)
        finally:
            context.close()
            CURRENT_CONTEXT.reset(token)
        failed = context.violation or error
        if failed is None:
            return returned
        failure = classify(failed)
        where = "".join(traceback.format_tb(failed.__traceback__))  # its message may quote a payload
        log.warning("%s failed with %s; `pipeline runs` has its message\n%s", what, type(failed).__qualname__, where)
        return replace(failure, message=self._redact(failure.message), cost=context.cost)

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
