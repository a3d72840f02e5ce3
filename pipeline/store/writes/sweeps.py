"""Guarded writes of sweeps: slots, so that one of several callers runs a sweep, and cursors, where it goes on."""

from pipeline.store.database import Command, Statement
from pipeline.store.rows import CursorRow, SlotRow

#: A last run that lies in the future is from before Postgres's clock was set back. One that lies there by less than
#: the pause may be of a transaction that began a moment after this one.
TAKE_SLOT = Statement[SlotRow]("""
WITH before AS (SELECT pipeline.clock() - last_run_at AS pause FROM pipeline.sweeps WHERE name = :name)
INSERT INTO pipeline.sweeps (name, last_run_at) VALUES (:name, pipeline.clock())
ON CONFLICT (name) DO UPDATE SET last_run_at = excluded.last_run_at
WHERE sweeps.last_run_at <= pipeline.clock() - CAST(:pause AS interval)
  OR sweeps.last_run_at > pipeline.clock() + CAST(:pause AS interval)
RETURNING report, (SELECT pause FROM before) AS pause
""")
REPORT_SLOT = Command("UPDATE pipeline.sweeps SET report = CAST(:report AS jsonb) WHERE name = :name")
CURSOR = Statement[CursorRow]("SELECT position FROM pipeline.cursors WHERE name = :name FOR UPDATE")
SET_CURSOR = Command("""
INSERT INTO pipeline.cursors (name, position) VALUES (:name, :position)
ON CONFLICT (name) DO UPDATE SET position = excluded.position
""")
