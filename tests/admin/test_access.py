"""API tokens and logins: created, used, refused and ended, each in the audit."""

from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from pipeline.admin.access import Access, Identity
from pipeline.domain.access import LoginSource, Rights, Role
from pipeline.domain.errors import InvalidInputError, NotFoundError
from pipeline.domain.values import Actor
from pipeline.store.database import Database, Statement
from tests.factories import a_workflow
from tests.support import table_reads

EVA = Actor(name="eva", reason="asked")
VIEWER = Rights(role=Role.VIEWER)
IDLE, LIFETIME = timedelta(hours=2), timedelta(hours=12)
_ACTS = Statement[Any]("SELECT actor || ': ' || act AS said FROM pipeline.audit ORDER BY id")
_STORED = Statement[Any](
    "SELECT t::text AS said FROM pipeline.access_tokens t UNION SELECT l::text FROM pipeline.logins l"
)


def said(db: Database, statement: Statement[Any]) -> list[str]:
    with db.transaction() as tx:
        return [row.said for row in tx.all(statement)]


def last_use(db: Database, token_id: UUID) -> Any:
    return table_reads.one(
        db, "SELECT last_used_at FROM pipeline.access_tokens WHERE id = :id", id=token_id
    ).last_used_at


def test_a_token_names_its_caller_and_only_its_hash_is_stored(db: Database) -> None:
    access = Access(db)
    made = access.create_token("ci", Rights(role=Role.PUBLISHER, can_see_payloads=True), EVA)
    assert access.token_identity(made.secret) == Identity(
        name="ci",
        rights=Rights(role=Role.PUBLISHER, can_see_payloads=True),
        source=LoginSource.TOKEN,
        token_id=made.token.id,
    )
    assert (made.secret[:3], len(made.secret)) == ("pl_", 46)
    assert made.secret.startswith(made.token.hint)
    assert [text for text in said(db, _STORED) if made.secret in text] == []
    assert said(db, _ACTS) == [f"eva: token.create {made.token.id} for ci"]


def test_an_unknown_an_expired_and_a_revoked_token_name_no_caller(db: Database) -> None:
    access = Access(db)
    short = access.create_token("ci", VIEWER, EVA, lifetime=timedelta(hours=1))
    revoked = access.create_token("ci", VIEWER, EVA)
    assert [access.revoke_token(revoked.token.id, EVA), access.revoke_token(revoked.token.id, EVA)] == [True, False]
    db.advance_clock(timedelta(hours=1))
    presented = (short.secret, revoked.secret, "pl_unknown", "other", "pl_\ud800")
    assert [access.token_identity(secret) for secret in presented] == [None] * 5
    assert not access.has_tokens()
    assert said(db, _ACTS)[-1] == f"eva: token.revoke {revoked.token.id} for ci"
    with pytest.raises(NotFoundError, match="There is no token"):
        access.revoke_token(uuid4(), EVA)


def test_the_last_use_of_a_token_is_recorded_to_the_hour(db: Database) -> None:
    access = Access(db)
    made = access.create_token("ci", VIEWER, EVA)
    assert access.tokens()[0].last_used_at is None
    seen = []
    for _ in range(3):
        access.token_identity(made.secret)
        seen.append(last_use(db, made.token.id))
        db.advance_clock(timedelta(minutes=40))
    assert seen[0] == seen[1] < seen[2]


def test_a_token_cannot_exceed_the_rights_of_its_creator(db: Database) -> None:
    a_workflow(db)
    access = Access(db)
    own = Rights(role=Role.ADMIN, workflows=frozenset({"billing"}))
    made = access.create_token("ci", Rights(role=Role.ADMIN, workflows=frozenset({"billing"})), EVA, within=own)
    other = access.create_token("all", VIEWER, EVA)
    with pytest.raises(InvalidInputError, match="more rights than its own"):
        access.create_token("ci", Rights(role=Role.VIEWER), EVA, within=own)
    with pytest.raises(NotFoundError, match="There is no token"):
        access.revoke_token(other.token.id, EVA, within=own)
    assert [token.id for token in access.tokens(own)] == [made.token.id]
    assert access.has_tokens()


@pytest.mark.parametrize("lifetime", [timedelta(0), timedelta(days=-1), timedelta(days=367)])
def test_a_token_lives_for_more_than_nothing_and_at_most_a_year(db: Database, lifetime: timedelta) -> None:
    with pytest.raises(InvalidInputError, match="at most 366 days"):
        Access(db).create_token("ci", VIEWER, EVA, lifetime=lifetime)
    assert Access(db).tokens() == []


def test_the_scope_of_a_token_names_known_workflows(db: Database) -> None:
    with pytest.raises(NotFoundError, match="There is no workflow 'nothing'"):
        Access(db).create_token("ci", Rights(role=Role.VIEWER, workflows=frozenset({"nothing"})), EVA)


def test_a_login_by_a_token_ends_with_the_token(db: Database) -> None:
    access = Access(db)
    made = access.create_token("ada", VIEWER, EVA)
    identity = access.token_identity(made.secret)
    assert identity is not None
    login = access.open_login(identity, lifetime=LIFETIME)
    assert access.login_identity(login, idle=IDLE) == identity
    access.revoke_token(made.token.id, EVA)
    assert access.login_identity(login, idle=IDLE) is None
    assert said(db, _ACTS)[1] == "ada: login by token"


def test_a_login_ends_when_it_was_idle_or_its_lifetime_is_over(db: Database) -> None:
    access = Access(db)
    identity = Identity(name="ada", rights=VIEWER, source=LoginSource.OIDC)
    idle, busy = access.open_login(identity, lifetime=LIFETIME), access.open_login(identity, lifetime=LIFETIME)
    alive = []
    for _ in range(13):
        db.advance_clock(timedelta(hours=1))
        alive.append(access.login_identity(busy, idle=IDLE) is not None)
    assert alive == [True] * 11 + [False] * 2
    assert access.login_identity(idle, idle=timedelta(days=1)) is None


def test_an_expired_login_is_deleted_at_the_next_one(db: Database) -> None:
    access = Access(db)
    identity = Identity(name="ada", rights=VIEWER, source=LoginSource.OIDC)
    access.open_login(identity, lifetime=LIFETIME)
    db.advance_clock(LIFETIME + timedelta(seconds=1))
    access.open_login(identity, lifetime=LIFETIME)
    assert len(said(db, _STORED)) == 1


def test_a_logout_ends_a_login_once(db: Database) -> None:
    access = Access(db)
    login = access.open_login(Identity(name="ada", rights=VIEWER, source=LoginSource.OIDC), lifetime=LIFETIME)
    assert [access.end_login(login), access.end_login(login)] == [True, False]
    assert access.login_identity(login, idle=IDLE) is None
    assert said(db, _ACTS) == ["ada: login by oidc", "ada: logout"]


def test_a_one_time_link_opens_one_login(db: Database) -> None:
    access = Access(db)
    rights = Rights(role=Role.ADMIN, can_see_payloads=True)
    link = access.create_link("ada", rights)
    assert access.login_identity(link, idle=IDLE) is None
    login = access.open_link(link, lifetime=LIFETIME)
    assert login is not None
    assert access.login_identity(login, idle=IDLE) == Identity(name="ada", rights=rights, source=LoginSource.LINK)
    assert access.open_link(link, lifetime=LIFETIME) is None
    assert said(db, _ACTS) == ["ada: link.create for ada", "ada: login by link"]


def test_an_expired_link_opens_nothing(db: Database) -> None:
    link = Access(db).create_link("ada", VIEWER)
    db.advance_clock(timedelta(minutes=16))
    assert Access(db).open_link(link, lifetime=LIFETIME) is None
