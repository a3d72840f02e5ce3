"""What both sides of a chaos run wrote down, as the judge reads it: the ledger's rows and the world's files."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import text

from pipeline.chaos.judge import Delivery, Effect, Entry, Facts
from pipeline.chaos.world import EFFECTS, LOOKS, REQUESTS
from pipeline.domain.states import UNRESOLVED, MutationStatus
from pipeline.store.database import Database
from pipeline.store.reads import invariants

#: Said by the judge itself, who knows that people were told.
_SURFACED = "settled-as-failed-did-not-happen"

_DELIVERIES = text("""
SELECT e.message_id AS "order", d.status, m.idempotency_key AS key FROM pipeline.events e
JOIN pipeline.deliveries d ON d.event_id = e.id
LEFT JOIN pipeline.runs r ON r.id = d.run_id LEFT JOIN pipeline.mutations m ON m.id = r.mutation_id
WHERE e.workflow = :workflow ORDER BY e.id
""")
_LEDGER = text("""
SELECT m.idempotency_key AS key, m.operation, m.status, m.resolved_by, m.error, m.surfaced_at IS NOT NULL AS surfaced,
       e.message_id AS "order"
FROM pipeline.mutations m JOIN pipeline.runs r ON r.id = m.run_id
LEFT JOIN pipeline.events e ON e.id = r.event_ids[1]
WHERE m.workflow = :workflow ORDER BY m.id
""")
_FOLLOWED = text("SELECT message_id FROM pipeline.events WHERE workflow = :workflow AND topic = :topic")
_PROGRESS = text("""
SELECT count(*) FILTER (WHERE d.status = 'consumed') AS done,
       count(*) FILTER (WHERE d.status <> 'consumed' AND coalesce(m.status, '') = :indeterminate) AS asked,
       count(*) AS delivered,
       (SELECT count(*) FROM pipeline.mutations w WHERE w.workflow = :workflow
          AND (w.watch_at IS NOT NULL OR w.status <> ALL(CAST(:ended AS text[])))) AS unsettled,
       (SELECT w.maintenance_reason FROM pipeline.workflows w WHERE w.name = :workflow AND w.maintenance) AS stopped,
       (SELECT string_agg(b.reason, '; ') FROM pipeline.blocks b
        WHERE b.workflow = :workflow AND b.closed_at IS NULL) AS blocked
FROM pipeline.events e JOIN pipeline.deliveries d ON d.event_id = e.id
LEFT JOIN pipeline.runs r ON r.id = d.run_id LEFT JOIN pipeline.mutations m ON m.id = r.mutation_id
WHERE e.workflow = :workflow
""")
_LOST = text("""
SELECT count(*) AS runs, count(*) FILTER (WHERE phase IN ('mutating', 'mutated') AND mutation_id IS NOT NULL) AS sent
FROM pipeline.runs WHERE workflow = :workflow AND error_type = 'WorkerLost'
""")
_UNFINISHED = text("""
SELECT e.message_id AS "order", d.status, r.phase, r.status AS run, r.error, m.idempotency_key AS key,
       m.status AS mutation, m.reconcile_attempts AS looks
FROM pipeline.events e JOIN pipeline.deliveries d ON d.event_id = e.id
LEFT JOIN pipeline.runs r ON r.id = coalesce(d.run_id, d.offered_to)
LEFT JOIN pipeline.mutations m ON m.id = r.mutation_id
WHERE e.workflow = :workflow AND d.status <> 'consumed' AND coalesce(m.status, '') <> :indeterminate ORDER BY e.id
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far the orders have come."""

    done: int
    asked: int
    delivered: int
    unsettled: int
    stands_still: str | None  #: why nothing will move any more

    def is_over(self, orders: int) -> bool:
        """Every order is done or a question, and nothing is being looked for or watched any more."""
        return self.delivered == orders == self.done + self.asked and not self.unsettled


def progress(db: Database, workflow: str) -> Progress:
    """Where the orders stand."""
    ended = [status for status in MutationStatus if status not in UNRESOLVED | {MutationStatus.PENDING}]
    with db.transaction() as tx:
        row = tx.first(
            _PROGRESS,
            workflow=workflow,
            indeterminate=MutationStatus.INDETERMINATE,
            ended=[*ended, MutationStatus.INDETERMINATE],
        )
    assert row is not None
    return Progress(
        done=row.done,
        asked=row.asked,
        delivered=row.delivered,
        unsettled=row.unsettled,
        stands_still=row.stopped or row.blocked,
    )


def lost(db: Database, workflow: str) -> tuple[int, int]:
    """How many runs lost their worker, and how many of those had their mutation in the ledger by then."""
    with db.transaction() as tx:
        row = tx.first(_LOST, workflow=workflow)
    assert row is not None
    return row.runs, row.sent


def unfinished(db: Database, workflow: str) -> list[str]:
    """Orders that came to no end, in words."""
    with db.transaction() as tx:
        rows = tx.all(_UNFINISHED, workflow=workflow, indeterminate=MutationStatus.INDETERMINATE)
    return [
        f"{row.order}: {row.status}; run {row.phase or 'none'}, {row.run or 'none'}; "
        f"mutation {row.mutation or 'none'} {row.key or ''} after {row.looks or 0} looks; {row.error or 'no error'}"
        for row in rows
    ]


def facts(db: Database, workflow: str, home: Path, orders: Sequence[str]) -> Facts:
    """Everything the judge needs."""
    with db.transaction() as tx:
        ledger = tx.all(_LEDGER, workflow=workflow)
        deliveries = tx.all(_DELIVERIES, workflow=workflow)
        followed = tx.all(_FOLLOWED, workflow=workflow, topic="done")
        findings = [found for found in invariants.findings(tx, limit=1000) if found.invariant != _SURFACED]
    return Facts(
        orders=orders,
        ledger=[
            Entry(
                key=row.key,
                order=row.order or "",
                operation=row.operation,
                status=row.status,
                has_surfaced=row.surfaced,
                resolved_by=row.resolved_by,
                error=row.error,
            )
            for row in ledger
        ],
        effects=[Effect(**line) for line in _lines(home / EFFECTS)],
        deliveries=[Delivery(order=row.order, status=row.status, key=row.key) for row in deliveries],
        followed=[row.message_id for row in followed],
        findings=[f"{found.invariant}: {found.subject}: {found.detail}" for found in findings],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A kind of request, as the world counts it, beside what the ledger says of keys that ended with it."""

    world: str
    requests: int
    done: int
    applied: int
    failed: int
    asked: int


NEVER_CAME = "never came"


def compared(found: Facts, home: Path) -> list[Seen]:
    """What the world did with requests, and what became of their keys. Several requests of a key: the last counts."""
    requests = _lines(home / REQUESTS)
    last = {line["key"]: str(line["fault"]) for line in requests}
    words = {entry.key: _word(entry) for entry in found.ledger}
    said = Counter((last.get(key, NEVER_CAME), word) for key, word in words.items())
    asked, done = (Counter(str(line["fault"]) for line in some) for some in (requests, _done(requests)))
    return [
        Seen(
            world=kind,
            requests=asked[kind],
            done=done[kind],
            applied=said[kind, "applied"],
            failed=said[kind, "failed"],
            asked=said[kind, "asked"],
        )
        for kind in [*dict.fromkeys(sorted(asked)), NEVER_CAME]
    ]


def looks(home: Path) -> Mapping[str, int]:
    """How often the world was asked what became of a request, by what it did with the question."""
    return Counter(str(line["fault"]) for line in _lines(home / LOOKS))


def _done(requests: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [line for line in requests if line["done"]]


def _word(entry: Entry) -> str:
    return entry.status if entry.status in ("applied", "failed") else "asked"


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
