"""What happened to a run or a mutation, moment by moment, from its rows, its blocks and the audit.

Nothing is kept for this alone: instants that no row remembers, such as the end of prepare, are not
in it. What is still to come is marked as planned.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Row

from pipeline.domain.states import MutationStatus, RunStatus

_DOUBTED = (MutationStatus.NEEDS_RECONCILE, MutationStatus.INDETERMINATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Something that happened, or is planned."""

    at: datetime
    what: str
    by: str | None = None  #: who did it, if it was a person or a sweep that signs
    note: str = ""
    is_planned: bool = False


def of_run(
    run: Row[Any],
    mutation: Row[Any] | None,
    *,
    acts: Sequence[Row[Any]],
    blocks: Sequence[Row[Any]],
    carried: Sequence[Row[Any]],
    now: datetime,
) -> tuple[Moment, ...]:
    """Everything that is known of a run, its mutation included."""
    found = [*_run(run), *(_mutation(mutation) if mutation is not None else ()), *_acts(acts)]
    for block in blocks:
        found += _moments((block.since, "workflow held back", f"{block.kind}: {block.reason}"))
        found += _moments((block.closed_at, "workflow let go", block.kind))
    found += [Moment(at=each.created_at, what="carried forward", note=f"by run {each.id}") for each in carried]
    return _ordered(found, now)


def of_mutation(mutation: Row[Any], *, acts: Sequence[Row[Any]], now: datetime) -> tuple[Moment, ...]:
    """Everything that is known of a mutation."""
    return _ordered([*_mutation(mutation), *_acts(acts)], now)


def of_acts(acts: Sequence[Row[Any]]) -> tuple[Moment, ...]:
    """What people and sweeps decided, and nothing else."""
    return tuple(_acts(acts))


def _run(run: Row[Any]) -> Iterator[Moment]:
    carries = f"carries run {run.retry_of} forward, attempt {run.attempt}" if run.retry_of else ""
    yield from _moments((run.created_at, "started", carries), (run.started_at, "taken by a worker", ""))
    if run.lease_expires_at is not None:
        yield Moment(at=run.lease_expires_at, what="lease ends", note=f"unless {run.worker} renews it")
    if run.finished_at is not None:
        done = run.status == RunStatus.COMMITTED
        note = "" if done else f"{run.status}: {run.error or 'no reason was kept'}"
        yield Moment(at=run.finished_at, what="committed" if done else "stopped", note=note)
    if run.retry_pending:
        yield from _moments((run.retry_at, "goes on in a new run", "not before"))


def _mutation(row: Row[Any]) -> Iterator[Moment]:
    what = f"{row.connector}.{row.operation}"
    yield Moment(at=row.created_at, what="asked for", note=f"{what}, key {row.idempotency_key}")
    yield from _moments(
        (row.approved_at, "approved", f"by {row.approved_by}"),
        (row.sent_at, "sent", f"attempt {row.attempts}" if row.attempts > 1 else ""),
        (row.doubted_at, "in doubt", f"{row.reconcile_attempts} looks so far"),
        (row.next_reconcile_at, "next look", ""),
        (row.resolved_at, str(row.status), f"settled by {row.resolved_by}" + (f": {row.error}" if row.error else "")),
        (row.watch_at, "looked for again", "in case it happens late"),
        (row.surfaced_at, "found after all", "although it was settled as failed"),
    )
    if row.status in _DOUBTED:
        yield from _moments((row.quiet_until, "quiet period ends", "until then it may still arrive"))


def _acts(rows: Iterable[Row[Any]]) -> Iterator[Moment]:
    for row in rows:
        yield Moment(at=row.at, what=row.act, by=row.actor, note=row.reason)


def _moments(*given: tuple[datetime | None, str, str]) -> list[Moment]:
    return [Moment(at=at, what=what, note=note) for at, what, note in given if at is not None]


def _ordered(moments: Iterable[Moment], now: datetime) -> tuple[Moment, ...]:
    marked = [
        Moment(at=each.at, what=each.what, by=each.by, note=each.note, is_planned=each.at > now) for each in moments
    ]
    return tuple(sorted(marked, key=lambda moment: moment.at))
