"""Reads for gauges, charts and the system page: how things stand. Nothing here writes.

Nothing here grows with what is done.

What is counted is open and found by an index, up to a bound; beyond it a number means "at least". All of it is read in
one short transaction that gives up rather than block other work.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from uuid import UUID

from pipeline.domain.states import DeliveryStatus, MutationStatus, RunStatus
from pipeline.domain.workflows import DesiredStatus, HandlerKind
from pipeline.store.database import Statement, Transaction, UnreadRow, interval
from pipeline.store.predicates import IS_AVAILABLE, IS_UNCLAIMED, OPEN_MUTATION
from pipeline.store.rows import (
    AttentionCountRow,
    BacklogRow,
    BreakerGaugeRow,
    BucketRow,
    LastActRow,
    LeaseCountRow,
    MutationCountRow,
    RunCountRow,
    RunLatencyRow,
    ServerRow,
    SweepGaugeRow,
    SweepRunRow,
    WorkflowGaugeRow,
)
from pipeline.store.schema import WorkerRow

#: How much is counted before a number becomes "at least": of one workflow, one consumer, one kind.
MAX_COUNT = 100_000
#: For consumers of several topics, whose events have to be looked at one by one.
MAX_COUNT_MIXED = 10_000
#: How long one of these statements may take.
STATEMENT_TIMEOUT = timedelta(seconds=2)

_LIMIT_READS = Statement[UnreadRow](
    "SELECT set_config('transaction_read_only', 'on', true), set_config('statement_timeout', :ms, true)"
)

#: Runs that are not over, and stopped ones that another will carry on.
RUNS = Statement[RunCountRow]("""
SELECT w.name AS workflow, r.phase, r.status, count(*) AS number
FROM pipeline.workflows w CROSS JOIN LATERAL (
  (SELECT r.phase, r.status FROM pipeline.runs r WHERE r.workflow = w.name AND r.finished_at IS NULL LIMIT :limit)
  UNION ALL
  (SELECT r.phase, r.status FROM pipeline.runs r WHERE r.workflow = w.name AND r.retry_pending LIMIT :limit)
) r GROUP BY w.name, r.phase, r.status
""")

LEASES = Statement[LeaseCountRow]("""
SELECT count(*) FILTER (WHERE r.lease_expires_at >= pipeline.clock()) AS held,
       count(*) FILTER (WHERE r.lease_expires_at < pipeline.clock()) AS lapsed
FROM (SELECT lease_expires_at FROM pipeline.runs
      WHERE finished_at IS NULL AND lease_expires_at IS NOT NULL LIMIT :limit) r
""")

#: Age since it was doubted, sent or written, whichever says how long it has been what it is.
MUTATIONS = Statement[MutationCountRow](f"""
SELECT m.connector, m.operation, m.status, count(*) AS number,
  extract(epoch FROM pipeline.clock() - min(m.since)) AS oldest,
  count(*) FILTER (WHERE m.is_awaiting_approval) AS awaiting_approval
FROM pipeline.workflows w CROSS JOIN LATERAL (
  SELECT m.connector, m.operation, m.status,
    CASE WHEN m.status = '{MutationStatus.PENDING}' THEN m.created_at
      ELSE coalesce(m.doubted_at, m.sent_at) END AS since,
    m.status = '{MutationStatus.PENDING}' AND m.approved_at IS NULL AND EXISTS (
      SELECT FROM pipeline.runs r WHERE r.id = m.run_id
        AND r.status = '{RunStatus.PAUSED_APPROVAL}') AS is_awaiting_approval
  FROM pipeline.mutations m
  WHERE m.workflow = w.name AND m.status IN {OPEN_MUTATION}
  ORDER BY m.id LIMIT :limit
) m GROUP BY m.connector, m.operation, m.status
""")

BREAKERS = Statement[BreakerGaugeRow](
    "SELECT connector, operation, closed_at IS NULL AS is_open FROM pipeline.breakers LIMIT :limit"
)

WORKFLOWS = Statement[WorkflowGaugeRow]("""
SELECT w.name AS workflow, w.desired, w.maintenance,
  ARRAY(SELECT DISTINCT b.kind FROM pipeline.blocks b WHERE b.workflow = w.name AND b.closed_at IS NULL) AS blocks
FROM pipeline.workflows w LIMIT :limit
""")

SWEEPS = Statement[SweepGaugeRow]("""
SELECT name, abs(extract(epoch FROM pipeline.clock() - last_run_at)) AS age, coalesce(report, '{}') AS report
FROM pipeline.sweeps LIMIT :limit
""")

#: What needs an operator and is not counted elsewhere.
ATTENTION = Statement[AttentionCountRow](f"""
SELECT
  (SELECT count(*) FROM (SELECT FROM pipeline.mutations m
     WHERE m.found_late_at IS NOT NULL AND m.acknowledged_by IS NULL LIMIT :limit) m) AS late_effect,
  (SELECT count(*) FROM (SELECT FROM pipeline.blocks b
     WHERE b.closed_at IS NULL AND b.kind = ANY(:kinds) LIMIT :limit) b) AS blocked,
  (SELECT count(*) FROM pipeline.handlers h WHERE EXISTS (SELECT FROM pipeline.deliveries d
     WHERE d.handler_id = h.id AND d.status = '{DeliveryStatus.QUARANTINED}')) AS quarantined,
  (SELECT count(*) FROM pipeline.handlers h WHERE h.retired AND (
     EXISTS (SELECT FROM pipeline.deliveries d
             WHERE d.handler_id = h.id AND d.status = '{DeliveryStatus.PENDING}' AND d.event_id > h.low_watermark)
     OR EXISTS (SELECT FROM pipeline.deliveries d WHERE d.handler_id = h.id AND d.status = '{DeliveryStatus.RESERVED}')
     OR EXISTS (SELECT FROM pipeline.runs r
                WHERE r.workflow = h.workflow AND r.handler_id = h.id AND r.retry_pending))) AS retired,
  (SELECT count(*) FROM pipeline.handlers h JOIN pipeline.workflows w ON w.name = h.workflow
    AND w.desired = '{DesiredStatus.ACTIVE}'
   WHERE NOT h.retired AND {IS_UNCLAIMED} AND (h.kind = '{HandlerKind.PRODUCER}'
     OR EXISTS (SELECT FROM pipeline.deliveries d
                WHERE d.handler_id = h.id AND d.status = '{DeliveryStatus.PENDING}' AND d.event_id > h.low_watermark)
     OR EXISTS (SELECT FROM pipeline.deliveries d WHERE d.handler_id = h.id
       AND d.status = '{DeliveryStatus.RESERVED}'))) AS unclaimed
""")

_IS_AVAILABLE = f"""d.offered_to IS NULL AND NOT d.declined
    AND {IS_AVAILABLE}"""
#: A workflow that an operator, a block or maintenance holds back starts nothing: more workers would only wait.
_CAN_WORKFLOW_START = f"""EXISTS (SELECT FROM pipeline.workflows w
    WHERE w.name = h.workflow AND w.desired = '{DesiredStatus.ACTIVE}' AND NOT w.maintenance)
  AND NOT EXISTS (SELECT FROM pipeline.blocks b WHERE b.workflow = h.workflow AND b.closed_at IS NULL)"""

#: Consumers of one topic: the index alone counts, and the first row that may be taken is the oldest.
BACKLOG = Statement[BacklogRow](f"""
SELECT h.workflow, s.topic, h.name AS handler, waiting.number,
  CASE WHEN {_CAN_WORKFLOW_START} THEN coalesce(extract(epoch FROM pipeline.clock() - e.created_at), 0)
    ELSE 0 END AS age,
  CASE WHEN {_CAN_WORKFLOW_START} THEN coalesce(extract(epoch FROM pipeline.clock() - l.created_at), 0)
    ELSE 0 END AS declined_age
FROM pipeline.handlers h
JOIN (SELECT workflow, handler_id, min(topic) AS topic FROM pipeline.subscriptions
      GROUP BY workflow, handler_id HAVING count(*) = 1) s ON s.workflow = h.workflow AND s.handler_id = h.id
CROSS JOIN LATERAL (SELECT count(*) AS number FROM (
  SELECT FROM pipeline.deliveries d WHERE d.handler_id = h.id AND d.status = '{DeliveryStatus.PENDING}'
    AND d.event_id > h.low_watermark
  ORDER BY d.event_id LIMIT :limit) d) waiting
LEFT JOIN LATERAL (
  SELECT d.event_id FROM pipeline.deliveries d
  WHERE d.handler_id = h.id AND d.status = '{DeliveryStatus.PENDING}' AND d.event_id > h.low_watermark
    AND {_IS_AVAILABLE}
  ORDER BY d.event_id LIMIT 1) oldest ON true
LEFT JOIN pipeline.events e ON e.id = oldest.event_id
LEFT JOIN LATERAL (
  SELECT d.event_id FROM pipeline.deliveries d
  WHERE d.handler_id = h.id AND d.status = '{DeliveryStatus.PENDING}' AND d.declined AND d.event_id > h.low_watermark
  ORDER BY d.event_id LIMIT 1) declined ON true
LEFT JOIN pipeline.events l ON l.id = declined.event_id
WHERE NOT h.retired
""")

#: Consumers of several topics: what waits longest, event by event.
BACKLOG_MIXED = Statement[BacklogRow](f"""
SELECT h.workflow, s.topic, h.name AS handler, coalesce(waiting.number, 0) AS number,
  CASE WHEN {_CAN_WORKFLOW_START} THEN coalesce(extract(epoch FROM pipeline.clock() - waiting.oldest), 0)
    ELSE 0 END AS age,
  CASE WHEN {_CAN_WORKFLOW_START} THEN coalesce(extract(epoch FROM pipeline.clock() - waiting.oldest_declined), 0)
    ELSE 0 END AS declined_age
FROM pipeline.handlers h JOIN pipeline.subscriptions s ON s.workflow = h.workflow AND s.handler_id = h.id
LEFT JOIN LATERAL (
  SELECT e.topic, count(*) AS number, min(e.created_at) FILTER (WHERE d.may_be_taken) AS oldest,
    min(e.created_at) FILTER (WHERE d.declined) AS oldest_declined
  FROM (SELECT d.event_id, d.declined, {_IS_AVAILABLE} AS may_be_taken FROM pipeline.deliveries d
        WHERE d.handler_id = h.id AND d.status = '{DeliveryStatus.PENDING}' AND d.event_id > h.low_watermark
        ORDER BY d.event_id LIMIT :limit) d
  JOIN pipeline.events e ON e.id = d.event_id GROUP BY e.topic) waiting ON waiting.topic = s.topic
WHERE NOT h.retired AND (SELECT count(*) FROM pipeline.subscriptions o
  WHERE o.workflow = h.workflow AND o.handler_id = h.id) > 1
""")

#: From the publish of the oldest input to the commit, of runs that commit in this transaction.
RUN_LATENCIES = Statement[RunLatencyRow]("""
SELECT r.workflow, h.name AS handler, extract(epoch FROM r.finished_at - (
  SELECT min(e.created_at) FROM pipeline.events e WHERE e.id = ANY(r.event_ids))) AS seconds
FROM pipeline.runs r JOIN pipeline.handlers h ON h.id = r.handler_id
WHERE r.id = ANY(CAST(:ids AS uuid[])) AND r.event_ids <> '{}'
""")


def limit_reads(tx: Transaction) -> None:
    """From here on this transaction only reads, and no statement of it takes long."""
    tx.all(_LIMIT_READS, ms=str(STATEMENT_TIMEOUT // timedelta(milliseconds=1)))


def runs(tx: Transaction) -> Sequence[RunCountRow]:
    """Runs that are not over, by workflow, phase and status."""
    return tx.all(RUNS, limit=MAX_COUNT)


def leases(tx: Transaction) -> Mapping[str, int]:
    """Runs that a worker holds, and those whose worker let its time pass."""
    row = tx.one(LEASES, limit=MAX_COUNT)
    return {"held": row.held, "lapsed": row.lapsed}


def mutations(tx: Transaction) -> Sequence[MutationCountRow]:
    """Unresolved mutations by operation and status: their number, their age, and how many wait for approval."""
    return tx.all(MUTATIONS, limit=MAX_COUNT)


def breakers(tx: Transaction) -> Sequence[BreakerGaugeRow]:
    """Every operation that ever had a breaker, and whether it is open."""
    return tx.all(BREAKERS, limit=MAX_COUNT)


def workflows(tx: Transaction) -> Sequence[WorkflowGaugeRow]:
    """What the status of each workflow is derived from."""
    return tx.all(WORKFLOWS, limit=MAX_COUNT)


def sweeps(tx: Transaction) -> Sequence[SweepGaugeRow]:
    """When each sweep last ran, and what it reported."""
    return tx.all(SWEEPS, limit=MAX_COUNT)


def attention(tx: Transaction, kinds: Sequence[str]) -> Mapping[str, int]:
    """What needs an operator and no other read counts; ``kinds`` are the blocks that an operator lifts."""
    row = tx.one(ATTENTION, limit=MAX_COUNT, kinds=list(kinds))
    return {name: getattr(row, name) for name in AttentionCountRow.__annotations__}


def backlog(tx: Transaction) -> Sequence[BacklogRow]:
    """What waits for each consumer, by topic: how many events, and how long the oldest that may be taken now."""
    return [*tx.all(BACKLOG, limit=MAX_COUNT), *tx.all(BACKLOG_MIXED, limit=MAX_COUNT_MIXED)]


def run_latencies(tx: Transaction, run_ids: Sequence[UUID]) -> Sequence[RunLatencyRow]:
    """How long the oldest input of each run waited. Runs without inputs are left out."""
    return tx.all(RUN_LATENCIES, ids=[str(run_id) for run_id in run_ids])


_WORKERS = Statement[WorkerRow]("SELECT * FROM pipeline.workers ORDER BY name LIMIT :limit")
_SWEEP_RUNS = Statement[SweepRunRow]("SELECT name, last_run_at, report FROM pipeline.sweeps ORDER BY name")
_SERVER = Statement[ServerRow](
    "SELECT current_setting('server_version') AS server_version, version_num AS schema_version "
    "FROM pipeline.alembic_version"
)
_LAST_ACT = Statement[LastActRow]("SELECT (SELECT a.at FROM pipeline.audit a ORDER BY a.id DESC LIMIT 1) AS at")
#: A workflow in which nothing happened has no samples. The reader counts them as zero.
_BUCKETS = Statement[BucketRow]("""
SELECT s.workflow, date_bin(CAST(:step AS interval), s.at, CAST(:since AS timestamptz)) AS at, sum(s.span) AS span,
  CAST(sum(s.published) AS bigint) AS published, CAST(sum(s.committed) AS bigint) AS committed,
  CAST(sum(s.stopped) AS bigint) AS stopped, CAST(sum(s.mutated) AS bigint) AS mutated,
  CAST(sum(s.uncertain) AS bigint) AS uncertain, max(s.backlog) AS backlog, max(s.at - s.oldest_at) AS oldest_age,
  max(s.unresolved) AS unresolved
FROM unnest(CAST(:workflows AS text[])) AS w(name)
JOIN pipeline.samples s ON s.workflow = w.name AND s.at >= :since AND s.at < :until
GROUP BY 1, 2 ORDER BY 1, 2
""")


def workers(tx: Transaction, *, limit: int = 1_000) -> Sequence[WorkerRow]:
    """Workers that run, and those that were killed within the last day."""
    return tx.all(_WORKERS, limit=limit)


def sweep_runs(tx: Transaction) -> dict[str, SweepRunRow]:
    """When each sweep ran last, and what it did. One that never ran is missing."""
    return {row.name: row for row in tx.all(_SWEEP_RUNS)}


def server(tx: Transaction) -> ServerRow:
    """The version of Postgres, and of the schema."""
    return tx.one(_SERVER)


def last_act_at(tx: Transaction) -> datetime | None:
    """When an operator or a sweep acted last."""
    return tx.one(_LAST_ACT).at


def buckets(
    tx: Transaction, workflows: Sequence[str], *, since: datetime, until: datetime, step: timedelta
) -> Sequence[BucketRow]:
    """Samples of workflows, added up by spans of time. A span without samples is missing."""
    return tx.all(_BUCKETS, workflows=list(workflows), since=since, until=until, step=interval(step))
