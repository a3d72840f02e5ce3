"""Filters that operators keep under a name, to open a page with them again."""

from dataclasses import dataclass
from datetime import datetime

from pipeline.store.database import Database
from pipeline.store.reads import requests
from pipeline.store.schema import SavedViewRow
from pipeline.transitions import saved_views as transitions


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedView:
    """A page with its filter, under a name."""

    name: str
    page: str
    query: str  #: the query string of the page
    saved_at: datetime


def list_views(db: Database, owner: str) -> list[SavedView]:
    """List the views of an operator, by name."""
    with db.transaction() as tx:
        return [_view(row) for row in requests.saved_views(tx, owner)]


def save_view(db: Database, owner: str, name: str, *, page: str, query: str) -> SavedView:
    """Keep a view under a name. A view of the same name is replaced."""
    with db.transaction() as tx:
        return _view(transitions.save(tx, owner, name, page=page, query=query))


def delete_view(db: Database, owner: str, name: str) -> None:
    """Delete a view of an operator."""
    with db.transaction() as tx:
        transitions.delete(tx, owner, name)


def _view(row: SavedViewRow) -> SavedView:
    return SavedView(name=row.name, page=row.page, query=row.query, saved_at=row.saved_at)
