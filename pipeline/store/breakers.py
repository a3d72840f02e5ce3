"""Guarded writes of breakers: a row that is not closed is an open one. Only ``execution`` may import this."""

from sqlalchemy import text

#: Open if enough of the operation's last calls ended with nobody knowing what became of them; what was before it was
#: closed last counts no more. Ids are ordered by time, so the floor keeps this a short walk back from the newest row.
JUDGE = text("""
WITH recent AS (
  SELECT doubted_at IS NOT NULL AS unknown FROM pipeline.mutations
  WHERE id >= CAST(lpad(to_hex(CAST(extract(epoch FROM clock_timestamp() - :window) * 1000 AS bigint)), 12, '0')
                   || '00000000000000000000' AS uuid)
    AND connector = :connector AND operation = :operation AND sent_at > pipeline.clock() - :window
    AND status <> 'in_flight' AND sent_at > coalesce(
      (SELECT closed_at FROM pipeline.breakers WHERE connector = :connector AND operation = :operation), '-infinity')
  ORDER BY id DESC LIMIT :last
), counted AS (
  SELECT count(*) AS calls, count(*) FILTER (WHERE unknown) AS unknown FROM recent
)
INSERT INTO pipeline.breakers (connector, operation, reason, probe_every, probe_at)
SELECT :connector, :operation, unknown || ' of the last ' || calls || ' outcomes are unknown', :probe_every,
       pipeline.clock() + :probe_every
FROM counted WHERE unknown >= :at_least AND unknown >= :share * calls
ON CONFLICT (connector, operation) DO UPDATE
SET reason = excluded.reason, opened_by = NULL, opened_at = excluded.opened_at, probe_every = excluded.probe_every,
    probe_at = excluded.probe_at, closed_at = NULL
WHERE breakers.closed_at IS NOT NULL RETURNING *
""")

#: A person opens it: without probes, until a person closes it.
OPEN = text("""
INSERT INTO pipeline.breakers (connector, operation, reason, opened_by, probe_every)
VALUES (:connector, :operation, :reason, :opened_by, interval '0')
ON CONFLICT (connector, operation) DO UPDATE
SET reason = excluded.reason, opened_by = excluded.opened_by, opened_at = excluded.opened_at, probe_at = NULL,
    closed_at = NULL
RETURNING *
""")

CLOSE = text("""
UPDATE pipeline.breakers SET closed_at = pipeline.clock()
WHERE connector = :connector AND operation = :operation AND closed_at IS NULL AND (:by_person OR opened_by IS NULL)
RETURNING *
""")

#: One caller gets the probe that is due; the next one is due a while later, whatever becomes of this one.
PROBE = text("""
UPDATE pipeline.breakers SET probe_at = pipeline.clock() + probe_every
WHERE connector = :connector AND operation = :operation AND closed_at IS NULL AND probe_at <= pipeline.clock()
RETURNING *
""")
