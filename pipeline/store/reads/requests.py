"""Reads of bulk previews, proposals, saved views and answers of the HTTP API. Nothing here writes."""

from collections.abc import Sequence
from uuid import UUID

from pipeline.store.database import Statement, Transaction
from pipeline.store.schema import ApiRequestRow, BulkPreviewRow, ProposalRow, SavedViewRow

_PREVIEW = Statement[BulkPreviewRow]("SELECT * FROM pipeline.bulk_previews WHERE id = :id")
_API_REQUEST = Statement[ApiRequestRow]("SELECT * FROM pipeline.api_requests WHERE caller = :caller AND key = :key")
_SAVED_VIEWS = Statement[SavedViewRow]("""
SELECT * FROM pipeline.saved_views WHERE owner = :owner ORDER BY name LIMIT :limit
""")

_OPEN_PROPOSAL = Statement[ProposalRow]("""
SELECT * FROM pipeline.proposals WHERE mutation_id = :mutation_id AND closed_at IS NULL
""")


def open_proposal(tx: Transaction, mutation_id: UUID) -> ProposalRow | None:
    """Return the answer about a mutation that waits for a second person."""
    return tx.first(_OPEN_PROPOSAL, mutation_id=mutation_id)


def bulk_preview(tx: Transaction, preview_id: UUID) -> BulkPreviewRow | None:
    """Return a preview with its items."""
    return tx.first(_PREVIEW, id=preview_id)


def api_request(tx: Transaction, caller: str, key: str) -> ApiRequestRow | None:
    """Return the request that a caller made under a key."""
    return tx.first(_API_REQUEST, caller=caller, key=key)


def saved_views(tx: Transaction, owner: str, *, limit: int = 200) -> Sequence[SavedViewRow]:
    """List the views that an operator saved, by name."""
    return tx.all(_SAVED_VIEWS, owner=owner, limit=limit)
