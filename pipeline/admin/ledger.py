"""Show rows of the ledger in a list, without parameters and results."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from pipeline.domain.states import MutationStatus, Resolver
from pipeline.store.rows import LedgerPageRow


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
