"""Show runs and sessions to an operator: a list, or one in detail."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from pipeline.admin import advice, lookup, workflows
from pipeline.admin import timeline as admin_timeline
from pipeline.admin.advice import Advice, RunSituation
from pipeline.admin.timeline import TimelineEntry
from pipeline.domain.errors import InvalidInputError, NotFoundError
from pipeline.domain.redaction import BY_NAME
from pipeline.domain.states import MutationOutcome, MutationStatus, Phase, RunStatus, Sequel, sequel_of
from pipeline.domain.values import EventHeader, header_of, session_cost
from pipeline.domain.workflows import SessionResult
from pipeline.store.database import Database, Transaction
from pipeline.store.reads import listings
from pipeline.store.rows import ListedEventRow, ListedRunRow, SessionCostRow
from pipeline.store.schema import MutationRow
from pipeline.telemetry import spans

_SHOWN_INPUTS = 200
#: Columns that a summary shows as they are.
_SAME_NAMES = (
    *("id", "workflow", "handler", "phase", "status", "title", "attempt", "error"),
    *("retried_by", "cost", "created_at", "finished_at"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run in one line."""

    id: UUID
    workflow: str
    handler: str
    phase: str
    status: str
    outcome: str  #: of its mutation: success, failure, skipped or empty
    title: str | None  #: as its prepare named it
    attempt: int
    input_count: int  #: how many inputs it reserved
    error: str | None
    sequel: Sequel  #: what became of it after it stopped; empty unless it stopped
    retried_by: UUID | None  #: the run that carried it forward
    cost: Decimal | None  #: what it has reported, in the author's unit
    created_at: datetime
    finished_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EventLine(EventHeader):
    """An event that went into a run or came out of it."""

    id: int
    deliveries: tuple[str, ...]  #: "handler: status", one for each consumer


@dataclass(frozen=True, slots=True, kw_only=True)
class MutationLine:
    """The mutation of a run, in one line."""

    id: UUID
    operation: str  #: connector.operation
    status: str
    idempotency_key: str
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLine:
    """The session of a run."""

    id: UUID
    started_at: datetime
    result: str | None  #: completed or failed; none while it is open
    cost: Decimal | None  #: of its runs, as far as it is known; of ten thousand runs at most


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What the prepare of a run decided. Fields that look like secrets are redacted."""

    reserved: Mapping[str, int]  #: how many events it reserved, by topic
    ui: Any  #: what it shows to people
    data: Any  #: what it handed on to mutate and next; None unless requested
    needs_approval: bool
    wake_at: datetime | None  #: when its handler asked to be woken


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDetail:
    """Everything about one run."""

    run: RunSummary
    worker: str | None  #: the last one that held it
    retry_of: UUID | None
    session: SessionLine | None
    inputs: tuple[EventLine, ...]
    outputs: tuple[EventLine, ...]
    mutation: MutationLine | None
    timeline: tuple[TimelineEntry, ...]
    advice: Advice
    plan: RunPlan | None  #: None: its prepare has not ended
    traceback: str | None  #: where its error was raised, if a handler raised it
    trace_id: str  #: of its spans, as 32 hexadecimal digits


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFilter:
    """Select runs. Empty fields do not restrict."""

    workflow: str | None = None
    handler: str | None = None
    status: RunStatus | None = None
    phase: Phase | None = None
    is_waiting: bool = False  #: only runs that stopped and wait for something
    session_id: UUID | None = None
    since: datetime | None = None
    until: datetime | None = None
    within: frozenset[str] | None = None  #: only of these workflows


def detail(db: Database, text: str, *, with_data: bool = False) -> RunDetail:
    """Return a run by its id or its first digits; with the data of its plan if requested."""
    with db.transaction() as tx:
        return _run_detail(tx, lookup.find_id(tx, text, "run"), with_data=with_data)


def _run_detail(tx: Transaction, run_id: UUID, *, with_data: bool) -> RunDetail:
    (run,) = listings.runs_by_id(tx, [run_id])
    mutation = next(iter(listings.mutations(tx, [run.mutation_id])), None) if run.mutation_id else None
    carried = listings.retries_of(tx, [run_id])
    inputs = listings.events_by_id(tx, run.event_ids[:_SHOWN_INPUTS])
    outputs = listings.outputs(tx, [run_id])
    blocks = listings.blocks_of_run(tx, run_id)
    (workflow,) = listings.workflows(tx, run.workflow)
    timeline = admin_timeline.of_run(
        run,
        mutation,
        acts=listings.audit(tx, run_id=run_id, mutation_id=run.mutation_id),
        blocks=blocks,
        retries=carried,
        now=tx.clock(),
    )
    record = listings.run_record(tx, run_id)
    around = RunSituation(
        mutation=mutation,
        retry=carried[0] if carried else None,
        block_kinds=frozenset(block.kind for block in blocks if block.closed_at is None),
        is_in_maintenance=workflow.maintenance,
        holds=workflows.workflow_holds(tx, run.workflow),
    )
    return RunDetail(
        run=run_summary(run),
        worker=run.worker,
        retry_of=run.retry_of,
        session=_session_line(tx, run),
        inputs=tuple(event_line(row) for row in inputs),
        outputs=tuple(event_line(row) for row in outputs),
        mutation=mutation_line(mutation) if mutation is not None else None,
        timeline=timeline,
        advice=advice.for_run(run, around),
        plan=_run_plan(record.prepare_result, with_data=with_data),
        traceback=record.error_frames,
        trace_id=f"{spans.run_span_context(run).trace_id:032x}",
    )


def _run_plan(saved: Any, *, with_data: bool) -> RunPlan | None:
    if saved is None:
        return None
    wake_at = saved.get("wake_at")
    return RunPlan(
        reserved={each["topic"]: len(each["ids"]) for each in saved.get("reservations", ())},
        ui=BY_NAME.value(saved.get("ui")),
        data=BY_NAME.value(saved.get("data")) if with_data else None,
        needs_approval=bool(saved.get("approval")),
        wake_at=None if wake_at is None else datetime.fromisoformat(wake_at),
    )


def run_summary(row: ListedRunRow) -> RunSummary:
    """Convert a row of a run."""
    same: Mapping[str, Any] = {name: getattr(row, name) for name in _SAME_NAMES}
    return RunSummary(**same, outcome=row.mutation_outcome, input_count=len(row.event_ids), sequel=sequel(row))


def sequel(row: ListedRunRow) -> Sequel:
    """Return what became of a run."""
    return sequel_of(
        RunStatus(row.status),
        MutationOutcome(row.mutation_outcome),
        MutationStatus(row.mutation_status) if row.mutation_status else None,
        has_inputs=bool(row.event_ids),
        is_retry_pending=row.retry_pending,
        is_retried=row.retried_by is not None,
    )


def sequel_text(row: ListedRunRow | RunSummary) -> str:
    """Describe what became of a run; with the run that carried it forward."""
    found = row.sequel if isinstance(row, RunSummary) else sequel(row)
    return f"{found} by run {row.retried_by}" if found is Sequel.RETRIED else str(found)


def _session_line(tx: Transaction, run: ListedRunRow) -> SessionLine | None:
    row = listings.session(tx, run.session_id)
    if row is None:
        return None
    cost = session_cost(row.cost, row.runs_cost, is_over=row.finished_at is not None)
    return SessionLine(id=row.id, started_at=row.started_at, result=row.result, cost=cost)


def event_line(row: ListedEventRow) -> EventLine:
    """Convert a row of an event."""
    return EventLine(**header_of(row), id=row.id, deliveries=tuple(row.deliveries or ()))


def mutation_line(row: MutationRow) -> MutationLine:
    """Convert a row of the ledger."""
    return MutationLine(
        id=row.id,
        operation=f"{row.connector}.{row.operation}",
        status=row.status,
        idempotency_key=row.idempotency_key,
        error=row.error,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSummary:
    """A session in one line."""

    id: UUID
    workflow: str
    started_at: datetime
    finished_at: datetime | None
    result: str | None  #: completed or failed; none while it is open
    error: str | None
    run_count: int | None  #: committed runs, once it is over
    cost: Decimal | None  #: of its runs, as far as it is known; of ten thousand runs at most


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFilter:
    """Select sessions. Empty fields do not restrict."""

    workflow: str | None = None
    result: SessionResult | None = None
    is_open: bool | None = None
    since: datetime | None = None
    until: datetime | None = None
    within: frozenset[str] | None = None  #: only of these workflows


def session_detail(db: Database, text: str) -> SessionSummary:
    """Return a session by its id."""
    try:
        session_id = UUID(text)
    except ValueError as error:
        raise InvalidInputError(f"{text!r} is not the id of a session; expected a UUID.") from error
    with db.transaction() as tx:
        row = listings.session(tx, session_id)
    if row is None:
        raise NotFoundError("session", text)
    return session_summary(row)


def session_summary(row: SessionCostRow) -> SessionSummary:
    """Convert a row of a session."""
    return SessionSummary(
        id=row.id,
        workflow=row.workflow,
        started_at=row.started_at,
        finished_at=row.finished_at,
        result=row.result,
        error=row.error,
        run_count=row.run_count,
        cost=session_cost(row.cost, row.runs_cost, is_over=row.finished_at is not None),
    )
