"""What sweeps and workers record beside the work, and what the sweeps delete.

- Of several callers that want to run a sweep, the database lets one through. Two beats at once are then harmless, and
  a worker may stand in for a beat that is gone.
- What a workflow no longer keeps is dropped or archived, page by page. A page is one short transaction, so no worker
  waits for it and a crash loses nothing but its position. The position is kept in the database: the next run of the
  sweep goes on from there, and begins again at the oldest row once it reaches rows that are too young for every
  workflow.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from pipeline.domain.workflows import WORKER_KEPT, WorkerInfo
from pipeline.store.database import Statement, Transaction
from pipeline.store.reads import attention
from pipeline.store.rows import ChainedRow, NoticeRow, PageRow, SlotRow
from pipeline.store.writes import housekeeping as housekeeping_store


def take_slot(tx: Transaction, name: str, every: timedelta) -> SlotRow | None:
    """Let this caller run the sweep now, if it has not run within three quarters of its period. None: it has.

    A run that Postgres's clock, since set back, put into the future counts as none.
    """
    return tx.first(housekeeping_store.TAKE_SLOT, name=name, pause=every * 0.75)


def save_report(tx: Transaction, name: str, counts: Mapping[str, int]) -> None:
    """Remember what the last run of a sweep did."""
    tx.execute(housekeeping_store.REPORT_SLOT, name=name, report=json.dumps(dict(counts)))


_CURSOR = "notices"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticePage:
    """Notices that are delivered in one go."""

    rows: Sequence[NoticeRow]
    offset: int  #: older ones that no receiver took at the last attempts
    is_full: bool  #: there may be more behind it


def next_notices(tx: Transaction, *, limit: int = 100) -> NoticePage:
    """Delete notices of what is over, and return those that were not delivered yet, oldest first.

    It goes on behind what could not be delivered the last time, and begins anew when it has come to the end: a crowd
    that a receiver refuses keeps no other notice waiting, and is tried again.
    """
    tx.execute(housekeeping_store.DELETE_ENDED_NOTICES)
    place = tx.first(housekeeping_store.CURSOR, name=_CURSOR)
    skipped = int(place.position) if place else 0
    rows = attention.undelivered_notices(tx, limit=limit, offset=skipped)
    return NoticePage(rows=rows, offset=skipped, is_full=len(rows) == limit)


def save_notice_position(tx: Transaction, page: NoticePage, *, delivered: int, undelivered: int) -> None:
    """Let the next page begin behind those that could not be delivered, or anew when this was the last."""
    is_last = not page.is_full and delivered + undelivered == len(page.rows)
    position = 0 if is_last else page.offset + undelivered
    if position != page.offset:
        tx.execute(housekeeping_store.SET_CURSOR, name=_CURSOR, position=str(position))


def mark_notice_delivered(tx: Transaction, kind: str, subject: str) -> None:
    """Remember that a notice was delivered, so that it is not sent again while it lasts."""
    tx.execute(housekeeping_store.INSERT_NOTICE, kind=kind, subject=subject)


@dataclass(frozen=True, slots=True)
class _PrunedTable:
    statement: Statement[PageRow]
    retention_field: str  #: the shortest of these ends the walk
    start: str = "00000000-0000-0000-0000-000000000000"


#: In this order: a run goes after its inputs, a session after its runs, an act after its mutation.
PRUNED_TABLES: Mapping[str, _PrunedTable] = {
    "events": _PrunedTable(housekeeping_store.PRUNE_EVENTS, "done", "0"),
    "runs": _PrunedTable(housekeeping_store.PRUNE_RUNS, "done"),
    "sessions": _PrunedTable(housekeeping_store.PRUNE_SESSIONS, "done"),
    "audit": _PrunedTable(housekeeping_store.PRUNE_AUDIT, "ledger", "0"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedPage:
    """What became of one page."""

    dropped: int
    is_last: bool  #: everything behind it is too young


def prune_page(tx: Transaction, name: str, *, limit: int = 1000) -> PrunedPage:
    """Read the next page of a table, and delete the rows that no workflow keeps any longer."""
    walk, shortest = PRUNED_TABLES[name], tx.one(housekeeping_store.SHORTEST_RETENTION)
    kept_for = getattr(shortest, walk.retention_field)
    if kept_for is None:
        return PrunedPage(dropped=0, is_last=True)
    tx.all(housekeeping_store.LOCK_PRUNING)
    place = tx.first(housekeeping_store.CURSOR, name=name)
    position = place.position if place else walk.start
    page = tx.first(walk.statement, position=position, limit=limit, shortest=kept_for)
    assert page is not None
    is_last = page.seen < limit or page.is_young
    tx.execute(housekeeping_store.SET_CURSOR, name=name, position=walk.start if is_last else str(page.position))
    return PrunedPage(dropped=page.dropped, is_last=is_last)


SAMPLES_KEPT = timedelta(days=14)
#: Events, and runs, that one sample counts at most.
_MAX_COUNTED = 200_000
#: Waiting events of one consumer that a sample counts at most.
_MAX_BACKLOG = 100_000


def record_worker(tx: Transaction, worker: WorkerInfo) -> None:
    """Record that a worker runs; forget workers that were not seen for a day."""
    tx.execute(
        housekeeping_store.RECORD_WORKER,
        name=worker.name,
        host=worker.host,
        pid=worker.pid,
        pool=worker.pool,
        concurrency=worker.concurrency,
        queues=list(worker.queues),
        workflows=json.dumps(dict(worker.workflows)),
        code_version=worker.code_version,
        package_version=worker.package_version,
        kept=WORKER_KEPT,
    )


def remove_worker(tx: Transaction, name: str) -> None:
    """Forget a worker that stops in order."""
    tx.execute(housekeeping_store.REMOVE_WORKER, name=name)


def take_sample(tx: Transaction) -> int:
    """Sample every workflow in which something happened or waits. Return their number."""
    return tx.one(housekeeping_store.TAKE_SAMPLE, limit=_MAX_COUNTED, counted=_MAX_BACKLOG).number


def delete_old_samples(tx: Transaction) -> int:
    """Delete samples that are older than two weeks. Return their number."""
    return tx.execute(housekeeping_store.DELETE_SAMPLES, kept=SAMPLES_KEPT)


def chain_audit(tx: Transaction, *, limit: int = 1000) -> ChainedRow | None:
    """Chain acts that are not chained yet, at most so many; return the head of the chain. None: all are chained."""
    return tx.first(housekeeping_store.CHAIN_AUDIT, limit=limit)
