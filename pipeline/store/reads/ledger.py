"""Reads of the ledger for the reconciler, operators, circuit breakers and the doctor. Nothing here writes."""

from collections.abc import Collection, Sequence
from typing import Any
from uuid import UUID

from pipeline.domain.codec import MARKER
from pipeline.domain.incidents import INCIDENT_GAP, INCIDENT_SPAN, MIN_INCIDENT_SIZE
from pipeline.domain.states import MutationStatus, Resolver
from pipeline.store.database import Statement, Transaction
from pipeline.store.predicates import MUTATION_MAY_HAVE_HAPPENED, OPEN_MUTATION, join_by_id
from pipeline.store.rows import (
    CountRow,
    DueMutationRow,
    IncidentRow,
    OpenBreakerRow,
    OperationNameRow,
    ParameterValueRow,
    ReplacementRunRow,
    UnresolvedMutationRow,
)
from pipeline.store.schema import OperationRow

#: Each kind has its own share, so that none can keep another waiting.
_DUE_MUTATIONS = Statement[DueMutationRow](f"""
(SELECT id, true AS is_first FROM pipeline.mutations WHERE status = '{MutationStatus.NEEDS_RECONCILE}'
  AND next_reconcile_at <= pipeline.clock() AND reconcile_attempts = 0
 ORDER BY next_reconcile_at LIMIT 10 * CAST(:limit AS bigint))
UNION ALL
(SELECT id, false FROM pipeline.mutations WHERE status = '{MutationStatus.NEEDS_RECONCILE}'
  AND next_reconcile_at <= pipeline.clock() AND reconcile_attempts > 0
 ORDER BY next_reconcile_at LIMIT :limit)
UNION ALL
(SELECT id, false FROM pipeline.mutations
 WHERE next_monitor_at <= pipeline.clock() ORDER BY next_monitor_at LIMIT :limit)
""")

_OPEN_BREAKERS = Statement[OpenBreakerRow]("""
SELECT b.*, b.probe_at IS NOT NULL AND b.probe_at <= pipeline.clock() AS is_due FROM pipeline.breakers b
WHERE b.closed_at IS NULL ORDER BY b.connector, b.operation
""")

#: Operations by name. No index knows them, so among the newest rows; what is open, and every breaker, besides.
_OPERATION_NAMES = Statement[OperationNameRow](f"""
SELECT connector, operation FROM (SELECT * FROM pipeline.mutations ORDER BY id DESC LIMIT :recent) newest
UNION
SELECT connector, operation FROM (
  SELECT m.connector, m.operation FROM pipeline.workflows w CROSS JOIN LATERAL (
    SELECT * FROM pipeline.mutations m
    WHERE m.workflow = w.name AND m.status IN {OPEN_MUTATION}
    ORDER BY m.id LIMIT :recent
  ) m
) open
UNION
SELECT connector, operation FROM pipeline.breakers ORDER BY connector, operation
""")

#: What an operator may resolve, with the events it is about.
_RESOLVABLE = """
SELECT m.*, r.event_ids, h.name AS handler, r.status AS run_status, h.after_failed_mutation, h.retired,
       m.quiet_until > pipeline.clock() AS is_quiet, r.error_type
"""
_JOIN_RUN = f"{join_by_id('runs', 'r', 'm.run_id')} JOIN pipeline.handlers h ON h.id = r.handler_id"
_MUTATIONS_BY_ID = Statement[UnresolvedMutationRow](f"""
{_RESOLVABLE} FROM pipeline.mutations m {_JOIN_RUN}
WHERE m.id = ANY(CAST(:ids AS uuid[])) AND m.status = ANY(CAST(:statuses AS text[])) ORDER BY m.id LIMIT :limit
""")


def _open_of_workflows(condition: str, columns: str = "m.*") -> str:
    """Return the SQL of open mutations, oldest first, found by the index of each workflow."""
    return f"""(
  SELECT m.* FROM pipeline.workflows w CROSS JOIN LATERAL (
    SELECT {columns} FROM pipeline.mutations m WHERE m.workflow = w.name AND m.status IN {OPEN_MUTATION} AND {condition}
    ORDER BY m.id LIMIT :limit
  ) m WHERE CAST(:workflow AS text) IS NULL OR w.name = :workflow ORDER BY m.id LIMIT :limit
) m"""


_IS_SELECTED = """m.status = ANY(CAST(:statuses AS text[]))
      AND (CAST(:connector AS text) IS NULL OR m.connector = :connector)
      AND (CAST(:operation AS text) IS NULL OR m.operation = :operation)
      AND (CAST(:older_than AS interval) IS NULL OR m.created_at < pipeline.clock() - CAST(:older_than AS interval))"""
_OPEN_BY_STATUS = Statement[UnresolvedMutationRow](f"""
{_RESOLVABLE} FROM {_open_of_workflows(_IS_SELECTED)} {_JOIN_RUN} ORDER BY m.id
""")

_QUESTION = (
    "m.id, m.run_id, m.workflow, m.connector, m.operation, m.headline, coalesce(m.doubted_at, m.created_at) AS since"
)
_ALIKE = "PARTITION BY connector, operation, error_class"
#: Incidents among the oldest unknown outcomes that wait for an operator, as `pipeline.domain.incidents` says.
_INCIDENTS = Statement[IncidentRow](f"""
WITH questions AS (
  SELECT m.*, coalesce((SELECT r.error_type FROM pipeline.runs r WHERE r.id = m.run_id), '') AS error_class
  FROM {_open_of_workflows(f"m.status = '{MutationStatus.INDETERMINATE}'", _QUESTION)}
), steps AS (
  SELECT *, since - lag(since) OVER ({_ALIKE} ORDER BY since, id) > interval '{INCIDENT_GAP}' AS is_apart
  FROM questions
), streams AS (
  SELECT *, count(*) FILTER (WHERE is_apart) OVER ({_ALIKE} ORDER BY since, id) AS stream FROM steps
), parts AS (
  SELECT *, floor(extract(epoch FROM since - min(since) OVER ({_ALIKE}, stream))
    / extract(epoch FROM interval '{INCIDENT_SPAN}')) AS part
  FROM streams
)
SELECT connector, operation, error_class, count(*) AS number, min(since) AS first_at, max(since) AS last_at,
  array_agg(DISTINCT workflow) AS workflows, (array_agg(headline ORDER BY since, id))[1:3] AS headlines,
  coalesce(array_agg(id ORDER BY since, id) FILTER (WHERE :with_ids), ARRAY[]::uuid[]) AS mutation_ids
FROM parts GROUP BY connector, operation, error_class, stream, part
HAVING count(*) >= {MIN_INCIDENT_SIZE} ORDER BY first_at, connector, operation, error_class
""")

#: Which other mutations a row of a provider may be about. No index has the parameters, so page by page, newest first.
#: A value is returned only for a mutation that may have happened:
#:
#: - refused, or not found by a reconcile attempt: it did not happen;
#: - found late: it happened;
#: - skipped by an operator after it was sent: it may have happened.
#:
#: Encrypted parameters are returned whole: the process opens them.
_PARAMETER_VALUES = Statement[ParameterValueRow](f"""
SELECT m.id, m.run_id, CASE WHEN x.counts THEN m.params -> :name END AS value,
  CASE WHEN x.counts AND m.params ? '{MARKER}' THEN m.params END AS params
FROM pipeline.mutations m CROSS JOIN LATERAL (
  SELECT (m.status IN {MUTATION_MAY_HAVE_HAPPENED}
    OR m.found_late_at IS NOT NULL OR (m.resolved_by = '{Resolver.OPERATOR_SKIP}' AND m.sent_at IS NOT NULL))
  AND (CAST(:connector AS text) IS NULL OR m.connector = :connector) AS counts) x
WHERE m.id < :below ORDER BY m.id DESC LIMIT :limit
""")

#: The replacement run of a run whose mutation was resolved as failed. Of several, one that applied its mutation.
_REPLACEMENT_RUN = Statement[ReplacementRunRow](f"""
SELECT o.id AS run_id, o.mutation_id, o.status, m.status AS mutation_status, m.connector, m.operation,
       m.idempotency_key, m.sent_at, m.result
FROM pipeline.runs r
JOIN pipeline.deliveries d ON d.handler_id = r.handler_id AND d.event_id = ANY(r.event_ids)
JOIN pipeline.runs o ON o.id = d.run_id LEFT JOIN pipeline.mutations m ON m.id = o.mutation_id
WHERE r.id = :run_id AND o.id <> r.id AND o.mutation_id IS DISTINCT FROM CAST(:mutation_id AS uuid)
ORDER BY m.status = '{MutationStatus.APPLIED}' DESC NULLS LAST, o.id LIMIT 1
""")


#: All rows of one effect are few, and failed ones have an index.
_ABSENCE_COUNT = Statement[CountRow](f"""
SELECT count(*) AS number FROM pipeline.mutations
WHERE effect_id = :effect_id AND status = '{MutationStatus.FAILED}' AND idempotency_key = :key AND NOT refused
""")


def absence_count(tx: Transaction, effect_id: UUID, key: str) -> int:
    """How many requests with this key failed, and were not refused."""
    return tx.one(_ABSENCE_COUNT, effect_id=effect_id, key=key).number


def due_mutations(tx: Transaction, *, limit: int = 100) -> Sequence[DueMutationRow]:
    """List mutations that are due: up to ``limit`` to be reconciled again, and as many to be monitored.

    Before them, up to ten times as many for their first reconcile attempt.
    """
    return tx.all(_DUE_MUTATIONS, limit=limit)


def open_breakers(tx: Transaction) -> Sequence[OpenBreakerRow]:
    """Every open breaker, and whether a probe of it is due."""
    return tx.all(_OPEN_BREAKERS)


def operation_names(tx: Transaction, *, recent: int) -> list[tuple[str, str]]:
    """Connector and operation of the newest rows, of what is open, and of every breaker there ever was."""
    return [(row.connector, row.operation) for row in tx.all(_OPERATION_NAMES, recent=recent)]


def replacement_run(tx: Transaction, run_id: UUID, mutation_id: UUID) -> ReplacementRunRow | None:
    """The other run that owns the inputs of this one now, with what it did besides this mutation."""
    return tx.first(_REPLACEMENT_RUN, run_id=run_id, mutation_id=mutation_id)


def parameter_values(
    tx: Transaction, name: str, *, connector: str | None, below: UUID, limit: int
) -> Sequence[ParameterValueRow]:
    """The ledger below an id, newest first: each with this parameter, or None where nothing can have happened."""
    return tx.all(_PARAMETER_VALUES, name=name, connector=connector, below=below, limit=limit)


def incidents(
    tx: Transaction, *, workflow: str | None = None, limit: int, with_ids: bool = False
) -> Sequence[IncidentRow]:
    """List incidents among the ``limit`` oldest unknown outcomes that wait for an operator, oldest first."""
    return tx.all(_INCIDENTS, workflow=workflow, limit=limit, with_ids=with_ids)


def mutations_by_status(
    tx: Transaction, *, statuses: Sequence[str], ids: Sequence[UUID] | None = None, limit: int = 100, **only: Any
) -> Sequence[UnresolvedMutationRow]:
    """Ledger rows of these statuses, oldest first: those of ``ids``, or the open ones.

    Of the open ones, ``only`` names workflow, connector, operation or older_than.
    """
    if ids is not None:
        named = [str(id_) for id_ in ids]
        return tx.all(_MUTATIONS_BY_ID, statuses=list(statuses), ids=named, limit=limit)
    given: dict[str, Any] = {"workflow": None, "connector": None, "operation": None, "older_than": None, **only}
    return tx.all(_OPEN_BY_STATUS, statuses=list(statuses), limit=limit, **given)


_OPERATIONS = Statement[OperationRow]("SELECT * FROM pipeline.operations ORDER BY connector, operation")
_OPERATIONS_BY_NAME = Statement[OperationRow]("""
SELECT o.* FROM unnest(CAST(:connectors AS text[]), CAST(:operations AS text[])) AS x(connector, operation)
JOIN pipeline.operations o ON o.connector = x.connector AND o.operation = x.operation
""")


def operations(tx: Transaction) -> Sequence[OperationRow]:
    """Every operation that a worker has registered."""
    return tx.all(_OPERATIONS)


def operations_by_name(tx: Transaction, names: Collection[tuple[str, str]]) -> Sequence[OperationRow]:
    """Registered operations by connector and operation."""
    if not names:
        return ()
    connectors, operations = zip(*sorted(names), strict=True)
    return tx.all(_OPERATIONS_BY_NAME, connectors=list(connectors), operations=list(operations))
