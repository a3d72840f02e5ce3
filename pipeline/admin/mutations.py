"""Show mutations to an operator: a list of the ledger, or one with its timeline, advice and notes.

Notes are in the audit. Who has a mutation open is in the memory of one process.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from pipeline.admin import advice, lookup, workflows
from pipeline.admin import timeline as admin_timeline
from pipeline.admin.advice import Advice
from pipeline.admin.operations import operations_by_name
from pipeline.admin.resolutions import MutationSummary, Resolutions, resolve_commands
from pipeline.admin.timeline import TimelineEntry
from pipeline.domain.redaction import BY_NAME
from pipeline.domain.states import MutationId, MutationStatus, Resolver
from pipeline.domain.values import Actor
from pipeline.store.database import Database
from pipeline.store.reads import listings
from pipeline.store.rows import LedgerPageRow
from pipeline.transitions import resolution


@dataclass(frozen=True, slots=True, kw_only=True)
class MutationDetail:
    """Everything about one mutation."""

    mutation: MutationSummary
    result: Any  #: null unless requested: it may hold personal data
    resolved_by: str | None  #: call, reconcile, operator …
    resolved_at: datetime | None
    timeline: tuple[TimelineEntry, ...]
    advice: Advice


def detail(resolutions: Resolutions, text: str, *, with_result: bool = False) -> MutationDetail:
    """Return a mutation by its id or its first digits; with its result if requested."""
    with resolutions.db.transaction() as tx:
        mutation_id = lookup.find_id(tx, text, "mutation")
        (row,) = listings.mutations(tx, [mutation_id])
        timeline = admin_timeline.of_mutation(row, acts=listings.audit(tx, mutation_id=mutation_id), now=tx.clock())
        holding = workflows.workflow_holds(tx, row.workflow)
        operations = operations_by_name(tx, [(row.connector, row.operation)])
    redaction = next((each.redaction for each in operations.values()), BY_NAME)
    mutation = resolutions.mutation(mutation_id)
    return MutationDetail(
        mutation=mutation,
        result=redaction.value(row.result) if with_result else None,
        resolved_by=row.resolved_by,
        resolved_at=row.resolved_at,
        timeline=timeline,
        advice=advice.for_mutation(row, holding, resolve_commands(mutation), declared=mutation.declared_result),
    )


PRESENCE_SECONDS = 30.0  #: after the last sign of an operator's page
_NOTE = "mutation.note"


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A note on a mutation."""

    at: datetime
    author: str
    text: str


def add_note(db: Database, mutation_id: UUID, by: Actor) -> None:
    """Add a note to a mutation: the reason of the actor is its text."""
    with db.transaction() as tx:
        resolution.note(tx, MutationId(mutation_id), by)


def notes(db: Database, mutation_id: UUID) -> list[Note]:
    """List the notes on a mutation, oldest first."""
    with db.transaction() as tx:
        rows = listings.audit(tx, mutation_id=mutation_id)
    return [Note(at=row.at, author=row.actor, text=row.reason) for row in rows if row.act == _NOTE]


class Presence:
    """Know which operators have a mutation open."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._seen: dict[UUID, dict[str, float]] = {}

    def enter(self, mutation_id: UUID, name: str) -> list[str]:
        """Record that an operator has a mutation open, and return the others who have."""
        now = self._clock()
        with self._lock:
            self._forget(now)
            seen = self._seen.setdefault(mutation_id, {})
            seen[name] = now
            return sorted(each for each in seen if each != name)

    def leave(self, mutation_id: UUID, name: str) -> None:
        """Record that an operator left a mutation."""
        with self._lock:
            self._seen.get(mutation_id, {}).pop(name, None)

    def _forget(self, now: float) -> None:
        for mutation_id, seen in list(self._seen.items()):
            kept = {name: at for name, at in seen.items() if now - at < PRESENCE_SECONDS}
            if kept:
                self._seen[mutation_id] = kept
            else:
                del self._seen[mutation_id]


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """A mutation in one line."""

    id: UUID
    run_id: UUID
    workflow: str
    handler: str
    connector: str
    operation: str
    headline: str
    status: str
    idempotency_key: str
    error: str | None
    error_type: str | None  #: class of the error that stopped its run
    attempts: int
    reconcile_attempts: int
    created_at: datetime
    sent_at: datetime | None
    doubted_at: datetime | None
    quiet_until: datetime | None  #: before this instant the request may still arrive
    resolved_by: str | None  #: call, reconcile, operator …
    resolved_at: datetime | None
    found_late_at: datetime | None  #: a late effect was found


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerFilter:
    """Select rows of the ledger. Empty fields do not restrict."""

    workflow: str | None = None
    connector: str | None = None
    operation: str | None = None
    statuses: tuple[MutationStatus, ...] = ()
    error_type: str | None = None
    older_than: timedelta | None = None
    resolved_by: Resolver | None = None
    since: datetime | None = None
    until: datetime | None = None
    within: frozenset[str] | None = None  #: only of these workflows


_SAME_NAMES = tuple(LedgerEntry.__annotations__)


def ledger_entry(row: LedgerPageRow) -> LedgerEntry:
    """Convert a row of the ledger."""
    return LedgerEntry(**{name: getattr(row, name) for name in _SAME_NAMES})
