"""Guarded writes of the ledger, and of the run that remembers what became of it.

Mutation and run change in one statement, so the two never disagree. A worker's write carries its fence
and expects the mutation in flight. A later verdict carries no fence and expects the run stopped in doubt.
Only ``transitions`` may import this.
"""

from pipeline.domain.states import Evidence, MutationOutcome, MutationStatus, Phase, Resolver, RunStatus
from pipeline.domain.workflows import AfterFailedMutation, BlockKind
from pipeline.store.database import Command, Statement
from pipeline.store.predicates import MUTATION_IN_DOUBT, added_cost
from pipeline.store.rows import BookedMutationRow, FailedMutationRow, SentMutationRow
from pipeline.store.schema import MutationRow, ProposalRow

#: Whether a failed mutation has used its key up, so that a repeat gets a new one. It has if
#:
#: - the provider itself refused it, or
#: - it was sent, and its key protects no repeat: the provider honours none, or has forgotten this one. A new key then
#:   tells the two effects apart.
_IS_KEY_USED_UP = """(m.refused OR (m.sent_at IS NOT NULL
  AND (NOT m.keyed OR coalesce(m.key_expires_at <= pipeline.clock(), false))))"""

#: What the ledger says about earlier requests for the same effect. All have failed, or the inputs were not free.
_EARLIER = f"""(
  SELECT count(*) FILTER (WHERE {_IS_KEY_USED_UP}) AS used_up,
         min(m.key_expires_at) FILTER (WHERE NOT {_IS_KEY_USED_UP}) AS key_expires_at
  FROM pipeline.mutations m WHERE m.effect_id = x.effect_id AND m.status = '{MutationStatus.FAILED}'
)"""

#: When a quiet period begins, and what time it is when one may be over: by Postgres and by the host of the process, the
#: later one to begin, the earlier one to end. Then a jump of either clock makes no quiet period shorter.
_QUIET_BEGINS = "greatest(pipeline.clock(), CAST(:opened_at AS timestamptz))"
_QUIET_NOW = "least(pipeline.clock(), CAST(:host_clock AS timestamptz))"


def _lease_end(sent: str) -> str:
    """Return the SQL of the end of a lease under which a request leaves: a whole lease from now.

    If nothing can reconcile the request, its lease covers its deadline too: to stop the run before would tell
    operators of an outcome that its worker may still find out. What can be reconciled is asked about at once, and an
    answer that it did not happen counts only after the quiet period, however early it comes.
    """
    return f"""greatest(r.lease_expires_at, pipeline.clock() + r.lease_duration,
        CASE WHEN NOT {sent}.reconcilable THEN {sent}.send_deadline END)"""


def _lease_duration(sent: str) -> str:
    """Return the SQL of the longest time that such a lease lasts."""
    return f"greatest(r.lease_duration, CASE WHEN NOT {sent}.reconcilable THEN {sent}.timeout END)"


BEGIN = Statement[SentMutationRow](f"""
WITH requested AS (
  SELECT * FROM jsonb_to_recordset(CAST(:rows AS jsonb))
    AS x(run uuid, fence bigint, connector text, operation text, params jsonb, request_hash text,
         effect_id uuid, timeout interval, settle interval, monitor_after interval,
         reconcilable boolean, keyed boolean, key_lifetime interval, needs_approval boolean,
         cost numeric, passes_breaker boolean, headline text, message_ids text[], message_count integer,
         four_eyes_value numeric)
), held AS (
  SELECT r.id, r.workflow FROM pipeline.runs r JOIN requested x ON x.run = r.id
  WHERE r.id = ANY(ARRAY(SELECT run FROM requested))
    AND r.fence = x.fence AND r.status = '{RunStatus.ACTIVE}' AND r.phase = '{Phase.PREPARED}' AND r.event_ids <> '{{}}'
    AND r.lease_expires_at > pipeline.clock()
    AND (x.needs_approval OR x.passes_breaker OR (
      SELECT b.closed_at IS NULL FROM pipeline.breakers b
      WHERE b.connector = x.connector AND b.operation = x.operation) IS NOT TRUE)
  ORDER BY r.id FOR NO KEY UPDATE OF r
), written AS (
  INSERT INTO pipeline.mutations (run_id, workflow, connector, operation, params, request_hash, effect_id,
    idempotency_key, status, reconcilable, keyed, key_lifetime, key_expires_at, settle, timeout, monitor_after,
    attempts, sent_at, send_deadline, quiet_until, headline, message_ids, message_count, four_eyes_value)
  SELECT h.id, h.workflow, x.connector, x.operation, coalesce(x.params, 'null'), x.request_hash, x.effect_id,
    x.effect_id || ':' || earlier.used_up,
    CASE WHEN x.needs_approval THEN '{MutationStatus.PENDING}' ELSE '{MutationStatus.IN_FLIGHT}' END,
    x.reconcilable, x.keyed, x.key_lifetime,
    least(earlier.key_expires_at, CASE WHEN NOT x.needs_approval THEN pipeline.clock() + x.key_lifetime END),
    x.settle, x.timeout, x.monitor_after, CASE WHEN x.needs_approval THEN 0 ELSE 1 END,
    CASE WHEN NOT x.needs_approval THEN pipeline.clock() END,
    CASE WHEN NOT x.needs_approval THEN pipeline.clock() + x.timeout END,
    CASE WHEN NOT x.needs_approval THEN {_QUIET_BEGINS} + x.timeout + x.settle END,
    coalesce(x.headline, ''), coalesce(x.message_ids, '{{}}'), coalesce(x.message_count, 0), x.four_eyes_value
  FROM held h JOIN requested x ON x.run = h.id CROSS JOIN LATERAL {_EARLIER} earlier
  RETURNING *
), moved AS (
  UPDATE pipeline.runs r
  SET phase = '{Phase.MUTATING}', mutation_id = w.id,
      status = CASE w.status WHEN '{MutationStatus.PENDING}' THEN '{RunStatus.PAUSED_APPROVAL}' ELSE r.status END,
      lease_expires_at = CASE w.status WHEN '{MutationStatus.IN_FLIGHT}' THEN {_lease_end("w")} END,
      lease_duration = {_lease_duration("w")},
      cost = {added_cost("x")}
  FROM written w JOIN requested x ON x.run = w.run_id WHERE r.id = w.run_id
  RETURNING r.fence, r.id AS run_id
)
SELECT w.*, m.fence FROM written w JOIN moved m ON m.run_id = w.run_id ORDER BY w.id
""")

#: A run with an unresolved mutation that its worker still holds, locked; its lease is extended over the new deadline.
_HELD = f"""held AS (
  SELECT r.id, r.mutation_id FROM pipeline.runs r
  JOIN jsonb_to_recordset(CAST(:rows AS jsonb)) AS x(run uuid, fence bigint) ON x.run = r.id
  WHERE r.id = ANY(ARRAY(SELECT run FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS x(run uuid)))
    AND r.fence = x.fence AND r.status = '{RunStatus.ACTIVE}' AND r.phase = '{Phase.MUTATING}'
    AND r.lease_expires_at > pipeline.clock()
  ORDER BY r.id FOR NO KEY UPDATE OF r
)"""
_LEASED = f"""leased AS (
  UPDATE pipeline.runs r
  SET lease_expires_at = {_lease_end("s")}, lease_duration = {_lease_duration("s")}, cost = {added_cost("x")}
  FROM sent s JOIN jsonb_to_recordset(CAST(:rows AS jsonb)) AS x(run uuid, cost numeric) ON x.run = s.run_id
  WHERE r.id = ANY(ARRAY(SELECT run_id FROM sent)) AND r.id = s.run_id RETURNING r.fence, r.id
)
SELECT s.*, l.fence FROM sent s JOIN leased l ON l.id = s.run_id ORDER BY s.id"""

SEND = Statement[SentMutationRow](f"""
WITH {_HELD}, sent AS (
  UPDATE pipeline.mutations m
  SET status = '{MutationStatus.IN_FLIGHT}', attempts = 1, sent_at = pipeline.clock(), timeout = coalesce(x.timeout,
    m.timeout),
      key_expires_at = least(m.key_expires_at, pipeline.clock() + m.key_lifetime),
      settle = coalesce(x.settle, m.settle), send_deadline = pipeline.clock() + coalesce(x.timeout, m.timeout),
      quiet_until = {_QUIET_BEGINS} + coalesce(x.timeout, m.timeout) + coalesce(x.settle, m.settle)
  FROM held h JOIN jsonb_to_recordset(CAST(:rows AS jsonb)) AS x(run uuid, timeout interval, settle interval)
    ON x.run = h.id
  WHERE m.id = h.mutation_id AND m.status = '{MutationStatus.PENDING}' AND m.approved_at IS NOT NULL
  RETURNING m.*
), {_LEASED}
""")

#: Another attempt at a mutation whose last attempt is known not to have happened.
RESEND = Statement[SentMutationRow](f"""
WITH {_HELD}, sent AS (
  UPDATE pipeline.mutations m
  SET attempts = m.attempts + 1, sent_at = pipeline.clock(), send_deadline = pipeline.clock() + m.timeout,
      quiet_until = {_QUIET_BEGINS} + m.timeout + m.settle
  FROM held h
  WHERE m.id = ANY(ARRAY(SELECT mutation_id FROM held)) AND m.id = h.mutation_id
    AND m.status = '{MutationStatus.IN_FLIGHT}'
  RETURNING m.*
), {_LEASED}
""")

#: A mutation and its run, locked in the order of every verdict. Its state is then compared with the one that was shown.
LOCK = Statement[MutationRow]("""
SELECT m.* FROM pipeline.mutations m JOIN pipeline.runs r ON r.id = m.run_id
WHERE m.id = :id ORDER BY r.id FOR NO KEY UPDATE OF r, m
""")

#: Run and mutation of a verdict that still counts, both locked, the run first.
_JUDGED = f"""
named AS MATERIALIZED (
  SELECT m.run_id FROM pipeline.mutations m WHERE m.id = ANY(ARRAY(SELECT mutation_id FROM requested))
), judged AS (
  SELECT r.id AS run, r.handler_id, r.event_ids, r.status AS run_status, m.id AS mutation, x.*
  FROM requested x JOIN pipeline.mutations m ON m.id = x.mutation_id JOIN pipeline.runs r ON r.id = m.run_id
  WHERE m.id = ANY(ARRAY(SELECT mutation_id FROM requested))
    AND r.id = ANY(ARRAY(SELECT run_id FROM named)) AND m.run_id = ANY(ARRAY(SELECT run_id FROM named))
    AND ((x.fence IS NOT NULL AND r.status = '{RunStatus.ACTIVE}' AND r.phase = '{Phase.MUTATING}' AND r.fence = x.fence
          AND m.status = '{MutationStatus.IN_FLIGHT}')
      OR (x.fence IS NULL AND r.status = '{RunStatus.PAUSED_RECONCILIATION}' AND r.phase = '{Phase.MUTATING}'
          AND m.status IN {MUTATION_IN_DOUBT})) {{guard}}
  ORDER BY r.id FOR NO KEY UPDATE OF r, m
)"""

_UNBLOCKED = f"""
unblocked AS (
  UPDATE pipeline.blocks b SET closed_at = pipeline.clock()
  WHERE b.run_id = ANY(ARRAY(SELECT run FROM judged)) AND b.kind = '{BlockKind.RECONCILIATION}' AND b.closed_at IS NULL
)"""

APPLY = Statement[MutationRow](f"""
WITH requested AS (
  SELECT * FROM jsonb_to_recordset(CAST(:rows AS jsonb))
    AS x(mutation_id uuid, fence bigint, result jsonb, resolved_by text, cost numeric)
), {_JUDGED.format(guard="")}, settled AS (
  UPDATE pipeline.mutations m
  SET status = '{MutationStatus.APPLIED}', result = j.result, error = NULL, next_reconcile_at = NULL,
      resolved_by = j.resolved_by, resolved_at = pipeline.clock()
  FROM judged j WHERE m.id = j.mutation AND m.id = ANY(ARRAY(SELECT mutation FROM judged)) RETURNING m.*
), moved AS (
  UPDATE pipeline.runs r
  SET phase = '{Phase.MUTATED}', mutation_outcome = '{MutationOutcome.SUCCESS}', lease_expires_at = NULL,
    dispatched_at = pipeline.clock(), cost = {added_cost("j")}
  FROM judged j WHERE r.id = j.run AND r.id = ANY(ARRAY(SELECT run FROM judged))
), {_UNBLOCKED}
SELECT * FROM settled ORDER BY id
""")

#: The answer to the call itself counts at once. A verdict that was found out later counts only if the reconcile attempt
#: began after the quiet period: the answer may be older than its record.
_IS_EVIDENCE = f"""AND ((x.evidence IN ('{Evidence.REFUSED}', '{Evidence.DEFINITE}') AND x.fence IS NOT NULL)
  OR m.quiet_until <= coalesce(x.reconcile_started_at, {_QUIET_NOW}))"""

_AFTER_FAILED = "(SELECT h.after_failed_mutation FROM pipeline.handlers h WHERE h.id = j.handler_id)"

FAIL = Statement[FailedMutationRow](f"""
WITH requested AS (
  SELECT * FROM jsonb_to_recordset(CAST(:rows AS jsonb))
    AS x(mutation_id uuid, fence bigint, error text, evidence text, reconcile_started_at timestamptz,
      resolved_by text)
), {_JUDGED.format(guard=_IS_EVIDENCE)}, settled AS (
  UPDATE pipeline.mutations m
  SET status = '{MutationStatus.FAILED}', error = j.error, next_reconcile_at = NULL,
      resolved_by = j.resolved_by, resolved_at = pipeline.clock(), refused = (j.evidence = '{Evidence.REFUSED}'),
      next_monitor_at = CASE WHEN (j.evidence = '{Evidence.ABSENCE}' OR j.fence IS NULL) AND m.reconcilable
        THEN pipeline.clock() + m.monitor_after END
  FROM judged j WHERE m.id = j.mutation AND m.id = ANY(ARRAY(SELECT mutation FROM judged)) RETURNING m.*
), moved AS (
  UPDATE pipeline.runs r
  SET phase = '{Phase.MUTATED}', mutation_outcome = '{MutationOutcome.FAILURE}',
      retry_pending = (r.retry_pending AND {_AFTER_FAILED} = '{AfterFailedMutation.MUTATE}')
  FROM judged j WHERE r.id = j.run AND r.id = ANY(ARRAY(SELECT run FROM judged))
), {_UNBLOCKED}
SELECT s.*, j.run, j.handler_id, j.event_ids, j.fence, {_AFTER_FAILED} AS after_failed_mutation
FROM settled s JOIN judged j ON j.mutation = s.id ORDER BY s.id
""")

#: An in-flight mutation of a run that is being stopped: to the reconciler, or directly to an operator.
DOUBT = Statement[MutationRow](f"""
WITH requested AS (
  SELECT * FROM jsonb_to_recordset(CAST(:rows AS jsonb))
    AS x(mutation_id uuid, status text, error text, quiet interval)
)
UPDATE pipeline.mutations m
SET status = x.status, error = x.error, doubted_at = pipeline.clock(),
    quiet_until = greatest(m.quiet_until, {_QUIET_BEGINS} + x.quiet),
    next_reconcile_at = CASE WHEN x.status = '{MutationStatus.NEEDS_RECONCILE}' THEN pipeline.clock() END
FROM requested x
WHERE m.id = ANY(ARRAY(SELECT mutation_id FROM requested)) AND m.id = x.mutation_id
  AND m.status = '{MutationStatus.IN_FLIGHT}'
RETURNING m.*
""")

#: An approved mutation of a run that is being stopped: it was never sent, so it did not happen.
VOID = Statement[MutationRow](f"""
WITH voided AS (
  UPDATE pipeline.mutations m
  SET status = '{MutationStatus.FAILED}', error = 'its run stopped before it was sent', resolved_by = '{Resolver.VOID}',
      resolved_at = pipeline.clock()
  WHERE m.id = ANY(ARRAY(
      SELECT r.mutation_id FROM pipeline.runs r
      WHERE r.id = ANY(CAST(:ids AS uuid[])) AND r.phase = '{Phase.MUTATING}'))
    AND m.status = '{MutationStatus.PENDING}'
  RETURNING m.*
), moved AS (
  UPDATE pipeline.runs r SET phase = '{Phase.MUTATED}', mutation_outcome = '{MutationOutcome.FAILURE}'
    FROM voided v WHERE r.id = v.run_id AND r.id = ANY(ARRAY(SELECT run_id FROM voided))
)
SELECT * FROM voided ORDER BY id
""")

BOOK = Statement[BookedMutationRow](f"""
WITH due AS (
  SELECT m.id FROM pipeline.mutations m
  JOIN jsonb_to_recordset(CAST(:rows AS jsonb)) AS x(mutation_id uuid, attempts integer) ON x.mutation_id = m.id
  WHERE m.status = '{MutationStatus.NEEDS_RECONCILE}' AND m.reconcile_attempts = x.attempts
    AND (m.next_reconcile_at <= pipeline.clock() OR m.next_reconcile_at = CAST(:deferred_until AS timestamptz))
  ORDER BY m.id FOR NO KEY UPDATE OF m SKIP LOCKED
)
UPDATE pipeline.mutations m
SET reconcile_attempts = m.reconcile_attempts + 1, next_reconcile_at = pipeline.clock() + x.delay,
    reconcile_deferred_since = NULL
FROM due, jsonb_to_recordset(CAST(:rows AS jsonb)) AS x(mutation_id uuid, delay interval)
WHERE m.id = due.id AND x.mutation_id = m.id
RETURNING m.*, {_QUIET_NOW} AS reconcile_started_at
""")

#: The next attempt is not before the time that the connector named. After an absence it is not before the end of the
#: quiet period, and the attempt that came too early is not counted.
POSTPONE = Command(f"""
UPDATE pipeline.mutations
SET reconcile_attempts = greatest(0, reconcile_attempts - CASE WHEN :until_quiet THEN 1 ELSE 0 END),
    next_reconcile_at = greatest(next_reconcile_at, pipeline.clock() + CAST(:after AS interval),
                                 CASE WHEN :until_quiet THEN pipeline.clock() + (quiet_until - {_QUIET_NOW}) END)
WHERE id = :id AND status = '{MutationStatus.NEEDS_RECONCILE}'
""")

#: No worker could make the attempt that is due. Since when is kept until an attempt is made.
DEFER = Statement[MutationRow](f"""
UPDATE pipeline.mutations
SET next_reconcile_at = greatest(next_reconcile_at, pipeline.clock() + CAST(:after AS interval)),
    reconcile_deferred_since = coalesce(reconcile_deferred_since, pipeline.clock())
WHERE id = :id AND status = '{MutationStatus.NEEDS_RECONCILE}' AND next_reconcile_at = :next_reconcile_at RETURNING *
""")

#: A check for the late effect of a mutation that was resolved on weak evidence. It is counted, and another is booked,
#: before it begins.
BEGIN_MONITOR_CHECK = Statement[MutationRow]("""
WITH due AS (
  SELECT id FROM pipeline.mutations
  WHERE id = :id AND (next_monitor_at <= pipeline.clock() OR next_monitor_at = CAST(:deferred_until AS timestamptz))
  FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE pipeline.mutations m
SET next_monitor_at = pipeline.clock() + CAST(:pause AS interval),
  monitor_attempts = monitor_attempts + CASE WHEN :counts THEN 1 ELSE 0 END
FROM due WHERE m.id = due.id RETURNING m.*
""")

SCHEDULE_MONITOR_CHECK = Command(f"""
UPDATE pipeline.mutations SET next_monitor_at = pipeline.clock() + CAST(:next AS interval)
WHERE id = :id AND status = '{MutationStatus.FAILED}' AND found_late_at IS NULL
""")

#: A check that ended without a verdict does not count: the booked one takes its place.
DISCOUNT_MONITOR_CHECK = Command(f"""
UPDATE pipeline.mutations SET monitor_attempts = greatest(0, monitor_attempts - 1)
WHERE id = :id AND status = '{MutationStatus.FAILED}' AND found_late_at IS NULL
""")

RECORD_LATE_EFFECT = Statement[MutationRow](f"""
UPDATE pipeline.mutations
SET found_late_at = pipeline.clock(), late_result = CAST(:result AS jsonb), next_monitor_at = NULL
WHERE id = :id AND status = '{MutationStatus.FAILED}' AND found_late_at IS NULL RETURNING *
""")

ACKNOWLEDGE = Statement[MutationRow]("""
UPDATE pipeline.mutations SET acknowledged_by = :by
WHERE id = :id AND found_late_at IS NOT NULL AND acknowledged_by IS NULL RETURNING *
""")

ESCALATE = Statement[MutationRow](f"""
UPDATE pipeline.mutations
SET status = '{MutationStatus.INDETERMINATE}', next_reconcile_at = NULL, error = concat_ws('; ', nullif(error, ''),
  CAST(:reason AS text))
WHERE id = ANY(CAST(:ids AS uuid[])) AND status = '{MutationStatus.NEEDS_RECONCILE}' RETURNING *
""")

#: An operation may have learnt to reconcile since the request was sent.
TRY_AGAIN = Statement[MutationRow](f"""
UPDATE pipeline.mutations
SET status = '{MutationStatus.NEEDS_RECONCILE}', reconcilable = true, reconcile_attempts = 0,
  next_reconcile_at = pipeline.clock(), reconcile_deferred_since = pipeline.clock()
WHERE id = :id AND status = '{MutationStatus.INDETERMINATE}' AND (reconcilable OR :can_reconcile) RETURNING *
""")

#: A request that was approved and not sent can be rejected: a worker that holds its run finds the run stopped.
SKIP = Statement[MutationRow](f"""
WITH judged AS (
  SELECT r.id AS run, m.id AS mutation FROM pipeline.mutations m JOIN pipeline.runs r ON r.id = m.run_id
  WHERE m.id = :id AND r.phase = '{Phase.MUTATING}'
    AND ((r.status = '{RunStatus.PAUSED_RECONCILIATION}' AND m.status IN {MUTATION_IN_DOUBT})
      OR (r.status IN ('{RunStatus.PAUSED_APPROVAL}', '{RunStatus.ACTIVE}') AND m.status = '{MutationStatus.PENDING}'))
  ORDER BY r.id FOR NO KEY UPDATE OF r, m
), settled AS (
  UPDATE pipeline.mutations m
  SET status = '{MutationStatus.FAILED}', error = :error, next_reconcile_at = NULL,
    resolved_by = '{Resolver.OPERATOR_SKIP}',
      resolved_at = pipeline.clock(),
      next_monitor_at = CASE WHEN m.sent_at IS NOT NULL AND m.reconcilable THEN pipeline.clock() + m.monitor_after END
  FROM judged j WHERE m.id = j.mutation RETURNING m.*
), moved AS (
  UPDATE pipeline.runs r
  SET phase = '{Phase.MUTATED}', mutation_outcome = '{MutationOutcome.SKIPPED}', retry_pending = true,
    lease_expires_at = NULL,
      status = CASE r.status WHEN '{RunStatus.ACTIVE}' THEN '{RunStatus.PAUSED_APPROVAL}' ELSE r.status END,
      retry_at = NULL,
      finished_at = coalesce(r.finished_at, pipeline.clock())
  FROM judged j WHERE r.id = j.run
), unblocked AS (
  UPDATE pipeline.blocks b SET closed_at = pipeline.clock() FROM judged j
  WHERE b.run_id = j.run AND b.kind = '{BlockKind.RECONCILIATION}' AND b.closed_at IS NULL
)
SELECT * FROM settled
""")

APPROVE = Statement[MutationRow](f"""
WITH waiting AS (
  SELECT r.id AS run, m.id AS mutation FROM pipeline.mutations m JOIN pipeline.runs r ON r.id = m.run_id
  WHERE m.id = :id AND m.status = '{MutationStatus.PENDING}' AND r.status = '{RunStatus.PAUSED_APPROVAL}'
    AND m.request_hash = :request_hash
  ORDER BY r.id FOR NO KEY UPDATE OF r, m
), approved AS (
  UPDATE pipeline.mutations m SET approved_by = :approved_by, approved_at = pipeline.clock()
  FROM waiting w WHERE m.id = w.mutation RETURNING m.*
), moved AS (
  UPDATE pipeline.runs r SET status = '{RunStatus.ACTIVE}', dispatched_at = NULL FROM waiting w WHERE r.id = w.run
)
SELECT * FROM approved
""")


#: A new proposal replaces the open one of its mutation.
REPLACE_PROPOSAL = Statement[ProposalRow]("""
WITH closed AS (
  UPDATE pipeline.proposals SET closed_at = pipeline.clock() WHERE mutation_id = :mutation_id AND closed_at IS NULL
  RETURNING id
)
INSERT INTO pipeline.proposals (mutation_id, act, answer, state, proposed_by, reason)
SELECT :mutation_id, :act, CAST(:answer AS jsonb), :state, :proposed_by, :reason
FROM (SELECT count(*) FROM closed) AS done
RETURNING *
""")

CONFIRM_PROPOSAL = Command("""
UPDATE pipeline.proposals SET closed_at = pipeline.clock(), confirmed_by = :by
WHERE id = :id AND closed_at IS NULL AND proposed_by <> :by
""")
