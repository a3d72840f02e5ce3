"""Guarded writes of breakers: a row that is not closed is an open one. Only ``transitions`` may import this."""

from pipeline.domain.states import MutationStatus, Phase, RunStatus
from pipeline.store.database import Statement
from pipeline.store.predicates import handler_columns
from pipeline.store.rows import DispatchableRunRow
from pipeline.store.schema import BreakerRow

#: Calls that count: answered or given up, sent within the window, and after the breaker was closed last.
_IS_RECENT_CALL = f"""m.connector = :connector AND m.operation = :operation
  AND m.sent_at > pipeline.clock() - CAST(:window AS interval)
    AND m.status <> '{MutationStatus.IN_FLIGHT}' AND m.sent_at > coalesce(
      (SELECT closed_at FROM pipeline.breakers WHERE connector = :connector AND operation = :operation), '-infinity')"""

#: Open if enough of the operation's last calls have an unknown outcome. Ids are ordered by time, so the floor keeps
#: this a short walk back from the newest row. A request that waited for approval is older than its call: those are
#: found by the time of approval, the newest ones and the ones around the mutation in question.
OPEN_IF_UNKNOWN = Statement[BreakerRow](f"""
WITH asked AS (
  SELECT approved_at FROM pipeline.mutations WHERE id = CAST(:mutation_id AS uuid) AND approved_at IS NOT NULL
), approved AS (
  (SELECT id FROM pipeline.mutations WHERE approved_at IS NOT NULL ORDER BY approved_at DESC LIMIT :last)
  UNION ALL
  SELECT m.id FROM asked CROSS JOIN LATERAL (
    SELECT id FROM pipeline.mutations WHERE approved_at <= asked.approved_at ORDER BY approved_at DESC LIMIT :last) m
  UNION ALL
  SELECT m.id FROM asked CROSS JOIN LATERAL (
    SELECT id FROM pipeline.mutations WHERE approved_at >= asked.approved_at ORDER BY approved_at LIMIT :last) m
), fresh AS (
  SELECT m.id FROM pipeline.mutations m
  WHERE m.id >= CAST(lpad(to_hex(CAST(
      extract(epoch FROM clock_timestamp() - CAST(:window AS interval)) * 1000 AS bigint)), 12, '0')
                     || '00000000000000000000' AS uuid) AND {_IS_RECENT_CALL}
  ORDER BY m.id DESC LIMIT :last
), seen AS (
  SELECT id FROM fresh
  UNION
  SELECT id FROM approved
), recent AS (
  SELECT m.doubted_at IS NOT NULL AS unknown FROM pipeline.mutations m
  WHERE m.id = ANY(ARRAY(SELECT id FROM seen)) AND {_IS_RECENT_CALL} ORDER BY m.sent_at DESC, m.id DESC LIMIT :last
), counted AS (
  SELECT count(*) AS calls, count(*) FILTER (WHERE unknown) AS unknown FROM recent
)
INSERT INTO pipeline.breakers (connector, operation, reason, probe_every, probe_at)
SELECT :connector, :operation, unknown || ' of the last ' || calls || ' outcomes are unknown', :probe_every,
       pipeline.clock() + CAST(:probe_every AS interval)
FROM counted WHERE unknown >= :at_least AND unknown >= :share * calls
ON CONFLICT (connector, operation) DO UPDATE
SET reason = excluded.reason, opened_by = NULL, opened_at = excluded.opened_at, probe_every = excluded.probe_every,
    probe_at = excluded.probe_at, closed_at = NULL
WHERE breakers.closed_at IS NOT NULL RETURNING *
""")

#: An operator opens it: without probes, until an operator closes it.
OPEN = Statement[BreakerRow]("""
INSERT INTO pipeline.breakers (connector, operation, reason, opened_by, probe_every)
VALUES (:connector, :operation, :reason, :opened_by, interval '0')
ON CONFLICT (connector, operation) DO UPDATE
SET reason = excluded.reason, opened_by = excluded.opened_by, opened_at = excluded.opened_at, probe_at = NULL,
    closed_at = NULL
RETURNING *
""")

CLOSE = Statement[BreakerRow]("""
UPDATE pipeline.breakers SET closed_at = pipeline.clock()
WHERE connector = :connector AND operation = :operation AND closed_at IS NULL AND (:by_operator OR opened_by IS NULL)
RETURNING *
""")

#: One caller gets the probe that is due. The next is due after ``probe_every``, whatever the result of this one.
TAKE_PROBE = Statement[BreakerRow]("""
UPDATE pipeline.breakers SET probe_at = pipeline.clock() + probe_every
WHERE connector = :connector AND operation = :operation AND closed_at IS NULL AND probe_at <= pipeline.clock()
RETURNING *
""")

#: Runs that have sent nothing and that no worker holds: some of them may wait for the breaker. A run that another
#: transaction has locked is being worked on already.
REDISPATCH_WAITING = Statement[DispatchableRunRow](f"""
WITH waiting AS (
  SELECT r.id FROM pipeline.runs r
  WHERE r.finished_at IS NULL AND r.status = '{RunStatus.ACTIVE}' AND r.lease_expires_at IS NULL
    AND (r.phase = '{Phase.MUTATING}' OR r.phase = '{Phase.PREPARED}' AND r.event_ids <> '{{}}')
  ORDER BY r.id LIMIT :limit FOR NO KEY UPDATE OF r SKIP LOCKED
)
UPDATE pipeline.runs r SET dispatched_at = NULL FROM waiting WHERE r.id = waiting.id
RETURNING r.*, {handler_columns("r")}
""")
