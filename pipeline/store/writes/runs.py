"""Guarded writes of runs. Each statement takes a cohort and names, row by row, the state it expects.

A statement locks the rows it will write in id order, writes only those whose guard holds, and
returns them: a run that is missing from the result was refused. Only ``transitions`` may import this.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any
from uuid import UUID

from pipeline.domain.renames import NameKind
from pipeline.domain.states import DeliveryStatus, MutationOutcome, MutationStatus, Phase, RunStatus
from pipeline.domain.workflows import DesiredStatus, HandlerKind
from pipeline.store.database import Command, RowT, Statement, Transaction
from pipeline.store.predicates import (
    AFTER_MUTATION,
    BEFORE_PREPARED,
    DECLINED_ORDER,
    HELD_INPUT,
    IS_AVAILABLE,
    IS_LEASE_IN_FUTURE,
    IS_OUTCOME_KNOWN,
    IS_PENDING_BY_KEY,
    IS_RETRY_DUE,
    IS_UNCLAIMED,
    PENDING_ORDER,
    added_cost,
    handler_columns,
    is_in_next_slice,
    is_key_free,
    is_of_handler,
    is_subscribed,
    sql_list,
)
from pipeline.store.rows import (
    ClaimedRunRow,
    NamedRunRow,
    OfferedEvent,
    RunFactsRow,
    RunIdRow,
    RunOfWorkflowRow,
    RunWithMutationRow,
    ShownEventsRow,
    StartedRunRow,
    UnclaimedRunRow,
)
from pipeline.store.schema import RunRow
from pipeline.store.writes.sessions import TURN, session_parts

#: Handlers or topics as (workflow, name); None: every one.
KnownNames = Collection[tuple[str, str]] | None

_REQUESTED = "requested AS (SELECT * FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS x({columns}))"

_PREPARED_COLUMNS = (
    "run uuid, fence bigint, events bigint[], topics text[], result jsonb, wake_at timestamptz, cost numeric"
)
_STOPPED_COLUMNS = (
    "run uuid, status text, error text, error_type text, error_frames text, retry_pending boolean, delay interval, "
    "cost numeric"
)

_IS_CONSUMER = f"""(
  SELECT h.kind = '{HandlerKind.CONSUMER}' FROM pipeline.handlers h WHERE h.id = r.handler_id)"""

# What a row of a large table is set to is found in an object by its key: a join could read the whole table.
# An array is unnested in a MATERIALIZED part of its own before anything is joined to it, and a cohort's rows
# are named by an array: both keep the planner on primary keys when it knows nothing of a table yet. Events of large
# batches are compared by IN (...) IS TRUE: it is hashed, where a join could become a loop in a loop.

#: The rows of a cohort whose worker still holds them, locked in id order.
_HELD = f"""held AS (
  SELECT r.id, r.workflow, r.handler_id, r.offered, r.snapshot, r.started_at
  FROM pipeline.runs r JOIN requested x ON x.run = r.id
  WHERE r.id = ANY(ARRAY(SELECT run FROM requested)) AND r.fence = x.fence AND r.status = '{RunStatus.ACTIVE}'
    AND {{guard}}
  ORDER BY r.id FOR NO KEY UPDATE OF r
)"""


#: The topic's uid and the message id of each event that a run has pinned.
_INPUTS = """(SELECT jsonb_agg(jsonb_build_array(
             (SELECT t.uid FROM pipeline.topics t WHERE t.workflow = e.workflow AND t.name = e.topic), e.message_id))
           FROM unnest(r.event_ids) AS input(event_id)
           CROSS JOIN LATERAL (SELECT * FROM pipeline.events e WHERE e.id = input.event_id OFFSET 0) e)"""

#: The claimer's code has every topic of the handler by its present name. With a former one it would find no event, and
#: call that idle. Few topics were ever renamed, and only a prepare reads topics.
_KNOWS_TOPICS = f"""NOT EXISTS (
  SELECT FROM pipeline.renames n JOIN pipeline.subscriptions s
    ON s.workflow = n.workflow AND s.topic = n.name AND s.handler_id = r.handler_id
  WHERE n.kind = '{NameKind.TOPIC}' AND n.workflow = r.workflow
    AND n.workflow || chr(31) || n.name <> ALL(CAST(:known_topics AS text[])))"""
_CAN_READ_TOPICS = f"(r.phase NOT IN {BEFORE_PREPARED} OR {_KNOWS_TOPICS})"


_OFFERED_COLUMNS = ["d.failures" if name == "failures" else f"e.{name}" for name in OfferedEvent._fields]
_NOTHING = "CAST(NULL AS jsonb)"
#: The pending events that a run was offered, oldest first; NULL for a run that chooses among all of its consumer.
_OFFERED = f"""CASE WHEN r.offered IS NOT NULL THEN (
    SELECT coalesce(jsonb_agg(jsonb_build_array({", ".join(_OFFERED_COLUMNS)}) ORDER BY e.id), '[]')
    FROM unnest(r.offered) AS offer(event_id) CROSS JOIN LATERAL (
      SELECT * FROM pipeline.deliveries d WHERE d.event_id = offer.event_id AND d.handler_id = r.handler_id OFFSET 0
    ) d CROSS JOIN LATERAL (SELECT * FROM pipeline.events e WHERE e.id = d.event_id OFFSET 0) e
    WHERE d.status = '{DeliveryStatus.PENDING}' AND d.offered_to = r.id) END"""


def _claim_sql(guard: str, phase: str, *, inputs: str = _NOTHING, offered: str = _NOTHING) -> str:
    """Return the SQL of a claim: the worker whose statement updates a free run holds it.

    Its transaction may have begun before the run was made. ``now`` is not before that, or a slot would be taken twice.
    """
    return f"""
WITH free AS (
  SELECT r.id, m.status AS mutation_status, m.result AS mutation_result, h.name AS handler, h.uid AS handler_uid,
    h.state AS handler_state, h.ordered, h.low_watermark, h.next_run_at, {IS_UNCLAIMED} AS is_unclaimed
  FROM pipeline.runs r
  CROSS JOIN LATERAL (SELECT * FROM pipeline.handlers h WHERE h.id = r.handler_id OFFSET 0) h
  LEFT JOIN LATERAL (SELECT * FROM pipeline.mutations m WHERE m.id = r.mutation_id OFFSET 0) m ON true
  WHERE r.id = ANY(CAST(:ids AS uuid[])) AND r.status = '{RunStatus.ACTIVE}' AND r.lease_expires_at IS NULL AND {guard}
    AND (CAST(:known_handlers AS text[]) IS NULL
      OR (r.workflow || chr(31) || h.name = ANY(CAST(:known_handlers AS text[])) AND {_CAN_READ_TOPICS}))
  ORDER BY r.id FOR NO KEY UPDATE OF r SKIP LOCKED
)
UPDATE pipeline.runs r
SET phase = {phase}, fence = r.fence + 1, worker = :worker,
    lease_expires_at = pipeline.clock() + CAST(:lease AS interval), lease_duration = CAST(:lease AS interval),
    started_at = coalesce(r.started_at, pipeline.clock()), snapshot = coalesce(r.snapshot, pg_current_snapshot())
FROM free
WHERE r.id = free.id AND r.id = ANY(ARRAY(SELECT id FROM free))
RETURNING r.*, free.mutation_status, free.mutation_result, free.handler, free.handler_uid, free.handler_state,
          free.ordered, free.low_watermark, free.next_run_at, free.is_unclaimed,
          {inputs} AS inputs, {offered} AS offered_events,
          greatest(pipeline.clock(), r.created_at) AS now
"""


CLAIM_PREPARE = Statement[ClaimedRunRow](
    _claim_sql(
        f"r.phase IN {BEFORE_PREPARED} AND h.kind = '{HandlerKind.CONSUMER}'", f"'{Phase.PREPARING}'", offered=_OFFERED
    )
)
CLAIM_PRODUCE = Statement[ClaimedRunRow](
    _claim_sql(f"r.phase IN {BEFORE_PREPARED} AND h.kind = '{HandlerKind.PRODUCER}'", f"'{Phase.PREPARING}'")
)
CLAIM_MUTATE = Statement[ClaimedRunRow](
    _claim_sql(
        f"""((r.phase = '{Phase.PREPARED}' AND r.event_ids <> '{{}}')
    OR (r.phase = '{Phase.MUTATING}' AND m.status = '{MutationStatus.PENDING}' AND m.approved_at IS NOT NULL
    AND (SELECT w.desired = '{DesiredStatus.ACTIVE}' AND NOT w.maintenance FROM pipeline.workflows w
      WHERE w.name = r.workflow)
    AND (SELECT true FROM pipeline.blocks b WHERE b.workflow = r.workflow AND b.closed_at IS NULL LIMIT 1) IS NULL))""",
        "r.phase",
        inputs=_INPUTS,
    )
)
CLAIM_NEXT = Statement[ClaimedRunRow](
    _claim_sql(
        f"((r.phase IN {AFTER_MUTATION} AND r.mutation_outcome <> '{MutationOutcome.FAILURE}') "
        f"OR (r.phase = '{Phase.PREPARED}' AND r.event_ids = '{{}}'))",
        f"'{Phase.EMITTING}'",
    )
)

_IS_AVAILABLE = f"d.event_id > :low_watermark AND {IS_AVAILABLE}"
_BATCH = "CAST(:batch AS integer)"
_IS_KEY_FREE = is_key_free(ordered=":ordered", handler=":handler_id", workflow=":workflow")

#: 1. Each run gets events that no run declined, filled up with declined ones.
#: 2. Of an ordered key it gets all events before them.
#: 3. It never gets a slice in which every event was declined.
#: 4. Events that are being narrowed down are offered with their like, in slices of at most ``slice_limit``. In a key
#:    the first event's limit counts. If prepare declined the smaller slice, they are offered with their like, in whole
#:    slices.
#: 5. A group is offered as it is, without others.
#: 6. ``has_more``: there are more slices of events that no run declined, or the window did not show all of them.
_SLICING = "d.slice_limit, d.group_size, d.narrowing_declined"
INSERT_SLICED = Statement[StartedRunRow](f"""
WITH fresh AS (
  SELECT d.event_id, d.key, d.declined, d.suspect, {_SLICING} FROM pipeline.deliveries d
  WHERE {is_of_handler(":handler_id")} AND d.status = '{DeliveryStatus.PENDING}' AND d.offered_to IS NULL
    AND NOT d.declined
    AND {_IS_AVAILABLE} AND {_IS_KEY_FREE}
    AND {is_in_next_slice(ordered=":ordered", handler=":handler_id", batch=_BATCH)}
      AND {is_subscribed(ordered=":ordered")}
  ORDER BY {PENDING_ORDER} LIMIT :window FOR UPDATE OF d
), declined AS (
  SELECT d.event_id, d.key, d.declined, d.suspect, {_SLICING} FROM pipeline.deliveries d
  WHERE (NOT CAST(:ordered AS boolean) OR d.key IS NULL) AND {is_of_handler(":handler_id")}
    AND d.status = '{DeliveryStatus.PENDING}' AND d.offered_to IS NULL AND d.declined AND {_IS_AVAILABLE}
  ORDER BY {DECLINED_ORDER} LIMIT :window FOR UPDATE OF d
), before_fresh AS (
  SELECT d.event_id, d.key, d.declined, d.suspect, {_SLICING} FROM pipeline.deliveries d
  WHERE :ordered AND {is_of_handler(":handler_id")} AND d.status = '{DeliveryStatus.PENDING}'
    AND d.offered_to IS NULL AND d.declined
    AND {_IS_AVAILABLE} AND {_IS_KEY_FREE} AND d.key IN (SELECT key FROM fresh)
    AND ((SELECT count(*) FROM fresh) < :window OR d.event_id < (SELECT max(event_id) FROM fresh))
  ORDER BY {DECLINED_ORDER} FOR UPDATE OF d
), candidates AS (
  SELECT * FROM fresh UNION ALL SELECT * FROM declined UNION ALL SELECT * FROM before_fresh
), grouped AS (
  SELECT event_id, declined, suspect, coalesce(slice_limit, group_size) AS size_limit,
    CASE WHEN :ordered AND key IS NOT NULL THEN 'key ' || key ELSE
      format('slice %s %s %s ', slice_limit, group_size, narrowing_declined) ||
    (row_number() OVER (PARTITION BY slice_limit, group_size, narrowing_declined, :ordered AND key IS NOT NULL
      ORDER BY declined, event_id) - 1)
    / least(slice_limit, group_size, {_BATCH}) END AS slice
  FROM candidates
), placed AS (
  SELECT *, row_number() OVER (PARTITION BY slice ORDER BY event_id) AS place,
    least(first_value(size_limit) OVER (PARTITION BY slice ORDER BY event_id), {_BATCH}) AS size
  FROM grouped
), slices AS (
  SELECT array_agg(event_id ORDER BY event_id) AS event_ids, bool_or(suspect) AS suspect,
         bool_and(declined) AS is_declined
  FROM placed WHERE place <= size GROUP BY slice HAVING NOT (:ordered AND bool_and(declined))
), chosen AS (
  SELECT pipeline.uuid7() AS id, event_ids, suspect FROM slices ORDER BY is_declined, event_ids[1] LIMIT :count
), {TURN}, {session_parts("EXISTS (SELECT FROM chosen)")}, created AS (
  INSERT INTO pipeline.runs (id, workflow, handler_id, session_id, offered, dispatched_at, traceparent)
  SELECT s.id, :workflow, :handler_id, session.id, s.event_ids, pipeline.clock(),
         (SELECT e.traceparent FROM pipeline.events e WHERE e.id = s.event_ids[1] AND e.created_by_run_id IS NULL)
  FROM chosen s, session
  RETURNING *
), places AS MATERIALIZED (
  SELECT s.id, offered.event_id FROM chosen s, unnest(s.event_ids) AS offered(event_id)
), offers AS (
  UPDATE pipeline.deliveries d SET offered_to =
    CAST((SELECT jsonb_object_agg(event_id, id) FROM places) ->> CAST(d.event_id AS text) AS uuid)
  WHERE d.event_id = ANY(ARRAY(SELECT event_id FROM places)) AND d.handler_id = :handler_id
)
SELECT c.*, s.suspect, {handler_columns("c")}, (
    (SELECT count(*) FROM slices WHERE NOT is_declined) > :count OR (SELECT count(*) FROM fresh) >= :window
  ) AS has_more
FROM created c JOIN chosen s ON s.id = c.id ORDER BY c.offered[1]
""")

#: A run that sees everything takes the trace of the event that waits first: most runs begin with it. Among others it
#: waits for those that are still choosing, so that none is offered what it sees; what they have chosen is theirs.
#: A commit ends a run and books the next slot without the workflow's lock. So one snapshot must show both: that no run
#: is active, and that the slot is still to be taken.
INSERT_UNSLICED = Statement[StartedRunRow](f"""
WITH wanted AS MATERIALIZED (SELECT (
  SELECT (SELECT e.traceparent FROM pipeline.events e WHERE e.id = d.event_id AND e.created_by_run_id IS NULL)
  FROM pipeline.deliveries d
  WHERE {is_of_handler(":handler_id")} AND d.status = '{DeliveryStatus.PENDING}' AND d.offered_to IS NULL
    AND d.event_id > (SELECT low_watermark FROM pipeline.handlers WHERE id = :handler_id)
    AND {IS_AVAILABLE}
  ORDER BY {PENDING_ORDER} LIMIT 1) AS traceparent
  WHERE NOT EXISTS (
    SELECT FROM pipeline.runs WHERE workflow = :workflow AND handler_id = :handler_id AND finished_at IS NULL
      AND status = '{RunStatus.ACTIVE}' AND (CAST(:is_single AS boolean) OR phase IN {BEFORE_PREPARED}))
    AND (CAST(:slot AS timestamptz) IS NULL
      OR (SELECT next_run_at FROM pipeline.handlers WHERE id = :handler_id) = CAST(:slot AS timestamptz))
), {TURN}, {session_parts("EXISTS (SELECT FROM wanted)")}, created AS (
  INSERT INTO pipeline.runs (workflow, handler_id, session_id, dispatched_at, traceparent)
  SELECT :workflow, :handler_id, session.id, pipeline.clock(), w.traceparent FROM wanted w, session
  RETURNING *
)
SELECT c.*, false AS suspect, {handler_columns("c")}, false AS has_more FROM created c
""")

#: A consumer whose run saw everything and took nothing is idle: the run's snapshot says what it has seen. This does not
#: hold for an ordered consumer with concurrency above 1: an event that the run could not see, since another run held
#: its key, may become free before the consumer is idle. Runs with a slice decline events one by one.
#:
#: 1. A run that was woken clears ``wake_at``.
#: 2. It keeps a later ``wake_at`` that a run with a slice set meanwhile.
#: 3. If it reserved events, ``declined`` is reset for the events that other runs declined, since it is not known that
#:    this run saw them.
#: 4. Events that are declined in a narrowed slice may be needed together: their limit is lifted, and they are due
#:    again.
_TOOK_NOTHING = "(d.offered_to = ANY(ARRAY(SELECT id FROM complete WHERE events = '{}')))"
FINISH_PREPARE = Statement[RunRow](f"""
WITH {_REQUESTED.format(columns=_PREPARED_COLUMNS)},
{_HELD.format(guard=f"r.phase = '{Phase.PREPARING}' AND " + _IS_CONSUMER)},
wanted AS MATERIALIZED (
  SELECT h.id AS run, h.handler_id, h.offered IS NULL AS alone, w.event_id, w.topic
  FROM held h JOIN requested x ON x.run = h.id, unnest(x.events, x.topics) AS w(event_id, topic)
), mine AS (
  SELECT d.event_id, d.handler_id, coalesce(d.offered_to, (
    SELECT w.run FROM wanted w WHERE w.alone AND w.event_id = d.event_id AND w.handler_id = d.handler_id
    ORDER BY w.run LIMIT 1)) AS run
  FROM pipeline.deliveries d
  WHERE d.event_id = ANY(ARRAY(SELECT event_id FROM wanted)) AND {IS_PENDING_BY_KEY}
    AND ((d.offered_to, d.event_id, d.topic) IN (SELECT run, event_id, topic FROM wanted)
      OR (d.offered_to IS NULL
        AND (d.handler_id, d.event_id, d.topic) IN (SELECT handler_id, event_id, topic FROM wanted WHERE alone)))
  ORDER BY d.event_id FOR UPDATE OF d
), complete AS (
  SELECT h.*, x.events AS events, x.result, x.wake_at FROM held h
  JOIN requested x ON x.run = h.id LEFT JOIN (SELECT run, count(*) AS number FROM mine GROUP BY run) m ON m.run = h.id
  WHERE cardinality(x.events) = coalesce(m.number, 0)
), moved AS (
  UPDATE pipeline.runs r
  SET phase = '{Phase.PREPARED}', event_ids = c.events, prepare_result = c.result, lease_expires_at = NULL,
      dispatched_at = pipeline.clock(), cost = {added_cost("x")}
  FROM complete c JOIN requested x ON x.run = c.id
  WHERE r.id = c.id AND r.id = ANY(ARRAY(SELECT id FROM complete))
  RETURNING r.*
), reserved AS (
  UPDATE pipeline.deliveries d
  SET status = '{DeliveryStatus.RESERVED}', offered_to = NULL, declined = false, run_id = coalesce(d.offered_to, (
    SELECT m.run FROM mine m WHERE m.event_id = d.event_id AND m.handler_id = d.handler_id))
  WHERE d.event_id = ANY(ARRAY(SELECT event_id FROM mine))
    AND ((d.event_id, d.handler_id) IN (
      SELECT event_id, handler_id FROM mine WHERE run = ANY(ARRAY(SELECT id FROM complete)))) IS TRUE
  RETURNING d.event_id
), unused AS MATERIALIZED (
  SELECT c.id, offered.event_id FROM complete c, unnest(c.offered) AS offered(event_id)
  WHERE offered.event_id <> ALL(c.events)
), handed_back AS (
  UPDATE pipeline.deliveries d SET offered_to = NULL, xid = pg_current_xact_id(),
    declined = {_TOOK_NOTHING} AND d.slice_limit IS NULL AND d.group_size IS NULL
      AND {is_subscribed(ordered="(SELECT o.ordered FROM pipeline.handlers o WHERE o.id = d.handler_id)")},
    slice_limit = CASE WHEN NOT {_TOOK_NOTHING} THEN d.slice_limit END,
    group_size = CASE WHEN NOT {_TOOK_NOTHING} THEN d.group_size END,
    narrowing_declined = d.narrowing_declined OR ({_TOOK_NOTHING} AND num_nonnulls(d.slice_limit, d.group_size) > 0)
  WHERE d.event_id = ANY(ARRAY(SELECT event_id FROM unused))
    AND ((d.offered_to, d.event_id) IN (SELECT id, event_id FROM unused)) IS TRUE
), left_over AS (
  SELECT d.event_id, d.handler_id FROM pipeline.deliveries d
  WHERE d.handler_id = ANY(ARRAY(SELECT handler_id FROM complete WHERE offered IS NULL AND events <> '{{}}'))
    AND d.status = '{DeliveryStatus.PENDING}' AND d.declined AND d.offered_to IS NULL
    AND ((d.event_id, d.handler_id) IN (SELECT event_id, handler_id FROM mine)) IS NOT TRUE
  ORDER BY {DECLINED_ORDER} FOR UPDATE OF d SKIP LOCKED
), reconsidered AS (
  UPDATE pipeline.deliveries d SET declined = false
  WHERE d.event_id = ANY(ARRAY(SELECT event_id FROM left_over))
    AND ((d.event_id, d.handler_id) IN (SELECT event_id, handler_id FROM left_over)) IS TRUE
), rested AS (
  UPDATE pipeline.handlers h
  SET idle_snapshot = CASE WHEN c.saw_all THEN c.snapshot END,
      idle_at = CASE WHEN c.saw_all THEN c.started_at END,
      wake_at = CASE WHEN c.offered IS NULL AND (c.is_single OR h.wake_at <= c.started_at) THEN c.wake_at
                     ELSE least(h.wake_at, c.wake_at) END
  FROM (
    SELECT DISTINCT ON (r.handler_id) r.*, w.concurrency = 1 AS is_single,
      r.events = '{{}}' AND r.offered IS NULL AND (w.concurrency = 1 OR NOT o.ordered) AS saw_all
    FROM complete r
    CROSS JOIN LATERAL (SELECT * FROM pipeline.workflows w WHERE w.name = r.workflow OFFSET 0) w
    CROSS JOIN LATERAL (SELECT * FROM pipeline.handlers o WHERE o.id = r.handler_id OFFSET 0) o
    ORDER BY r.handler_id, r.wake_at NULLS LAST
  ) c
  WHERE h.id = ANY(ARRAY(SELECT handler_id FROM complete)) AND h.id = c.handler_id
    AND (SELECT count(*) FROM reserved) >= 0
    AND (c.events = '{{}}' OR h.idle_snapshot IS NOT NULL OR c.wake_at IS NOT NULL
         OR (c.offered IS NULL AND h.wake_at IS NOT NULL))
)
SELECT * FROM moved ORDER BY id
""")

NO_MUTATION = Statement[RunRow](f"""
WITH {_REQUESTED.format(columns="run uuid, fence bigint, cost numeric")},
{_HELD.format(guard=f"r.phase = '{Phase.PREPARED}'")}
UPDATE pipeline.runs r SET phase = '{Phase.MUTATED}', lease_expires_at = NULL, dispatched_at = pipeline.clock(),
  cost = {added_cost("x")}
FROM held JOIN requested x ON x.run = held.id
WHERE r.id = held.id AND r.id = ANY(ARRAY(SELECT id FROM held)) RETURNING r.*
""")

_HELD_WITHOUT_MUTATION = sql_list(Phase.PREPARING, Phase.PREPARED, Phase.EMITTING)
_IS_LEASED = "r.lease_expires_at IS NOT NULL"
_IS_UNSENT = f"""(r.phase = '{Phase.MUTATING}' AND (
  SELECT m.status = '{MutationStatus.PENDING}' FROM pipeline.mutations m WHERE m.id = r.mutation_id))"""

#: A lease that was written just now is not written again. A row that another transaction holds is written at
#: this moment, by its worker or by a rescuer. The next heartbeat sees by which, and no other run waits for it.
HEARTBEAT = Statement[RunIdRow](f"""
WITH {_REQUESTED.format(columns="run uuid, fence bigint")}, held AS (
  SELECT r.id FROM pipeline.runs r JOIN requested x ON x.run = r.id
  WHERE r.id = ANY(ARRAY(SELECT run FROM requested)) AND r.fence = x.fence AND r.status = '{RunStatus.ACTIVE}'
    AND r.lease_expires_at < pipeline.clock() + CAST(:lease AS interval) - CAST(:fresh_for AS interval)
  ORDER BY r.id FOR NO KEY UPDATE OF r SKIP LOCKED
), extended AS (
  UPDATE pipeline.runs r SET lease_expires_at = pipeline.clock() + CAST(:lease AS interval)
  FROM held WHERE r.id = held.id AND r.id = ANY(ARRAY(SELECT id FROM held))
)
SELECT r.id FROM pipeline.runs r JOIN requested x ON x.run = r.id
WHERE r.id = ANY(ARRAY(SELECT run FROM requested)) AND r.fence = x.fence AND r.status = '{RunStatus.ACTIVE}'
  AND r.lease_expires_at IS NOT NULL
""")

HAND_BACK = Statement[RunRow](f"""
WITH {_REQUESTED.format(columns="run uuid, fence bigint")},
{_HELD.format(guard=f"(r.phase IN {_HELD_WITHOUT_MUTATION} OR {_IS_UNSENT}) AND {_IS_LEASED}")}
UPDATE pipeline.runs r SET lease_expires_at = NULL, dispatched_at = CASE WHEN :later THEN pipeline.clock() END
FROM held WHERE r.id = held.id AND r.id = ANY(ARRAY(SELECT id FROM held)) RETURNING r.*
""")

#: As if each worker had just sent a heartbeat: one that lives keeps its runs, the lease of one that is gone lapses.
SHORTEN_LEASES = Statement[RunIdRow](f"""
WITH future AS (
  SELECT r.id FROM pipeline.runs r WHERE r.finished_at IS NULL AND {IS_LEASE_IN_FUTURE}
  ORDER BY r.id LIMIT :limit FOR NO KEY UPDATE OF r SKIP LOCKED
)
UPDATE pipeline.runs r SET lease_expires_at = pipeline.clock() + r.lease_duration
FROM future WHERE r.id = future.id RETURNING r.id
""")

EXPIRE_LEASES_OF_PROCESS = Statement[RunOfWorkflowRow](f"""
UPDATE pipeline.runs SET lease_expires_at = pipeline.clock() - interval '1 microsecond'
WHERE finished_at IS NULL AND status = '{RunStatus.ACTIVE}' AND lease_expires_at IS NOT NULL AND worker = :worker
RETURNING id, workflow
""")

MARK_DISPATCHED = Statement[RunRow](f"""
UPDATE pipeline.runs SET dispatched_at = pipeline.clock()
WHERE id = ANY(CAST(:ids AS uuid[])) AND status = '{RunStatus.ACTIVE}' AND lease_expires_at IS NULL RETURNING *
""")

#: A message reached a worker that does not know the handler: redispatch on the next tick instead of after
#: ``redispatch_after``.
REQUEUE_UNKNOWN = Statement[RunIdRow](f"""
UPDATE pipeline.runs r SET dispatched_at = NULL, worker = NULL FROM pipeline.handlers h
WHERE r.id = ANY(CAST(:ids AS uuid[])) AND r.status = '{RunStatus.ACTIVE}' AND r.lease_expires_at IS NULL
  AND h.id = r.handler_id
  AND (r.workflow || chr(31) || h.name <> ALL(CAST(:known_handlers AS text[])) OR NOT {_CAN_READ_TOPICS})
RETURNING r.id
""")

#: Only runs that no message is under way for, and that no worker has held since they were handed back.
LOCK_UNCLAIMED = Statement[UnclaimedRunRow](f"""
SELECT r.id, r.handler_id FROM pipeline.runs r
WHERE r.id = ANY(CAST(:ids AS uuid[])) AND r.status = '{RunStatus.ACTIVE}'
  AND r.lease_expires_at IS NULL AND r.dispatched_at IS NULL AND r.worker IS NULL
ORDER BY r.id FOR NO KEY UPDATE OF r
""")

#: Before the mutation the run ends. Once its outcome is known, another run retries it. A run whose request was
#: approved, and a run that tries a plan again, stay as they are.
WITHDRAW_UNCLAIMED = Statement[NamedRunRow](f"""
UPDATE pipeline.runs r
SET status = '{RunStatus.PAUSED_TRANSIENT}', error = :error, error_type = 'UnknownHandler',
  finished_at = pipeline.clock(),
    retry_pending = r.phase IN {AFTER_MUTATION},
    attempt = r.attempt - CASE WHEN r.phase IN {AFTER_MUTATION} THEN 1 ELSE 0 END
FROM pipeline.handlers h
WHERE r.id = ANY(CAST(:ids AS uuid[])) AND r.status = '{RunStatus.ACTIVE}' AND r.lease_expires_at IS NULL
  AND h.id = r.handler_id
  AND (r.phase IN {BEFORE_PREPARED} OR (r.phase = '{Phase.PREPARED}' AND r.retry_of IS NULL)
    OR (r.phase IN {AFTER_MUTATION} AND r.mutation_outcome <> '{MutationOutcome.FAILURE}'))
RETURNING r.*, h.name AS handler
""")

LOCK_TO_STOP = Statement[RunIdRow](f"""
WITH {_REQUESTED.format(columns="run uuid, fence bigint")}
SELECT r.id FROM pipeline.runs r JOIN requested x ON x.run = r.id
WHERE r.id = ANY(ARRAY(SELECT run FROM requested)) AND r.status = '{RunStatus.ACTIVE}' AND r.fence = x.fence
ORDER BY r.id FOR NO KEY UPDATE OF r
""")

#: A row that another transaction holds is being written by a worker that lives, or by another rescuer: the next pass
#: sees what became of it.
LOCK_LAPSED = Statement[RunIdRow](f"""
SELECT r.id FROM pipeline.runs r
WHERE r.id = ANY(CAST(:ids AS uuid[])) AND r.status = '{RunStatus.ACTIVE}' AND r.lease_expires_at < pipeline.clock()
ORDER BY r.id FOR NO KEY UPDATE OF r SKIP LOCKED
""")

#: The run of a retired handler that keeps an event, and what it takes to end it.
RUN_OF_RETIRED_HANDLER = Statement[RunIdRow](f"""
SELECT r.id FROM pipeline.handlers h JOIN pipeline.deliveries d ON d.event_id = :event_id AND d.handler_id = h.id
JOIN pipeline.runs r ON r.id = d.run_id
WHERE h.workflow = :workflow AND h.name = :handler AND h.retired AND d.status IN {HELD_INPUT}
  AND (r.finished_at IS NULL OR r.retry_pending)
""")
LOCK_RUN_OF_RETIRED_HANDLER = Statement[RunWithMutationRow]("""
SELECT r.*, m.status AS mutation_status FROM pipeline.runs r LEFT JOIN pipeline.mutations m ON m.id = r.mutation_id
WHERE r.id = :id AND (r.finished_at IS NULL OR r.retry_pending) FOR NO KEY UPDATE OF r
""")
END_RUN_OF_RETIRED_HANDLER = Statement[RunRow](f"""
UPDATE pipeline.runs SET status = CASE WHEN status = '{RunStatus.ACTIVE}' THEN '{RunStatus.FAILED_INTERNAL}'
  ELSE status END, error = :error,
  error_type = 'RetiredHandler', finished_at = coalesce(finished_at, pipeline.clock()),
  retry_pending = false, retry_at = NULL
WHERE id = :id AND lease_expires_at IS NULL AND (status = '{RunStatus.ACTIVE}' OR retry_pending) RETURNING *
""")

#: A run that chooses among all events died with its process, after another failure. What it was shown is not known:
#: at most the oldest events that it could see.
SHOWN_BEFORE_CRASH = Statement[ShownEventsRow](f"""
SELECT r.id, ARRAY(
  SELECT d.event_id FROM pipeline.deliveries d
  WHERE d.handler_id = r.handler_id AND d.status = '{DeliveryStatus.PENDING}' AND d.offered_to IS NULL
    AND d.event_id > h.low_watermark AND {IS_AVAILABLE}
  ORDER BY d.event_id LIMIT 100) AS shown
FROM pipeline.runs r JOIN pipeline.handlers h ON h.id = r.handler_id
WHERE r.id = ANY(CAST(:ids AS uuid[])) AND r.offered IS NULL AND r.phase IN {BEFORE_PREPARED}
  AND h.kind = '{HandlerKind.CONSUMER}' AND h.consecutive_failures > 0
""")

#: No run holds an event that a run was shown and has not reserved. If the failure names it, it counts like an input.
RUN_FACTS = Statement[RunFactsRow](f"""
WITH {_REQUESTED.format(columns="run uuid, culprits bigint[]")}
SELECT r.*, m.status AS mutation_status, m.reconcilable, h.after_failed_mutation, h.failure_policy,
       h.consecutive_failures, h.failing_since AS handler_failing_since, h.failing_events,
       w.on_uncertain, w.on_logic_error, w.on_exhausted, w.concurrency, i.*, h.name AS handler,
       pipeline.clock() AS now
FROM pipeline.runs r JOIN requested x ON x.run = r.id
CROSS JOIN LATERAL (SELECT * FROM pipeline.handlers h WHERE h.id = r.handler_id OFFSET 0) h
CROSS JOIN LATERAL (SELECT * FROM pipeline.workflows w WHERE w.name = r.workflow OFFSET 0) w
LEFT JOIN LATERAL (SELECT * FROM pipeline.mutations m WHERE m.id = r.mutation_id OFFSET 0) m ON true
CROSS JOIN LATERAL (
  SELECT coalesce(max(b.failures), 0) AS input_failures, max(b.failing_since) AS input_failing_since,
    CASE WHEN bool_and(num_nonnulls(b.slice_limit, b.group_size) > 0 OR b.narrowing_declined)
      THEN max(b.slice_limit) END AS input_slice_limit,
    coalesce(bool_or(b.group_size IS NULL AND NOT b.narrowing_declined), true) AS can_narrow_inputs
  FROM (
    SELECT d.*, d.event_id = ANY(x.culprits) AS is_named, bool_or(d.event_id = ANY(x.culprits)) OVER () AS has_named
    FROM pipeline.deliveries d
    WHERE d.handler_id = r.handler_id
      AND d.event_id = ANY(r.event_ids || coalesce(r.offered, '{{}}') || x.culprits)
      AND (d.run_id = r.id OR d.offered_to = r.id OR (r.offered IS NULL AND r.event_ids = '{{}}'
        AND d.status = '{DeliveryStatus.PENDING}' AND d.offered_to IS NULL))
  ) b WHERE b.is_named OR NOT b.has_named
) i
WHERE r.id = ANY(ARRAY(SELECT run FROM requested)) ORDER BY r.id
""")

STOP = Statement[RunIdRow](f"""
WITH {_REQUESTED.format(columns=_STOPPED_COLUMNS)}
UPDATE pipeline.runs r
SET status = x.status, error = x.error, error_type = x.error_type, error_frames = x.error_frames,
    finished_at = pipeline.clock(), lease_expires_at = NULL, retry_pending = x.retry_pending,
    retry_at = pipeline.clock() + x.delay, cost = {added_cost("x")}
FROM requested x WHERE r.id = x.run AND r.id = ANY(ARRAY(SELECT run FROM requested)) RETURNING r.id
""")

#: A retry stays in the trace of the run it retries, as `pipeline.telemetry.spans` computes it.
INSERT_RETRIES = Statement[StartedRunRow](f"""
WITH stopped AS (
  SELECT r.* FROM pipeline.runs r
  WHERE r.id = ANY(CAST(:ids AS uuid[])) AND r.retry_pending AND {IS_RETRY_DUE} AND {IS_OUTCOME_KNOWN}
  ORDER BY r.id LIMIT :count FOR NO KEY UPDATE OF r
), {TURN}, {session_parts("EXISTS (SELECT FROM stopped)")}, created AS (
  INSERT INTO pipeline.runs (workflow, handler_id, session_id, phase, mutation_outcome, mutation_id, offered,
                             event_ids, prepare_result, retry_of, attempt, dispatched_at, traceparent)
  SELECT s.workflow, s.handler_id, session.id,
         CASE WHEN s.mutation_outcome = '{MutationOutcome.FAILURE}'
           THEN '{Phase.PREPARED}' ELSE '{Phase.EMITTING}' END,
         CASE WHEN s.mutation_outcome = '{MutationOutcome.FAILURE}'
           THEN '{MutationOutcome.NONE}' ELSE s.mutation_outcome END,
         CASE WHEN s.mutation_outcome = '{MutationOutcome.FAILURE}' THEN NULL ELSE s.mutation_id END,
         s.offered, s.event_ids, s.prepare_result, s.id, s.attempt + 1, pipeline.clock(),
         '00-' || coalesce(substring(s.traceparent FROM '^00-([0-9a-f]{{32}})-[0-9a-f]{{16}}-[0-9a-f]{{2}}$'), x.id)
         || '-' || right(x.id, 16) || '-'
         || coalesce(substring(s.traceparent FROM '^00-[0-9a-f]{{32}}-[0-9a-f]{{16}}-([0-9a-f]{{2}})$'), '81')
  FROM session, stopped s, LATERAL (SELECT replace(CAST(s.id AS text), '-', '') AS id) x
  RETURNING *
), carried AS (
  UPDATE pipeline.runs r SET retry_pending = false WHERE r.id = ANY(ARRAY(SELECT retry_of FROM created))
), transferred AS (
  UPDATE pipeline.deliveries d SET run_id =
    CAST((SELECT jsonb_object_agg(retry_of, id) FROM created) ->> CAST(d.run_id AS text) AS uuid)
  WHERE d.event_id = ANY(ARRAY(SELECT unnest(event_ids) FROM created))
    AND d.run_id = ANY(ARRAY(SELECT retry_of FROM created))
)
SELECT c.*, s.status = '{RunStatus.CRASHED}' AS suspect, {handler_columns("c")}, true AS has_more
FROM created c JOIN stopped s ON s.id = c.retry_of ORDER BY c.id
""")


def claim(
    tx: Transaction,
    statement: Statement[ClaimedRunRow],
    ids: Sequence[UUID],
    known: Mapping[str, KnownNames],
    **claimer: Any,
) -> Sequence[ClaimedRunRow]:
    """Claim runs of the ``handlers`` that the claimer knows, with the ``topics`` that it knows."""
    return tx.all(statement, ids=[str(id_) for id_ in ids], **_known_parameters(known), **claimer)


def requeue_unknown(tx: Transaction, ids: Sequence[UUID], known: Mapping[str, KnownNames]) -> Sequence[RunIdRow]:
    """Redispatch those of these runs soon whose handler or topics the claimer does not know."""
    if not ids or known["handlers"] is None:
        return ()
    return tx.all(REQUEUE_UNKNOWN, ids=[str(id_) for id_ in ids], **_known_parameters(known))


def _known_parameters(known: Mapping[str, KnownNames]) -> dict[str, list[str] | None]:
    """Names as the claim statements compare them: they have no control characters."""
    return {
        f"known_{what}": None if names is None else sorted("\x1f".join(pair) for pair in names)
        for what, names in known.items()
    }


def execute_ids(tx: Transaction, statement: Statement[RowT], ids: Sequence[UUID], **params: Any) -> Sequence[RowT]:
    """Run a statement that takes a cohort as ids. Return the rows that it updated."""
    return tx.all(statement, ids=[str(id_) for id_ in ids], **params)


#: The run that retries such a run counts its attempts from 1 again.
RESET_RUN_FAILURES = Command("""
UPDATE pipeline.runs SET attempt = 0, retry_at = NULL WHERE workflow = :workflow AND retry_pending
""")

#: What a reconcile attempt in the background has cost. Its run is stopped, so no fence guards it.
ADD_COST = Command(f"""
UPDATE pipeline.runs r SET cost = {added_cost("x")}
FROM (SELECT CAST(:cost AS numeric) AS cost) x, pipeline.mutations m WHERE m.id = :mutation_id AND r.id = m.run_id
""")
