"""Build the timeline of a run or a mutation from its rows, its blocks and the audit.

Instants that no row stores, such as the end of prepare, are missing. Future entries are marked as planned.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from pipeline.domain.states import MutationStatus, RunStatus
from pipeline.store.rows import ListedRunRow
from pipeline.store.schema import AuditRow, BlockRow, MutationRow

_IN_DOUBT = (MutationStatus.NEEDS_RECONCILE, MutationStatus.INDETERMINATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEntry:
    """Something that happened, or is planned."""

    at: datetime
    description: str
    by: str | None = None  #: the operator or sweep that did it, if recorded
    note: str = ""
    is_planned: bool = False


def of_run(
    run: ListedRunRow,
    mutation: MutationRow | None,
    *,
    acts: Sequence[AuditRow],
    blocks: Sequence[BlockRow],
    retries: Sequence[ListedRunRow],
    now: datetime,
) -> tuple[TimelineEntry, ...]:
    """Build the timeline of a run, including its mutation."""
    found = [*_run(run), *(_mutation(mutation) if mutation is not None else ()), *_acts(acts)]
    for block in blocks:
        found += _entries((block.since, "workflow blocked", f"{block.kind}: {block.reason}"))
        found += _entries((block.closed_at, "workflow unblocked", block.kind))
    found += [TimelineEntry(at=each.created_at, description="retried", note=f"by run {each.id}") for each in retries]
    return _sorted_entries(found, now)


def of_mutation(mutation: MutationRow, *, acts: Sequence[AuditRow], now: datetime) -> tuple[TimelineEntry, ...]:
    """Build the timeline of a mutation."""
    return _sorted_entries([*_mutation(mutation), *_acts(acts)], now)


def of_acts(acts: Sequence[AuditRow]) -> tuple[TimelineEntry, ...]:
    """Build a timeline of the acts of operators and sweeps."""
    return tuple(_acts(acts))


def _run(run: ListedRunRow) -> Iterator[TimelineEntry]:
    retry = f"retry of run {run.retry_of}, attempt {run.attempt}" if run.retry_of else ""
    yield from _entries((run.created_at, "started", retry), (run.started_at, "claimed by a worker", ""))
    if run.lease_expires_at is not None:
        yield TimelineEntry(at=run.lease_expires_at, description="lease ends", note=f"unless {run.worker} renews it")
    if run.finished_at is not None:
        done = run.status == RunStatus.COMMITTED
        note = "" if done else f"{run.status}: {run.error or 'no reason stored'}"
        yield TimelineEntry(at=run.finished_at, description="committed" if done else "stopped", note=note)
    if run.retry_pending:
        yield from _entries((run.retry_at, "retry planned", "not before"))


def _mutation(row: MutationRow) -> Iterator[TimelineEntry]:
    what = f"{row.connector}.{row.operation}"
    yield TimelineEntry(at=row.created_at, description="requested", note=f"{what}, key {row.idempotency_key}")
    yield from _entries(
        (row.approved_at, "approved", f"by {row.approved_by}"),
        (row.sent_at, "sent", f"attempt {row.attempts}" if row.attempts > 1 else ""),
        (row.doubted_at, "in doubt", f"{row.reconcile_attempts} reconcile attempts so far"),
        (row.next_reconcile_at, "next reconcile attempt", ""),
        (row.resolved_at, str(row.status), f"resolved by {row.resolved_by}" + (f": {row.error}" if row.error else "")),
        (row.next_monitor_at, "next late-effect check", "in case it happens late"),
        (row.found_late_at, "late effect found", "although it was resolved as failed"),
    )
    if row.status in _IN_DOUBT:
        yield from _entries((row.quiet_until, "quiet period ends", "until then it may still arrive"))


def _acts(rows: Iterable[AuditRow]) -> Iterator[TimelineEntry]:
    for row in rows:
        yield TimelineEntry(at=row.at, description=row.act, by=row.actor, note=row.reason)


def _entries(*given: tuple[datetime | None, str, str]) -> list[TimelineEntry]:
    return [TimelineEntry(at=at, description=what, note=note) for at, what, note in given if at is not None]


def _sorted_entries(moments: Iterable[TimelineEntry], now: datetime) -> tuple[TimelineEntry, ...]:
    marked = [
        TimelineEntry(at=each.at, description=each.description, by=each.by, note=each.note, is_planned=each.at > now)
        for each in moments
    ]
    return tuple(sorted(marked, key=lambda moment: moment.at))
