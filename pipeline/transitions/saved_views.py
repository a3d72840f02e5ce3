"""Filters that an operator keeps under a name."""

from pipeline.domain.errors import NotFoundError
from pipeline.domain.payloads import checked_name, checked_text
from pipeline.store.database import Transaction
from pipeline.store.schema import SavedViewRow
from pipeline.store.writes import saved_views as view_store


def save(tx: Transaction, owner: str, name: str, *, page: str, query: str) -> SavedViewRow:
    """Keep a view under a name. A view of the same name is replaced."""
    return tx.one(
        view_store.SAVE_VIEW,
        owner=owner,
        name=checked_name(name, what="the name of the view"),
        page=checked_name(page, what="the page of the view"),
        query=checked_text(query, what="the filter of the view", limit=4_000),
    )


def delete(tx: Transaction, owner: str, name: str) -> None:
    """Delete a view of this owner."""
    if not tx.execute(view_store.DELETE_VIEW, owner=owner, name=name):
        raise NotFoundError("saved view", name)
