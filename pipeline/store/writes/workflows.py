"""Guarded writes of workflows, handlers, topics, blocks, sessions and maintenance tasks.

A transaction that starts or stops runs of a workflow locks its row first (``LOCK_WORKFLOWS``). Publishers and
committing workers never touch it. Only ``transitions`` may import this.
"""

from collections.abc import Sequence

from pipeline.store.database import Command, Statement, Transaction, UnreadRow
from pipeline.store.rows import (
    BackfillRow,
    HandlerFactsRow,
    LockedWorkflowRow,
    MaintenanceTaskIdRow,
    NameRow,
    OperationNameRow,
)
from pipeline.store.schema import BlockRow

LOCK_WORKFLOWS = Statement[NameRow](
    "SELECT name FROM pipeline.workflows WHERE name = ANY(:names) ORDER BY name FOR NO KEY UPDATE"
)

#: Lock a workflow and read what is due in it, in one round trip.
LOCK_AND_READ_FACTS = Statement[HandlerFactsRow](
    "SELECT * FROM pipeline.handler_facts(ARRAY[CAST(:workflow AS text)], is_locking => true)"
)

LOCK_WORKFLOWS_OF_RUNS = Statement[LockedWorkflowRow]("""
SELECT w.name, (
  SELECT count(DISTINCT r.workflow) FROM pipeline.runs r WHERE r.id = ANY(CAST(:ids AS uuid[]))) AS wanted
FROM pipeline.workflows w
WHERE w.name IN (SELECT r.workflow FROM pipeline.runs r WHERE r.id = ANY(CAST(:ids AS uuid[])))
ORDER BY w.name FOR NO KEY UPDATE
""")


def lock_workflows_of_runs(tx: Transaction, ids: Sequence[str]) -> None:
    """Lock the workflows of runs. One that was renamed while this waited is locked under its new name."""
    locked = tx.all(LOCK_WORKFLOWS_OF_RUNS, ids=list(ids))
    if not locked or len(locked) < locked[0].wanted:
        tx.all(LOCK_WORKFLOWS_OF_RUNS, ids=list(ids))


#: The second registration of a workflow sees what the first has written. Taken before any other lock, and only here.
LOCK_REGISTRATION = Statement[UnreadRow]("SELECT pg_advisory_xact_lock(hashtext('pipeline.register'), hashtext(:name))")

UPSERT_WORKFLOW = Command("""
INSERT INTO pipeline.workflows
  (name, version, fingerprint, known_fingerprints, concurrency, on_uncertain, on_logic_error,
   on_exhausted, keep_done, keep_ledger, archives)
VALUES (:name, :version, :fingerprint, CAST(:known_fingerprints AS text[]), :concurrency,
  :on_uncertain, :on_logic_error, :on_exhausted, :keep_done, :keep_ledger, :archives)
ON CONFLICT (name) DO UPDATE SET version = excluded.version, fingerprint = excluded.fingerprint,
  known_fingerprints = excluded.known_fingerprints, concurrency = excluded.concurrency,
  on_uncertain = excluded.on_uncertain, on_logic_error = excluded.on_logic_error,
  on_exhausted = excluded.on_exhausted,
  keep_done = excluded.keep_done, keep_ledger = excluded.keep_ledger, archives = excluded.archives
""")

UPSERT_TOPICS = Command("""
INSERT INTO pipeline.topics (workflow, name, schema, is_encrypted)
SELECT :workflow, x.name, x.schema, x.is_encrypted
FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS x(name text, schema jsonb, is_encrypted boolean)
ON CONFLICT (workflow, name) DO UPDATE
SET schema = excluded.schema, is_encrypted = excluded.is_encrypted, retired = false
""")
#: Its topics are refused to publishers in the clear from the same moment.
SET_CODEC_SECRET = Command("""
WITH topics AS (UPDATE pipeline.topics SET is_encrypted = true WHERE workflow = :name AND NOT is_encrypted)
UPDATE pipeline.workflows SET codec_secret = CAST(:secret AS jsonb) WHERE name = :name
""")

RETIRE_TOPICS = Command("""
UPDATE pipeline.topics SET retired = true
WHERE workflow = :workflow AND name <> ALL(CAST(:names AS text[])) AND NOT retired
""")

ADD_TOPICS = Command("""
INSERT INTO pipeline.topics (workflow, name, schema, is_encrypted)
SELECT :workflow, x.name, x.schema, x.is_encrypted
FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS x(name text, schema jsonb, is_encrypted boolean)
ON CONFLICT (workflow, name) DO UPDATE SET retired = false
""")


#: Waits for every open publisher of the workflow and makes later ones see the new subscriptions: the backfill that
#: follows can then neither miss an event nor deliver it twice. ``pipeline.routes`` takes the same lock, shared.
LOCK_SUBSCRIPTIONS = Statement[UnreadRow](
    "SELECT pg_advisory_xact_lock(hashtext('pipeline.subscriptions'), hashtext(:workflow))"
)
#: For a transaction that locks rows before it publishes.
SHARE_SUBSCRIPTIONS = Statement[UnreadRow]("SELECT count(*) FROM pipeline.routes(:workflow, '{}')")
SHARE_SUBSCRIPTIONS_OF_RUNS = Statement[UnreadRow]("""
SELECT count(*) FROM (
  SELECT DISTINCT r.workflow FROM pipeline.runs r WHERE r.id = ANY(CAST(:ids AS uuid[])) ORDER BY r.workflow
) w CROSS JOIN LATERAL pipeline.routes(w.workflow, '{}')
""")

#: Events up to ``backfill_until`` are those of publishers that have ended: the lock above has waited for the others.
INSERT_SUBSCRIPTION = Command("""
INSERT INTO pipeline.subscriptions (workflow, topic, handler_id, backfill_until)
VALUES (:workflow, :topic, :handler_id, CASE WHEN :is_backfilled THEN (SELECT last_value FROM pipeline.event_ids) END)
ON CONFLICT DO NOTHING
""")

DELETE_SUBSCRIPTION = Command("""
DELETE FROM pipeline.subscriptions WHERE workflow = :workflow AND topic = :topic AND handler_id = :handler_id
""")

#: Pruning and backfilling take turns: a consumer must not be handed an event that is on its way out.
LOCK_BACKFILL = Statement[UnreadRow]("SELECT pg_advisory_xact_lock_shared(hashtext('pipeline.backfill'))")

#: Deliver the next earlier events of a topic to a consumer that has joined it, in the order of the index on message
#: ids. An ordered consumer waits for the last page, and has seen none of it when it comes. So the last
#: page must not be empty: one more event than a page has is read ahead.
BACKFILL_PAGE = Statement[BackfillRow]("""
WITH page AS MATERIALIZED (
  SELECT e.id, e.key, e.message_id, row_number() OVER (ORDER BY e.message_id) <= :limit AS is_in FROM (
    SELECT * FROM pipeline.events
    WHERE workflow = :workflow AND topic = :topic AND message_id > :after AND id <= :until
    ORDER BY message_id LIMIT :limit + 1
  ) e
), filled AS (
  INSERT INTO pipeline.deliveries (event_id, handler_id, topic, key)
  SELECT p.id, :handler_id, :topic, p.key FROM page p WHERE p.is_in ORDER BY p.id
  ON CONFLICT DO NOTHING RETURNING event_id
), lowered AS (
  UPDATE pipeline.handlers SET low_watermark = 0, idle_snapshot = NULL
  WHERE id = :handler_id AND (SELECT count(*) FROM filled) >= 0
)
UPDATE pipeline.subscriptions s SET backfill_after = coalesce(p.last_id, s.backfill_after),
  backfill_until = CASE WHEN p.has_more THEN s.backfill_until END
FROM (SELECT bool_or(NOT is_in) AS has_more, max(message_id) FILTER (WHERE is_in) AS last_id FROM page) p
WHERE s.workflow = :workflow AND s.topic = :topic AND s.handler_id = :handler_id
RETURNING s.backfill_until IS NULL AS is_done, (SELECT count(*) FROM filled) AS delivered
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


_COLUMNS = """connector, operation, is_mutation, params_schema, result_schema, redact, shown, shows, look_up, keyed,
  key_lifetime, can_reconcile, can_fetch, timeout, settle, value, four_eyes_above"""
_TYPES = """connector text, operation text, is_mutation boolean, params_schema jsonb, result_schema jsonb,
    redact text[], shown text[], shows text, look_up text, keyed boolean, key_lifetime interval, can_reconcile boolean,
    can_fetch boolean, timeout interval, settle interval, value text, four_eyes_above numeric"""
_CHANGED = ", ".join(f"{name} = excluded.{name}" for name in _COLUMNS.replace("\n", "").replace(" ", "").split(",")[2:])

#: Insert operations that are new, and change those that differ if ``can_replace``. An equal one is not touched.
UPSERT = Statement[OperationNameRow](f"""
WITH declared AS (
  SELECT {_COLUMNS} FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS x({_TYPES})
)
INSERT INTO pipeline.operations AS o ({_COLUMNS})
SELECT {_COLUMNS} FROM declared d WHERE NOT EXISTS (
  SELECT FROM pipeline.operations known WHERE known.connector = d.connector AND known.operation = d.operation
    AND (NOT :can_replace OR to_jsonb(known) - 'registered_at' = to_jsonb(d)))
ORDER BY connector, operation
ON CONFLICT (connector, operation) DO UPDATE SET {_CHANGED}, registered_at = pipeline.clock() WHERE :can_replace
RETURNING o.connector, o.operation
""")
