"""Reads of active runs that nobody holds: whose message may be lost, and which no worker takes.

A run that a worker handed back because it does not know its handler has neither a message nor a worker.
"""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import Row, text

from pipeline.store.database import Transaction

Rows = Sequence[Row[Any]]

#: In turns, so that a crowd of one handler starves no other; of each handler's the longest silent first.
UNHELD = text("""
SELECT t.* FROM (
  SELECT r.*, row_number() OVER (
    PARTITION BY r.handler_id, r.dispatched_at IS NULL ORDER BY r.dispatched_at, r.id) AS turn
  FROM pipeline.runs r
  WHERE r.finished_at IS NULL AND r.status = 'active' AND r.lease_expires_at IS NULL
    AND (r.dispatched_at IS NULL OR r.dispatched_at < pipeline.clock() - :silence)
) t ORDER BY t.turn, t.dispatched_at NULLS LAST, t.id LIMIT :limit
""")

SUSPECTS = text("""
SELECT r.id FROM pipeline.runs r
WHERE r.id = ANY(CAST(:ids AS uuid[])) AND (
  EXISTS (SELECT FROM pipeline.deliveries d
    WHERE d.event_id = ANY(coalesce(r.offered, r.event_ids)) AND d.handler_id = r.handler_id AND d.suspect)
  OR EXISTS (SELECT FROM pipeline.runs p WHERE p.id = r.retry_of AND p.status = 'crashed'))
""")

#: A handler of which somebody holds a run is known to somebody.
UNHEARD = text("""
SELECT r.id, r.workflow FROM pipeline.runs r
WHERE r.finished_at IS NULL AND r.status = 'active' AND r.lease_expires_at IS NULL
  AND r.dispatched_at IS NULL AND r.worker IS NULL AND r.created_at < pipeline.clock() - :patience
  AND NOT EXISTS (
    SELECT FROM pipeline.runs o WHERE o.workflow = r.workflow AND o.handler_id = r.handler_id
      AND o.finished_at IS NULL AND o.lease_expires_at > pipeline.clock())
ORDER BY r.id LIMIT :limit
""")


def unheld_runs(tx: Transaction, *, silence: Any, limit: int = 100) -> Rows:
    """Active runs nobody holds and whose last message is older than ``silence``."""
    return tx.all(UNHELD, silence=silence, limit=limit)


def suspects(tx: Transaction, ids: Sequence[UUID]) -> set[UUID]:
    """Which of these runs follow one that died with its process: each of them travels alone."""
    return {row.id for row in tx.all(SUSPECTS, ids=[str(id_) for id_ in ids])}


def unheard_runs(tx: Transaction, *, patience: Any, limit: int = 1_000) -> Rows:
    """Runs older than ``patience`` that workers have handed back, of handlers that nobody seems to know."""
    return tx.all(UNHEARD, patience=patience, limit=limit)
