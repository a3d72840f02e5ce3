"""What people were told already, and what comes next."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row

from pipeline.store.database import Transaction
from pipeline.store.reads import attention
from pipeline.store.writes import notices as notice_store
from pipeline.store.writes import retention as retention_store

_WALK = "notices"


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What people are told of in one go."""

    rows: Sequence[Row[Any]]
    skipped: int  #: older ones that nobody took at the last tries
    is_full: bool  #: there may be more behind it


def next_page(tx: Transaction, *, most: int = 100) -> Page:
    """Forget what is over, and say what people were not told of yet, oldest first.

    It goes on behind what could not be delivered the last time, and begins anew when it has come to the end: a crowd
    that a receiver refuses keeps nobody else waiting, and is tried again.
    """
    tx.run(notice_store.FORGET_NOTICES_OF_THE_PAST)
    place = tx.first(retention_store.POSITION, name=_WALK)
    skipped = int(place.position) if place else 0
    rows = attention.unannounced(tx, limit=most, skip=skipped)
    return Page(rows=rows, skipped=skipped, is_full=len(rows) == most)


def turn_page(tx: Transaction, page: Page, *, delivered: int, undelivered: int) -> None:
    """Let the next page begin behind those that could not be delivered, or anew when this was the last."""
    is_last = not page.is_full and delivered + undelivered == len(page.rows)
    position = 0 if is_last else page.skipped + undelivered
    if position != page.skipped:
        tx.run(retention_store.SET_POSITION, name=_WALK, position=str(position))


def announced(tx: Transaction, kind: str, subject: str) -> None:
    """Remember that a notice was delivered, so that it is not sent again while it lasts."""
    tx.run(notice_store.INSERT_NOTICE, kind=kind, subject=subject)
