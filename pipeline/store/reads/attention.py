"""What needs an operator: one row per notice, with the name that identifies it, and whether any of it changed.

Pending approvals are one notice per workflow, and quarantined events one per handler, however many they are: they come
in large numbers. Every part is found by an index on what is open.
"""

from collections.abc import Sequence

from pipeline.domain.states import DeliveryStatus, MutationStatus, RunStatus
from pipeline.domain.workflows import CLEARED_BY_RESUME
from pipeline.store.database import Statement, Transaction
from pipeline.store.predicates import join_by_id, sql_list
from pipeline.store.reads.work import distinct_values
from pipeline.store.rows import HighWaterRow, NoticeRow, WaitingCountRow, WatchedItemRow
from pipeline.store.schema import AuditRow

_HEADLINE = "coalesce(nullif(headline, ''), connector || '.' || operation)"

ATTENTION_ITEMS = f"""
  SELECT 'maintenance' AS kind, 'task ' || id AS subject, workflow, workflow || ' is in maintenance' AS headline,
         reason, opened_at AS since
  FROM pipeline.maintenance_tasks WHERE closed_at IS NULL
  UNION ALL
  SELECT 'blocked', 'block ' || id, workflow, workflow || ' starts no runs', kind || ': ' || reason, since
  FROM pipeline.blocks WHERE closed_at IS NULL
  UNION ALL
  SELECT 'indeterminate', 'mutation ' || id, workflow, {_HEADLINE},
         connector || '.' || operation || ': ' || coalesce(error, ''), created_at
  FROM pipeline.mutations WHERE status = '{MutationStatus.INDETERMINATE}'
  UNION ALL
  SELECT 'late_effect', 'mutation ' || id, workflow, {_HEADLINE},
         connector || '.' || operation || ' seems to have happened after all (' || idempotency_key
         || '); it was resolved as not having happened' || coalesce(': ' || (
           SELECT a.evidence ->> 'advice' FROM pipeline.audit a
           WHERE a.mutation_id = m.id AND a.act = 'mutation.found_late' ORDER BY a.id DESC LIMIT 1), ''), found_late_at
  FROM pipeline.mutations m WHERE found_late_at IS NOT NULL AND acknowledged_by IS NULL
  UNION ALL
  SELECT 'breaker', connector || '.' || operation || ' at ' || opened_at, '',
         connector || '.' || operation || ' starts no new mutation', reason, opened_at
  FROM pipeline.breakers WHERE closed_at IS NULL
  UNION ALL
  SELECT 'approval', 'workflow ' || workflow, workflow, (array_agg({_HEADLINE} ORDER BY id))[1],
         'requests wait to be allowed, the first is mutation ' || min(CAST(id AS text)), min(created_at)
  FROM pipeline.mutations WHERE status = '{MutationStatus.PENDING}' AND approved_at IS NULL GROUP BY workflow
  UNION ALL
  SELECT 'quarantined', 'handler ' || h.name || ' of ' || h.workflow, h.workflow,
         'events of ' || h.name || ' are quarantined',
         'events were set aside, the oldest is event ' || d.event_id, e.created_at
  FROM pipeline.handlers h CROSS JOIN LATERAL (
    SELECT min(event_id) AS event_id FROM pipeline.deliveries WHERE handler_id = h.id
      AND status = '{DeliveryStatus.QUARANTINED}'
  ) d JOIN pipeline.events e ON e.id = d.event_id
"""

_UNDELIVERED_NOTICES = Statement[NoticeRow](f"""
SELECT w.* FROM ({ATTENTION_ITEMS}) w
WHERE NOT EXISTS (SELECT FROM pipeline.notices n WHERE n.kind = w.kind AND n.subject = w.subject)
ORDER BY w.since, w.kind, w.subject OFFSET :skip LIMIT :limit
""")


def undelivered_notices(tx: Transaction, *, limit: int = 100, offset: int = 0) -> Sequence[NoticeRow]:
    """What needs an operator and has no notice yet, oldest first."""
    return tx.all(_UNDELIVERED_NOTICES, limit=limit, skip=offset)


_QUARANTINED = distinct_values(
    "quarantined", "handler_id", "pipeline.deliveries", f"o.status = '{DeliveryStatus.QUARANTINED}'"
)
_UNKNOWN = f"m.status = '{MutationStatus.INDETERMINATE}'"


def _hash(*columns: str) -> str:
    return f"hashtextextended(concat_ws(chr(31), {', '.join(columns)}), 0)"


#: Of quarantined events, as many are counted as a fingerprint needs.
_ITEMS = f"""
  SELECT 'mutation' AS kind, CAST(m.id AS text) AS id, m.workflow, coalesce(m.doubted_at, m.created_at) AS since,
    true AS is_waiting, {_hash("m.id", "m.reconcile_attempts", "m.error")} AS fingerprint
  FROM pipeline.mutations m WHERE {_UNKNOWN}
  UNION ALL
  SELECT 'approval', CAST(m.id AS text), m.workflow, m.created_at, true, {_hash("m.id", "m.request_hash")}
  FROM pipeline.mutations m {join_by_id("runs", "r", "m.run_id")}
  WHERE m.status = '{MutationStatus.PENDING}' AND m.approved_at IS NULL AND r.status = '{RunStatus.PAUSED_APPROVAL}'
  UNION ALL
  SELECT 'late_effect', CAST(m.id AS text), m.workflow, m.found_late_at, true, {_hash("m.id", "m.found_late_at")}
  FROM pipeline.mutations m WHERE m.found_late_at IS NOT NULL AND m.acknowledged_by IS NULL
  UNION ALL
  SELECT 'block', CAST(b.run_id AS text), b.workflow, b.since, b.kind IN {sql_list(*sorted(CLEARED_BY_RESUME))},
    {_hash("b.id")}
  FROM pipeline.blocks b WHERE b.closed_at IS NULL
  UNION ALL
  SELECT 'quarantine', h.name, h.workflow, e.created_at, true, {_hash("h.id", "d.number", "d.newest")}
  FROM quarantined q JOIN pipeline.handlers h ON h.id = q.handler_id CROSS JOIN LATERAL (
    SELECT count(*) AS number, max(d.event_id) AS newest, min(d.event_id) AS oldest FROM (
      SELECT d.event_id FROM pipeline.deliveries d WHERE d.handler_id = h.id
        AND d.status = '{DeliveryStatus.QUARANTINED}' ORDER BY d.event_id LIMIT :limit) d
  ) d {join_by_id("events", "e", "d.oldest")}
  UNION ALL
  SELECT 'breaker', b.connector || '.' || b.operation, '', b.opened_at, true, {_hash("b.opened_at", "b.reason")}
  FROM pipeline.breakers b WHERE b.closed_at IS NULL
  UNION ALL
  SELECT 'workflow', w.name, w.name, w.maintenance_since, w.maintenance,
    {_hash("w.name", "w.version", "w.desired", "w.maintenance", "w.maintenance_reason")}
  FROM pipeline.workflows w
"""
HIGH_WATER = Statement[HighWaterRow](f"""
WITH RECURSIVE {_QUARANTINED}
SELECT pipeline.clock() AS now, (SELECT a.id FROM pipeline.audit a ORDER BY a.id DESC LIMIT 1) AS act_id,
  count(*) FILTER (WHERE i.is_waiting) AS waiting, min(i.since) FILTER (WHERE i.is_waiting) AS oldest_at,
  count(*) || '/' || coalesce(sum(i.fingerprint), 0) AS digest
FROM ({_ITEMS}) i
""")
_WATCHED_ITEMS = Statement[WatchedItemRow](f"""
WITH RECURSIVE {_QUARANTINED} SELECT i.kind, i.id, i.workflow, i.fingerprint FROM ({_ITEMS}) i
""")
_WAITING_COUNTS = Statement[WaitingCountRow](f"""
WITH RECURSIVE {_QUARANTINED} SELECT i.kind, i.workflow, count(*) AS number
FROM ({_ITEMS}) i WHERE i.is_waiting GROUP BY i.kind, i.workflow
""")
_ACTS_AFTER = Statement[AuditRow]("SELECT * FROM pipeline.audit WHERE id > :act_id ORDER BY id LIMIT :limit")
_MAX_QUARANTINED = 1_000


def high_water(tx: Transaction) -> HighWaterRow:
    """How the installation stands: what was done last, what waits, and a digest of every watched item."""
    return tx.one(HIGH_WATER, limit=_MAX_QUARANTINED)


def watched_items(tx: Transaction) -> Sequence[WatchedItemRow]:
    """Every watched item with its fingerprint."""
    return tx.all(_WATCHED_ITEMS, limit=_MAX_QUARANTINED)


def waiting_counts(tx: Transaction) -> Sequence[WaitingCountRow]:
    """How many watched items wait for operators, by kind and workflow."""
    return tx.all(_WAITING_COUNTS, limit=_MAX_QUARANTINED)


def acts_after(tx: Transaction, act_id: int, *, limit: int = 500) -> Sequence[AuditRow]:
    """What operators and sweeps did after an act, oldest first."""
    return tx.all(_ACTS_AFTER, act_id=act_id, limit=limit)
