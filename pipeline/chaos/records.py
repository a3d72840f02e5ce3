"""The records of a chaos run for the judge: the ledger's rows and the provider's files."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

from pipeline.chaos.judge import ChaosRecords, LedgerEntry, OrderDelivery, ProviderEffect
from pipeline.chaos.provider import EFFECTS, RECONCILES, REQUESTS, records_of
from pipeline.domain.states import UNRESOLVED, MutationStatus
from pipeline.store.database import Database, Statement
from pipeline.store.reads import invariants

_DELIVERIES = Statement[Any]("""
SELECT e.message_id AS "order", d.status, m.idempotency_key AS key FROM pipeline.events e
JOIN pipeline.deliveries d ON d.event_id = e.id
LEFT JOIN pipeline.runs r ON r.id = d.run_id LEFT JOIN pipeline.mutations m ON m.id = r.mutation_id
WHERE e.workflow = :workflow ORDER BY e.id
""")
_LEDGER = Statement[Any]("""
SELECT m.idempotency_key AS key, m.operation, m.status, m.resolved_by, m.error,
       coalesce(extract(epoch FROM m.resolved_at), 0)::float AS resolved_at,
       m.found_late_at IS NOT NULL AS is_found_late, coalesce(e.message_id, '') AS "order"
FROM pipeline.mutations m JOIN pipeline.runs r ON r.id = m.run_id
LEFT JOIN pipeline.events e ON e.id = r.event_ids[1]
WHERE m.workflow = :workflow ORDER BY m.id
""")
_COMPLETED_ORDERS = Statement[Any](
    "SELECT message_id FROM pipeline.events WHERE workflow = :workflow AND topic = :topic"
)
_PROGRESS = Statement[Any]("""
SELECT count(*) FILTER (WHERE d.status = 'consumed') AS done,
       count(*) FILTER (WHERE d.status <> 'consumed' AND coalesce(m.status, '') = :indeterminate) AS unresolved,
       count(*) AS delivered,
       (SELECT count(*) FROM pipeline.mutations w WHERE w.workflow = :workflow
          AND (w.next_monitor_at IS NOT NULL OR w.status <> ALL(CAST(:ended AS text[])))) AS open_mutations,
       coalesce(
         (SELECT nullif(w.maintenance_reason, '') FROM pipeline.workflows w WHERE w.name = :workflow AND w.maintenance),
         (SELECT string_agg(b.reason, '; ') FROM pipeline.blocks b
          WHERE b.workflow = :workflow AND b.closed_at IS NULL)) AS block_reason
FROM pipeline.events e JOIN pipeline.deliveries d ON d.event_id = e.id
LEFT JOIN pipeline.runs r ON r.id = d.run_id LEFT JOIN pipeline.mutations m ON m.id = r.mutation_id
WHERE e.workflow = :workflow
""")
_LOST_RUNS = Statement[Any]("""
SELECT count(*) AS runs, count(*) FILTER (WHERE phase IN ('mutating', 'mutated') AND mutation_id IS NOT NULL) AS sent
FROM pipeline.runs WHERE workflow = :workflow AND error_type = 'WorkerLost'
""")
_DOUBTS = Statement[Any]("""
SELECT operation, coalesce(resolved_by, '') AS settled_by,
       coalesce(extract(epoch FROM resolved_at - doubted_at), 0)::float AS seconds
FROM pipeline.mutations WHERE workflow = :workflow AND doubted_at IS NOT NULL
""")
_RUN_TIMES = Statement[Any]("""
SELECT extract(epoch FROM started_at)::float AS started_at, extract(epoch FROM finished_at)::float AS finished_at,
       coalesce(worker, '') AS worker, coalesce(error_type, '') = 'WorkerLost' AS is_lost
FROM pipeline.runs WHERE workflow = :workflow
""")
_LATE_EFFECTS = Statement[Any]("""
SELECT id FROM pipeline.mutations
WHERE workflow = :workflow AND found_late_at IS NOT NULL AND acknowledged_by IS NULL
""")
_REMAINING = Statement[Any]("""
SELECT (SELECT count(*) FROM pipeline.events) + (SELECT count(*) FROM pipeline.runs) AS rows
""")
_SERVER = Statement[Any]("""
SELECT current_setting('server_version') AS version, pg_database_size(current_database()) / 1e6 AS megabytes
""")
_UNFINISHED = Statement[Any]("""
SELECT e.message_id AS "order", d.status, r.phase, r.status AS run, r.error, m.idempotency_key AS key,
       m.status AS mutation, m.reconcile_attempts
FROM pipeline.events e JOIN pipeline.deliveries d ON d.event_id = e.id
LEFT JOIN pipeline.runs r ON r.id = coalesce(d.run_id, d.offered_to)
LEFT JOIN pipeline.mutations m ON m.id = r.mutation_id
WHERE e.workflow = :workflow AND d.status <> 'consumed' AND coalesce(m.status, '') <> :indeterminate ORDER BY e.id
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of the orders."""

    done: int
    unresolved: int
    delivered: int
    open_mutations: int
    block_reason: str | None  #: why the whole workflow stands still

    def is_over(self, orders: int) -> bool:
        """Return whether every order is done or unresolved, and nothing is reconciled or monitored."""
        return self.delivered == orders == self.done + self.unresolved and not self.open_mutations


def progress(db: Database, workflow: str) -> Progress:
    """Read the progress of the orders."""
    ended = [status for status in MutationStatus if status not in UNRESOLVED | {MutationStatus.PENDING}]
    with db.transaction() as tx:
        row = tx.first(
            _PROGRESS,
            workflow=workflow,
            indeterminate=MutationStatus.INDETERMINATE,
            ended=[*ended, MutationStatus.INDETERMINATE],
        )
    assert row is not None
    return Progress(**row._asdict())


def lost_run_counts(db: Database, workflow: str) -> tuple[int, int]:
    """Count the runs that lost their worker, and how many had a mutation."""
    with db.transaction() as tx:
        row = tx.first(_LOST_RUNS, workflow=workflow)
    assert row is not None
    return row.runs, row.sent


def unfinished_orders(db: Database, workflow: str) -> list[str]:
    """Describe the orders that did not finish."""
    with db.transaction() as tx:
        rows = tx.all(_UNFINISHED, workflow=workflow, indeterminate=MutationStatus.INDETERMINATE)
    return [
        f"{row.order}: {row.status}; run {row.phase or 'none'}, {row.run or 'none'}; "
        f"mutation {row.mutation or 'none'} {row.key or ''} after {row.reconcile_attempts or 0} reconcile attempts; "
        f"{row.error or 'no error'}"
        for row in rows
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """A mutation whose outcome was unknown for a while."""

    operation: str
    settled_by: str
    seconds: float  #: from the doubt to the verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimes:
    """When a run started and finished, in seconds since 1970, and by which process."""

    started_at: float | None
    finished_at: float | None
    worker: str
    is_lost: bool


def doubts(db: Database, workflow: str) -> list[Doubt]:
    """Read the mutations whose outcome was unknown."""
    with db.transaction() as tx:
        return [Doubt(**row._asdict()) for row in tx.all(_DOUBTS, workflow=workflow)]


def run_times(db: Database, workflow: str) -> list[RunTimes]:
    """Read the times of every run."""
    with db.transaction() as tx:
        return [RunTimes(**row._asdict()) for row in tx.all(_RUN_TIMES, workflow=workflow)]


def late_effects(db: Database, workflow: str) -> list[UUID]:
    """Return the mutations whose late effect waits for a person."""
    with db.transaction() as tx:
        return [row.id for row in tx.all(_LATE_EFFECTS, workflow=workflow)]


def remaining_rows(db: Database) -> int:
    """Count the events and runs that are left."""
    with db.transaction() as tx:
        return int(tx.one(_REMAINING).rows)


def server(db: Database) -> tuple[str, float]:
    """Return the version of Postgres, and the size of the database in megabytes."""
    with db.transaction() as tx:
        row = tx.one(_SERVER)
    return row.version, float(row.megabytes)


def load_records(
    db: Database, workflow: str, home: Path, orders: Sequence[str], *, with_late_effects: bool = False
) -> ChaosRecords:
    """Read everything that the judge needs. ``with_late_effects``: unacknowledged late effects are findings, too."""
    with db.transaction() as tx:
        ledger = tx.all(_LEDGER, workflow=workflow)
        deliveries = tx.all(_DELIVERIES, workflow=workflow)
        followed = tx.all(_COMPLETED_ORDERS, workflow=workflow, topic="done")
        findings = [
            found
            for found in invariants.findings(tx, limit=1000)
            if with_late_effects or found.invariant != invariants.LATE_EFFECTS
        ]
    return ChaosRecords(
        orders=orders,
        ledger=[LedgerEntry(**row._asdict()) for row in ledger],
        effects=[ProviderEffect(**line) for line in records_of(home / EFFECTS)],
        deliveries=[OrderDelivery(**row._asdict()) for row in deliveries],
        completed_orders=[row.message_id for row in followed],
        findings=[f"{found.invariant}: {found.subject}: {found.detail}" for found in findings],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultComparison:
    """Requests of one fault, beside the ledger's statuses of the keys that ended with it."""

    fault: str
    requests: int
    effects: int
    applied: int
    failed: int
    unresolved: int


NEVER_ARRIVED = "never arrived"


def comparison(found: ChaosRecords, home: Path) -> list[FaultComparison]:
    """Compare the provider's requests with the ledger. The last request of a key counts."""
    requests = records_of(home / REQUESTS)
    last = {line["key"]: str(line["fault"]) for line in requests}
    statuses = {entry.key: _ledger_status(entry) for entry in found.ledger}
    ledger = Counter((last.get(key, NEVER_ARRIVED), status) for key, status in statuses.items())
    received, done = (Counter(str(line["fault"]) for line in some) for some in (requests, _requests_done(requests)))
    return [
        FaultComparison(
            fault=kind,
            requests=received[kind],
            effects=done[kind],
            applied=ledger[kind, "applied"],
            failed=ledger[kind, "failed"],
            unresolved=ledger[kind, "unresolved"],
        )
        for kind in [*dict.fromkeys(sorted(received)), NEVER_ARRIVED]
    ]


def reconcile_counts(home: Path) -> Mapping[str, int]:
    """Count the reconcile requests by their fault."""
    return Counter(str(line["fault"]) for line in records_of(home / RECONCILES))


def _requests_done(requests: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [line for line in requests if line["done"]]


def _ledger_status(entry: LedgerEntry) -> str:
    return entry.status if entry.status in ("applied", "failed") else "unresolved"
