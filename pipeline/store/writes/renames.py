"""Move what belongs to a name to another one. Only ``transitions`` may import this.

Statements are in the lock order: of what runs and workers lock row by row, rows are locked by id before they are
written. Nothing else writes the other rows of a workflow while its registration and its subscriptions are locked.
"""

from collections.abc import Mapping

from pipeline.domain.renames import NameKind
from pipeline.domain.states import DeliveryStatus, Phase, RunStatus
from pipeline.store import schema
from pipeline.store.database import Command, Statement
from pipeline.store.rows import CountRow, MutationIdRow, RunIdRow

_WORKFLOW_COLUMNS = ", ".join(each.name for each in schema.workflows.columns if each.name != "name")

SAVE_RENAME = Command("""
INSERT INTO pipeline.renames (kind, workflow, former, name) VALUES (:kind, :workflow, :former, :name)
ON CONFLICT (kind, workflow, former) DO UPDATE SET name = excluded.name
""")

#: The code says no more that these names are one: each may be used anew.
FORGET_RENAMES = Command(f"""
DELETE FROM pipeline.renames
WHERE (workflow = :workflow OR (kind = '{NameKind.WORKFLOW}' AND name IN (:workflow, :stored_as)))
  AND kind || chr(31) || former <> ALL(CAST(:kept AS text[]))
""")
#: A name that is used again is no former one.
FORGET_FORMER = Command("DELETE FROM pipeline.renames WHERE kind = :kind AND workflow = :workflow AND former = :name")
FOLLOW_RENAMES = Command("""
UPDATE pipeline.renames SET name = :name WHERE kind = :kind AND workflow = :workflow AND name = :former
""")

RENAME_HANDLER = Command(
    "UPDATE pipeline.handlers SET name = :name, retired = false WHERE workflow = :workflow AND name = :former"
)

#: A worker that is choosing among events of the former topic loses its run: it would find none, and call that idle.
TAKE_PREPARING_RUNS = Statement[RunIdRow](f"""
WITH taken AS (
  SELECT r.id FROM pipeline.runs r
  WHERE r.workflow = :workflow AND r.finished_at IS NULL AND r.status = '{RunStatus.ACTIVE}'
    AND r.phase = '{Phase.PREPARING}' AND r.handler_id = ANY(ARRAY(
      SELECT s.handler_id FROM pipeline.subscriptions s
      WHERE s.workflow = :workflow AND s.topic = ANY(CAST(:topics AS text[]))))
  ORDER BY r.id FOR NO KEY UPDATE OF r
)
UPDATE pipeline.runs r SET fence = r.fence + 1, lease_expires_at = NULL, worker = NULL, dispatched_at = NULL
FROM taken t WHERE r.id = t.id RETURNING r.id
""")
RENAME_TOPIC = (
    Command("UPDATE pipeline.topics SET name = :name WHERE workflow = :workflow AND name = :former"),
    Command("UPDATE pipeline.subscriptions SET topic = :name WHERE workflow = :workflow AND topic = :former"),
)
#: A delivery has the topic of its event.
MOVE_DELIVERIES = Command("""
WITH moved AS MATERIALIZED (
  SELECT d.event_id, d.handler_id FROM pipeline.events e JOIN pipeline.deliveries d ON d.event_id = e.id
  WHERE e.workflow = :workflow AND e.topic = :former ORDER BY d.event_id, d.handler_id FOR NO KEY UPDATE OF d
)
UPDATE pipeline.deliveries d SET topic = :name FROM moved m
WHERE d.event_id = m.event_id AND d.handler_id = m.handler_id
""")
MOVE_EVENTS = Command("UPDATE pipeline.events SET topic = :name WHERE workflow = :workflow AND topic = :former")

COPY_WORKFLOW = Command(f"""
INSERT INTO pipeline.workflows (name, {_WORKFLOW_COLUMNS})
SELECT :name, {_WORKFLOW_COLUMNS} FROM pipeline.workflows WHERE name = :former
""")
LOCK_RUNS = Statement[RunIdRow]("""
SELECT id FROM pipeline.runs WHERE workflow = :former AND (finished_at IS NULL OR retry_pending)
ORDER BY id FOR NO KEY UPDATE
""")
LOCK_MUTATIONS = Statement[MutationIdRow](
    "SELECT id FROM pipeline.mutations WHERE workflow = :former ORDER BY id FOR NO KEY UPDATE"
)


def _move(table: str) -> Command:
    return Command(f"UPDATE pipeline.{table} SET workflow = :name WHERE workflow = :former")


MOVE_RUNS, MOVE_MUTATIONS, MOVE_BLOCKS = _move("runs"), _move("mutations"), _move("blocks")
#: After the deliveries, in the lock order.
MOVE_HANDLERS = _move("handlers")
#: By what is moved, as the audit and the log count it. An act keeps the name that the workflow had: it never changes.
MOVE_REST = {
    name: _move(name)
    for name in ("sessions", "topics", "subscriptions", "events", "maintenance_tasks", "renames", "samples")
}
DELETE_WORKFLOW = Command("DELETE FROM pipeline.workflows WHERE name = :former")

_IS_OPEN = f"d.status IN ('{DeliveryStatus.PENDING}', '{DeliveryStatus.RESERVED}', '{DeliveryStatus.QUARANTINED}')"
#: How many events wait under a former name.
OPEN_EVENTS: Mapping[str, Statement[CountRow]] = {
    NameKind.HANDLER: Statement[CountRow](f"""
SELECT count(*) AS number FROM pipeline.deliveries d JOIN pipeline.handlers h ON h.id = d.handler_id
WHERE h.workflow = :workflow AND h.name = :former AND {_IS_OPEN}
"""),
    NameKind.TOPIC: Statement[CountRow](f"""
SELECT count(*) AS number FROM pipeline.events e JOIN pipeline.deliveries d ON d.event_id = e.id
WHERE e.workflow = :workflow AND e.topic = :former AND {_IS_OPEN}
"""),
    NameKind.WORKFLOW: Statement[CountRow](f"""
SELECT count(*) AS number FROM pipeline.deliveries d JOIN pipeline.handlers h ON h.id = d.handler_id
WHERE h.workflow = :former AND {_IS_OPEN}
"""),
}
