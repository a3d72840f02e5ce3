"""Reads for operators: lists, and everything about one thing. All bounded.

What is open is found by an index. What is long done has no index of its own, which would make every
write pay for a rare read: it is searched for among the newest rows, and the caller names how many.
"""

import re
from collections.abc import Sequence
from typing import Protocol
from uuid import UUID

from sqlalchemy.dialects.postgresql import JSONB

from pipeline.domain.codec import MARKER
from pipeline.domain.states import DeliveryStatus, MutationOutcome, MutationStatus, Phase, RunStatus
from pipeline.domain.values import HEADER_FIELDS
from pipeline.store.database import Statement, Transaction, UnreadRow
from pipeline.store.predicates import BEFORE_PREPARED, HELD_INPUT, IS_MISSING_WORKER, join_by_id
from pipeline.store.rows import (
    CalledOperationRow,
    CapacityRow,
    EventDeliveryRow,
    EventDeliveryStatusRow,
    EventWithPayloadRow,
    HandlerDeliveryRow,
    LateEffectRow,
    ListedEventRow,
    ListedHandlerRow,
    ListedMutationRow,
    ListedRunRow,
    ListedWorkflowRow,
    MutationIdRow,
    RunRecordRow,
    SessionCostRow,
    UnsentRunRow,
)
from pipeline.store.schema import AuditRow, BlockRow, HandlerRow, metadata

#: How much is counted before a count becomes "at least".
MAX_COUNTED = 10_000
_MAX_LINES = 200

_WORKFLOWS = Statement[ListedWorkflowRow]("""
SELECT w.*, t.id AS task_id, t.opened_at AS task_opened_at FROM pipeline.workflows w
LEFT JOIN pipeline.maintenance_tasks t ON t.workflow = w.name AND t.closed_at IS NULL
WHERE CAST(:workflow AS text) IS NULL OR w.name = :workflow ORDER BY w.name
""")

_HANDLERS = Statement[ListedHandlerRow](f"""
SELECT h.*, waiting.count AS waiting, reserved.count AS reserved, quarantined.count AS quarantined,
  quarantined.oldest AS quarantined_id, oldest.id AS oldest_id, oldest.created_at AS oldest_at,
  stopped.count AS stopped, stopped.since AS stopped_at,
  {IS_MISSING_WORKER} AS is_unclaimed,
  (SELECT count(*) FROM pipeline.runs r WHERE r.workflow = h.workflow AND r.handler_id = h.id
     AND r.finished_at IS NULL AND r.status = '{RunStatus.ACTIVE}') AS active_runs,
  ARRAY(SELECT s.topic FROM pipeline.subscriptions s
        WHERE s.workflow = h.workflow AND s.handler_id = h.id ORDER BY s.topic) AS subscribes
FROM pipeline.handlers h
CROSS JOIN LATERAL (SELECT count(*), min(event_id) AS oldest FROM (
  SELECT d.event_id FROM pipeline.deliveries d WHERE d.handler_id = h.id AND d.status = '{DeliveryStatus.PENDING}'
    AND d.event_id > h.low_watermark ORDER BY d.event_id LIMIT :limit) d) waiting
CROSS JOIN LATERAL (SELECT count(*), min(event_id) AS oldest FROM (
  SELECT d.event_id FROM pipeline.deliveries d WHERE d.handler_id = h.id AND d.status = '{DeliveryStatus.RESERVED}'
  ORDER BY d.event_id LIMIT :limit) d) reserved
CROSS JOIN LATERAL (SELECT count(*), min(event_id) AS oldest FROM (
  SELECT d.event_id FROM pipeline.deliveries d WHERE d.handler_id = h.id AND d.status = '{DeliveryStatus.QUARANTINED}'
  ORDER BY d.event_id LIMIT :limit) d) quarantined
CROSS JOIN LATERAL (SELECT count(*), min(r.finished_at) AS since FROM pipeline.runs r
  WHERE r.workflow = h.workflow AND r.retry_pending AND r.handler_id = h.id AND h.retired) stopped
LEFT JOIN pipeline.events oldest ON oldest.id = coalesce(waiting.oldest, reserved.oldest)
WHERE CAST(:workflow AS text) IS NULL OR h.workflow = :workflow ORDER BY h.workflow, h.name
""")

#: Of the runs that hold the places of a workflow: how many have sent nothing and are held by no worker, and the first
#: that waits to be allowed.
_CAPACITY_HOLDERS = Statement[CapacityRow](f"""
SELECT w.name AS workflow, held.* FROM pipeline.workflows w CROSS JOIN LATERAL (
  SELECT count(*) FILTER (WHERE r.status = '{RunStatus.ACTIVE}' AND r.lease_expires_at IS NULL AND (
           r.phase = '{Phase.MUTATING}' OR r.phase = '{Phase.PREPARED}' AND r.event_ids <> '{{}}')) AS unsent,
    (array_agg(r.id ORDER BY r.id) FILTER (WHERE r.status = '{RunStatus.PAUSED_APPROVAL}'))[1] AS approval_run_id,
    min(r.created_at) FILTER (WHERE r.status = '{RunStatus.PAUSED_APPROVAL}') AS approval_since
  FROM (SELECT * FROM pipeline.runs r WHERE r.workflow = w.name AND r.finished_at IS NULL LIMIT :limit) r
  JOIN pipeline.handlers h ON h.id = r.handler_id AND NOT h.retired
) held WHERE CAST(:workflow AS text) IS NULL OR w.name = :workflow
""")

_BLOCKS = Statement[BlockRow]("""
SELECT b.* FROM pipeline.blocks b WHERE b.closed_at IS NULL
  AND (CAST(:workflow AS text) IS NULL OR b.workflow = :workflow) ORDER BY b.since, b.id LIMIT :limit
""")

EVENT_COLUMNS = ", ".join(
    f"e.{name}" for name in ("id", "workflow", *HEADER_FIELDS, "caused_by", "created_by_run_id", "created_at")
)
#: Where an event stands for each of its consumers.
JOIN_DELIVERIES = """
LEFT JOIN LATERAL (
  SELECT array_agg(h.name || ': ' || d.status ORDER BY h.name) AS deliveries
  FROM pipeline.deliveries d JOIN pipeline.handlers h ON h.id = d.handler_id WHERE d.event_id = e.id
) s ON true
"""
_EVENTS_BY_MESSAGE = Statement[ListedEventRow](f"""
SELECT e.*, s.deliveries FROM (
  SELECT {EVENT_COLUMNS} FROM pipeline.topics t JOIN pipeline.events e
    ON e.workflow = t.workflow AND e.topic = t.name AND e.message_id = :message_id
  ORDER BY e.id DESC LIMIT :limit
) e {JOIN_DELIVERIES} ORDER BY e.id DESC
""")
_EVENTS_BY_ID = Statement[EventWithPayloadRow](f"""
SELECT {EVENT_COLUMNS}, e.payload, s.deliveries FROM pipeline.events e {JOIN_DELIVERIES}
WHERE e.id = ANY(CAST(:ids AS bigint[])) ORDER BY e.id
""")
_DELIVERIES = Statement[HandlerDeliveryRow]("""
SELECT d.*, h.name AS handler, h.workflow, h.retired FROM pipeline.deliveries d
JOIN pipeline.handlers h ON h.id = d.handler_id
WHERE d.event_id = ANY(CAST(:ids AS bigint[])) ORDER BY d.event_id, h.name LIMIT :limit
""")
#: As a parameter, the status would keep a prepared statement from using the index on it.
_DELIVERIES_BY_STATUS = {
    status: Statement[EventDeliveryRow](f"""
SELECT {EVENT_COLUMNS}, h.name AS handler, h.retired, d.failures, d.failing_since, d.error
FROM pipeline.handlers h CROSS JOIN LATERAL (
  SELECT * FROM pipeline.deliveries d WHERE d.handler_id = h.id AND d.status = '{status}' AND d.offered_to IS NULL
  ORDER BY d.event_id LIMIT :limit
) d JOIN pipeline.events e ON e.id = d.event_id
WHERE (CAST(:workflow AS text) IS NULL OR h.workflow = :workflow)
  AND (CAST(:handler AS text) IS NULL OR h.name = :handler)
ORDER BY d.event_id, h.name LIMIT :limit
""")
    for status in (DeliveryStatus.PENDING, DeliveryStatus.QUARANTINED)
}
_DELIVERIES_BY_EVENT = Statement[EventDeliveryStatusRow](f"""
SELECT {EVENT_COLUMNS}, h.name AS handler, h.retired, d.status, d.failures, d.failing_since, d.error
FROM pipeline.deliveries d
JOIN pipeline.handlers h ON h.id = d.handler_id JOIN pipeline.events e ON e.id = d.event_id
WHERE d.event_id = ANY(CAST(:ids AS bigint[])) ORDER BY d.event_id, h.name
""")

#: Inputs of runs that a retired handler has left behind, those that an operator skipped since included.
_EVENTS_OF_RETIRED_HANDLER = Statement[EventDeliveryStatusRow](f"""
SELECT DISTINCT {EVENT_COLUMNS}, h.name AS handler, h.retired, d.status, d.failures, d.failing_since, d.error
FROM pipeline.handlers h
CROSS JOIN LATERAL (
  SELECT r.id, r.event_ids FROM pipeline.runs r
  WHERE r.workflow = h.workflow AND r.handler_id = h.id AND r.finished_at IS NULL
  UNION ALL
  SELECT r.id, r.event_ids FROM pipeline.runs r
  WHERE r.workflow = h.workflow AND r.handler_id = h.id AND r.retry_pending
) r
JOIN pipeline.deliveries d ON d.event_id = ANY(r.event_ids) AND d.handler_id = h.id AND d.run_id = r.id
JOIN pipeline.events e ON e.id = d.event_id
WHERE h.workflow = :workflow AND h.name = :handler AND h.retired AND d.status IN {HELD_INPUT}
ORDER BY e.id LIMIT :limit
""")

RUN_COLUMNS = """
  r.id, r.workflow, h.name AS handler, h.kind, r.phase, r.status, r.mutation_outcome, r.mutation_id, r.attempt,
  r.retry_of, r.retry_pending, r.retry_at, r.error, r.error_type, r.created_at, r.started_at, r.finished_at,
  r.event_ids, r.worker, r.lease_expires_at, coalesce(r.lease_expires_at > pipeline.clock(), false) AS is_leased,
  r.prepare_result -> 'ui' ->> 'title' AS title, r.cost, r.session_id, r.traceparent,
  (SELECT m.status FROM pipeline.mutations m WHERE m.id = r.mutation_id) AS mutation_status,
  (SELECT c.id FROM pipeline.runs c WHERE c.retry_of = r.id) AS retried_by
"""
_RUNS_BY_ID = Statement[ListedRunRow](f"""
SELECT {RUN_COLUMNS} FROM pipeline.runs r JOIN pipeline.handlers h ON h.id = r.handler_id
WHERE r.id = ANY(CAST(:ids AS uuid[])) ORDER BY r.id
""")
_RUN_RECORD = Statement[RunRecordRow]("SELECT r.prepare_result, r.error_frames FROM pipeline.runs r WHERE r.id = :id")
_RETRIES_OF = Statement[ListedRunRow](f"""
SELECT {RUN_COLUMNS} FROM pipeline.runs r JOIN pipeline.handlers h ON h.id = r.handler_id
WHERE r.retry_of = ANY(CAST(:ids AS uuid[])) ORDER BY r.id
""")
_SESSION = Statement[SessionCostRow]("""
SELECT s.*, (SELECT sum(r.cost) FROM (
  SELECT r.cost FROM pipeline.runs r WHERE r.session_id = s.id LIMIT :limit) r) AS runs_cost
FROM pipeline.sessions s WHERE s.id = :id
""")
_OUTPUTS = Statement[ListedEventRow](f"""
SELECT {EVENT_COLUMNS}, s.deliveries FROM pipeline.events e {JOIN_DELIVERIES}
WHERE e.created_by_run_id = ANY(CAST(:ids AS uuid[])) ORDER BY e.id LIMIT :limit
""")

_LEDGER = Statement[ListedMutationRow](f"""
SELECT m.*, r.status AS run_status, r.phase AS run_phase, r.event_ids, h.name AS handler,
  m.quiet_until > pipeline.clock() AS is_quiet
FROM pipeline.mutations m {join_by_id("runs", "r", "m.run_id")} JOIN pipeline.handlers h ON h.id = r.handler_id
WHERE m.id = ANY(CAST(:ids AS uuid[])) ORDER BY m.id
""")
_RECENT_MUTATIONS = Statement[MutationIdRow]("""
SELECT m.id FROM (SELECT * FROM pipeline.mutations ORDER BY id DESC LIMIT :recent) m
WHERE m.status = :status AND (CAST(:workflow AS text) IS NULL OR m.workflow = :workflow) ORDER BY m.id DESC LIMIT :limit
""")
#: No index knows which handler called what, so among the newest rows.
_CALLED_OPERATIONS = Statement[CalledOperationRow]("""
SELECT h.name AS handler, m.connector, m.operation, count(*) AS number FROM (
  SELECT m.connector, m.operation, (SELECT r.handler_id FROM pipeline.runs r WHERE r.id = m.run_id) AS handler_id
  FROM (SELECT * FROM pipeline.mutations ORDER BY id DESC LIMIT :recent) m WHERE m.workflow = :workflow
) m JOIN pipeline.handlers h ON h.id = m.handler_id
GROUP BY h.name, m.connector, m.operation ORDER BY h.name, m.connector, m.operation
""")
#: Runs of a handler that have something to do and have sent nothing: offered events, with a plan, waiting to be
#: allowed, or stopped and to try the same plan again. ``connector`` names what was asked for already.
_UNSENT_RUNS = Statement[UnsentRunRow](f"""
SELECT r.id, r.workflow, r.handler_id, coalesce(m.run_id, r.id) AS run_id, r.phase, r.event_ids, r.prepare_result,
  m.connector, m.operation, m.params, m.approved_at,
  (SELECT array_agg(e.message_id ORDER BY e.id) FROM pipeline.events e WHERE e.id = ANY(r.event_ids)) AS message_ids
FROM (
  SELECT r.* FROM pipeline.runs r WHERE r.workflow = :workflow AND r.handler_id = :handler_id AND r.finished_at IS NULL
    AND (r.phase IN {BEFORE_PREPARED} AND r.offered IS NOT NULL OR r.phase = '{Phase.MUTATING}'
         OR r.phase = '{Phase.PREPARED}' AND r.event_ids <> '{{}}')
  UNION ALL
  SELECT r.* FROM pipeline.runs r WHERE r.workflow = :workflow AND r.retry_pending AND r.handler_id = :handler_id
    AND r.mutation_outcome = '{MutationOutcome.FAILURE}'
) r LEFT JOIN pipeline.mutations m ON m.id = r.mutation_id AND m.status = '{MutationStatus.PENDING}'
WHERE r.phase <> '{Phase.MUTATING}' OR r.mutation_id IS NULL OR m.id IS NOT NULL
ORDER BY r.id LIMIT :limit
""")
_PENDING_APPROVALS = Statement[MutationIdRow](f"""
SELECT m.id FROM pipeline.workflows w CROSS JOIN LATERAL (
  SELECT m.id FROM pipeline.mutations m {join_by_id("runs", "r", "m.run_id")}
  WHERE m.workflow = w.name AND m.status = '{MutationStatus.PENDING}' AND m.approved_at IS NULL
    AND r.status = '{RunStatus.PAUSED_APPROVAL}' ORDER BY m.id LIMIT :limit
) m WHERE CAST(:workflow AS text) IS NULL OR w.name = :workflow ORDER BY m.id LIMIT :limit
""")
_LATE_EFFECTS = Statement[LateEffectRow]("""
SELECT m.*, (SELECT a.evidence ->> 'advice' FROM pipeline.audit a
             WHERE a.mutation_id = m.id AND a.act = 'mutation.found_late' ORDER BY a.id DESC LIMIT 1) AS advice
FROM pipeline.mutations m
WHERE m.found_late_at IS NOT NULL AND m.acknowledged_by IS NULL ORDER BY m.id LIMIT :limit
""")

_AUDIT = Statement[AuditRow]("""
SELECT a.* FROM (
  SELECT * FROM pipeline.audit WHERE run_id = CAST(:run_id AS uuid)
  UNION SELECT * FROM pipeline.audit WHERE mutation_id = CAST(:mutation_id AS uuid)
  UNION SELECT * FROM pipeline.audit WHERE event_id = CAST(:event_id AS bigint)
) a ORDER BY a.id LIMIT :limit
""")
_AUDIT_OF_WORKFLOW = Statement[AuditRow]("""
SELECT a.* FROM pipeline.audit a WHERE a.workflow = :workflow ORDER BY a.id DESC LIMIT :limit
""")
_BLOCKS_OF_RUN = Statement[BlockRow]("SELECT * FROM pipeline.blocks WHERE run_id = :run_id ORDER BY id LIMIT :limit")

_HAS_OLDER = {
    table: Statement[UnreadRow](f"SELECT true FROM pipeline.{table} ORDER BY id DESC OFFSET :recent LIMIT 1")
    for table in ("events", "runs", "mutations")
}


def workflows(tx: Transaction, name: str | None = None) -> Sequence[ListedWorkflowRow]:
    """Every workflow, or one, with its open maintenance task."""
    return tx.all(_WORKFLOWS, workflow=name)


def handlers(tx: Transaction, workflow: str | None = None, *, limit: int = MAX_COUNTED) -> Sequence[ListedHandlerRow]:
    """Handlers with what waits for them, counted up to ``most``."""
    return tx.all(_HANDLERS, workflow=workflow, limit=limit)


def capacity_holders(
    tx: Transaction, workflow: str | None = None, *, limit: int = MAX_COUNTED
) -> Sequence[CapacityRow]:
    """Who holds the places of workflows without moving on, counted up to ``most``."""
    return tx.all(_CAPACITY_HOLDERS, workflow=workflow, limit=limit)


def blocks(tx: Transaction, workflow: str | None = None, *, limit: int = 1_000) -> Sequence[BlockRow]:
    """What holds workflows back, oldest first."""
    return tx.all(_BLOCKS, workflow=workflow, limit=limit)


def events_by_message(tx: Transaction, message_id: str, *, limit: int = 20) -> Sequence[ListedEventRow]:
    """Events of a message id on any topic, newest first."""
    return tx.all(_EVENTS_BY_MESSAGE, message_id=message_id, limit=limit)


def events_by_id(tx: Transaction, ids: Sequence[int]) -> Sequence[EventWithPayloadRow]:
    """These events, with their payloads."""
    return tx.all(_EVENTS_BY_ID, ids=list(ids))


def deliveries(tx: Transaction, event_ids: Sequence[int], *, limit: int = 1_000) -> Sequence[HandlerDeliveryRow]:
    """Where events stand for each consumer."""
    return tx.all(_DELIVERIES, ids=list(event_ids), limit=limit)


def deliveries_by_status(
    tx: Transaction,
    *,
    status: DeliveryStatus = DeliveryStatus.QUARANTINED,
    workflow: str | None = None,
    handler: str | None = None,
    limit: int = 100,
) -> Sequence[EventDeliveryRow]:
    """Events that were set aside (or, by status, that wait), oldest first, once for each consumer."""
    return tx.all(_DELIVERIES_BY_STATUS[status], workflow=workflow, handler=handler, limit=limit)


def events_of_retired_handler(
    tx: Transaction, workflow: str, handler: str, *, limit: int = 100
) -> Sequence[EventDeliveryStatusRow]:
    """Events that the runs of a handler still hold although it is gone from the code, oldest first."""
    return tx.all(_EVENTS_OF_RETIRED_HANDLER, workflow=workflow, handler=handler, limit=limit)


def deliveries_by_event(tx: Transaction, ids: Sequence[int]) -> Sequence[EventDeliveryStatusRow]:
    """These events as they stand for each of their consumers."""
    return tx.all(_DELIVERIES_BY_EVENT, ids=list(ids))


def runs_by_id(tx: Transaction, ids: Sequence[UUID]) -> Sequence[ListedRunRow]:
    """These runs."""
    return tx.all(_RUNS_BY_ID, ids=[str(id_) for id_ in ids])


def run_record(tx: Transaction, run_id: UUID) -> RunRecordRow:
    """What the prepare of a run decided, and where its error was raised."""
    return tx.one(_RUN_RECORD, id=run_id)


def session(tx: Transaction, session_id: UUID) -> SessionCostRow | None:
    """The session of a run, with what its runs have cost."""
    return tx.first(_SESSION, id=session_id, limit=MAX_COUNTED)


def retries_of(tx: Transaction, ids: Sequence[UUID]) -> Sequence[ListedRunRow]:
    """The retries of these runs."""
    return tx.all(_RETRIES_OF, ids=[str(id_) for id_ in ids])


def outputs(tx: Transaction, run_ids: Sequence[UUID], *, limit: int = _MAX_LINES) -> Sequence[ListedEventRow]:
    """Events that these runs published."""
    return tx.all(_OUTPUTS, ids=[str(id_) for id_ in run_ids], limit=limit)


def mutations(tx: Transaction, ids: Sequence[UUID]) -> Sequence[ListedMutationRow]:
    """Rows of the ledger, with the run each belongs to."""
    return tx.all(_LEDGER, ids=[str(id_) for id_ in ids])


def recent_mutations(
    tx: Transaction, *, status: str, workflow: str | None = None, recent: int, limit: int = 100
) -> list[UUID]:
    """The newest mutations of a status that nothing waits for any more."""
    given = {"status": status, "workflow": workflow, "recent": recent, "limit": limit}
    return [row.id for row in tx.all(_RECENT_MUTATIONS, **given)]


def called_operations(tx: Transaction, workflow: str, *, recent: int) -> Sequence[CalledOperationRow]:
    """Operations that the handlers of a workflow called, in the newest rows of the ledger."""
    return tx.all(_CALLED_OPERATIONS, workflow=workflow, recent=recent)


def unsent_runs(tx: Transaction, handler: HandlerRow, *, limit: int) -> Sequence[UnsentRunRow]:
    """Runs of a handler that have sent nothing yet, oldest first, with what they asked for if they did."""
    return tx.all(_UNSENT_RUNS, workflow=handler.workflow, handler_id=handler.id, limit=limit)


def pending_approvals(tx: Transaction, workflow: str | None = None, *, limit: int = 100) -> list[UUID]:
    """Requests that wait to be allowed, oldest first."""
    return [row.id for row in tx.all(_PENDING_APPROVALS, workflow=workflow, limit=limit)]


def late_effects(tx: Transaction, *, limit: int = 100) -> Sequence[LateEffectRow]:
    """Late effects that no operator has acknowledged."""
    return tx.all(_LATE_EFFECTS, limit=limit)


def audit(
    tx: Transaction, *, run_id: UUID | None = None, mutation_id: UUID | None = None, event_id: int | None = None
) -> Sequence[AuditRow]:
    """What operators and sweeps decided about a run, a mutation or an event, oldest first."""
    return tx.all(_AUDIT, run_id=run_id, mutation_id=mutation_id, event_id=event_id, limit=_MAX_LINES)


def audit_of_workflow(tx: Transaction, workflow: str, *, limit: int = 10) -> Sequence[AuditRow]:
    """The newest acts about a workflow."""
    return tx.all(_AUDIT_OF_WORKFLOW, workflow=workflow, limit=limit)


def blocks_of_run(tx: Transaction, run_id: UUID) -> Sequence[BlockRow]:
    """How a run held its workflow back."""
    return tx.all(_BLOCKS_OF_RUN, run_id=run_id, limit=_MAX_LINES)


def has_older(tx: Transaction, table: str, recent: int) -> bool:
    """Whether a table holds more than its newest ``recent`` rows."""
    return tx.first(_HAS_OLDER[table], recent=recent) is not None


class KeyUseRow(Protocol):
    """How many values of a column were encrypted with a key."""

    key_id: str
    table_name: str
    column_name: str
    uses: int


#: An encrypted value in the text of a JSON column. Postgres writes the shortest name of an object first.
_ENCRYPTED = rf'"{re.escape(MARKER)}": \{{"key": "([^"]*)"'
_KEYS_IN_USE = Statement[KeyUseRow](
    " UNION ALL ".join(
        f"SELECT found.key_id, '{table.name}' AS table_name, '{column.name}' AS column_name, count(*) AS uses "
        f"FROM {table}, LATERAL (SELECT (regexp_matches(CAST({column.name} AS text), :encrypted, 'g'))[1] AS key_id) "
        "found GROUP BY 1"
        for table in metadata.sorted_tables
        for column in table.columns
        if isinstance(column.type, JSONB)
    )
    + " ORDER BY 1, 2, 3"
)


def keys_in_use(tx: Transaction) -> list[KeyUseRow]:
    """Return which keys of codecs have encrypted stored values, by table and column. It reads whole tables."""
    return list(tx.all(_KEYS_IN_USE, encrypted=_ENCRYPTED))
