"""Guarded writes of events and deliveries. Only ``transitions`` may import this.

Every move into ``pending`` stamps the row with the transaction's id, so that a consumer whose last
prepare found nothing can tell what it cannot have seen.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.domain.states import DeliveryStatus, MutationOutcome, MutationStatus, Phase, RunStatus
from pipeline.domain.workflows import HandlerKind
from pipeline.store.database import Command, Statement, Transaction, encode_rows
from pipeline.store.functions import EVENT_COLUMNS, INSERT_EVENTS
from pipeline.store.predicates import IS_RESERVED_BY_KEY, OPEN_DELIVERY, UNOWNED_DELIVERY, added_cost
from pipeline.store.rows import CommittedRunRow, EventIdRow, PublishAnswerRow, ReleasedInputRow
from pipeline.store.schema import DeliveryRow

PUBLISH = Statement[PublishAnswerRow]("""
SELECT * FROM pipeline.publish(
  CAST(:workflow AS text), CAST(:topics AS jsonb), CAST(:rows AS jsonb), CAST(:is_replacing AS boolean))
""")


_BEGAN_AT = f"""CASE WHEN held.retry_of IS NULL THEN held.created_at ELSE (
            SELECT m.created_at FROM pipeline.mutations m
            WHERE m.id = held.mutation_id AND m.status = '{MutationStatus.APPLIED}') END"""


#: Everything a commit does, in one statement guarded by the run it belongs to: publish what the run
#: emitted, consume exactly what it reserved (what an operator skipped stays skipped), forget the handler's
#: failures, and let an ordered consumer that was idle behind a key of this run prepare again. ``caused_by``
#: is the set of root events of the run's inputs. A commit that publishes nothing waits for no deploy.
#: A commit ends the time in which a handler fails. A run that began earlier proves nothing, nor does one that took no
#: input. The retry of a run began when the mutation of that run did.
def _commit_sql(phase: Phase, kind: HandlerKind) -> str:
    return f"""
WITH requested AS (
  SELECT * FROM jsonb_to_recordset(CAST(:rows AS jsonb))
    AS x(run uuid, fence bigint, state jsonb, cost numeric, next_run_at timestamptz)
), emitted AS MATERIALIZED (
  SELECT * FROM jsonb_to_recordset(CAST(:events AS jsonb)) AS g({EVENT_COLUMNS})
), routes AS MATERIALIZED (
  SELECT t.* FROM (
    SELECT r.workflow, array_agg(DISTINCT g.topic) AS topics
    FROM emitted g JOIN pipeline.runs r ON r.id = g.run AND r.id = ANY(ARRAY(SELECT run FROM emitted))
    GROUP BY r.workflow ORDER BY r.workflow
  ) w CROSS JOIN LATERAL pipeline.routes(w.workflow, w.topics) t
), locked AS (
  SELECT r.id, r.workflow, r.handler_id, r.event_ids, r.mutation_id, r.retry_of, r.created_at
  FROM pipeline.runs r JOIN requested x ON x.run = r.id
  WHERE r.id = ANY(ARRAY(SELECT run FROM requested))
    AND r.fence = x.fence AND r.status = '{RunStatus.ACTIVE}' AND r.phase = '{phase}'
    AND (SELECT h.kind FROM pipeline.handlers h WHERE h.id = r.handler_id) = '{kind}'
    AND (SELECT count(*) FROM routes) >= 0
  ORDER BY r.id FOR NO KEY UPDATE OF r
), misdirected AS (
  SELECT g.run FROM emitted g JOIN locked l ON l.id = g.run
  LEFT JOIN routes t ON t.workflow = l.workflow AND t.name = g.topic WHERE t.name IS NULL
), held AS (
  SELECT l.* FROM locked l WHERE l.id <> ALL(ARRAY(SELECT run FROM misdirected))
), moved AS (
  UPDATE pipeline.runs r
  SET phase = '{Phase.COMMITTED}', status = '{RunStatus.COMMITTED}', finished_at = pipeline.clock(),
    lease_expires_at = NULL,
      output_state = x.state, cost = {added_cost("x")}
  FROM requested x, held h WHERE r.id = h.id AND x.run = h.id AND r.id = ANY(ARRAY(SELECT id FROM held))
  RETURNING r.*
), inputs AS MATERIALIZED (
  SELECT h.id, h.handler_id, input.event_id FROM held h, unnest(h.event_ids) AS input(event_id)
), consumed AS (
  UPDATE pipeline.deliveries d SET status = '{DeliveryStatus.CONSUMED}'
  WHERE d.event_id = ANY(ARRAY(SELECT event_id FROM inputs)) AND d.run_id = ANY(ARRAY(SELECT id FROM held))
    AND {IS_RESERVED_BY_KEY}
  RETURNING d.run_id
), roots AS (
  SELECT n.id AS run, (array_agg(DISTINCT root.id ORDER BY root.id))[1:32] AS caused_by
  FROM inputs n CROSS JOIN LATERAL (SELECT * FROM pipeline.events i WHERE i.id = n.event_id OFFSET 0) i,
  unnest(CASE WHEN i.caused_by = '{{}}' THEN ARRAY[i.id] ELSE i.caused_by END) AS root(id)
  WHERE n.id = ANY(ARRAY(SELECT run FROM emitted))
  GROUP BY n.id
), emitters AS MATERIALIZED (
  SELECT h.id, h.workflow, roots.caused_by FROM held h LEFT JOIN roots ON roots.run = h.id
), given AS (
  SELECT g.*, h.workflow, h.caused_by FROM emitted g JOIN emitters h ON h.id = g.run
), {INSERT_EVENTS}, calmed AS (
  UPDATE pipeline.handlers h SET consecutive_failures = 0, retry_at = NULL, unclaimed_since = NULL,
    next_run_at = coalesce(x.next_run_at, h.next_run_at),
    idle_snapshot = CASE WHEN NOT (h.ordered AND x.frees) THEN h.idle_snapshot END,
    failing_since = CASE WHEN (x.began_at > h.failing_since) IS NOT TRUE THEN h.failing_since END,
    failing_events = CASE WHEN (x.began_at > h.failing_since) IS NOT TRUE THEN h.failing_events END
  FROM (SELECT held.handler_id, max(requested.next_run_at) AS next_run_at, bool_or(held.event_ids <> '{{}}') AS frees,
          max({_BEGAN_AT}) FILTER (WHERE {kind == HandlerKind.PRODUCER} OR held.event_ids <> '{{}}') AS began_at
        FROM held JOIN requested ON requested.run = held.id GROUP BY held.handler_id) x
  WHERE h.id = ANY(ARRAY(SELECT handler_id FROM held)) AND h.id = x.handler_id
    AND (h.consecutive_failures > 0 OR x.next_run_at IS NOT NULL
    OR x.began_at > h.failing_since OR (h.ordered AND x.frees AND h.idle_snapshot IS NOT NULL))
)
SELECT m.*, coalesce(p.number, 0) AS published_count, pipeline.require_inputs(m.id, coalesce(c.number, 0),
  CASE m.mutation_outcome WHEN '{MutationOutcome.SKIPPED}' THEN 0 ELSE cardinality(m.event_ids) END)
FROM moved m
LEFT JOIN (SELECT run_id, count(*) AS number FROM consumed GROUP BY run_id) c ON c.run_id = m.id
LEFT JOIN (SELECT created_by_run_id AS run, count(*) AS number FROM fresh GROUP BY created_by_run_id) p ON p.run = m.id
ORDER BY m.id
"""


COMMIT = Statement[CommittedRunRow](_commit_sql(Phase.EMITTING, HandlerKind.CONSUMER))
COMMIT_PRODUCER = Statement[CommittedRunRow](_commit_sql(Phase.PREPARING, HandlerKind.PRODUCER))

#: Inputs of stopped runs: pending again (or set aside), no longer offered, visible as new. What waited
#: behind the key of a quarantined event was seen by no run.
RELEASE_INPUTS = Statement[ReleasedInputRow](f"""
WITH x AS (
  SELECT * FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS x(run uuid, handler_id integer, events bigint[],
    unheld boolean, quarantine boolean, error text, failed boolean, counts boolean, suspect boolean, delay interval,
    slice_limit integer)
), freed AS (
  UPDATE pipeline.handlers h SET idle_snapshot = NULL
  WHERE h.ordered AND h.idle_snapshot IS NOT NULL AND h.id = ANY(ARRAY(SELECT x.handler_id FROM x WHERE x.quarantine))
), inputs AS MATERIALIZED (
  SELECT x.*, input.event_id FROM x, unnest(x.events) AS input(event_id)
)
UPDATE pipeline.deliveries d
SET status = CASE WHEN x.quarantine THEN '{DeliveryStatus.QUARANTINED}' ELSE '{DeliveryStatus.PENDING}' END,
    error = CASE WHEN x.quarantine THEN x.error END, suspect = coalesce(x.suspect, d.suspect),
    run_id = NULL, offered_to = NULL, declined = false,
    failures = least(d.failures + CASE WHEN x.counts THEN 1 ELSE 0 END, 32767),
    failing_since = CASE WHEN x.failed THEN coalesce(d.failing_since, pipeline.clock()) ELSE d.failing_since END,
    slice_limit = CASE WHEN d.group_size IS NULL THEN least(d.slice_limit, x.slice_limit) END,
    narrowing_declined = d.narrowing_declined AND x.slice_limit IS NULL,
    available_at = CASE WHEN x.delay > interval '0' THEN pipeline.clock() + x.delay END,
    xid = pg_current_xact_id()
FROM inputs x
WHERE d.event_id = ANY(ARRAY(SELECT event_id FROM inputs)) AND d.event_id = x.event_id AND d.handler_id = x.handler_id
  AND ((d.status = '{DeliveryStatus.RESERVED}' AND d.run_id = x.run) OR (d.status = '{DeliveryStatus.PENDING}'
    AND d.offered_to = x.run)
    OR (d.status = '{DeliveryStatus.PENDING}' AND d.offered_to IS NULL AND x.unheld))
RETURNING d.event_id, d.status, x.run
""")

#: What a run has reserved: its inputs go with it.
_INPUTS = f"""
FROM pipeline.runs r, unnest(r.event_ids) AS input(event_id)
WHERE r.id = ANY(CAST(:ids AS uuid[])) AND d.event_id = input.event_id AND d.handler_id = r.handler_id
  AND d.run_id = r.id AND d.status = '{DeliveryStatus.RESERVED}'
RETURNING d.event_id
"""
SKIP_INPUTS = Statement[EventIdRow](f"UPDATE pipeline.deliveries d SET status = '{DeliveryStatus.SKIPPED}' {_INPUTS}")
CONSUME_INPUTS = Statement[EventIdRow](
    f"UPDATE pipeline.deliveries d SET status = '{DeliveryStatus.CONSUMED}' {_INPUTS}"
)
#: Offered again, the inputs of a run are one slice, which is not narrowed down (``domain.failures.narrowed_limit``).
KEEP_TOGETHER = Statement[EventIdRow](f"""
UPDATE pipeline.deliveries d
SET group_size = nullif(cardinality(r.event_ids), 1), slice_limit = NULL, narrowing_declined = false {_INPUTS}
""")

_ONE = "event_id = :event_id AND handler_id = :handler_id"
#: When failures are forgotten, nothing is narrowed down any more. Inputs that stay together do so whatever happens.
_FORGET_FAILURES = "failures = 0, failing_since = NULL, slice_limit = NULL, narrowing_declined = false"

LOCK_ONE = Statement[DeliveryRow](f"SELECT * FROM pipeline.deliveries WHERE {_ONE} FOR UPDATE")
SKIP_ONE = Statement[DeliveryRow](f"""
WITH freed AS (UPDATE pipeline.handlers SET idle_snapshot = NULL WHERE id = :handler_id AND ordered)
UPDATE pipeline.deliveries SET status = '{DeliveryStatus.SKIPPED}', offered_to = NULL
WHERE {_ONE} AND status IN {UNOWNED_DELIVERY} AND offered_to IS NULL RETURNING *
""")
QUARANTINE_ONE = Statement[DeliveryRow](f"""
WITH freed AS (UPDATE pipeline.handlers SET idle_snapshot = NULL WHERE id = :handler_id AND ordered)
UPDATE pipeline.deliveries SET status = '{DeliveryStatus.QUARANTINED}', error = :error
WHERE {_ONE} AND status = '{DeliveryStatus.PENDING}' AND offered_to IS NULL RETURNING *
""")
RELEASE_ONE = Statement[DeliveryRow](f"""
WITH lowered AS (
  UPDATE pipeline.handlers SET low_watermark = least(low_watermark, :event_id - 1) WHERE id = :handler_id
)
UPDATE pipeline.deliveries
SET status = '{DeliveryStatus.PENDING}', {_FORGET_FAILURES}, error = NULL,
  available_at = NULL, declined = false,
  xid = pg_current_xact_id()
WHERE {_ONE} AND status = '{DeliveryStatus.QUARANTINED}' RETURNING *
""")


def release_inputs(tx: Transaction, rows: Sequence[Mapping[str, Any]]) -> Sequence[ReleasedInputRow]:
    """Give the inputs of stopped runs back."""
    return tx.all(RELEASE_INPUTS, rows=encode_rows(rows))


RESET_EVENT_FAILURES = Command(f"""
UPDATE pipeline.deliveries d SET {_FORGET_FAILURES}
FROM pipeline.handlers h
WHERE h.workflow = :workflow AND d.handler_id = h.id AND d.failing_since IS NOT NULL AND d.status IN {OPEN_DELIVERY}
""")
