"""Guarded writes of the ledger, and of the run that remembers what became of it.

Ledger and run move in one statement, so the two never disagree. A worker's write carries its fence
and finds the mutation in flight; a later verdict carries none and finds the run stopped in doubt.
Only ``execution`` may import this.
"""

from pipeline.store.rows import BookedMutationRow, FailedMutationRow, MutationRow, SentMutationRow
from pipeline.store.statements import Command, Statement

BEGIN = Statement[SentMutationRow]("""
WITH requested AS (
  SELECT * FROM jsonb_to_recordset(CAST(:rows AS jsonb))
    AS x(run uuid, fence bigint, connector text, operation text, params jsonb, request_hash text,
         idempotency_key text, timeout interval, settle interval, monitor_after interval,
         reconcilable boolean, needs_approval boolean)
), held AS (
  SELECT r.id, r.workflow FROM pipeline.runs r JOIN requested x ON x.run = r.id
  WHERE r.id = ANY(ARRAY(SELECT run FROM requested))
    AND r.fence = x.fence AND r.status = 'active' AND r.phase = 'prepared' AND r.event_ids <> '{}'
    AND r.lease_expires_at > pipeline.clock()
  ORDER BY r.id FOR NO KEY UPDATE OF r
), written AS (
  INSERT INTO pipeline.mutations (run_id, workflow, connector, operation, params, request_hash, idempotency_key,
    status, reconcilable, settle, timeout, monitor_after, attempts, sent_at, send_deadline, quiet_until)
  SELECT h.id, h.workflow, x.connector, x.operation, coalesce(x.params, 'null'), x.request_hash, x.idempotency_key,
    CASE WHEN x.needs_approval THEN 'pending' ELSE 'in_flight' END, x.reconcilable, x.settle, x.timeout,
    x.monitor_after, CASE WHEN x.needs_approval THEN 0 ELSE 1 END,
    CASE WHEN NOT x.needs_approval THEN pipeline.clock() END,
    CASE WHEN NOT x.needs_approval THEN pipeline.clock() + x.timeout END,
    CASE WHEN NOT x.needs_approval THEN pipeline.clock() + x.timeout + x.settle END
  FROM held h JOIN requested x ON x.run = h.id
  RETURNING *
), moved AS (
  UPDATE pipeline.runs r
  SET phase = 'mutating', mutation_id = w.id,
      status = CASE w.status WHEN 'pending' THEN 'paused:approval' ELSE r.status END,
      lease_expires_at = CASE w.status WHEN 'in_flight' THEN greatest(r.lease_expires_at, w.send_deadline) END
  FROM written w WHERE r.id = w.run_id
  RETURNING r.fence, r.id AS run_id
)
SELECT w.*, m.fence FROM written w JOIN moved m ON m.run_id = w.run_id ORDER BY w.id
""")

#: A run whose worker still holds it with its mutation not settled, locked; and its lease over the new deadline.
_HELD = """held AS (
  SELECT r.id, r.mutation_id FROM pipeline.runs r
  JOIN jsonb_to_recordset(CAST(:rows AS jsonb)) AS x(run uuid, fence bigint) ON x.run = r.id
  WHERE r.fence = x.fence AND r.status = 'active' AND r.phase = 'mutating' AND r.lease_expires_at > pipeline.clock()
  ORDER BY r.id FOR NO KEY UPDATE OF r
)"""
_LEASED = """leased AS (
  UPDATE pipeline.runs r SET lease_expires_at = greatest(r.lease_expires_at, s.send_deadline)
  FROM sent s WHERE r.id = s.run_id RETURNING r.fence, r.id
)
SELECT s.*, l.fence FROM sent s JOIN leased l ON l.id = s.run_id ORDER BY s.id"""

SEND = Statement[SentMutationRow](f"""
WITH {_HELD}, sent AS (
  UPDATE pipeline.mutations m
  SET status = 'in_flight', attempts = 1, sent_at = pipeline.clock(), timeout = coalesce(x.timeout, m.timeout),
      settle = coalesce(x.settle, m.settle), send_deadline = pipeline.clock() + coalesce(x.timeout, m.timeout),
      quiet_until = pipeline.clock() + coalesce(x.timeout, m.timeout) + coalesce(x.settle, m.settle)
  FROM held h JOIN jsonb_to_recordset(CAST(:rows AS jsonb)) AS x(run uuid, timeout interval, settle interval)
    ON x.run = h.id
  WHERE m.id = h.mutation_id AND m.status = 'pending' AND m.approved_at IS NOT NULL
  RETURNING m.*
), {_LEASED}
""")

#: Another attempt at a mutation whose last one is known not to have happened.
RESEND = Statement[SentMutationRow](f"""
WITH {_HELD}, sent AS (
  UPDATE pipeline.mutations m
  SET attempts = m.attempts + 1, sent_at = pipeline.clock(), send_deadline = pipeline.clock() + m.timeout,
      quiet_until = pipeline.clock() + m.timeout + m.settle
  FROM held h WHERE m.id = h.mutation_id AND m.status = 'in_flight' RETURNING m.*
), {_LEASED}
""")

#: Run and mutation of a verdict, both locked, run first, where the verdict still counts.
_JUDGED = """
judged AS (
  SELECT r.id AS run, r.handler_id, r.event_ids, r.status AS run_status, m.id AS mutation, x.*
  FROM requested x JOIN pipeline.mutations m ON m.id = x.mutation_id JOIN pipeline.runs r ON r.id = m.run_id
  WHERE m.id = ANY(ARRAY(SELECT mutation_id FROM requested))
    AND ((x.fence IS NOT NULL AND r.status = 'active' AND r.phase = 'mutating' AND r.fence = x.fence
          AND m.status = 'in_flight')
      OR (x.fence IS NULL AND r.status = 'paused:reconciliation' AND r.phase = 'mutating'
          AND m.status IN ('needs_reconcile', 'indeterminate'))) {guard}
  ORDER BY r.id FOR NO KEY UPDATE OF r, m
)"""

_UNBLOCKED = """
unblocked AS (
  UPDATE pipeline.blocks b SET closed_at = pipeline.clock() FROM judged j
  WHERE b.run_id = j.run AND b.kind = 'reconciliation' AND b.closed_at IS NULL
)"""

APPLY = Statement[MutationRow](f"""
WITH requested AS (
  SELECT * FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS x(mutation_id uuid, fence bigint, result jsonb)
), {_JUDGED.format(guard="")}, settled AS (
  UPDATE pipeline.mutations m
  SET status = 'applied', result = j.result, error = NULL, next_reconcile_at = NULL,
      resolved_by = :resolved_by, resolved_at = pipeline.clock()
  FROM judged j WHERE m.id = j.mutation RETURNING m.*
), moved AS (
  UPDATE pipeline.runs r
  SET phase = 'mutated', mutation_outcome = 'success', lease_expires_at = NULL, dispatched_at = pipeline.clock()
  FROM judged j WHERE r.id = j.run
), {_UNBLOCKED}
SELECT * FROM settled ORDER BY id
""")

#: An answer to the call itself counts at once; anything found out later only if it was asked when the request
#: could no longer be travelling: an answer may be older than its record.
_IS_EVIDENCE = """AND ((x.evidence = 'definite' AND x.fence IS NOT NULL)
  OR m.quiet_until <= coalesce(x.reconcile_started_at, pipeline.clock()))"""

FAIL = Statement[FailedMutationRow](f"""
WITH requested AS (
  SELECT * FROM jsonb_to_recordset(CAST(:rows AS jsonb))
    AS x(mutation_id uuid, fence bigint, error text, evidence text, reconcile_started_at timestamptz)
), {_JUDGED.format(guard=_IS_EVIDENCE)}, settled AS (
  UPDATE pipeline.mutations m
  SET status = 'failed', error = j.error, next_reconcile_at = NULL,
      resolved_by = :resolved_by, resolved_at = pipeline.clock(),
      next_monitor_at = CASE WHEN j.evidence = 'absence' AND m.reconcilable THEN pipeline.clock() + m.monitor_after END
  FROM judged j WHERE m.id = j.mutation RETURNING m.*
), moved AS (
  UPDATE pipeline.runs r
  SET phase = 'mutated', mutation_outcome = 'failure',
      retry_pending = (r.retry_pending AND h.after_failed_mutation = 'mutate')
  FROM judged j JOIN pipeline.handlers h ON h.id = j.handler_id WHERE r.id = j.run
), {_UNBLOCKED}
SELECT s.*, j.run, j.handler_id, j.event_ids, j.fence, h.after_failed_mutation
FROM settled s JOIN judged j ON j.mutation = s.id JOIN pipeline.handlers h ON h.id = j.handler_id ORDER BY s.id
""")

#: An in-flight mutation of a run that is being stopped: to the background, or straight to a person.
DOUBT = Statement[MutationRow]("""
UPDATE pipeline.mutations m
SET status = x.status, error = x.error, doubted_at = pipeline.clock(),
    quiet_until = greatest(m.quiet_until, pipeline.clock() + x.quiet),
    next_reconcile_at = CASE WHEN x.status = 'needs_reconcile' THEN pipeline.clock() END
FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS x(mutation_id uuid, status text, error text, quiet interval)
WHERE m.id = x.mutation_id AND m.status = 'in_flight'
RETURNING m.*
""")

#: An approved mutation of a run that is being stopped: it was never sent, so it did not happen.
VOID = Statement[MutationRow]("""
WITH voided AS (
  UPDATE pipeline.mutations m
  SET status = 'failed', error = 'its run stopped before it was sent', resolved_by = 'void',
      resolved_at = pipeline.clock()
  FROM pipeline.runs r
  WHERE r.id = ANY(CAST(:ids AS uuid[])) AND r.phase = 'mutating' AND m.id = r.mutation_id AND m.status = 'pending'
  RETURNING m.*
), moved AS (
  UPDATE pipeline.runs r SET phase = 'mutated', mutation_outcome = 'failure' FROM voided v WHERE r.id = v.run_id
)
SELECT * FROM voided ORDER BY id
""")

BOOK = Statement[BookedMutationRow]("""
WITH due AS (
  SELECT m.id FROM pipeline.mutations m
  JOIN jsonb_to_recordset(CAST(:rows AS jsonb)) AS x(mutation_id uuid, attempts integer) ON x.mutation_id = m.id
  WHERE m.status = 'needs_reconcile' AND m.reconcile_attempts = x.attempts AND m.next_reconcile_at <= pipeline.clock()
  ORDER BY m.id FOR NO KEY UPDATE OF m SKIP LOCKED
)
UPDATE pipeline.mutations m
SET reconcile_attempts = m.reconcile_attempts + 1, next_reconcile_at = pipeline.clock() + x.delay
FROM due, jsonb_to_recordset(CAST(:rows AS jsonb)) AS x(mutation_id uuid, delay interval)
WHERE m.id = due.id AND x.mutation_id = m.id
RETURNING m.*, pipeline.clock() AS reconcile_started_at
""")

#: Not before the outside system wants to be asked, and when absence was found, not before it proves something:
#: a look that came too early for that is not counted.
POSTPONE = Command("""
UPDATE pipeline.mutations
SET reconcile_attempts = greatest(0, reconcile_attempts - CASE WHEN :until_quiet THEN 1 ELSE 0 END),
    next_reconcile_at = greatest(next_reconcile_at, pipeline.clock() + CAST(:after AS interval),
                                 CASE WHEN :until_quiet THEN quiet_until END)
WHERE id = :id AND status = 'needs_reconcile'
""")

#: A look at a mutation that was settled on weak evidence: counted, and another booked, before this one begins.
BEGIN_MONITOR_CHECK = Statement[MutationRow]("""
WITH due AS (
  SELECT id FROM pipeline.mutations WHERE id = :id AND next_monitor_at <= pipeline.clock() FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE pipeline.mutations m
SET next_monitor_at = pipeline.clock() + :pause,
  monitor_attempts = monitor_attempts + CASE WHEN :counts THEN 1 ELSE 0 END
FROM due WHERE m.id = due.id RETURNING m.*
""")

SCHEDULE_MONITOR_CHECK = Command("""
UPDATE pipeline.mutations SET next_monitor_at = pipeline.clock() + CAST(:next AS interval)
WHERE id = :id AND status = 'failed' AND found_late_at IS NULL
""")

#: A look of the watch that came back and told nothing: the one booked in its place is the same look.
DISCOUNT_MONITOR_CHECK = Command("""
UPDATE pipeline.mutations SET monitor_attempts = greatest(0, monitor_attempts - 1)
WHERE id = :id AND status = 'failed' AND found_late_at IS NULL
""")

RECORD_LATE_EFFECT = Statement[MutationRow]("""
UPDATE pipeline.mutations
SET found_late_at = pipeline.clock(), late_result = CAST(:result AS jsonb), next_monitor_at = NULL
WHERE id = :id AND status = 'failed' AND found_late_at IS NULL RETURNING *
""")

ACKNOWLEDGE = Statement[MutationRow]("""
UPDATE pipeline.mutations SET acknowledged_by = :by
WHERE id = :id AND found_late_at IS NOT NULL AND acknowledged_by IS NULL RETURNING *
""")

ESCALATE = Statement[MutationRow]("""
UPDATE pipeline.mutations
SET status = 'indeterminate', next_reconcile_at = NULL, error = concat_ws('; ', nullif(error, ''), :reason)
WHERE id = ANY(CAST(:ids AS uuid[])) AND status = 'needs_reconcile' RETURNING *
""")

#: An operation may have learnt to reconcile since the request was sent.
TRY_AGAIN = Statement[MutationRow]("""
UPDATE pipeline.mutations
SET status = 'needs_reconcile', reconcilable = true, reconcile_attempts = 0, next_reconcile_at = pipeline.clock()
WHERE id = :id AND status = 'indeterminate' AND (reconcilable OR :can_reconcile) RETURNING *
""")

#: A request that was allowed and not sent can be taken back: a worker that holds its run finds it stopped.
SKIP = Statement[MutationRow]("""
WITH judged AS (
  SELECT r.id AS run, m.id AS mutation FROM pipeline.mutations m JOIN pipeline.runs r ON r.id = m.run_id
  WHERE m.id = :id AND r.phase = 'mutating'
    AND ((r.status = 'paused:reconciliation' AND m.status IN ('needs_reconcile', 'indeterminate'))
      OR (r.status IN ('paused:approval', 'active') AND m.status = 'pending'))
  ORDER BY r.id FOR NO KEY UPDATE OF r, m
), settled AS (
  UPDATE pipeline.mutations m
  SET status = 'failed', error = :error, next_reconcile_at = NULL, resolved_by = 'operator_skip',
      resolved_at = pipeline.clock(),
      next_monitor_at = CASE WHEN m.sent_at IS NOT NULL AND m.reconcilable THEN pipeline.clock() + m.monitor_after END
  FROM judged j WHERE m.id = j.mutation RETURNING m.*
), moved AS (
  UPDATE pipeline.runs r
  SET phase = 'mutated', mutation_outcome = 'skipped', retry_pending = true, lease_expires_at = NULL,
      status = CASE r.status WHEN 'active' THEN 'paused:approval' ELSE r.status END, retry_at = NULL,
      finished_at = coalesce(r.finished_at, pipeline.clock())
  FROM judged j WHERE r.id = j.run
), unblocked AS (
  UPDATE pipeline.blocks b SET closed_at = pipeline.clock() FROM judged j
  WHERE b.run_id = j.run AND b.kind = 'reconciliation' AND b.closed_at IS NULL
)
SELECT * FROM settled
""")

APPROVE = Statement[MutationRow]("""
WITH waiting AS (
  SELECT r.id AS run, m.id AS mutation FROM pipeline.mutations m JOIN pipeline.runs r ON r.id = m.run_id
  WHERE m.id = :id AND m.status = 'pending' AND r.status = 'paused:approval' AND m.request_hash = :request_hash
  ORDER BY r.id FOR NO KEY UPDATE OF r, m
), approved AS (
  UPDATE pipeline.mutations m SET approved_by = :approved_by, approved_at = pipeline.clock()
  FROM waiting w WHERE m.id = w.mutation RETURNING m.*
), moved AS (
  UPDATE pipeline.runs r SET status = 'active', dispatched_at = NULL FROM waiting w WHERE r.id = w.run
)
SELECT * FROM approved
""")
