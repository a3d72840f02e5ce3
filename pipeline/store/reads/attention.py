"""What needs an operator: one row per notice, with the name that identifies it.

Pending approvals are one notice per workflow, and quarantined events one per handler, however many they are: they come
in large numbers. Every part is found by an index on what is open.
"""

from collections.abc import Sequence

from pipeline.domain.states import DeliveryStatus, MutationStatus
from pipeline.store.database import Statement, Transaction
from pipeline.store.rows import NoticeRow

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
