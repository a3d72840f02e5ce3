"""Guarded writes of workflows, handlers, topics, blocks, sessions and maintenance tasks.

A transaction that starts or stops runs of a workflow locks its row first (``LOCK_WORKFLOWS``). Publishers and
committing workers never touch it. Only ``transitions`` may import this.
"""

from pipeline.store.database import Command, Statement, UnreadRow
from pipeline.store.rows import MaintenanceTaskIdRow, NameRow
from pipeline.store.schema import BlockRow

LOCK_WORKFLOWS = Statement[NameRow](
    "SELECT name FROM pipeline.workflows WHERE name = ANY(:names) ORDER BY name FOR NO KEY UPDATE"
)

LOCK_WORKFLOWS_OF_RUNS = Statement[NameRow]("""
SELECT w.name FROM pipeline.workflows w
WHERE w.name IN (SELECT r.workflow FROM pipeline.runs r WHERE r.id = ANY(CAST(:ids AS uuid[])))
ORDER BY w.name FOR NO KEY UPDATE
""")

#: The second registration of a workflow sees what the first has written. Taken before any other lock, and only here.
LOCK_REGISTRATION = Statement[UnreadRow]("SELECT pg_advisory_xact_lock(hashtext('pipeline.register'), hashtext(:name))")

UPSERT_WORKFLOW = Command("""
INSERT INTO pipeline.workflows
  (name, version, fingerprint, known_fingerprints, concurrency, on_uncertain, on_logic_error,
   keep_done, keep_ledger, archives)
VALUES (:name, :version, :fingerprint, CAST(:known_fingerprints AS text[]), :concurrency,
  :on_uncertain, :on_logic_error, :keep_done, :keep_ledger, :archives)
ON CONFLICT (name) DO UPDATE SET version = excluded.version, fingerprint = excluded.fingerprint,
  known_fingerprints = excluded.known_fingerprints, concurrency = excluded.concurrency,
  on_uncertain = excluded.on_uncertain, on_logic_error = excluded.on_logic_error,
  keep_done = excluded.keep_done, keep_ledger = excluded.keep_ledger, archives = excluded.archives
""")

UPSERT_TOPICS = Command("""
INSERT INTO pipeline.topics (workflow, name, schema)
SELECT :workflow, x.name, x.schema
FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS x(name text, schema jsonb)
ON CONFLICT (workflow, name) DO UPDATE SET schema = excluded.schema
""")

ADD_TOPICS = Command("""
INSERT INTO pipeline.topics (workflow, name, schema)
SELECT :workflow, x.name, x.schema
FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS x(name text, schema jsonb)
ON CONFLICT (workflow, name) DO NOTHING
""")


#: Waits for every open publisher and makes later ones see the new subscriptions: the backfill that
#: follows can then neither miss an event nor deliver it twice.
LOCK_SUBSCRIPTIONS = Command("LOCK TABLE pipeline.subscriptions IN ACCESS EXCLUSIVE MODE")

INSERT_SUBSCRIPTION = Command("""
INSERT INTO pipeline.subscriptions (workflow, topic, handler_id) VALUES (:workflow, :topic, :handler_id)
ON CONFLICT DO NOTHING
""")

DELETE_SUBSCRIPTION = Command("""
DELETE FROM pipeline.subscriptions WHERE workflow = :workflow AND topic = :topic AND handler_id = :handler_id
""")

BACKFILL = Command("""
WITH filled AS (
  INSERT INTO pipeline.deliveries (event_id, handler_id, topic, key)
  SELECT e.id, :handler_id, e.topic, e.key FROM pipeline.events e WHERE e.workflow = :workflow AND e.topic = :topic
  ORDER BY e.id ON CONFLICT DO NOTHING RETURNING event_id
)
UPDATE pipeline.handlers SET low_watermark = 0 WHERE id = :handler_id AND EXISTS (SELECT FROM filled)
""")


SET_DESIRED = Statement[NameRow]("""
UPDATE pipeline.workflows SET desired = :desired WHERE name = :name AND desired <> :desired RETURNING name
""")

ENTER_MAINTENANCE = Statement[NameRow]("""
UPDATE pipeline.workflows SET maintenance = true, maintenance_reason = :reason, maintenance_since = pipeline.clock()
WHERE name = :name AND NOT maintenance RETURNING name
""")
EXIT_MAINTENANCE = Statement[NameRow]("""
WITH closed AS (
  UPDATE pipeline.maintenance_tasks SET closed_at = pipeline.clock() WHERE workflow = :name AND closed_at IS NULL
)
UPDATE pipeline.workflows SET maintenance = false, maintenance_reason = NULL, maintenance_since = NULL
WHERE name = :name AND maintenance RETURNING name
""")
OPEN_MAINTENANCE_TASK = Statement[MaintenanceTaskIdRow]("""
INSERT INTO pipeline.maintenance_tasks (workflow, reason)
SELECT name, coalesce(maintenance_reason, '') FROM pipeline.workflows WHERE name = :name AND maintenance
ON CONFLICT (workflow) WHERE closed_at IS NULL DO NOTHING RETURNING id
""")

INSERT_BLOCKS = Statement[BlockRow]("""
INSERT INTO pipeline.blocks (workflow, run_id, kind, reason)
SELECT x.workflow, x.run, x.kind, x.reason
FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS x(workflow text, run uuid, kind text, reason text)
ON CONFLICT (run_id, kind) WHERE closed_at IS NULL DO NOTHING RETURNING *
""")
CLOSE_BLOCKS = Statement[BlockRow]("""
UPDATE pipeline.blocks SET closed_at = pipeline.clock()
WHERE workflow = :workflow AND kind = ANY(:kinds) AND closed_at IS NULL RETURNING *
""")
