"""Guarded writes of handlers: declaration, state, back-off and watermarks."""

from dataclasses import fields
from typing import Any

from pydantic import BaseModel
from sqlalchemy.dialects import postgresql

from pipeline.domain.states import DeliveryStatus
from pipeline.domain.values import HandlerSpec
from pipeline.domain.workflows import HandlerKind, OnUncertain
from pipeline.store import schema
from pipeline.store.database import Command, Statement
from pipeline.store.rows import HandlerIdRow, HandlerStateRow, HorizonRow, SharedStateRow

#: Columns that the code declares, by the field of ``HandlerSpec`` that they hold. Other fields are not stored.
DECLARED = {
    each.name: column
    for each in fields(HandlerSpec)
    if (column := each.metadata.get("column", each.name)) in schema.handlers.c
}
_TYPES = {name: schema.handlers.c[name].type.compile(postgresql.dialect()) for name in DECLARED.values()}  # type: ignore[no-untyped-call]


def declared_values(handler: HandlerSpec) -> dict[str, Any]:
    """What the code declares about a handler, as a row for the statements below."""
    values = {column: getattr(handler, name) for name, column in DECLARED.items()}
    plain = {
        name: value.model_dump(mode="json") if isinstance(value, BaseModel) else value for name, value in values.items()
    }
    return plain | {"first_run_at": handler.first_run_at}


_UPSERT_HANDLERS = f"""
INSERT INTO pipeline.handlers (workflow, next_run_at, {", ".join(_TYPES)})
SELECT :workflow, x.first_run_at, {", ".join(f"x.{name}" for name in _TYPES)}
FROM jsonb_to_recordset(CAST(:rows AS jsonb))
  AS x(first_run_at timestamptz, {", ".join(f"{name} {kind}" for name, kind in _TYPES.items())})
ON CONFLICT (workflow, name) DO UPDATE SET retired = false,
  {", ".join(f"{name} = excluded.{name}" for name in _TYPES if name != "name")},
  next_run_at = CASE WHEN handlers.schedule IS DISTINCT FROM excluded.schedule THEN excluded.next_run_at
                     ELSE coalesce(handlers.next_run_at, excluded.next_run_at) END
"""
UPSERT_HANDLERS = Command(_UPSERT_HANDLERS)

#: What another release has as well is left as that one wants it.
RESTORE_HANDLERS = Command(f"{_UPSERT_HANDLERS} WHERE handlers.retired")

RETIRE_HANDLERS = Command("""
UPDATE pipeline.handlers SET retired = true
WHERE workflow = :workflow AND name <> ALL(CAST(:names AS text[])) AND NOT retired
""")

#: Executed before the handlers are written: a worker that finishes a prepare locks its events before its handler.
RESET_DECLINED = Command(f"""
WITH declined AS (
  SELECT d.event_id, d.handler_id FROM pipeline.deliveries d
  WHERE d.handler_id = ANY(ARRAY(SELECT h.id FROM pipeline.handlers h WHERE h.workflow = :workflow))
    AND d.status = '{DeliveryStatus.PENDING}' AND d.declined
  ORDER BY d.event_id, d.handler_id FOR UPDATE OF d
)
UPDATE pipeline.deliveries d SET declined = false FROM declined x
WHERE d.event_id = x.event_id AND d.handler_id = x.handler_id
""")
CLEAR_IDLE = Command("UPDATE pipeline.handlers SET idle_snapshot = NULL WHERE workflow = :workflow")


SET_STATE = Command("UPDATE pipeline.handlers SET state = CAST(:state AS jsonb) WHERE id = :id")
LOCK_HANDLER_STATES = Statement[HandlerStateRow]("""
SELECT id, state FROM pipeline.handlers WHERE id = ANY(:ids) ORDER BY id FOR NO KEY UPDATE
""")
#: Read after the states are locked: another deployment that has written one was registered before.
SHARED_STATES = Statement[SharedStateRow](f"""
SELECT h.workflow, h.name FROM pipeline.handlers h JOIN pipeline.workflows w ON w.name = h.workflow
WHERE h.id = ANY(:ids) AND (w.concurrency > 1 OR w.on_uncertain = '{OnUncertain.CONTAIN}') ORDER BY h.id
""")

#: Called for handlers that run alone. A worker held the run that stopped, so the handler is claimed.
BACK_OFF = Command("""
UPDATE pipeline.handlers h
SET consecutive_failures = CASE WHEN x.is_over THEN 0 ELSE h.consecutive_failures + x.failures END,
    retry_at = CASE WHEN NOT x.is_over THEN greatest(h.retry_at, pipeline.clock() + x.delay) END,
    unclaimed_since = NULL
FROM (
  SELECT handler_id, count(*) AS failures, max(delay) AS delay, bool_and(is_over) AS is_over
  FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS g(handler_id integer, delay interval, is_over boolean)
  GROUP BY handler_id
) x
WHERE h.id = x.handler_id
""")

#: Since when runs of a handler fail without a commit, and which events all of them have in common.
RECORD_FAILING = Command("""
UPDATE pipeline.handlers h SET failing_since = coalesce(h.failing_since, pipeline.clock()), failing_events = x.events
FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS x(handler_id integer, events bigint[])
WHERE h.id = x.handler_id AND (h.failing_since IS NULL OR h.failing_events IS DISTINCT FROM x.events)
""")

#: No worker claims the runs of these handlers. Back off 1 to 10 minutes, in proportion to the age of the oldest event.
#: Failures are forgotten: they are of code that no worker has.
BACK_OFF_UNCLAIMED = Command(f"""
UPDATE pipeline.handlers h
SET consecutive_failures = 0, unclaimed_since = coalesce(h.unclaimed_since, pipeline.clock()),
  retry_at = greatest(h.retry_at, pipeline.clock() +
  least(greatest((pipeline.clock() - coalesce((
    SELECT e.created_at FROM pipeline.deliveries d JOIN pipeline.events e ON e.id = d.event_id
    WHERE d.handler_id = h.id AND d.status = '{DeliveryStatus.PENDING}'
      AND d.event_id > h.low_watermark ORDER BY d.event_id LIMIT 1),
    h.next_run_at)) / 2, interval '1 minute'), interval '10 minutes'))
WHERE h.id = ANY(:ids) AND NOT h.retired
""")
CLEAR_UNCLAIMED = Command("""
WITH locked AS (SELECT id FROM pipeline.handlers WHERE id = ANY(:ids) ORDER BY id FOR NO KEY UPDATE)
UPDATE pipeline.handlers h SET retry_at = NULL, unclaimed_since = NULL
FROM locked WHERE h.id = locked.id AND h.unclaimed_since IS NOT NULL
""")

RUN_PRODUCER_NOW = Statement[HandlerIdRow](f"""
UPDATE pipeline.handlers SET next_run_at = least(next_run_at, pipeline.clock()), retry_at = NULL
WHERE workflow = :workflow AND name = :name AND kind = '{HandlerKind.PRODUCER}' AND NOT retired RETURNING id
""")

RESET_HANDLER_FAILURES = Command("""
UPDATE pipeline.handlers SET consecutive_failures = 0, retry_at = NULL, unclaimed_since = NULL,
  failing_since = NULL, failing_events = NULL
WHERE workflow = :workflow AND (consecutive_failures > 0 OR retry_at IS NOT NULL OR failing_since IS NOT NULL)
""")


#: Read before the transaction has an id of its own: every transaction that has taken an event id up to
#: this one got its own id earlier, and so has a smaller one than this transaction is about to get.
HORIZON = Statement[HorizonRow](
    "SELECT last_value, pg_current_xact_id_if_assigned() IS NULL AS is_first FROM pipeline.event_ids"
)

#: The previous horizon has passed once every transaction that could hold an id below it has ended. One that a dump
#: brought along from a cluster that was further on never would: it is noted anew.
RAISE_WATERMARKS = Command(f"""
UPDATE pipeline.handlers h SET low_watermark = greatest(h.low_watermark, least(h.horizon, o.oldest - 1))
FROM (
  SELECT w.id, least(
    (SELECT min(event_id) FROM pipeline.deliveries WHERE handler_id = w.id AND status = '{DeliveryStatus.PENDING}'),
    (SELECT min(event_id) FROM pipeline.deliveries WHERE handler_id = w.id AND status = '{DeliveryStatus.RESERVED}'),
    9223372036854775807) AS oldest
  FROM pipeline.handlers w
) o
WHERE o.id = h.id AND h.horizon_xmax <= pg_snapshot_xmin(pg_current_snapshot())
  AND least(h.horizon, o.oldest - 1) > h.low_watermark
""")
#: A horizon that is noted already, and has not grown, stays: nothing is written while no event is published.
SET_HORIZON = Command("""
UPDATE pipeline.handlers SET horizon = :horizon, horizon_xmax = pg_current_xact_id()
WHERE horizon IS NULL OR (horizon <> :horizon AND horizon_xmax <= pg_snapshot_xmin(pg_current_snapshot()))
  OR horizon_xmax > pg_snapshot_xmax(pg_current_snapshot())
""")

#: A snapshot of another cluster: forgotten before this one gets as far, when it would hide what came meanwhile.
CLEAR_FOREIGN_SNAPSHOTS = Command("""
UPDATE pipeline.handlers SET idle_snapshot = NULL
WHERE pg_snapshot_xmax(idle_snapshot) > pg_snapshot_xmax(pg_current_snapshot())
""")
LOCK_ALL_HANDLERS = Statement[HandlerIdRow]("SELECT id FROM pipeline.handlers ORDER BY id FOR NO KEY UPDATE")
