"""Which notices were delivered, and which come next."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.store.database import Transaction
from pipeline.store.reads import attention
from pipeline.store.rows import NoticeRow
from pipeline.store.writes import notices as notice_store
from pipeline.store.writes import sweeps as sweep_store

_CURSOR = "notices"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticePage:
    """Notices that are delivered in one go."""

    rows: Sequence[NoticeRow]
    offset: int  #: older ones that no receiver took at the last attempts
    is_full: bool  #: there may be more behind it


def next_page(tx: Transaction, *, limit: int = 100) -> NoticePage:
    """Delete notices of what is over, and return those that were not delivered yet, oldest first.

    It goes on behind what could not be delivered the last time, and begins anew when it has come to the end: a crowd
    that a receiver refuses keeps no other notice waiting, and is tried again.
    """
    tx.execute(notice_store.DELETE_ENDED_NOTICES)
    place = tx.first(sweep_store.CURSOR, name=_CURSOR)
    skipped = int(place.position) if place else 0
    rows = attention.undelivered_notices(tx, limit=limit, offset=skipped)
    return NoticePage(rows=rows, offset=skipped, is_full=len(rows) == limit)


def save_position(tx: Transaction, page: NoticePage, *, delivered: int, undelivered: int) -> None:
    """Let the next page begin behind those that could not be delivered, or anew when this was the last."""
    is_last = not page.is_full and delivered + undelivered == len(page.rows)
    position = 0 if is_last else page.offset + undelivered
    if position != page.offset:
        tx.execute(sweep_store.SET_CURSOR, name=_CURSOR, position=str(position))


def mark_delivered(tx: Transaction, kind: str, subject: str) -> None:
    """Remember that a notice was delivered, so that it is not sent again while it lasts."""
    tx.execute(notice_store.INSERT_NOTICE, kind=kind, subject=subject)
