"""Letting go of the past: what a workflow no longer keeps is dropped or archived, page by page.

A page is one short transaction, so nobody waits for it and a crash loses nothing but its place. The
place is kept in the database: whoever runs the sweep next goes on from there, and begins again at
the oldest row when it has come to rows that are too young for anybody to let go of.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import TextClause

from pipeline.store.database import Transaction
from pipeline.store.writes import retention as retention_store


@dataclass(frozen=True, slots=True)
class _Walk:
    statement: TextClause
    limit: str  #: the shortest of these ends the walk
    start: str = "00000000-0000-0000-0000-000000000000"


#: In this order: a run goes after its inputs, a session after its runs, an act after its mutation.
WALKS: Mapping[str, _Walk] = {
    "events": _Walk(retention_store.EVENTS, "done", "0"),
    "runs": _Walk(retention_store.RUNS, "done"),
    "sessions": _Walk(retention_store.SESSIONS, "done"),
    "audit": _Walk(retention_store.AUDIT, "ledger", "0"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What became of one page."""

    dropped: int
    is_last: bool  #: everything behind it is too young


def drop_page(tx: Transaction, name: str, *, most: int = 1000) -> Page:
    """Look at the next rows of a walk and let go of those that no workflow keeps any longer."""
    walk, shortest = WALKS[name], tx.first(retention_store.SHORTEST)
    assert shortest is not None
    limit = getattr(shortest, walk.limit)
    if limit is None:
        return Page(dropped=0, is_last=True)
    tx.run(retention_store.HOLD_SUBSCRIPTIONS)
    place = tx.first(retention_store.POSITION, name=name)
    position = place.position if place else walk.start
    page = tx.first(walk.statement, position=position, most=most, shortest=limit)
    assert page is not None
    is_last = page.seen < most or page.is_young
    tx.run(retention_store.SET_POSITION, name=name, position=walk.start if is_last else str(page.position))
    return Page(dropped=page.dropped, is_last=is_last)
