"""Reads of active runs that nobody holds: whose message may be lost, and which no worker takes.

A run that a worker handed back because it does not know its handler has neither a message nor a worker.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Row, text

from pipeline.store.database import Transaction

Rows = Sequence[Row[Any]]

#: In turns, so that a crowd of one handler starves no other; of each handler's the longest silent first. What died
#: with its process before, or may have been the cause, is told apart: it travels alone.
UNHELD = text("""
WITH turns AS (
  SELECT r.id, r.dispatched_at,
    row_number() OVER (PARTITION BY r.handler_id, r.dispatched_at IS NULL ORDER BY r.dispatched_at, r.id) AS turn
  FROM pipeline.runs r
  WHERE r.finished_at IS NULL AND r.status = 'active' AND r.lease_expires_at IS NULL
    AND (r.dispatched_at IS NULL OR r.dispatched_at < pipeline.clock() - :silence)
), chosen AS MATERIALIZED (
  SELECT id FROM turns ORDER BY turn, dispatched_at NULLS LAST, id LIMIT :limit
)
SELECT r.*, EXISTS (
    SELECT FROM unnest(coalesce(r.offered, r.event_ids)) AS input(event_id)
    JOIN pipeline.deliveries d ON d.event_id = input.event_id AND d.handler_id = r.handler_id WHERE d.suspect
  ) OR EXISTS (SELECT FROM pipeline.runs p WHERE p.id = r.retry_of AND p.status = 'crashed') AS suspect
FROM pipeline.runs r WHERE r.id = ANY(ARRAY(SELECT id FROM chosen)) ORDER BY r.id
""")

UNHEARD = text("""
SELECT id, workflow FROM pipeline.runs
WHERE finished_at IS NULL AND status = 'active' AND lease_expires_at IS NULL AND phase IN ('pending', 'preparing')
  AND dispatched_at IS NULL AND worker IS NULL AND created_at < pipeline.clock() - :patience ORDER BY id LIMIT :limit
""")


def unheld_runs(tx: Transaction, *, silence: Any, limit: int = 100) -> Rows:
    """Active runs nobody holds and whose last message is older than ``silence``."""
    return tx.all(UNHELD, silence=silence, limit=limit)


def unheard_runs(tx: Transaction, *, patience: Any, limit: int = 1_000) -> Rows:
    """Runs that have reserved nothing yet and that workers have handed back for longer than ``patience``."""
    return tx.all(UNHEARD, patience=patience, limit=limit)
