"""Reads for workers and sweeps. Reads for operators are in ``listings`` and ``traces``.

Functions are nouns, so that a read is not mistaken for a transition. Every package may import this.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

from pipeline.domain.renames import NameKind
from pipeline.domain.states import DeliveryStatus, RunStatus
from pipeline.domain.workflows import BlockKind
from pipeline.store import facts
from pipeline.store.database import Statement, Transaction
from pipeline.store.predicates import IS_AVAILABLE, IS_LEASE_IN_FUTURE, KEEPS_SESSION_OPEN, handler_columns, is_key_free
from pipeline.store.rows import (
    DispatchableRunRow,
    HandlerFactsRow,
    LapsedRunRow,
    LeasedRunRow,
    MutationIdRow,
    NamedTopicRow,
    NameRow,
    OfferedEventRow,
    OpenBackfillRow,
    PendingEventRow,
    PresentNameRow,
    RefusedInputRow,
    RetriedRunRow,
    RunIdRow,
    RunMutationRow,
    RunOfWorkflowRow,
    SessionIdRow,
    SubscribedHandlerRow,
    SweepAgeRow,
    WorkflowFactsRow,
)
from pipeline.store.schema import BlockRow, EventRow, HandlerRow, RunRow, WorkflowRow

_RUNS = Statement[LeasedRunRow]("""
SELECT r.*, coalesce(r.lease_expires_at > pipeline.clock(), false) AS is_leased FROM pipeline.runs r
WHERE r.id = ANY(CAST(:ids AS uuid[])) ORDER BY r.id
""")

_MUTATIONS = Statement[RunMutationRow]("""
SELECT m.*, r.status AS run_status, r.phase AS run_phase, r.fence, r.traceparent, w.version AS workflow_version
FROM pipeline.mutations m JOIN pipeline.runs r ON r.id = m.run_id JOIN pipeline.workflows w ON w.name = m.workflow
WHERE m.id = ANY(CAST(:ids AS uuid[])) ORDER BY m.id
""")

#: What a run that runs alone may see: everything pending. For an ordered consumer an event waits
#: while another run holds an event of its key, or an earlier one is backing off.
_WORKFLOW_OF_HANDLER = "(SELECT workflow FROM pipeline.handlers WHERE id = :handler_id)"
_PEEK = Statement[PendingEventRow](f"""
SELECT e.*, d.failures FROM (
  SELECT d.event_id, d.failures FROM pipeline.deliveries d
  WHERE d.handler_id = :handler_id AND d.topic = :topic AND d.status = '{DeliveryStatus.PENDING}'
    AND d.offered_to IS NULL AND d.event_id > :low_watermark
    AND {IS_AVAILABLE}
    AND {is_key_free(ordered=":ordered", handler=":handler_id", workflow=_WORKFLOW_OF_HANDLER)}
  ORDER BY d.event_id
) d CROSS JOIN LATERAL (
  SELECT * FROM pipeline.events e WHERE e.id = d.event_id OFFSET 0
) e
ORDER BY d.event_id LIMIT :limit
""")
#: What runs among others may see: the slice each was offered.
_PEEK_SLICE = Statement[OfferedEventRow](f"""
WITH offers AS MATERIALIZED (
  SELECT r.id AS run_id, r.handler_id, slice.event_id FROM pipeline.runs r, unnest(r.offered) AS slice(event_id)
  WHERE r.id = ANY(CAST(:ids AS uuid[]))
)
SELECT e.*, d.failures, o.run_id FROM offers o
JOIN pipeline.deliveries d ON d.event_id = o.event_id AND d.handler_id = o.handler_id
JOIN pipeline.events e ON e.id = d.event_id
WHERE d.status = '{DeliveryStatus.PENDING}' AND d.offered_to = o.run_id
ORDER BY d.event_id
""")

_REFUSED_INPUTS = Statement[RefusedInputRow]("""
SELECT w.event_id, e.topic AS found_topic, d.status, d.run_id, d.offered_to, w.topic
FROM unnest(CAST(:events AS bigint[]), CAST(:topics AS text[])) AS w(event_id, topic)
LEFT JOIN pipeline.events e ON e.id = w.event_id
LEFT JOIN pipeline.deliveries d ON d.event_id = w.event_id AND d.handler_id = :handler_id
ORDER BY w.event_id
""")

_DELIVERED_EVENTS = Statement[EventRow]("""
SELECT e.* FROM pipeline.deliveries d JOIN pipeline.events e ON e.id = d.event_id
WHERE d.event_id = ANY(:ids) AND d.handler_id = :handler_id AND e.topic = :topic ORDER BY e.id
""")
_HANDLER = Statement[HandlerRow]("SELECT * FROM pipeline.handlers WHERE workflow = :workflow AND name = :name")
_HANDLERS = Statement[HandlerRow]("SELECT * FROM pipeline.handlers WHERE workflow = :workflow ORDER BY name")
_WORKFLOW = Statement[WorkflowRow]("SELECT * FROM pipeline.workflows WHERE name = :name")
_WORKFLOW_NAMES = Statement[NameRow]("SELECT name FROM pipeline.workflows ORDER BY name")
#: A former name of a workflow leads to the present one.
_TOPICS = Statement[NamedTopicRow](f"""
SELECT t.*, ARRAY(
  SELECT n.former FROM pipeline.renames n
  WHERE n.kind = '{NameKind.TOPIC}' AND n.workflow = t.workflow AND n.name = t.name) AS former_names,
  current_setting('transaction_isolation') AS isolation
FROM pipeline.topics t WHERE t.workflow = coalesce((
  SELECT n.name FROM pipeline.renames n
  WHERE n.kind = '{NameKind.WORKFLOW}' AND n.workflow = '' AND n.former = :workflow), :workflow)
ORDER BY t.name
""")
_PRESENT_NAMES = Statement[PresentNameRow](
    "SELECT former, name FROM pipeline.renames WHERE kind = :kind AND workflow = :workflow"
)
_SUBSCRIPTIONS = Statement[SubscribedHandlerRow](
    "SELECT topic, handler_id FROM pipeline.subscriptions WHERE workflow = :workflow"
)
#: By the index on backfills that are not complete.
_OPEN_BACKFILLS = Statement[OpenBackfillRow]("""
SELECT workflow, topic, handler_id, backfill_until, backfill_after FROM pipeline.subscriptions
WHERE workflow = coalesce(:workflow, workflow) AND backfill_until IS NOT NULL ORDER BY workflow, topic, handler_id
""")
_OPEN_BLOCKS = Statement[BlockRow](
    "SELECT * FROM pipeline.blocks WHERE workflow = :workflow AND closed_at IS NULL ORDER BY since, id"
)
_BLOCKING_MUTATIONS = Statement[MutationIdRow](f"""
SELECT m.id FROM pipeline.blocks b JOIN pipeline.runs r ON r.id = b.run_id
JOIN pipeline.mutations m ON m.id = r.mutation_id
WHERE b.workflow = :workflow AND b.kind = '{BlockKind.RECONCILIATION}' AND b.closed_at IS NULL ORDER BY m.id
""")
#: Of a workflow of which the code has no handler any more. The facts of others come with those of their handlers.
_WORKFLOW_FACTS = Statement[WorkflowFactsRow](facts.workflow_facts("ARRAY[CAST(:workflow AS text)]"))
_HANDLER_FACTS = Statement[HandlerFactsRow](
    "SELECT * FROM pipeline.handler_facts(CAST(:workflows AS text[]), is_locking => false)"
)


def _next_value(column: str, table: str, condition: str, after: str = "") -> str:
    """Return the SQL of the first value of an indexed column, or of the first one after another."""
    later = f" AND o.{column} > {after}" if after else ""
    return f"(SELECT o.{column} FROM {table} o WHERE {condition}{later} ORDER BY o.{column} LIMIT 1)"


def distinct_values(name: str, column: str, table: str, condition: str) -> str:
    """Return a part of a statement with the distinct values of an indexed column, each found by one step in the index.

    The last row is NULL. The step repeats the condition of the partial index.
    """
    return f"""{name} AS (
  SELECT {_next_value(column, table, condition)} AS {column}
  UNION ALL
  SELECT {_next_value(column, table, condition, f"{name}.{column}")} FROM {name} WHERE {name}.{column} IS NOT NULL
)"""


_PENDING = f"o.status = '{DeliveryStatus.PENDING}'"
#: The facts of the workflows in which something may be due. The cost depends on what is open, not on how many
#: workflows there are: those with pending events, with runs to retry, with a slot or a wake-up whose time has come.
DUE_FACTS = Statement[HandlerFactsRow](f"""
WITH RECURSIVE {distinct_values("waiting", "handler_id", "pipeline.deliveries", _PENDING)},
{distinct_values("retrying", "workflow", "pipeline.runs", "o.retry_pending")}
SELECT * FROM pipeline.handler_facts(ARRAY(
  SELECT h.workflow FROM pipeline.handlers h
  WHERE h.id = ANY(ARRAY(SELECT handler_id FROM waiting)) AND NOT h.retired
    AND (h.retry_at IS NULL OR h.retry_at <= pipeline.clock())
  UNION ALL SELECT workflow FROM retrying WHERE workflow IS NOT NULL
  UNION ALL SELECT h.workflow FROM pipeline.handlers h WHERE h.next_run_at <= pipeline.clock() AND NOT h.retired
  UNION ALL SELECT h.workflow FROM pipeline.handlers h WHERE h.wake_at <= pipeline.clock() AND NOT h.retired
), is_locking => false)
""")
_RETRIED_RUN_IDS = Statement[RetriedRunRow](
    "SELECT retry_of FROM pipeline.runs WHERE retry_of = ANY(CAST(:ids AS uuid[]))"
)
_SWEEPS = Statement[SweepAgeRow]("SELECT name, pipeline.clock() - last_run_at AS age FROM pipeline.sweeps")
_OVERDUE_PERIODS = 3  #: a sweep is overdue when it has not run for so many of its periods
#: In turns, so that many runs of one workflow hold up no other.
_LAPSED = Statement[LapsedRunRow](f"""
SELECT t.id, t.workflow, t.is_in_future FROM (
  SELECT r.id, r.workflow, {IS_LEASE_IN_FUTURE} AS is_in_future,
    row_number() OVER (PARTITION BY r.workflow ORDER BY r.id) AS turn
  FROM pipeline.runs r
  WHERE r.finished_at IS NULL AND (r.lease_expires_at < pipeline.clock() OR {IS_LEASE_IN_FUTURE})
) t ORDER BY t.turn, t.id LIMIT :limit
""")
_FINISHABLE = Statement[SessionIdRow](f"""
SELECT s.id FROM pipeline.sessions s
WHERE s.finished_at IS NULL
  AND NOT EXISTS (SELECT FROM pipeline.runs r WHERE r.workflow = s.workflow AND {KEEPS_SESSION_OPEN})
  AND EXISTS (SELECT FROM pipeline.runs r WHERE r.session_id = s.id) ORDER BY s.id LIMIT :limit
""")
_UNATTENDED_MAINTENANCE = Statement[NameRow]("""
SELECT w.name FROM pipeline.workflows w WHERE w.maintenance AND NOT EXISTS (
  SELECT FROM pipeline.maintenance_tasks t WHERE t.workflow = w.name AND t.closed_at IS NULL) ORDER BY w.name
""")


def runs(tx: Transaction, ids: Sequence[UUID]) -> Sequence[LeasedRunRow]:
    """The runs that exist of those asked for."""
    return tx.all(_RUNS, ids=[str(id_) for id_ in ids])


def mutations(tx: Transaction, ids: Sequence[UUID]) -> Sequence[RunMutationRow]:
    """Ledger rows with the state of the run each belongs to."""
    return tx.all(_MUTATIONS, ids=[str(id_) for id_ in ids])


def reservable_events(
    tx: Transaction,
    run: RunRow,
    topic: str,
    *,
    limit: int = 100,
    low_watermark: int = 0,
    ordered: bool = False,
) -> Sequence[PendingEventRow]:
    """Pending events a run may reserve, oldest first."""
    if run.offered is not None:
        return [row for row in slices(tx, [run.id])[run.id] if row.topic == topic][:limit]
    alone = {"handler_id": run.handler_id, "low_watermark": low_watermark, "ordered": ordered}
    return tx.all(_PEEK, topic=topic, limit=limit, **alone)


def delivered_events(tx: Transaction, handler_id: int, topic: str, ids: Sequence[int]) -> Sequence[EventRow]:
    """Events of a topic by id that were delivered to a handler, whatever became of them."""
    return tx.all(_DELIVERED_EVENTS, handler_id=handler_id, topic=topic, ids=list(ids))


def slices(tx: Transaction, ids: Sequence[UUID]) -> dict[UUID, list[OfferedEventRow]]:
    """The pending events that each of these runs was offered, oldest first: one read for a cohort."""
    found: dict[UUID, list[OfferedEventRow]] = {run_id: [] for run_id in ids}
    for row in tx.all(_PEEK_SLICE, ids=[str(run_id) for run_id in ids]):
        found[row.run_id].append(row)
    return found


def refused_inputs(
    tx: Transaction, handler_id: int, events: Sequence[int], topics: Sequence[str]
) -> Sequence[RefusedInputRow]:
    """What became of events that could not be reserved."""
    return tx.all(_REFUSED_INPUTS, handler_id=handler_id, events=list(events), topics=list(topics))


def workflow(tx: Transaction, name: str) -> WorkflowRow | None:
    """One workflow."""
    return tx.first(_WORKFLOW, name=name)


def workflow_names(tx: Transaction) -> list[str]:
    """Every workflow that was ever registered."""
    return [row.name for row in tx.all(_WORKFLOW_NAMES)]


def handler(tx: Transaction, workflow: str, name: str) -> HandlerRow | None:
    """One handler."""
    return tx.first(_HANDLER, workflow=workflow, name=name)


def handlers(tx: Transaction, workflow: str) -> Sequence[HandlerRow]:
    """The handlers of a workflow, retired ones included."""
    return tx.all(_HANDLERS, workflow=workflow)


def topics(tx: Transaction, workflow: str) -> Sequence[NamedTopicRow]:
    """The topics of a workflow, under its present or a former name."""
    return tx.all(_TOPICS, workflow=workflow)


def topics_by_name(tx: Transaction, workflow: str) -> dict[str, NamedTopicRow]:
    """The topics of a workflow by every name that a publisher may use: former ones, and the present one."""
    rows = topics(tx, workflow)
    return {former: row for row in rows for former in row.former_names} | {row.name: row for row in rows}


def present_names(tx: Transaction, kind: NameKind, workflow: str = "") -> dict[str, str]:
    """Former names of topics or handlers of a workflow, or of workflows, each with the present one."""
    return {row.former: row.name for row in tx.all(_PRESENT_NAMES, kind=kind, workflow=workflow)}


def subscriptions(tx: Transaction, workflow: str) -> set[tuple[str, int]]:
    """Who listens to what in a workflow."""
    return {(row.topic, row.handler_id) for row in tx.all(_SUBSCRIPTIONS, workflow=workflow)}


def open_backfills(tx: Transaction, workflow: str | None = None) -> Sequence[OpenBackfillRow]:
    """Subscriptions of a workflow, or of all, whose earlier events are not all delivered."""
    return tx.all(_OPEN_BACKFILLS, workflow=workflow)


def subscriptions_by_name(tx: Transaction, workflow: str) -> set[tuple[str, str]]:
    """Which handlers of a workflow listen to which topics, by name."""
    names = {row.id: row.name for row in handlers(tx, workflow)}
    return {(topic, names[handler_id]) for topic, handler_id in subscriptions(tx, workflow)}


def open_blocks(tx: Transaction, workflow: str) -> Sequence[BlockRow]:
    """Why the system holds a workflow back."""
    return tx.all(_OPEN_BLOCKS, workflow=workflow)


def blocking_mutations(tx: Transaction, workflow: str) -> list[UUID]:
    """Mutations whose unknown outcome holds a workflow back."""
    return [row.id for row in tx.all(_BLOCKING_MUTATIONS, workflow=workflow)]


def workflow_facts(tx: Transaction, workflow: str) -> WorkflowFactsRow | None:
    """What decides whether a workflow may start a run: its switches, its open blocks and its active runs."""
    return tx.first(_WORKFLOW_FACTS, workflow=workflow)


def retried_run_ids(tx: Transaction, ids: Sequence[UUID]) -> set[UUID]:
    """Which of these runs another run has retried."""
    return {row.retry_of for row in tx.all(_RETRIED_RUN_IDS, ids=[str(id_) for id_ in ids])}


def handler_facts(tx: Transaction, *workflows: str) -> Sequence[HandlerFactsRow]:
    """What the scheduler's decisions need to know of each handler, read without a lock."""
    return tx.all(_HANDLER_FACTS, workflows=list(workflows))


def due_facts(tx: Transaction) -> Sequence[HandlerFactsRow]:
    """The same of all workflows in which something may be due."""
    return tx.all(DUE_FACTS)


def retryable_runs(tx: Transaction, workflow: str) -> list[UUID]:
    """Stopped runs whose outcome is known and whose pause is over, oldest first."""
    return sorted(UUID(run_id) for row in handler_facts(tx, workflow) for run_id in row.retryable)


def sweep_ages(tx: Transaction) -> dict[str, timedelta]:
    """How long ago each sweep has run. One that never ran is missing.

    A last run in the future is from before the clock was set back, and says as little as one long ago.
    """
    return {row.name: abs(row.age) for row in tx.all(_SWEEPS)}


def overdue_sweeps(tx: Transaction, periods: Mapping[str, timedelta]) -> list[str]:
    """Sweeps that never ran, or not for so many of their periods that they should have."""
    return overdue(sweep_ages(tx), periods)


def overdue(
    ages: Mapping[str, timedelta], periods: Mapping[str, timedelta], *, since: timedelta = timedelta.max
) -> list[str]:
    """Sweeps of these ages that are overdue; one that never ran is as old as ``since`` says."""
    return [name for name, every in periods.items() if ages.get(name, since) > every * _OVERDUE_PERIODS]


def lapsed_runs(tx: Transaction, *, limit: int) -> Sequence[LapsedRunRow]:
    """Runs whose worker has stopped extending its lease: the oldest of each workflow first, then the second ones.

    Runs whose lease ends later than it can are among them.
    """
    return tx.all(_LAPSED, limit=limit)


def finishable_sessions(tx: Transaction, *, limit: int = 100) -> list[UUID]:
    """Open sessions of workflows without active runs."""
    return [row.id for row in tx.all(_FINISHABLE, limit=limit)]


def unattended_maintenance(tx: Transaction) -> list[str]:
    """Workflows in maintenance without an open maintenance task."""
    return [row.name for row in tx.all(_UNATTENDED_MAINTENANCE)]


#: In turns, so that many runs of one handler starve no other. Of each handler the longest undispatched first.
STALE_DISPATCHES = Statement[DispatchableRunRow](f"""
SELECT t.*, {handler_columns("t")} FROM (
  SELECT r.*, row_number() OVER (
    PARTITION BY r.handler_id, r.dispatched_at IS NULL ORDER BY r.dispatched_at, r.id) AS turn
  FROM pipeline.runs r
  WHERE r.finished_at IS NULL AND r.status = '{RunStatus.ACTIVE}' AND r.lease_expires_at IS NULL
    AND (r.dispatched_at IS NULL OR r.dispatched_at < pipeline.clock() - CAST(:redispatch_after AS interval)
      OR r.dispatched_at > pipeline.clock() + CAST(:redispatch_after AS interval))
) t ORDER BY t.turn, t.dispatched_at NULLS LAST, t.id LIMIT :limit
""")

SUSPECT_RUNS = Statement[RunIdRow](f"""
SELECT r.id FROM pipeline.runs r
WHERE r.id = ANY(CAST(:ids AS uuid[])) AND (
  EXISTS (SELECT FROM pipeline.deliveries d
    WHERE d.event_id = ANY(coalesce(r.offered, r.event_ids)) AND d.handler_id = r.handler_id AND d.suspect)
  OR EXISTS (SELECT FROM pipeline.runs p WHERE p.id = r.retry_of AND p.status = '{RunStatus.CRASHED}'))
""")

#: A worker that holds a run knows its handler.
UNCLAIMED_RUNS = Statement[RunOfWorkflowRow](f"""
SELECT r.id, r.workflow FROM pipeline.runs r
WHERE r.finished_at IS NULL AND r.status = '{RunStatus.ACTIVE}' AND r.lease_expires_at IS NULL
  AND r.dispatched_at IS NULL AND r.worker IS NULL AND r.created_at < pipeline.clock() - CAST(:patience AS interval)
  AND NOT EXISTS (
    SELECT FROM pipeline.runs o WHERE o.workflow = r.workflow AND o.handler_id = r.handler_id
      AND o.finished_at IS NULL AND o.lease_expires_at > pipeline.clock())
ORDER BY r.id LIMIT :limit
""")


def stale_dispatches(tx: Transaction, *, redispatch_after: Any, limit: int = 100) -> Sequence[DispatchableRunRow]:
    """Active runs that no worker holds and whose last message is older than ``redispatch_after``.

    A message from the future is from before the clock was set back, and may be as old.
    """
    return tx.all(STALE_DISPATCHES, redispatch_after=redispatch_after, limit=limit)


def suspect_runs(tx: Transaction, ids: Sequence[UUID]) -> set[UUID]:
    """Which of these runs follow one that died with its process: each of them travels alone."""
    return {row.id for row in tx.all(SUSPECT_RUNS, ids=[str(id_) for id_ in ids])}


def unclaimed_runs(tx: Transaction, *, older_than: Any, limit: int = 1_000) -> Sequence[RunOfWorkflowRow]:
    """Runs older than ``older_than`` that workers have handed back, and whose handler no worker seems to know."""
    return tx.all(UNCLAIMED_RUNS, patience=older_than, limit=limit)
