"""Reads of the ledger for those who look into it: reconciler, desk, breakers, doctor. Nothing here writes."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import Row, text

from pipeline.store.database import Transaction

Rows = Sequence[Row[Any]]

_DUE = text("""
SELECT id FROM (
  SELECT id, next_reconcile_at AS due_at FROM pipeline.mutations
  WHERE status = 'needs_reconcile' AND next_reconcile_at <= pipeline.clock()
  UNION ALL
  SELECT id, watch_at FROM pipeline.mutations WHERE watch_at <= pipeline.clock()
) due ORDER BY due_at LIMIT :limit
""")

_BREAKERS = text("""
SELECT b.*, b.probe_at IS NOT NULL AND b.probe_at <= pipeline.clock() AS is_due FROM pipeline.breakers b
WHERE b.closed_at IS NULL ORDER BY b.connector, b.operation
""")

#: What a person may settle, with the events it is about.
_QUESTIONS = text("""
SELECT m.*, r.event_ids, h.name AS handler, r.status AS run_status,
       m.quiet_until > pipeline.clock() AS is_quiet,
       (SELECT array_agg(e.message_id ORDER BY e.id) FROM pipeline.events e
        WHERE e.id = ANY(r.event_ids)) AS message_ids
FROM pipeline.mutations m JOIN pipeline.runs r ON r.id = m.run_id JOIN pipeline.handlers h ON h.id = r.handler_id
WHERE m.status = ANY(CAST(:statuses AS text[]))
  AND (CAST(:workflow AS text) IS NULL OR m.workflow = :workflow)
  AND (CAST(:connector AS text) IS NULL OR m.connector = :connector)
  AND (CAST(:operation AS text) IS NULL OR m.operation = :operation)
  AND (CAST(:older_than AS interval) IS NULL OR m.created_at < pipeline.clock() - CAST(:older_than AS interval))
  AND (CAST(:ids AS uuid[]) IS NULL OR m.id = ANY(CAST(:ids AS uuid[])))
ORDER BY m.id LIMIT :limit
""")

#: Which run did what a run that was settled as failed had set out to do: the other side of an alarm.
_INSTEAD = text("""
SELECT o.id AS run_id, o.mutation_id, o.status, m.status AS mutation_status FROM pipeline.runs r
JOIN pipeline.deliveries d ON d.handler_id = r.handler_id AND d.event_id = ANY(r.event_ids)
JOIN pipeline.runs o ON o.id = d.run_id LEFT JOIN pipeline.mutations m ON m.id = o.mutation_id
WHERE r.id = :run_id ORDER BY o.id LIMIT 1
""")


def due(tx: Transaction, *, limit: int = 100) -> list[UUID]:
    """Mutations whose next look is due: those in doubt, and those that are still watched."""
    return [row.id for row in tx.all(_DUE, limit=limit)]


def breakers(tx: Transaction) -> Rows:
    """Every open breaker, and whether a probe of it is due."""
    return tx.all(_BREAKERS)


def instead(tx: Transaction, run_id: UUID) -> Row[Any] | None:
    """The run that now owns the inputs of this one, which may be itself."""
    return tx.first(_INSTEAD, run_id=run_id)


def questions(
    tx: Transaction, *, statuses: Sequence[str], ids: Sequence[UUID] | None = None, limit: int = 100, **only: Any
) -> Rows:
    """Ledger rows of these statuses, oldest first; ``only`` names workflow, connector, operation or older_than."""
    given: dict[str, Any] = {"workflow": None, "connector": None, "operation": None, "older_than": None, **only}
    named = None if ids is None else [str(id_) for id_ in ids]
    return tx.all(_QUESTIONS, statuses=list(statuses), ids=named, limit=limit, **given)
