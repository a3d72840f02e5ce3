"""Writes beside the state of work: the audit, notices that were delivered, sweeps, and what is no longer kept.

- Slots let one of several callers run a sweep. Cursors say where it goes on.
- Rows that a workflow no longer keeps are dropped page by page. Ids are ordered by time, so a page is a short scan of
  the primary key from where the last one ended, and no table needs an index for its pruning. Each statement reads one
  page, deletes the rows that may go, moves them to the archive where the workflow says so, and returns where the page
  ended. A row that some work still needs stays however old it is.
"""

from pipeline.domain.states import RunStatus
from pipeline.store.database import Command, Statement, UnreadRow
from pipeline.store.predicates import DONE_DELIVERY
from pipeline.store.reads.attention import ATTENTION_ITEMS
from pipeline.store.rows import CursorRow, PageRow, RetentionRow, SlotRow

INSERT_AUDIT = Command("""
INSERT INTO pipeline.audit (actor, act, workflow, run_id, mutation_id, event_id, reason, evidence)
VALUES (:actor, :act, :workflow, :run_id, :mutation_id, :event_id, :reason, CAST(:evidence AS jsonb))
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


def _page_summary(last: str) -> str:
    """What a page tells of itself; ``last`` is the SQL of its greatest id."""
    return f"""
SELECT (SELECT count(*) FROM dropped) AS dropped, count(*) AS seen, {last} AS position,
  coalesce(max(p.at) > pipeline.clock() - CAST(:shortest AS interval), true) AS is_young
FROM page p
"""


_BY_NUMBER, _BY_UUID = _page_summary("max(p.id)"), _page_summary("max(CAST(p.id AS text))")

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

#: A run goes after its inputs and after its retry; with a mutation, when the ledger lets go. A mutation stays while an
#: input of it is open, also one that it released: the refusals in the ledger count the keys of a repeat.
#: A session that is still open gets the number and the cost of its deleted runs added.
PRUNE_RUNS = Statement[PageRow](f"""
WITH page AS MATERIALIZED (
  SELECT r.id, r.created_at AS at, w.keep_done, w.keep_ledger, w.archives
  FROM pipeline.runs r LEFT JOIN pipeline.workflows w ON w.name = r.workflow
  WHERE r.id > CAST(:position AS uuid) ORDER BY r.id LIMIT :limit
), gone AS MATERIALIZED (
  SELECT r.id, p.archives FROM page p JOIN pipeline.runs r ON r.id = p.id
  LEFT JOIN pipeline.mutations m ON m.id = r.mutation_id
  WHERE r.finished_at < pipeline.clock() - CASE WHEN m.id IS NULL THEN p.keep_done ELSE p.keep_ledger END
    AND NOT r.retry_pending
    AND (m.id IS NULL OR (m.resolved_at < pipeline.clock() - p.keep_ledger AND m.next_monitor_at IS NULL
      AND (m.found_late_at IS NULL OR m.acknowledged_by IS NOT NULL)))
    AND NOT EXISTS (SELECT FROM pipeline.blocks b WHERE b.run_id = r.id AND b.closed_at IS NULL)
    AND NOT EXISTS (SELECT FROM pipeline.runs c WHERE c.retry_of = r.id)
    AND NOT EXISTS (
      SELECT FROM unnest(r.event_ids) AS i(event_id)
      JOIN pipeline.deliveries d ON d.event_id = i.event_id AND d.handler_id = r.handler_id
      WHERE d.run_id = r.id OR (m.id IS NOT NULL AND d.status NOT IN {DONE_DELIVERY}))
), unblocked AS (
  DELETE FROM pipeline.blocks b USING gone g WHERE b.run_id = g.id
), settled AS (
  DELETE FROM pipeline.mutations m USING gone g WHERE m.run_id = g.id RETURNING m.*
), dropped AS (
  DELETE FROM pipeline.runs r USING gone g WHERE r.id = g.id RETURNING r.*
), numbered AS (
  SELECT session_id, count(*) FILTER (WHERE status = '{RunStatus.COMMITTED}') AS runs, sum(cost) AS cost
  FROM dropped GROUP BY session_id
), open AS (
  SELECT s.id FROM pipeline.sessions s WHERE s.finished_at IS NULL AND s.id IN (SELECT session_id FROM numbered)
  ORDER BY s.id FOR NO KEY UPDATE
), counted AS (
  UPDATE pipeline.sessions s SET run_count = coalesce(s.run_count, 0) + n.runs,
    cost = CASE WHEN n.cost IS NULL THEN s.cost ELSE coalesce(s.cost, 0) + n.cost END
  FROM numbered n JOIN open o ON o.id = n.session_id WHERE s.id = o.id
), archived AS (
  INSERT INTO pipeline.archive (kind, id, workflow, content)
  SELECT 'run', CAST(x.id AS text), x.workflow, to_jsonb(x) || jsonb_build_object('mutation', to_jsonb(s))
  FROM dropped x JOIN gone g ON g.id = x.id AND g.archives LEFT JOIN settled s ON s.run_id = x.id
)
{_BY_UUID}
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

#: An act stays at least as long as the mutation it is about. Acts that belong to no workflow stay.
PRUNE_AUDIT = Statement[PageRow](f"""
WITH page AS MATERIALIZED (
  SELECT a.id, a.at, a.mutation_id, w.keep_ledger, w.archives
  FROM pipeline.audit a LEFT JOIN pipeline.workflows w ON w.name = a.workflow
  WHERE a.id > CAST(:position AS bigint) ORDER BY a.id LIMIT :limit
), dropped AS (
  DELETE FROM pipeline.audit a USING page p
  WHERE a.id = p.id AND p.at < pipeline.clock() - p.keep_ledger
    AND NOT EXISTS (SELECT FROM pipeline.mutations m WHERE m.id = p.mutation_id)
  RETURNING a.*
), archived AS (
  INSERT INTO pipeline.archive (kind, id, workflow, content)
  SELECT 'audit', CAST(x.id AS text), x.workflow, to_jsonb(x)
  FROM dropped x JOIN page p ON p.id = x.id AND p.archives
)
{_BY_NUMBER}
""")
