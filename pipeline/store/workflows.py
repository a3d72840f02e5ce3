"""Guarded writes of workflows, handlers, topics, blocks, sessions and maintenance tasks.

Whoever starts or stops runs of a workflow locks its row first (``LOCK``); publishers and committing
workers never touch it. Only ``execution`` may import this.
"""

from sqlalchemy import text

from pipeline.store.waits import WAITS

LOCK = text("SELECT name FROM pipeline.workflows WHERE name = ANY(:names) ORDER BY name FOR NO KEY UPDATE")

LOCK_OF_RUNS = text("""
SELECT w.name FROM pipeline.workflows w
WHERE w.name IN (SELECT r.workflow FROM pipeline.runs r WHERE r.id = ANY(CAST(:ids AS uuid[])))
ORDER BY w.name FOR NO KEY UPDATE
""")

#: Whoever registers a workflow second sees what the first has written. Before any other lock, and taken by nobody else.
LOCK_REGISTRATION = text("SELECT pg_advisory_xact_lock(hashtext('pipeline.register'), hashtext(:name))")

UPSERT = text("""
INSERT INTO pipeline.workflows
  (name, version, fingerprint, releases, concurrency, on_uncertain, on_logic_error, keep_done, keep_ledger, archives)
VALUES (:name, :version, :fingerprint, CAST(:releases AS text[]), :concurrency, :on_uncertain, :on_logic_error,
  :keep_done, :keep_ledger, :archives)
ON CONFLICT (name) DO UPDATE SET version = excluded.version, fingerprint = excluded.fingerprint,
  releases = excluded.releases, concurrency = excluded.concurrency,
  on_uncertain = excluded.on_uncertain, on_logic_error = excluded.on_logic_error,
  keep_done = excluded.keep_done, keep_ledger = excluded.keep_ledger, archives = excluded.archives
""")

UPSERT_TOPICS = text("""
INSERT INTO pipeline.topics (workflow, name, schema)
SELECT :workflow, x.name, x.schema
FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS x(name text, schema jsonb)
ON CONFLICT (workflow, name) DO UPDATE SET schema = excluded.schema
""")

ADD_TOPICS = text("""
INSERT INTO pipeline.topics (workflow, name, schema)
SELECT :workflow, x.name, x.schema
FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS x(name text, schema jsonb)
ON CONFLICT (workflow, name) DO NOTHING
""")

_UPSERT_HANDLERS = """
INSERT INTO pipeline.handlers (workflow, name, kind, batch, ordered, after_failed_mutation, failure_policy, schedule,
                               next_run_at)
SELECT :workflow, x.name, x.kind, x.batch, x.ordered, x.after_failed_mutation, x.failure_policy, x.schedule,
  x.first_run_at
FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS x(name text, kind text, batch integer, ordered boolean,
  after_failed_mutation text, failure_policy jsonb, schedule text, first_run_at timestamptz)
ON CONFLICT (workflow, name) DO UPDATE SET kind = excluded.kind, batch = excluded.batch, ordered = excluded.ordered,
  after_failed_mutation = excluded.after_failed_mutation, failure_policy = excluded.failure_policy, retired = false,
  schedule = excluded.schedule,
  next_run_at = CASE WHEN handlers.schedule IS DISTINCT FROM excluded.schedule THEN excluded.next_run_at
                     ELSE coalesce(handlers.next_run_at, excluded.next_run_at) END
"""
UPSERT_HANDLERS = text(_UPSERT_HANDLERS)

#: What another release has as well is left as that one wants it.
GIVE_BACK_HANDLERS = text(f"{_UPSERT_HANDLERS} WHERE handlers.retired")

RETIRE_HANDLERS = text("""
UPDATE pipeline.handlers SET retired = true
WHERE workflow = :workflow AND name <> ALL(CAST(:names AS text[])) AND NOT retired
""")

LOOK_AGAIN = text("""
WITH woken AS (
  UPDATE pipeline.handlers SET idle_snapshot = NULL WHERE workflow = :workflow RETURNING id
)
UPDATE pipeline.deliveries d SET declined = false FROM woken h
WHERE d.handler_id = h.id AND d.status = 'pending' AND d.declined
""")

#: Waits for every open publisher and makes later ones see the new subscriptions: the backfill that
#: follows can then neither miss an event nor deliver it twice.
LOCK_SUBSCRIPTIONS = text("LOCK TABLE pipeline.subscriptions IN ACCESS EXCLUSIVE MODE")

INSERT_SUBSCRIPTION = text("""
INSERT INTO pipeline.subscriptions (workflow, topic, handler_id) VALUES (:workflow, :topic, :handler_id)
ON CONFLICT DO NOTHING
""")

DELETE_SUBSCRIPTION = text("""
DELETE FROM pipeline.subscriptions WHERE workflow = :workflow AND topic = :topic AND handler_id = :handler_id
""")

BACKFILL = text("""
WITH filled AS (
  INSERT INTO pipeline.deliveries (event_id, handler_id, key)
  SELECT e.id, :handler_id, e.key FROM pipeline.events e WHERE e.workflow = :workflow AND e.topic = :topic
  ORDER BY e.id ON CONFLICT DO NOTHING RETURNING event_id
)
UPDATE pipeline.handlers SET low_watermark = 0 WHERE id = :handler_id AND EXISTS (SELECT FROM filled)
""")

SET_STATE = text("UPDATE pipeline.handlers SET state = CAST(:state AS jsonb) WHERE id = :id")
LOCK_STATES = text("""
SELECT id, state FROM pipeline.handlers WHERE id = ANY(:ids) ORDER BY id FOR NO KEY UPDATE
""")
#: Read after the states are locked: whoever else has written one was registered before.
SHARED_STATES = text("""
SELECT h.workflow, h.name FROM pipeline.handlers h JOIN pipeline.workflows w ON w.name = h.workflow
WHERE h.id = ANY(:ids) AND (w.concurrency > 1 OR w.on_uncertain = 'contain') ORDER BY h.id
""")

#: Called for handlers that run alone. What is over waits for nothing: a rest without failures would mean that no
#: worker takes its runs.
BACK_OFF = text("""
UPDATE pipeline.handlers h
SET consecutive_failures = CASE WHEN x.is_over THEN 0 ELSE h.consecutive_failures + x.failures END,
    retry_at = CASE WHEN NOT x.is_over THEN greatest(h.retry_at, pipeline.clock() + x.delay) END
FROM (
  SELECT handler_id, count(*) AS failures, max(delay) AS delay, bool_and(is_over) AS is_over
  FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS g(handler_id integer, delay interval, is_over boolean)
  GROUP BY handler_id
) x
WHERE h.id = x.handler_id
""")

#: No worker takes the runs of these handlers: each rests the longer the longer its work has waited. A rest without
#: failures is how such a handler is known, so failures of code that no worker has are forgotten.
REST = text("""
UPDATE pipeline.handlers h
SET consecutive_failures = 0, retry_at = greatest(h.retry_at, pipeline.clock() +
  least(greatest((pipeline.clock() - coalesce((
    SELECT e.created_at FROM pipeline.deliveries d JOIN pipeline.events e ON e.id = d.event_id
    WHERE d.handler_id = h.id AND d.status = 'pending' AND d.event_id > h.low_watermark ORDER BY d.event_id LIMIT 1),
    h.next_run_at)) / 2, interval '1 minute'), interval '10 minutes'))
WHERE h.id = ANY(:ids) AND NOT h.retired
""")
HEARD = text("""
UPDATE pipeline.handlers SET retry_at = NULL
WHERE id = ANY(:ids) AND retry_at IS NOT NULL AND consecutive_failures = 0
""")

FORGIVE = text("""
UPDATE pipeline.handlers SET consecutive_failures = 0, retry_at = NULL
WHERE workflow = :workflow AND (consecutive_failures > 0 OR retry_at IS NOT NULL)
""")

#: The run that carries such a run forward counts from 1 again.
FORGIVE_RUNS = text("""
UPDATE pipeline.runs SET attempt = 0, retry_at = NULL WHERE workflow = :workflow AND retry_pending
""")
FORGIVE_EVENTS = text("""
UPDATE pipeline.deliveries d SET failures = 0 FROM pipeline.handlers h
WHERE h.workflow = :workflow AND d.handler_id = h.id AND d.failures > 0 AND d.status IN ('pending', 'reserved')
""")

#: Read before the transaction has an id of its own: every transaction that has taken an event id up to
#: this one got its own id earlier, and so has a smaller one than this transaction is about to get.
HORIZON = text("SELECT last_value, pg_current_xact_id_if_assigned() IS NULL AS is_first FROM pipeline.event_ids")

#: The previous horizon has passed once every transaction that could hold an id below it has ended. One that a dump
#: brought along from a cluster that was further on never would: it is noted anew.
RAISE_WATERMARKS = text("""
UPDATE pipeline.handlers h SET low_watermark = greatest(h.low_watermark, least(h.horizon, o.oldest - 1))
FROM (
  SELECT w.id, least(
    (SELECT min(event_id) FROM pipeline.deliveries WHERE handler_id = w.id AND status = 'pending'),
    (SELECT min(event_id) FROM pipeline.deliveries WHERE handler_id = w.id AND status = 'reserved'),
    9223372036854775807) AS oldest
  FROM pipeline.handlers w
) o
WHERE o.id = h.id AND h.horizon_xmax <= pg_snapshot_xmin(pg_current_snapshot())
""")
SET_HORIZON = text("""
UPDATE pipeline.handlers SET horizon = :horizon, horizon_xmax = pg_current_xact_id()
WHERE horizon IS NULL OR horizon_xmax <= pg_snapshot_xmin(pg_current_snapshot())
  OR horizon_xmax > pg_snapshot_xmax(pg_current_snapshot())
""")

#: A snapshot of another cluster: forgotten before this one gets as far, when it would hide what came meanwhile.
FORGET_STRANGE_SNAPSHOTS = text("""
UPDATE pipeline.handlers SET idle_snapshot = NULL
WHERE pg_snapshot_xmax(idle_snapshot) > pg_snapshot_xmax(pg_current_snapshot())
""")
LOCK_HANDLERS = text("SELECT id FROM pipeline.handlers ORDER BY id FOR NO KEY UPDATE")

SET_DESIRED = text("""
UPDATE pipeline.workflows SET desired = :desired WHERE name = :name AND desired <> :desired RETURNING name
""")

ENTER_MAINTENANCE = text("""
UPDATE pipeline.workflows SET maintenance = true, maintenance_reason = :reason, maintenance_since = pipeline.clock()
WHERE name = :name AND NOT maintenance RETURNING name
""")
EXIT_MAINTENANCE = text("""
WITH closed AS (
  UPDATE pipeline.maintenance_tasks SET closed_at = pipeline.clock() WHERE workflow = :name AND closed_at IS NULL
)
UPDATE pipeline.workflows SET maintenance = false, maintenance_reason = NULL, maintenance_since = NULL
WHERE name = :name AND maintenance RETURNING name
""")
OPEN_TASK = text("""
INSERT INTO pipeline.maintenance_tasks (workflow, reason)
SELECT name, coalesce(maintenance_reason, '') FROM pipeline.workflows WHERE name = :name AND maintenance
ON CONFLICT (workflow) WHERE closed_at IS NULL DO NOTHING RETURNING id
""")

INSERT_BLOCKS = text("""
INSERT INTO pipeline.blocks (workflow, run_id, kind, reason)
SELECT x.workflow, x.run, x.kind, x.reason
FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS x(workflow text, run uuid, kind text, reason text)
ON CONFLICT (run_id, kind) WHERE closed_at IS NULL DO NOTHING RETURNING *
""")
CLOSE_BLOCKS = text("""
UPDATE pipeline.blocks SET closed_at = pipeline.clock()
WHERE workflow = :workflow AND kind = ANY(:kinds) AND closed_at IS NULL RETURNING *
""")

OPEN_SESSION = text("""
WITH opened AS (
  INSERT INTO pipeline.sessions (workflow) VALUES (:workflow)
  ON CONFLICT (workflow) WHERE finished_at IS NULL DO NOTHING RETURNING id
)
SELECT id FROM opened UNION ALL
SELECT id FROM pipeline.sessions WHERE workflow = :workflow AND finished_at IS NULL LIMIT 1
""")

DISCARD_SESSION = text("""
DELETE FROM pipeline.sessions s
WHERE s.id = :id AND NOT EXISTS (SELECT FROM pipeline.runs r WHERE r.session_id = s.id)
""")

LOCK_OF_SESSIONS = text("""
SELECT w.name FROM pipeline.workflows w
WHERE w.name IN (SELECT s.workflow FROM pipeline.sessions s WHERE s.id = ANY(CAST(:ids AS uuid[])))
ORDER BY w.name FOR NO KEY UPDATE
""")

#: Taken before a session is ended, after its runs: what retention drops at the same moment is then counted once.
LOCK_SESSIONS = text("""
SELECT id FROM pipeline.sessions WHERE id = ANY(CAST(:ids AS uuid[])) AND finished_at IS NULL
ORDER BY id FOR NO KEY UPDATE
""")

MOST_COUNTED = 10_000


def _of_runs(number: str) -> str:
    """A number of a session's runs; NULL when there are too many to be read while the workflow is locked."""
    read = f"SELECT status, cost FROM pipeline.runs WHERE session_id = s.id LIMIT {MOST_COUNTED} + 1"
    return f"(SELECT CASE WHEN count(*) <= {MOST_COUNTED} THEN {number} END FROM ({read}) r)"


#: Retention has told the session of the runs that it dropped.
_RUN_COUNT = _of_runs("coalesce(s.run_count, 0) + count(*) FILTER (WHERE r.status = 'committed')")
_RUN_COST = _of_runs("coalesce(sum(r.cost) + coalesce(s.cost, 0), s.cost)")
END_SESSIONS = text(f"""
UPDATE pipeline.sessions s
SET finished_at = pipeline.clock(), result = 'failed', error = x.error, run_count = {_RUN_COUNT}, cost = {_RUN_COST}
FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS x(session_id uuid, error text)
WHERE s.id = x.session_id AND s.finished_at IS NULL RETURNING s.*
""")
FINISH_SESSIONS = text(f"""
UPDATE pipeline.sessions s
SET finished_at = pipeline.clock(), result = 'completed', run_count = {_RUN_COUNT}, cost = {_RUN_COST}
WHERE s.id = ANY(CAST(:ids AS uuid[])) AND s.finished_at IS NULL
  AND EXISTS (SELECT FROM pipeline.runs r WHERE r.session_id = s.id)
  AND NOT EXISTS (SELECT FROM pipeline.runs r
    WHERE r.workflow = s.workflow AND r.session_id = s.id AND r.finished_at IS NULL)
RETURNING s.*
""")

#: A last run that lies in the future is from before Postgres's clock was set back. One that lies there by less than
#: the pause may be of a transaction that began a moment after this one.
TAKE_SLOT = text("""
INSERT INTO pipeline.sweeps (name, last_run_at) VALUES (:name, pipeline.clock())
ON CONFLICT (name) DO UPDATE SET last_run_at = excluded.last_run_at
WHERE sweeps.last_run_at <= pipeline.clock() - :pause OR sweeps.last_run_at > pipeline.clock() + :pause RETURNING name
""")
REPORT_SLOT = text("UPDATE pipeline.sweeps SET report = CAST(:report AS jsonb) WHERE name = :name")

INSERT_NOTICE = text("""
INSERT INTO pipeline.notices (kind, subject) VALUES (:kind, :subject) ON CONFLICT DO NOTHING
""")

#: People are told again if it comes to that again.
FORGET_NOTICES_OF_THE_PAST = text(f"""
DELETE FROM pipeline.notices n WHERE (n.kind, n.subject) NOT IN (SELECT w.kind, w.subject FROM ({WAITS}) w)
""")
FORGET_NOTICE = text("DELETE FROM pipeline.notices WHERE kind = :kind AND subject = :subject")

INSERT_AUDIT = text("""
INSERT INTO pipeline.audit (actor, act, workflow, run_id, mutation_id, event_id, reason, evidence)
VALUES (:actor, :act, :workflow, :run_id, :mutation_id, :event_id, :reason, CAST(:evidence AS jsonb))
""")
