"""Reads of what callers of the API own: tokens, logins, saved views, previews, proposals, kept answers.

Nothing here writes. Tokens and logins are found by the hash of the secret that a caller presents.
"""

from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID

from pipeline.store.database import Statement, Transaction
from pipeline.store.rows import ExistsRow, LiveLoginRow, LiveTokenRow
from pipeline.store.schema import AccessTokenRow, ApiRequestRow, BulkPreviewRow, ProposalRow, SavedViewRow

_IS_LIVE = "t.revoked_at IS NULL AND t.expires_at > pipeline.clock()"

_LIVE_TOKEN = Statement[LiveTokenRow](f"""
SELECT t.*, t.last_used_at IS NULL OR t.last_used_at < pipeline.clock() - CAST(:use_every AS interval) AS is_use_stale
FROM pipeline.access_tokens t WHERE t.secret_hash = :secret_hash AND {_IS_LIVE}
""")

#: A login by a token ends with its token.
_LIVE_LOGIN = Statement[LiveLoginRow](f"""
SELECT l.*, l.seen_at < pipeline.clock() - CAST(:use_every AS interval) AS is_use_stale
FROM pipeline.logins l LEFT JOIN pipeline.access_tokens t ON t.id = l.token_id
WHERE l.secret_hash = :secret_hash AND l.expires_at > pipeline.clock()
  AND l.seen_at > pipeline.clock() - CAST(:idle AS interval)
  AND (l.token_id IS NULL OR {_IS_LIVE})
""")

_TOKENS = Statement[AccessTokenRow]("SELECT * FROM pipeline.access_tokens ORDER BY id DESC LIMIT :limit")

_TOKEN = Statement[AccessTokenRow]("SELECT * FROM pipeline.access_tokens WHERE id = :id")

_HAS_LIVE_TOKEN = Statement[ExistsRow](
    f"SELECT EXISTS (SELECT FROM pipeline.access_tokens t WHERE {_IS_LIVE}) AS is_found"
)


def live_token(tx: Transaction, secret_hash: str, *, use_every: timedelta) -> LiveTokenRow | None:
    """The token with this hash, unless it is revoked or expired."""
    return tx.first(_LIVE_TOKEN, secret_hash=secret_hash, use_every=use_every)


def live_login(tx: Transaction, secret_hash: str, *, idle: timedelta, use_every: timedelta) -> LiveLoginRow | None:
    """The open login with this hash, unless it is expired, was idle for too long, or its token ended."""
    return tx.first(_LIVE_LOGIN, secret_hash=secret_hash, idle=idle, use_every=use_every)


def tokens(tx: Transaction, *, limit: int = 1_000) -> Sequence[AccessTokenRow]:
    """The newest tokens, revoked and expired ones included."""
    return tx.all(_TOKENS, limit=limit)


def token(tx: Transaction, token_id: UUID) -> AccessTokenRow | None:
    """One token, revoked or expired or not."""
    return tx.first(_TOKEN, id=token_id)


def has_live_token(tx: Transaction) -> bool:
    """Whether any token can be used now."""
    return tx.one(_HAS_LIVE_TOKEN).is_found


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
