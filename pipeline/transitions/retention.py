"""Letting go of the past: what a workflow no longer keeps is dropped or archived, page by page.

A page is one short transaction, so no worker waits for it and a crash loses nothing but its position. The
position is kept in the database: the next run of the sweep goes on from there, and begins again at
the oldest row once it reaches rows that are too young for every workflow.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.store.database import Statement, Transaction
from pipeline.store.rows import PageRow
from pipeline.store.writes import retention as retention_store
from pipeline.store.writes import sweeps as sweep_store


@dataclass(frozen=True, slots=True)
class _PrunedTable:
    statement: Statement[PageRow]
    retention_field: str  #: the shortest of these ends the walk
    start: str = "00000000-0000-0000-0000-000000000000"


#: In this order: a run goes after its inputs, a session after its runs, an act after its mutation.
PRUNED_TABLES: Mapping[str, _PrunedTable] = {
    "events": _PrunedTable(retention_store.PRUNE_EVENTS, "done", "0"),
    "runs": _PrunedTable(retention_store.PRUNE_RUNS, "done"),
    "sessions": _PrunedTable(retention_store.PRUNE_SESSIONS, "done"),
    "audit": _PrunedTable(retention_store.PRUNE_AUDIT, "ledger", "0"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedPage:
    """What became of one page."""

    dropped: int
    is_last: bool  #: everything behind it is too young


def prune_page(tx: Transaction, name: str, *, limit: int = 1000) -> PrunedPage:
    """Read the next page of a table, and delete the rows that no workflow keeps any longer."""
    walk, shortest = PRUNED_TABLES[name], tx.one(retention_store.SHORTEST_RETENTION)
    kept_for = getattr(shortest, walk.retention_field)
    if kept_for is None:
        return PrunedPage(dropped=0, is_last=True)
    tx.all(retention_store.LOCK_PRUNING)
    place = tx.first(sweep_store.CURSOR, name=name)
    position = place.position if place else walk.start
    page = tx.first(walk.statement, position=position, limit=limit, shortest=kept_for)
    assert page is not None
    is_last = page.seen < limit or page.is_young
    tx.execute(sweep_store.SET_CURSOR, name=name, position=walk.start if is_last else str(page.position))
    return PrunedPage(dropped=page.dropped, is_last=is_last)
