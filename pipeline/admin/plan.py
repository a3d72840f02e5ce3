"""Plan what a workflow would send, without sending or reserving anything.

Prepare and mutate run over the backlog as in production; each planned run sees what the ones before it would leave.
Existing runs that have sent nothing come first, from their phase on. Reads of outside systems are made. Mutations are
requested and not sent.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

from pipeline.domain.failures import Failure
from pipeline.domain.states import Phase
from pipeline.domain.values import DEFAULT_LIMITS, Limits
from pipeline.store.database import Database
from pipeline.store.reads import listings, work
from pipeline.store.rows import OfferedEventRow, PendingEventRow, UnsentRunRow
from pipeline.store.schema import HandlerRow
from pipeline.transitions import renames
from pipeline.worker.phases import Phases
from pipeline.workflows.authoring import Consumer
from pipeline.workflows.handler_types import RequestedMutation
from pipeline.workflows.registry import Registry, spec_of

_MOST_EVENTS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """One run: its inputs, and the request that it would send, redacted."""

    handler: str
    message_ids: tuple[str, ...]
    connector: str = ""
    operation: str = ""
    headline: str = ""
    params: dict[str, Any] | None = None
    needs_approval: bool = False
    problem: str = ""  #: why the run would stop
    is_waiting: bool = False  #: the run exists already and has sent nothing yet

    @property
    def request(self) -> str:
        """Connector and operation; empty when no mutation would be requested."""
        return f"{self.connector}.{self.operation}" if self.connector else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRename:
    """What the next worker with the loaded code moves to a new name."""

    kind: str
    former: str
    name: str
    waiting: int  #: events that wait under the former name


@dataclass
class _DryRun:
    """A run that is in no table, with the fields that the phases read."""

    id: Any
    workflow: str
    handler: str
    handler_id: int
    handler_state: Any
    now: datetime
    low_watermark: int
    ordered: bool
    offered: Any = None
    fence: int = 0
    event_ids: tuple[int, ...] = ()
    prepare_result: dict[str, Any] | None = None


class Planner:
    """Plan the runs of workflows with the loaded code."""

    def __init__(
        self, db: Database, registry: Registry, *, step_limit: timedelta, limits: Limits = DEFAULT_LIMITS
    ) -> None:
        self.db, self.registry = db, registry
        self.phases = Phases(db, registry, step_limit=step_limit, limits=limits)

    def plan(self, workflow: str, *, limit: int = 100) -> list[PlannedRun]:
        """Plan the unsent runs of a workflow's consumers, at most ``limit`` of each."""
        found = self.registry.workflow(workflow)
        try:
            return [
                planned
                for consumer in found.consumers.values()
                for planned in self._consumer_runs(workflow, consumer, limit)
            ]
        finally:
            self.phases.steps.close()

    def renames(self, workflow: str) -> list[PlannedRename]:
        """List what a worker with the loaded code would rename. Nothing is moved."""
        with self.db.transaction() as tx:
            spec = spec_of(self.registry.workflow(workflow), tx.clock())
            planned = renames.plan(tx, spec, renames.stored_workflow(tx, spec))
            return [
                PlannedRename(
                    kind=str(each.kind),
                    former=each.former,
                    name=each.name,
                    waiting=renames.waiting_events(tx, planned.stored_as, each),
                )
                for each in planned.everything
            ]

    def _consumer_runs(self, workflow: str, consumer: Consumer, most: int) -> Iterator[PlannedRun]:
        handler, now, left = self._backlog(workflow, consumer)
        if handler is None:
            return
        unsent = self._unsent(handler, most)
        for row, offered in unsent:
            planned = self._existing_run(consumer, _dry_run(workflow, handler, now), row, offered)
            if planned is not None:
                yield replace(planned, is_waiting=True)
        held = {event for row, offered in unsent for event in (*row.event_ids, *(each.id for each in offered))}
        left = [row for row in left if row.id not in held]  # a run may have taken them since the backlog was read
        for _ in range(most - len(unsent)):
            if not left:
                return
            planned, taken = self._new_run(workflow, consumer, _dry_run(workflow, handler, now), left)
            if planned is not None:
                yield planned
            if not taken:
                return
            left = [row for row in left if row.id not in taken]

    def _backlog(self, workflow: str, consumer: Consumer) -> tuple[HandlerRow | None, datetime, list[PendingEventRow]]:
        """Return the consumer's row, the time, and its pending events, oldest first."""
        with self.db.transaction() as tx:
            handler, now = work.handler(tx, workflow, consumer.name), tx.clock()
            if handler is None:
                return None, now, []
            given: dict[str, Any] = {
                "low_watermark": handler.low_watermark,
                "ordered": handler.ordered,
                "limit": _MOST_EVENTS,
            }
            run: Any = _dry_run(workflow, handler, now)
            rows = [
                row for topic in consumer.subscribes for row in work.reservable_events(tx, run, topic.name, **given)
            ]
        return handler, now, sorted(rows, key=lambda row: row.id)

    def _unsent(self, handler: HandlerRow, most: int) -> list[tuple[UnsentRunRow, list[OfferedEventRow]]]:
        """Return runs that have sent nothing yet, each with the events offered to it and not reserved."""
        with self.db.transaction() as tx:
            rows = listings.unsent_runs(tx, handler, limit=most)
            offered = work.slices(tx, [row.id for row in rows if row.phase in (Phase.PENDING, Phase.PREPARING)])
        return [(row, offered.get(row.id, [])) for row in rows]

    def _existing_run(
        self, consumer: Consumer, run: Any, row: UnsentRunRow, offered: Sequence[PendingEventRow]
    ) -> PlannedRun | None:
        """Plan an existing run from its phase on: unprepared, prepared, or with its request."""
        if row.phase in (Phase.PENDING, Phase.PREPARING):
            return self._new_run(run.workflow, consumer, run, offered)[0]
        message_ids, run.prepare_result = tuple(row.message_ids or ()), row.prepare_result
        if row.connector is not None and row.operation is not None:
            asked = RequestedMutation(connector=row.connector, operation=row.operation, params=row.params)
            return self._planned_run(run, message_ids, asked, row.approved_at is None)
        run.event_ids = tuple(row.event_ids)
        is_asking = bool((row.prepare_result or {}).get("approval"))
        return self._planned_run(run, message_ids, self._requested(run), is_asking)

    def _new_run(
        self, workflow: str, consumer: Consumer, run: Any, left: Sequence[PendingEventRow]
    ) -> tuple[PlannedRun | None, set[int]]:
        """Plan one run over the events that are left. Returns also the events it would take."""
        alone = self.registry.workflow(workflow).concurrency == 1
        seen = left if alone else left[: consumer.batch]
        plan = self.phases.answer(self.phases.prepare(run, seen))
        ids = {row.id: row.message_id for row in left}
        if isinstance(plan, Failure):
            blamed = [event for event in plan.culprits if event in ids] or [row.id for row in seen]
            named = tuple(ids[event] for event in blamed)
            return PlannedRun(handler=consumer.name, message_ids=named, problem=plan.message), set(blamed)
        run.event_ids = tuple(event for reserved in plan.reservations for event in reserved.ids)
        if not run.event_ids:
            return None, set()
        run.prepare_result = {"data": plan.data, "ui": plan.ui}
        asked = self._requested(run)
        message_ids = tuple(ids.get(event, str(event)) for event in run.event_ids)
        return self._planned_run(run, message_ids, asked, plan.needs_approval), set(run.event_ids)

    def _requested(self, run: Any) -> RequestedMutation | Failure | None:
        asked = self.phases.answer(self.phases.mutate(run))
        return asked if isinstance(asked, Failure) else asked.request

    def _planned_run(
        self,
        run: Any,
        message_ids: tuple[str, ...],
        asked: RequestedMutation | Failure | None,
        approval: bool,
    ) -> PlannedRun:
        if isinstance(asked, Failure):
            return PlannedRun(handler=run.handler, message_ids=message_ids, problem=asked.message)
        if asked is None:
            return PlannedRun(handler=run.handler, message_ids=message_ids)
        operation = self.registry.operation(asked.connector, asked.operation)
        if operation is None:
            problem = f"{asked.connector}.{asked.operation} is not known here"
            return PlannedRun(handler=run.handler, message_ids=message_ids, problem=problem)
        return PlannedRun(
            handler=run.handler,
            message_ids=message_ids,
            connector=asked.connector,
            operation=asked.operation,
            headline=operation.headline(asked.params, (run.prepare_result or {}).get("ui"), message_ids),
            params=operation.redaction.value(asked.params),
            needs_approval=approval,
        )


def _dry_run(workflow: str, handler: HandlerRow, now: datetime) -> _DryRun:
    return _DryRun(
        id=uuid4(),
        workflow=workflow,
        handler=handler.name,
        handler_id=handler.id,
        handler_state=handler.state,
        now=now,
        low_watermark=handler.low_watermark,
        ordered=handler.ordered,
    )


def request_counts(planned: Sequence[PlannedRun]) -> dict[str, int]:
    """Count the requests by operation."""
    found: dict[str, int] = {}
    for item in planned:
        if item.request:
            found[item.request] = found.get(item.request, 0) + 1
    return dict(sorted(found.items()))
