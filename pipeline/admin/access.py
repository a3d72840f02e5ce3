"""Create, list and revoke API tokens, and open and end logins of the console.

A secret is 256 random bits. It is shown once; the database has its SHA-256 hash. A secret with so much chance needs
no slow hash: it cannot be guessed. Answers to requests with an Idempotency-Key are kept for a day.
"""

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from pipeline.domain.access import LoginSource, Rights, Role
from pipeline.domain.codec import opened
from pipeline.domain.errors import InvalidInputError, NotFoundError
from pipeline.domain.payloads import checked_name
from pipeline.domain.values import Actor
from pipeline.store.database import Database, Transaction
from pipeline.store.reads import access as access_reads
from pipeline.store.reads import work
from pipeline.store.schema import AccessTokenRow, LoginRow
from pipeline.transitions import access
from pipeline.transitions import access as transitions
from pipeline.transitions.access import NewSecret

TOKEN_PREFIX = "pl_"  # noqa: S105 - what every token begins with
DEFAULT_LIFETIME, MAX_LIFETIME = timedelta(days=90), timedelta(days=366)
LINK_LIFETIME = timedelta(minutes=15)
_HINT_LENGTH = len(TOKEN_PREFIX) + 6
_RECORD_TOKEN_USE_EVERY = timedelta(hours=1)
_RECORD_LOGIN_USE_EVERY = timedelta(minutes=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSummary:
    """An API token as people see it. Its secret is not known any more."""

    id: UUID
    hint: str  #: the begin of its secret
    name: str  #: of the caller, kept in the audit with every act
    role: Role
    can_see_payloads: bool
    workflows: tuple[str, ...] | None  #: the only workflows in scope; null: all
    created_by: str
    created_at: datetime
    expires_at: datetime
    last_used_at: datetime | None  #: to the hour; null: never
    revoked_at: datetime | None
    revoked_by: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatedToken:
    """A new API token with its secret, which is shown this once."""

    secret: str
    token: TokenSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A caller that presented a secret: its name, its rights and what the secret belongs to."""

    name: str
    rights: Rights
    source: LoginSource
    token_id: UUID | None = None


class Access:
    """API tokens and logins of one database."""

    def __init__(self, db: Database) -> None:
        self.db = db

    def create_token(
        self,
        name: str,
        rights: Rights,
        by: Actor,
        *,
        lifetime: timedelta = DEFAULT_LIFETIME,
        within: Rights | None = None,
    ) -> CreatedToken:
        """Create an API token. ``within``: the rights of the creator, which the token may not exceed."""
        _check_lifetime(lifetime)
        if within is not None and not within.includes(rights):
            raise InvalidInputError(
                f"{by.name} cannot give more rights than its own: role, payloads and workflows of a token must be "
                "among them. Nothing was created."
            )
        secret = TOKEN_PREFIX + _new_secret()
        new = NewSecret(
            secret_hash=_hash(secret),
            name=checked_name(name, what="the name of the token"),
            rights=rights,
            lifetime=lifetime,
        )
        with self.db.transaction() as tx:
            _check_workflows(tx, rights)
            row = access.create_token(tx, new, secret[:_HINT_LENGTH], by)
        return CreatedToken(secret=secret, token=_summary(row))

    def tokens(self, within: Rights | None = None) -> list[TokenSummary]:
        """List tokens, newest first. ``within``: only those that a holder of these rights could create."""
        with self.db.transaction() as tx:
            rows = access_reads.tokens(tx)
        return [_summary(row) for row in rows if within is None or within.includes(_rights(row))]

    def revoke_token(self, token_id: UUID, by: Actor, *, within: Rights | None = None) -> bool:
        """Revoke a token and every login that it opened. Return whether it was not revoked before."""
        with self.db.transaction() as tx:
            row = access_reads.token(tx, token_id)
            if row is not None and within is not None and not within.includes(_rights(row)):
                raise NotFoundError("token", token_id)
            return access.revoke_token(tx, token_id, by)

    def has_tokens(self) -> bool:
        """Whether any token can be used now."""
        with self.db.transaction() as tx:
            return access_reads.has_live_token(tx)

    def token_identity(self, secret: str) -> Identity | None:
        """Return the caller of an API token; None if it is unknown, revoked or expired."""
        if not secret.startswith(TOKEN_PREFIX):
            return None
        with self.db.transaction() as tx:
            row = access_reads.live_token(tx, _hash(secret), use_every=_RECORD_TOKEN_USE_EVERY)
            if row is not None and row.is_use_stale:
                access.touch_token(tx, row.id)
        if row is None:
            return None
        return Identity(name=row.name, rights=_rights(row), source=LoginSource.TOKEN, token_id=row.id)

    def login_identity(self, secret: str, *, idle: timedelta) -> Identity | None:
        """Return the person of a login; None if it is unknown, expired or was idle for too long."""
        with self.db.transaction() as tx:
            row = access_reads.live_login(tx, _hash(secret), idle=idle, use_every=_RECORD_LOGIN_USE_EVERY)
            if row is not None and row.is_use_stale:
                access.touch_login(tx, row.id)
        return None if row is None else _identity(row)

    def open_login(self, identity: Identity, *, lifetime: timedelta) -> str:
        """Open a login for a caller; return its secret."""
        secret = _new_secret()
        new = NewSecret(secret_hash=_hash(secret), name=identity.name, rights=identity.rights, lifetime=lifetime)
        with self.db.transaction() as tx:
            access.open_login(tx, new, identity.source, identity.token_id)
        return secret

    def create_link(self, name: str, rights: Rights, *, lifetime: timedelta = LINK_LIFETIME) -> str:
        """Create a one-time link for a person; return its secret."""
        secret = _new_secret()
        new = NewSecret(secret_hash=_hash(secret), name=name, rights=rights, lifetime=lifetime)
        with self.db.transaction() as tx:
            access.create_link(tx, new, Actor(name=name, is_claimed=True))
        return secret

    def open_link(self, link: str, *, lifetime: timedelta) -> str | None:
        """Open the login of a one-time link; return its secret. None: the link is unknown, used or expired."""
        secret = _new_secret()
        with self.db.transaction() as tx:
            row = access.open_link(tx, _hash(link), _hash(secret), lifetime)
        return None if row is None else secret

    def end_login(self, secret: str) -> bool:
        """End a login. Return whether there was one."""
        with self.db.transaction() as tx:
            return access.end_login(tx, _hash(secret))


def _new_secret() -> str:
    return secrets.token_urlsafe(32)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="surrogatepass")).hexdigest()


def _check_lifetime(lifetime: timedelta) -> None:
    if not timedelta(0) < lifetime <= MAX_LIFETIME:
        raise InvalidInputError(
            f"A token cannot live for {lifetime}; expected more than nothing and at most {MAX_LIFETIME.days} days."
        )


def _check_workflows(tx: Transaction, rights: Rights) -> None:
    known = work.workflow_names(tx) if rights.workflows is not None else ()
    for name in sorted((rights.workflows or frozenset()) - set(known)):
        raise NotFoundError("workflow", name, known)


def _rights(row: AccessTokenRow | LoginRow) -> Rights:
    return Rights(
        role=Role(row.role),
        can_see_payloads=row.can_see_payloads,
        workflows=None if row.workflows is None else frozenset(row.workflows),
    )


def _identity(row: LoginRow) -> Identity:
    return Identity(name=row.name, rights=_rights(row), source=LoginSource(row.source), token_id=row.token_id)


def _summary(row: AccessTokenRow) -> TokenSummary:
    return TokenSummary(
        id=row.id,
        hint=row.hint,
        name=row.name,
        role=Role(row.role),
        can_see_payloads=row.can_see_payloads,
        workflows=None if row.workflows is None else tuple(row.workflows),
        created_by=row.created_by,
        created_at=row.created_at,
        expires_at=row.expires_at,
        last_used_at=row.last_used_at,
        revoked_at=row.revoked_at,
        revoked_by=row.revoked_by,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierRequest:
    """The request that was made under the same key."""

    request_hash: str
    status: int | None  #: None while it runs
    answer: Mapping[str, Any]


def begin_request(db: Database, caller: str, key: str, request_hash: str) -> EarlierRequest | None:
    """Begin a request under a key. Return the earlier request if the key is in use; None: execute it."""
    with db.transaction() as tx:
        row = transitions.begin_request(tx, caller, key, request_hash)
    if row is None:
        return None
    return EarlierRequest(request_hash=row.request_hash, status=row.status, answer=opened(row.answer) or {})


def save_answer(db: Database, caller: str, key: str, *, status: int, answer: Mapping[str, Any]) -> None:
    """Keep the answer for repeats of the request."""
    with db.transaction() as tx:
        transitions.save_answer(tx, caller, key, status=status, answer=answer)


def forget_request(db: Database, caller: str, key: str) -> None:
    """Free the key of a request that changed nothing."""
    with db.transaction() as tx:
        transitions.forget_request(tx, caller, key)
