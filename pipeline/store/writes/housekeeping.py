"""Writes beside the state of work: audit, notices, sweeps, workers, samples, and what is no longer kept.

- Slots let one of several callers run a sweep. Cursors say where it goes on.
- Rows that a workflow no longer keeps are dropped page by page. Ids are ordered by time, so a page is a short scan of
  the primary key from where the last one ended, and no table needs an index for its pruning. Each statement reads one
  page, deletes the rows that may go, moves them to the archive where the workflow says so, and returns where the page
  ended. A row that some work still needs stays however old it is.
"""

from pipeline.domain.states import DeliveryStatus, RunStatus
from pipeline.store.database import Command, Statement, UnreadRow
from pipeline.store.functions import page_summary
from pipeline.store.predicates import DONE_DELIVERY, MUTATION_IN_DOUBT, PENDING_ORDER, is_of_handler, join_by_id
from pipeline.store.reads.attention import ATTENTION_ITEMS
from pipeline.store.reads.work import distinct_values
from pipeline.store.rows import ChainedRow, CountRow, CursorRow, PageRow, RetentionRow, SlotRow

INSERT_AUDIT = Command("""
INSERT INTO pipeline.audit (actor, act, claimed, workflow, run_id, mutation_id, event_id, reason, evidence)
VALUES (:actor, :act, :claimed, :workflow, :run_id, :mutation_id, :event_id, :reason, CAST(:evidence AS jsonb))
""")


INSERT_NOTICE = Command("""
INSERT INTO pipeline.notices (kind, subject) VALUES (:kind, :subject) ON CONFLICT DO NOTHING
""")

#: If the same thing needs an operator again, a new notice is sent.
DELETE_ENDED_NOTICES = Command(f"""
DELETE FROM pipeline.notices n WHERE (n.kind, n.subject) NOT IN (SELECT w.kind, w.subject FROM ({ATTENTION_ITEMS}) w)
""")
DELETE_NOTICE = Command("DELETE FROM pipeline.notices WHERE kind = :kind AND subject = :subject")


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


#: Taken before a page of events is read: a consumer that joins a topic fills itself from the events under the shared
#: lock (``LOCK_BACKFILL``), and must not be handed one that is on its way out.
LOCK_PRUNING = Statement[UnreadRow]("SELECT pg_advisory_xact_lock(hashtext('pipeline.backfill'))")

SHORTEST_RETENTION = Statement[RetentionRow](
    "SELECT min(keep_done) AS done, min(keep_ledger) AS ledger FROM pipeline.workflows"
)


_BY_NUMBER, _BY_UUID = page_summary("max(p.id)"), page_summary("max(CAST(p.id AS text))")

#: An event is done with when every consumer is, and has been for as long as the workflow wants it kept. What a consumer
#: that has joined its topic is yet to be handed stays. The inputs of
#: a mutation that is still monitored stay: if a late effect is found, they name the replacement run.
PRUNE_EVENTS = Statement[PageRow](f"""
WITH page AS MATERIALIZED (
  SELECT e.id, e.workflow, e.topic, e.created_at AS at, w.keep_done, w.archives
  FROM pipeline.events e LEFT JOIN pipeline.workflows w ON w.name = e.workflow
  WHERE e.id > CAST(:position AS bigint) ORDER BY e.id LIMIT :limit
), gone AS MATERIALIZED (
  SELECT p.id, p.archives FROM page p
  WHERE p.at < pipeline.clock() - p.keep_done AND NOT EXISTS (
    SELECT FROM pipeline.deliveries d LEFT JOIN pipeline.runs r ON r.id = d.run_id
    WHERE d.event_id = p.id AND (d.status NOT IN {DONE_DELIVERY} OR r.retry_pending
      OR (r.id IS NOT NULL AND r.finished_at IS NULL) OR r.finished_at >= pipeline.clock() - p.keep_done))
    AND NOT EXISTS (SELECT FROM pipeline.subscriptions s
      WHERE s.workflow = p.workflow AND s.topic = p.topic AND s.backfill_until >= p.id)
    AND p.id NOT IN (SELECT unnest(r.event_ids) FROM pipeline.mutations m JOIN pipeline.runs r ON r.id = m.run_id
                     WHERE m.next_monitor_at IS NOT NULL)
), delivered AS (
  DELETE FROM pipeline.deliveries d USING gone g WHERE d.event_id = g.id RETURNING d.*
), dropped AS (
  DELETE FROM pipeline.events e USING gone g WHERE e.id = g.id RETURNING e.*
), archived AS (
  INSERT INTO pipeline.archive (kind, id, workflow, content)
  SELECT 'event', CAST(x.id AS text), x.workflow,
    to_jsonb(x) || jsonb_build_object('deliveries', coalesce(l.listed, '[]'))
  FROM dropped x JOIN gone g ON g.id = x.id AND g.archives
  LEFT JOIN (SELECT event_id, jsonb_agg(to_jsonb(d)) AS listed FROM delivered d GROUP BY event_id) l
    ON l.event_id = x.id
)
{_BY_NUMBER}
""")

#: The ledger and the audit are deleted by functions of the schema only.
PRUNE_RUNS = Statement[PageRow]("""
SELECT * FROM pipeline.prune_runs(CAST(:position AS uuid), CAST(:limit AS integer), CAST(:shortest AS interval))
""")

PRUNE_SESSIONS = Statement[PageRow](f"""
WITH page AS MATERIALIZED (
  SELECT s.id, s.started_at AS at, s.finished_at, w.keep_done
  FROM pipeline.sessions s JOIN pipeline.workflows w ON w.name = s.workflow
  WHERE s.id > CAST(:position AS uuid) ORDER BY s.id LIMIT :limit
), dropped AS (
  DELETE FROM pipeline.sessions s USING page p
  WHERE s.id = p.id AND p.finished_at < pipeline.clock() - p.keep_done
    AND NOT EXISTS (SELECT FROM pipeline.runs r WHERE r.session_id = s.id)
  RETURNING s.id
)
{_BY_UUID}
""")

PRUNE_AUDIT = Statement[PageRow]("""
SELECT * FROM pipeline.prune_audit(CAST(:position AS bigint), CAST(:limit AS integer), CAST(:shortest AS interval))
""")

#: Costs nothing while every act is chained. The row is the head of the chain.
CHAIN_AUDIT = Statement[ChainedRow]("""
SELECT s.* FROM pipeline.chain_audit(CAST(:limit AS integer)) s
WHERE EXISTS (SELECT FROM pipeline.audit_links WHERE position IS NULL)
""")


#: A worker that was killed leaves its row. It is shown as gone for a while, and deleted by the next heartbeat.
RECORD_WORKER = Command("""
WITH gone AS (DELETE FROM pipeline.workers WHERE seen_at < pipeline.clock() - CAST(:kept AS interval) AND name <> :name)
INSERT INTO pipeline.workers (name, host, pid, pool, concurrency, queues, workflows, code_version, package_version)
VALUES (:name, :host, :pid, :pool, :concurrency, CAST(:queues AS text[]), CAST(:workflows AS jsonb), :code_version,
  :package_version)
ON CONFLICT (name) DO UPDATE SET seen_at = pipeline.clock(), concurrency = excluded.concurrency,
  queues = excluded.queues
""")
REMOVE_WORKER = Command("DELETE FROM pipeline.workers WHERE name = :name")

#: The smallest id that a run could have got a minute ago. A run of a transaction that is open now has a larger one.
_RECENT_RUN_ID = """CAST(lpad(to_hex(CAST(extract(epoch FROM clock_timestamp() - interval '1 minute') * 1000
      AS bigint)), 12, '0') || repeat('0', 20) AS uuid)"""
_WAITING = distinct_values("waiting", "handler_id", "pipeline.deliveries", f"o.status = '{DeliveryStatus.PENDING}'")
#: One sample of every workflow in which something happened or waits. The cost depends on that, and not on how many
#: workflows or how much history there is:
#:
#: - Events are counted from the last one of the sample before.
#: - A run that ended since then was open at that time, or was created since. So the ids of runs are searched from the
#:   oldest run that was active then. Runs that waited for approval are found by the time of the approval.
#:
#: Rows of a transaction that is open while the sample is taken may be counted by none.
TAKE_SAMPLE = Statement[CountRow](f"""
WITH RECURSIVE {_WAITING},
here AS MATERIALIZED (
  SELECT coalesce((SELECT e.id FROM pipeline.events e ORDER BY e.id DESC LIMIT 1), 0) AS event,
    least({_RECENT_RUN_ID}, (SELECT o.id FROM (
      SELECT r.id FROM pipeline.runs r WHERE r.finished_at IS NULL AND r.status = '{RunStatus.ACTIVE}' OFFSET 0
    ) o ORDER BY o.id LIMIT 1)) AS run
), mark AS MATERIALIZED (
  SELECT coalesce(CAST(c.position ->> 'at' AS timestamptz), pipeline.clock()) AS at,
    coalesce(CAST(c.position ->> 'event' AS bigint), h.event) AS event,
    coalesce(CAST(c.position ->> 'run' AS uuid), h.run) AS run
  FROM here h LEFT JOIN (
    SELECT CAST(position AS jsonb) AS position FROM pipeline.cursors WHERE name = 'samples') c ON true
), published AS (
  SELECT e.workflow, count(*) AS number FROM (
    SELECT e.workflow FROM pipeline.events e WHERE e.id > (SELECT event FROM mark) ORDER BY e.id LIMIT :limit
  ) e GROUP BY e.workflow
), ended AS (
  SELECT r.workflow, r.status, r.mutation_id FROM (
    SELECT r.* FROM pipeline.runs r WHERE r.id >= (SELECT run FROM mark) ORDER BY r.id DESC LIMIT :limit
  ) r WHERE r.finished_at > (SELECT at FROM mark)
  UNION ALL
  SELECT r.workflow, r.status, r.mutation_id FROM pipeline.mutations m {join_by_id("runs", "r", "m.run_id")}
  WHERE m.approved_at > (SELECT at FROM mark) - interval '1 hour' AND r.id < (SELECT run FROM mark)
    AND r.finished_at > (SELECT at FROM mark)
), runs AS (
  SELECT e.workflow, count(*) FILTER (WHERE e.status = '{RunStatus.COMMITTED}') AS committed,
    count(*) FILTER (WHERE e.status <> '{RunStatus.COMMITTED}') AS stopped, count(e.mutation_id) AS mutated,
    count(*) FILTER (WHERE e.status <> '{RunStatus.COMMITTED}' AND (
      SELECT m.doubted_at IS NOT NULL FROM pipeline.mutations m WHERE m.id = e.mutation_id)) AS uncertain
  FROM ended e GROUP BY e.workflow
), backlog AS (
  SELECT h.workflow, sum(d.number) AS number, min(d.oldest) AS oldest
  FROM waiting w {join_by_id("handlers", "h", "w.handler_id")}
  CROSS JOIN LATERAL (SELECT count(*) AS number, min(d.event_id) AS oldest FROM (
    SELECT d.event_id FROM pipeline.deliveries d WHERE {is_of_handler("h.id")} AND d.event_id > h.low_watermark
      AND d.status = '{DeliveryStatus.PENDING}' ORDER BY {PENDING_ORDER} LIMIT :counted) d) d
  WHERE d.number > 0 AND NOT h.retired GROUP BY h.workflow
), unresolved AS (
  SELECT m.workflow, count(*) AS number FROM pipeline.mutations m WHERE m.status IN {MUTATION_IN_DOUBT}
  GROUP BY m.workflow
), written AS (
  INSERT INTO pipeline.samples (workflow, span, published, committed, stopped, mutated, uncertain, backlog, oldest_at,
    unresolved)
  SELECT w.workflow, pipeline.clock() - (SELECT at FROM mark), coalesce(p.number, 0), coalesce(r.committed, 0),
    coalesce(r.stopped, 0), coalesce(r.mutated, 0), coalesce(r.uncertain, 0), coalesce(b.number, 0),
    (SELECT e.created_at FROM pipeline.events e WHERE e.id = b.oldest), coalesce(u.number, 0)
  FROM (
    SELECT workflow FROM published UNION SELECT workflow FROM runs UNION SELECT workflow FROM backlog
    UNION SELECT workflow FROM unresolved
  ) w LEFT JOIN published p USING (workflow) LEFT JOIN runs r USING (workflow) LEFT JOIN backlog b USING (workflow)
  LEFT JOIN unresolved u USING (workflow)
  ON CONFLICT DO NOTHING RETURNING 1
), marked AS (
  INSERT INTO pipeline.cursors (name, position)
  SELECT 'samples', jsonb_build_object('at', pipeline.clock(), 'event', h.event, 'run', h.run) FROM here h
  ON CONFLICT (name) DO UPDATE SET position = excluded.position
)
SELECT count(*) AS number FROM written
""")
DELETE_SAMPLES = Command("DELETE FROM pipeline.samples WHERE at < pipeline.clock() - CAST(:kept AS interval)")
