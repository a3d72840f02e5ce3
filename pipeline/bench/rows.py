"""Rows that a benchmark makes and removes in a database of its own, beside the transitions.

A table of a million finished runs is made by copying one: publishing and running them would take an hour.
"""

from typing import Any

from pipeline.bench.workflow import IDLE, NAMES
from pipeline.domain.states import DeliveryStatus
from pipeline.store.schema import metadata

_TABLES = ", ".join(str(table) for table in metadata.sorted_tables)
_OWN = f"^({'|'.join(NAMES)}|{IDLE}[0-9]+)$"  #: the names of the benchmark's workflows
_COPY = "copy-"
ORDER = "order-"  #: the names of orders that were published begin with it, and come after those of copies
NOT_COPIED = f"e.message_id >= '{ORDER}'"  #: of a row ``e`` of events

#: Each run that is copied has an order, its delivery, a mutation, and the event that it published.
_COPY_FINISHED = f"""
WITH source AS (
  SELECT r.id AS run, m.id AS mutation, d.event_id AS "order", o.id AS done
  FROM pipeline.runs r JOIN pipeline.mutations m ON m.run_id = r.id JOIN pipeline.deliveries d ON d.run_id = r.id
  JOIN pipeline.events o ON o.created_by_run_id = r.id
  WHERE r.workflow = %(workflow)s AND d.status = '{DeliveryStatus.CONSUMED}' LIMIT 1
), new AS MATERIALIZED (
  SELECT s.*, pipeline.uuid7() AS new_run, pipeline.uuid7() AS new_mutation,
    pipeline.next_event_id() AS new_order, pipeline.next_event_id() AS new_done, n
  FROM source s, generate_series(1, %(count)s) n
), runs AS (
  INSERT INTO pipeline.runs OVERRIDING SYSTEM VALUE
  SELECT (jsonb_populate_record(NULL::pipeline.runs,
    to_jsonb(r) || jsonb_build_object('id', n.new_run, 'event_ids', jsonb_build_array(n.new_order),
      'mutation_id', n.new_mutation))).*
  FROM new n JOIN pipeline.runs r ON r.id = n.run
), mutations AS (
  INSERT INTO pipeline.mutations OVERRIDING SYSTEM VALUE
  SELECT (jsonb_populate_record(NULL::pipeline.mutations,
    to_jsonb(m) || jsonb_build_object('id', n.new_mutation, 'run_id', n.new_run, 'effect_id', n.new_mutation,
      'idempotency_key', n.new_mutation))).*
  FROM new n JOIN pipeline.mutations m ON m.id = n.mutation
), orders AS (
  INSERT INTO pipeline.events OVERRIDING SYSTEM VALUE
  SELECT (jsonb_populate_record(NULL::pipeline.events,
    to_jsonb(e) || jsonb_build_object('id', n.new_order, 'message_id', '{_COPY}' || n.new_order))).*
  FROM new n JOIN pipeline.events e ON e.id = n."order"
), done AS (
  INSERT INTO pipeline.events OVERRIDING SYSTEM VALUE
  SELECT (jsonb_populate_record(NULL::pipeline.events,
    to_jsonb(e) || jsonb_build_object('id', n.new_done, 'message_id', '{_COPY}' || n.new_order,
      'created_by_run_id', n.new_run, 'caused_by', jsonb_build_array(n.new_order)))).*
  FROM new n JOIN pipeline.events e ON e.id = n.done
)
INSERT INTO pipeline.deliveries OVERRIDING SYSTEM VALUE
SELECT (jsonb_populate_record(NULL::pipeline.deliveries,
  to_jsonb(d) || jsonb_build_object('event_id', n.new_order, 'run_id', n.new_run))).*
FROM new n JOIN pipeline.deliveries d ON d.event_id = n."order"
"""


def clear(cursor: Any) -> list[str]:
    """Remove every row, unless there are workflows of other programs: remove nothing then, and return some names."""
    cursor.execute("BEGIN; LOCK TABLE pipeline.workflows IN ACCESS EXCLUSIVE MODE")
    try:
        cursor.execute("SELECT name FROM pipeline.workflows WHERE name !~ %s ORDER BY name LIMIT 3", (_OWN,))
        foreign = [name for (name,) in cursor.fetchall()]
        if not foreign:
            cursor.execute(f"TRUNCATE {_TABLES} CASCADE")
    finally:
        cursor.execute("COMMIT")
    return foreign


def copy_finished_run(cursor: Any, workflow: str, count: int) -> None:
    """Copy a finished run of a workflow so many times, with its order, its mutation and what it published."""
    cursor.execute(_COPY_FINISHED, {"workflow": workflow, "count": count})
