"""What callers of the API own: tokens, logins, saved views, and answers kept by Idempotency-Key.

Callers hash a secret before they hand it in; the secret itself is never stored.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

from pipeline.domain.access import LoginSource, Rights
from pipeline.domain.codec import seal
from pipeline.domain.errors import NotFoundError
from pipeline.domain.payloads import checked_name, checked_text
from pipeline.domain.values import Actor
from pipeline.store.database import Transaction
from pipeline.store.reads import access
from pipeline.store.schema import AccessTokenRow, ApiRequestRow, LoginRow, SavedViewRow
from pipeline.store.writes import access as access_store
from pipeline.transitions import audit


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSecret:
    """A secret that names a caller and its rights, for as long as it lives."""

    secret_hash: str
    name: str
    rights: Rights
    lifetime: timedelta


def create_token(tx: Transaction, new: NewSecret, hint: str, by: Actor) -> AccessTokenRow:
    """Create an API token. ``hint`` is the begin of its secret, by which people recognize it."""
    row = tx.one(access_store.INSERT_TOKEN, hint=hint, created_by=by.name, **_columns(new))
    audit.record(tx, by, f"token.create {row.id} for {row.name}")
    tx.log_on_commit("token.created", token_id=row.id, caller=row.name, role=row.role, actor=by.name)
    return row


def revoke_token(tx: Transaction, token_id: UUID, by: Actor) -> bool:
    """Revoke an API token and the logins that were opened with it. Return whether it was not revoked before."""
    if access.token(tx, token_id) is None:
        raise NotFoundError("token", token_id, hint="`pipeline tokens list` lists them.")
    row = tx.first(access_store.REVOKE_TOKEN, id=token_id, revoked_by=by.name)
    if row is not None:
        audit.record(tx, by, f"token.revoke {row.id} for {row.name}")
        tx.log_on_commit("token.revoked", token_id=row.id, caller=row.name, actor=by.name)
    return row is not None


def touch_token(tx: Transaction, token_id: UUID) -> None:
    """Record that an API token was used now."""
    tx.execute(access_store.TOUCH_TOKEN, id=token_id)


def create_link(tx: Transaction, new: NewSecret, by: Actor) -> LoginRow:
    """Create a one-time link: a login that is not open yet."""
    row = _insert_login(tx, new, LoginSource.LINK, is_open=False)
    audit.record(tx, by, f"link.create for {row.name}")
    return row


def open_link(tx: Transaction, link_hash: str, secret_hash: str, lifetime: timedelta) -> LoginRow | None:
    """Open the login of a one-time link. None: there is no such link, or it was used, or it expired."""
    row = tx.first(access_store.OPEN_LINK, link_hash=link_hash, secret_hash=secret_hash, lifetime=lifetime)
    if row is not None:
        _record_login(tx, row)
    return row


def open_login(tx: Transaction, new: NewSecret, source: LoginSource, token_id: UUID | None = None) -> LoginRow:
    """Open a login, and delete expired ones. With a token it ends when the token does."""
    tx.execute(access_store.DELETE_EXPIRED_LOGINS)
    row = _insert_login(tx, new, source, token_id=token_id)
    _record_login(tx, row)
    return row


def touch_login(tx: Transaction, login_id: UUID) -> None:
    """Record that a login was used now: it is not idle."""
    tx.execute(access_store.TOUCH_LOGIN, id=login_id)


def end_login(tx: Transaction, secret_hash: str) -> bool:
    """End a login at the wish of its person. Return whether there was one."""
    row = tx.first(access_store.END_LOGIN, secret_hash=secret_hash)
    if row is not None:
        audit.record(tx, Actor(name=row.name), "logout")
        tx.log_on_commit("login.ended", login_id=row.id, caller=row.name)
    return row is not None


def _insert_login(
    tx: Transaction, new: NewSecret, source: LoginSource, *, token_id: UUID | None = None, is_open: bool = True
) -> LoginRow:
    return tx.one(access_store.INSERT_LOGIN, source=source, token_id=token_id, is_open=is_open, **_columns(new))


def _record_login(tx: Transaction, row: LoginRow) -> None:
    audit.record(tx, Actor(name=row.name), f"login by {row.source}")
    tx.log_on_commit("login.opened", login_id=row.id, caller=row.name, role=row.role, source=row.source)


def _columns(new: NewSecret) -> dict[str, object]:
    rights = new.rights
    return {
        "secret_hash": new.secret_hash,
        "name": new.name,
        "lifetime": new.lifetime,
        "role": rights.role,
        "can_see_payloads": rights.can_see_payloads,
        "workflows": None if rights.workflows is None else sorted(rights.workflows),
    }


def begin_request(tx: Transaction, caller: str, key: str, request_hash: str) -> ApiRequestRow | None:
    """Begin a request under a key. Return the earlier request if the key is in use; None: the caller executes it."""
    given = checked_name(key, what="Idempotency-Key")
    tx.execute(access_store.DELETE_OLD_REQUESTS)
    stored = request_hash if tx.codecs is None else tx.codecs.request_hash(tx, request_hash)
    if tx.first(access_store.BEGIN_REQUEST, caller=caller, key=given, request_hash=stored) is not None:
        return None
    earlier: Any = access.api_request(tx, caller, given)
    if earlier is not None and earlier.request_hash == stored:
        return earlier._replace(request_hash=request_hash)  # type: ignore[no-any-return]  # the caller has this one
    return earlier  # type: ignore[no-any-return]


def save_answer(tx: Transaction, caller: str, key: str, *, status: int, answer: Mapping[str, Any]) -> None:
    """Keep the answer for repeats of the request. It may show a payload: a process with a codec seals it."""
    codec = None if tx.codecs is None else tx.codecs.any_codec
    kept = answer if codec is None else seal(codec, dict(answer), "answer", caller, key)
    tx.execute(access_store.SAVE_ANSWER, caller=caller, key=key, status=status, answer=json.dumps(dict(kept)))


def forget_request(tx: Transaction, caller: str, key: str) -> None:
    """Free the key of a request that changed nothing."""
    tx.execute(access_store.FORGET_REQUEST, caller=caller, key=key)


def save_view(tx: Transaction, owner: str, name: str, *, page: str, query: str) -> SavedViewRow:
    """Keep a view under a name. A view of the same name is replaced."""
    return tx.one(
        access_store.SAVE_VIEW,
        owner=owner,
        name=checked_name(name, what="the name of the view"),
        page=checked_name(page, what="the page of the view"),
        query=checked_text(query, what="the filter of the view", limit=4_000),
    )


def delete_view(tx: Transaction, owner: str, name: str) -> None:
    """Delete a view of this owner."""
    if not tx.execute(access_store.DELETE_VIEW, owner=owner, name=name):
        raise NotFoundError("saved view", name)
