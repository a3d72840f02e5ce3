"""Writes about the installation itself: which workers run, and samples of how the workflows stand.

Only operators read them. No decision does.
"""

from pipeline.domain.states import DeliveryStatus, RunStatus
from pipeline.store.database import Command, Statement
from pipeline.store.predicates import MUTATION_IN_DOUBT, PENDING_ORDER, is_of_handler, join_by_id
from pipeline.store.reads.work import distinct_values
from pipeline.store.rows import CountRow

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
  FROM waiting w JOIN pipeline.handlers h ON h.id = w.handler_id AND NOT h.retired
  CROSS JOIN LATERAL (SELECT count(*) AS number, min(d.event_id) AS oldest FROM (
    SELECT d.event_id FROM pipeline.deliveries d WHERE {is_of_handler("h.id")} AND d.event_id > h.low_watermark
      AND d.status = '{DeliveryStatus.PENDING}' ORDER BY {PENDING_ORDER} LIMIT :counted) d) d
  WHERE d.number > 0 GROUP BY h.workflow
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
