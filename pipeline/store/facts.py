"""SQL of the facts by which the scheduler decides: what a workflow allows, and what makes its handlers due.

The function ``pipeline.handler_facts`` runs it, with the workflow's lock or without. Each fact is found by an index on
what is open.
"""

from collections.abc import Mapping
from typing import NamedTuple

from pipeline.domain.states import DeliveryStatus, RunStatus
from pipeline.store.predicates import (
    IS_AVAILABLE,
    IS_OUTCOME_KNOWN,
    IS_RETRY_DUE,
    IS_UNCLAIMED,
    PENDING_ORDER,
    is_in_next_slice,
    is_key_free,
    is_of_handler,
    is_subscribed,
)

MAX_RETRIES = 1000  #: runs that one start retries, at most: as many as the largest cohort can have

#: After a restore into another cluster, stored transaction ids may be larger than the current one. A snapshot with such
#: an id is treated as unknown. A delivery with such an id was visible to every snapshot of this cluster.
_CURRENT_XMAX = "pg_snapshot_xmax(pg_current_snapshot())"
_IS_WAITING = f"d.status = '{DeliveryStatus.PENDING}' AND d.offered_to IS NULL"
_IS_KEY_FREE = is_key_free(ordered="h.ordered", handler="h.id", workflow="h.workflow")


class Fact(NamedTuple):
    """A column of the facts: its type, and its SQL."""

    type: str
    sql: str


#: The code still has the run's handler. A run of a retired one waits for an operator only.
_IS_HANDLER_CURRENT = """r.handler_id <> ALL(ARRAY(
      SELECT h.id FROM pipeline.handlers h WHERE h.workflow = w.name AND h.retired))"""

#: Runs that nothing overtakes while the workflow has one place. They wait for approval, or for a retry with a known
#: outcome. Runs of unclaimed handlers are left out; they are scheduled first once a worker knows the handler.
_WAITING_RUNS = f"""
    SELECT true FROM pipeline.runs r
    WHERE r.workflow = w.name AND r.retry_pending AND {IS_OUTCOME_KNOWN} AND (
      SELECT NOT h.retired AND NOT {IS_UNCLAIMED} FROM pipeline.handlers h WHERE h.id = r.handler_id)
    UNION ALL
    SELECT true FROM pipeline.runs r
    WHERE r.workflow = w.name AND r.finished_at IS NULL AND r.status = '{RunStatus.PAUSED_APPROVAL}'
      AND {_IS_HANDLER_CURRENT}"""

#: What a workflow ``w`` allows. An active run takes a place. Runs of handlers that the code no longer has take none.
WORKFLOW_FACTS: Mapping[str, Fact] = {
    "workflow": Fact("text", "w.name"),
    "desired": Fact("text", "w.desired"),
    "maintenance": Fact("boolean", "w.maintenance"),
    "concurrency": Fact("integer", "w.concurrency"),
    "blocks": Fact(
        "bigint", "(SELECT count(*) FROM pipeline.blocks b WHERE b.workflow = w.name AND b.closed_at IS NULL)"
    ),
    "active_runs": Fact(
        "bigint",
        f"""(SELECT count(*) FROM pipeline.runs r
    WHERE r.workflow = w.name AND r.finished_at IS NULL AND r.status = '{RunStatus.ACTIVE}'
      AND {_IS_HANDLER_CURRENT})""",
    ),
    "turns": Fact("integer[]", "w.turns"),
    "has_waiting": Fact("boolean", f"(w.concurrency = 1 AND ({_WAITING_RUNS} LIMIT 1) IS NOT NULL)"),
}

#: An event that the last empty prepare of the handler cannot have seen, or whose pause is over since.
_HAS_UNSEEN = f"""(CASE WHEN h.idle_snapshot IS NULL OR pg_snapshot_xmax(h.idle_snapshot) > {_CURRENT_XMAX} THEN (
    SELECT true FROM pipeline.deliveries d
    WHERE {is_of_handler("h.id")} AND {_IS_WAITING} AND d.event_id > h.low_watermark AND NOT d.declined
      AND {IS_AVAILABLE}
      AND {_IS_KEY_FREE}
      AND (w.concurrency = 1 OR {is_in_next_slice(ordered="h.ordered", handler="h.id", batch="h.batch")})
      AND (w.concurrency = 1 OR {is_subscribed(ordered="h.ordered")})
    ORDER BY {PENDING_ORDER} LIMIT 1)
  ELSE (
    SELECT true FROM pipeline.deliveries d
    WHERE d.handler_id = h.id AND {_IS_WAITING} AND d.xid >= pg_snapshot_xmin(h.idle_snapshot)
      AND d.xid < {_CURRENT_XMAX} AND NOT pg_visible_in_snapshot(d.xid, h.idle_snapshot)
      AND NOT d.declined AND {IS_AVAILABLE}
    ORDER BY d.xid LIMIT 1)
  END IS NOT NULL OR (
    SELECT true FROM pipeline.deliveries d
    WHERE d.handler_id = h.id AND {_IS_WAITING} AND d.available_at > h.idle_at
      AND d.available_at <= pipeline.clock()
    ORDER BY d.available_at LIMIT 1) IS NOT NULL)"""

_RETRYABLE = f"""ARRAY(
    SELECT CAST(r.id AS text) FROM pipeline.runs r
    WHERE r.workflow = h.workflow AND r.retry_pending AND r.handler_id = h.id AND {IS_RETRY_DUE}
      AND {IS_OUTCOME_KNOWN}
    ORDER BY r.id LIMIT {MAX_RETRIES})"""

#: Of the first event that a run which sees everything is shown: in how large a slice it may be offered. Only consumers
#: that get such a run have it.
_SLICE_LIMIT = f"""CASE WHEN w.concurrency = 1 OR h.wake_at IS NOT NULL THEN (
    SELECT coalesce(d.slice_limit, d.group_size) FROM pipeline.deliveries d
    WHERE {is_of_handler("h.id")} AND {_IS_WAITING} AND d.event_id > h.low_watermark AND NOT d.declined
      AND {IS_AVAILABLE} AND {_IS_KEY_FREE}
    ORDER BY {PENDING_ORDER} LIMIT 1) END"""

#: What makes a handler ``h`` due, and what its next run needs.
HANDLER_FACTS: Mapping[str, Fact] = {
    "id": Fact("integer", "h.id"),
    "name": Fact("text", "h.name"),
    "kind": Fact("text", "h.kind"),
    "retry_at": Fact("timestamptz", "h.retry_at"),
    "wake_at": Fact("timestamptz", "h.wake_at"),
    "next_run_at": Fact("timestamptz", "h.next_run_at"),
    "batch": Fact("integer", "h.batch"),
    "ordered": Fact("boolean", "h.ordered"),
    "low_watermark": Fact("bigint", "h.low_watermark"),
    "has_unseen": Fact("boolean", _HAS_UNSEEN),
    "retryable": Fact("text[]", _RETRYABLE),
    "slice_limit": Fact("integer", _SLICE_LIMIT),
    "is_unclaimed": Fact("boolean", f"({IS_UNCLAIMED})"),
    "has_probe_run": Fact(
        "boolean",
        f"""({IS_UNCLAIMED} AND (
    SELECT true FROM pipeline.runs r WHERE r.workflow = h.workflow AND r.handler_id = h.id AND r.finished_at IS NULL
      AND r.status = '{RunStatus.ACTIVE}' LIMIT 1) IS NOT NULL)""",
    ),
    "now": Fact("timestamptz", "pipeline.clock()"),
}


def workflow_facts(names: str) -> str:
    """Return the SQL of what these workflows allow, one row for each."""
    facts = ",\n  ".join(f"{fact.sql} AS {name}" for name, fact in WORKFLOW_FACTS.items())
    return f"SELECT {facts} FROM pipeline.workflows w WHERE w.name = ANY({names})"


def handler_facts(names: str) -> str:
    """Return the SQL of the facts of every current handler of these workflows. Those of a workflow are read once.

    OFFSET 0 keeps the planner from joining whole tables, which it would do while it takes them for small.
    """
    facts = ",\n  ".join(f"{fact.sql} AS {name}" for name, fact in HANDLER_FACTS.items())
    allowed = ", ".join(f"w.{name}" for name in WORKFLOW_FACTS)
    return f"""
SELECT {allowed},
  {facts}
FROM ({workflow_facts(names)} OFFSET 0) w
CROSS JOIN LATERAL (SELECT * FROM pipeline.handlers c WHERE c.workflow = w.workflow AND NOT c.retired OFFSET 0) h
ORDER BY w.workflow, h.name
"""
