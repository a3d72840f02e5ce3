"""SQL conditions that more than one statement uses.

Aliases are fixed: ``d`` is a delivery, ``h`` a handler, ``r`` a run. The functions take SQL expressions for what the
statement knows of an ordered consumer. A consumer without order passes them all.

A set of statuses or phases that several statements share is a SQL list. A single status is written in an f-string:
``status = '{RunStatus.ACTIVE}'``. ``tests/architecture`` refuses text that names a member without its enum.
"""

from enum import StrEnum

from pipeline.domain.states import DeliveryStatus, MutationOutcome, MutationStatus, Phase, RunStatus
from pipeline.domain.workflows import DesiredStatus


def sql_list(*members: StrEnum) -> str:
    """Write members of an enum as a SQL list: ``('applied', 'failed')``."""
    return f"({', '.join(repr(member.value) for member in members)})"


RESOLVED_MUTATION = sql_list(MutationStatus.APPLIED, MutationStatus.FAILED)
OPEN_MUTATION = sql_list(
    MutationStatus.PENDING, MutationStatus.IN_FLIGHT, MutationStatus.NEEDS_RECONCILE, MutationStatus.INDETERMINATE
)
#: Its outcome is unknown, and no call of it is under way.
MUTATION_IN_DOUBT = sql_list(MutationStatus.NEEDS_RECONCILE, MutationStatus.INDETERMINATE)
#: It was sent, and is not known to have failed.
MUTATION_MAY_HAVE_HAPPENED = sql_list(
    MutationStatus.IN_FLIGHT, MutationStatus.NEEDS_RECONCILE, MutationStatus.INDETERMINATE, MutationStatus.APPLIED
)
#: The run has not chosen its inputs yet.
BEFORE_PREPARED = sql_list(Phase.PENDING, Phase.PREPARING)
#: The outcome of the run's mutation is known, and the run is not committed.
AFTER_MUTATION = sql_list(Phase.MUTATED, Phase.EMITTING)
#: A run holds the delivery, or may.
OPEN_DELIVERY = sql_list(DeliveryStatus.PENDING, DeliveryStatus.RESERVED)
#: No run holds the delivery, and it is not done.
UNOWNED_DELIVERY = sql_list(DeliveryStatus.PENDING, DeliveryStatus.QUARANTINED)
DONE_DELIVERY = sql_list(DeliveryStatus.CONSUMED, DeliveryStatus.SKIPPED)
#: An input of a run that is not over.
HELD_INPUT = sql_list(DeliveryStatus.RESERVED, DeliveryStatus.SKIPPED)

#: The order of the index on pending deliveries. Together with ``is_of_handler`` only that index has it: by ``event_id``
#: alone the planner could walk the primary key through everything that is done.
PENDING_ORDER = "d.handler_id, d.event_id"
#: The same of the index on declined ones: by another the planner could walk through all that is pending.
DECLINED_ORDER = "d.handler_id, d.declined, d.event_id"

#: Of a delivery that is named by its key: it is pending. No index on pending deliveries has this condition, so that the
#: planner takes the key instead of walking through all that is pending.
IS_PENDING_BY_KEY = f"coalesce(d.status, '') = '{DeliveryStatus.PENDING}'"
#: The same of one that a run has reserved: many may be reserved, and an array of names is searched for each of them.
IS_RESERVED_BY_KEY = f"coalesce(d.status, '') = '{DeliveryStatus.RESERVED}'"

#: Of a delivery: it does not back off, so a run may take it now.
IS_AVAILABLE = "(d.available_at IS NULL OR d.available_at <= pipeline.clock())"

#: Of a run: its lease ends later than one that was just written could. Postgres's clock was set back since. The second
#: duration is for transactions that began a little earlier than the one that wrote the lease.
IS_LEASE_IN_FUTURE = "r.lease_expires_at > pipeline.clock() + 2 * r.lease_duration"

#: Of a stopped run: it does not back off, so it may be retried now.
IS_RETRY_DUE = "(r.retry_at IS NULL OR r.retry_at <= pipeline.clock())"

#: Of a run: the outcome of its mutation is known, or it has none. Found by key, whatever the planner knows of a table.
IS_OUTCOME_KNOWN = f"""coalesce((
      SELECT m.status IN {RESOLVED_MUTATION} FROM pipeline.mutations m WHERE m.id = r.mutation_id), true)"""

#: Of a run: its session stays open for it. A session waits for no approval: an operator may take days.
KEEPS_SESSION_OPEN = f"(r.finished_at IS NULL AND r.status <> '{RunStatus.PAUSED_APPROVAL}')"

#: Of a handler: no live worker claims its runs. Its code is on none of them.
IS_UNCLAIMED = "h.unclaimed_since IS NOT NULL"

#: The same, of a handler whose runs should be claimed: the code has it, and its workflow is active.
IS_MISSING_WORKER = f"""{IS_UNCLAIMED} AND NOT h.retired AND EXISTS (
  SELECT FROM pipeline.workflows w WHERE w.name = h.workflow AND w.desired = '{DesiredStatus.ACTIVE}')"""


def is_key_free(*, ordered: str, handler: str, workflow: str) -> str:
    """The key is free: no event of it is reserved or offered, and none before this one backs off or is yet to come.

    While a topic is backfilled, events of every key are yet to come. A skipped event holds its key until the run that
    tells ``next`` of it has committed. Such runs are few, so the keys are found by way of them; the delivery itself
    does not differ from one that was skipped long ago.
    """
    return f"""(NOT {ordered} OR d.key IS NULL OR (NOT EXISTS (
      SELECT FROM pipeline.deliveries o
      WHERE o.handler_id = d.handler_id AND o.key = d.key AND o.status IN {OPEN_DELIVERY}
        AND (o.status = '{DeliveryStatus.RESERVED}' OR o.key_offered OR o.available_at IS NOT NULL)
        AND o.event_id <> d.event_id
        AND (o.status = '{DeliveryStatus.RESERVED}' OR o.key_offered
             OR (o.event_id < d.event_id AND o.available_at > pipeline.clock())))
    AND NOT coalesce(d.key = ANY(ARRAY(
      SELECT (SELECT s.key FROM pipeline.deliveries s
              WHERE s.event_id = i.event_id AND s.handler_id = {handler} AND s.status = '{DeliveryStatus.SKIPPED}')
      FROM (
        SELECT event_ids, mutation_outcome FROM pipeline.runs
        WHERE workflow = {workflow} AND handler_id = {handler} AND finished_at IS NULL
        UNION ALL
        SELECT event_ids, mutation_outcome FROM pipeline.runs
        WHERE workflow = {workflow} AND handler_id = {handler} AND retry_pending
      ) r CROSS JOIN LATERAL unnest(r.event_ids) AS i(event_id)
        WHERE r.mutation_outcome = '{MutationOutcome.SKIPPED}')), false)
    AND NOT EXISTS (SELECT FROM pipeline.subscriptions b
      WHERE b.workflow = {workflow} AND b.handler_id = {handler} AND b.backfill_until IS NOT NULL)))"""


def is_in_next_slice(*, ordered: str, handler: str, batch: str) -> str:
    """True if fewer than ``batch`` declined events of the same key precede the event.

    Otherwise the next slice of the key would contain declined events only. They are read once for a statement, and
    found by key.
    """
    return f"""(NOT {ordered} OR d.key IS NULL OR d.event_id <= coalesce(CAST((
      SELECT jsonb_object_agg(k.key, k.last_id) FROM (
        SELECT o.key, (array_agg(o.event_id ORDER BY o.event_id))[{batch}] AS last_id FROM (
          SELECT d.key, d.event_id FROM pipeline.deliveries d
          WHERE {is_of_handler(handler)} AND d.status = '{DeliveryStatus.PENDING}' AND d.declined
            AND d.offered_to IS NULL AND d.key IS NOT NULL
          ORDER BY {DECLINED_ORDER} OFFSET 0
        ) o
        GROUP BY o.key HAVING count(*) >= {batch}
      ) k) ->> d.key AS bigint), 9223372036854775807))"""


def is_subscribed(*, ordered: str) -> str:
    """The consumer is subscribed to its topic: an event that no run can see blocks no other."""
    return f"""(NOT {ordered} OR (SELECT true FROM pipeline.subscriptions s
      WHERE s.workflow = (SELECT o.workflow FROM pipeline.handlers o WHERE o.id = d.handler_id)
        AND s.topic = d.topic AND s.handler_id = d.handler_id) IS NOT NULL)"""


def added_cost(reported: str) -> str:
    """Return the SQL of the cost of run ``r`` with what was reported. It stays NULL while nothing was."""
    return f"coalesce(r.cost + {reported}.cost, r.cost, {reported}.cost)"


def handler_columns(run: str) -> str:
    """Return the columns that the message of a run says of its handler, found by key."""
    return f"""(SELECT h.name FROM pipeline.handlers h WHERE h.id = {run}.handler_id) AS handler,
  (SELECT h.kind FROM pipeline.handlers h WHERE h.id = {run}.handler_id) AS kind"""


def is_of_handler(handler: str) -> str:
    """The delivery is of this handler. With an array the planner cannot drop the handler from ``PENDING_ORDER``."""
    return f"d.handler_id = ANY(ARRAY[CAST({handler} AS integer)])"


def join_by_id(table: str, alias: str, key: str) -> str:
    """Return a join that finds each row by its id.

    A plain join may be planned while the tables are empty, as one that reads a whole table in order. OFFSET 0 keeps
    the planner from that.
    """
    return f"CROSS JOIN LATERAL (SELECT * FROM pipeline.{table} o WHERE o.id = {key} OFFSET 0) {alias}"
