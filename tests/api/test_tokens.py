"""Callers with API tokens: who they are, what they may do, and every refusal."""

from base64 import b64decode
from datetime import timedelta
from typing import Any

import pytest
from starlette.testclient import TestClient

from pipeline.admin.access import Access
from pipeline.api import Person, Role
from pipeline.domain.access import Rights
from pipeline.domain.values import Actor
from pipeline.store.database import Database, Statement
from tests.api.conftest import ClientOf
from tests.factories import a_workflow
from tests.support.table_reads import one

_ACTS = Statement[Any]("SELECT actor, act FROM pipeline.audit ORDER BY id")


def a_token(db: Database, role: Role = Role.ADMIN, **rights: Any) -> dict[str, str]:
    """Create a token; return the header that presents it."""
    made = Access(db).create_token("ci", Rights(role=role, **rights), Actor(name="eva"))
    return {"Authorization": f"Bearer {made.secret}"}


def acts(db: Database) -> list[tuple[str, str]]:
    with db.transaction() as tx:
        return [(row.actor, row.act.partition(" ")[0]) for row in tx.all(_ACTS)]


def slug(answer: Any) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/problem+json"
    return answer.status_code, answer.json()["type"].removeprefix("urn:pipeline:problem:")


def test_a_token_names_its_caller(client_of: ClientOf, db: Database) -> None:
    me = client_of(None).get("/v1/me", headers=a_token(db, Role.OPERATOR)).json()
    assert (me["name"], me["role"], me["authenticated_by"]) == ("ci", "operator", "token")


def test_an_unknown_an_expired_and_a_revoked_token_are_refused(client_of: ClientOf, db: Database) -> None:
    client, access = client_of(None), Access(db)
    revoked = access.create_token("ci", Rights(role=Role.ADMIN), Actor(name="eva"))
    access.revoke_token(revoked.token.id, Actor(name="eva"))
    expired = access.create_token("ci", Rights(role=Role.ADMIN), Actor(name="eva"), lifetime=timedelta(hours=1))
    db.advance_clock(timedelta(hours=2))
    for secret in (revoked.secret, expired.secret, "pl_unknown", "pl_", "other"):
        answer = client.get("/v1/me", headers={"Authorization": f"Bearer {secret}"})
        assert slug(answer) == (401, "unauthenticated")
        assert answer.headers["www-authenticate"].startswith("Bearer")


def test_an_unknown_token_is_refused_even_if_the_application_knows_the_caller(client_of: ClientOf) -> None:
    client = client_of(Person(name="ada", role=Role.ADMIN))
    assert slug(client.get("/v1/me", headers={"Authorization": "Bearer pl_unknown"})) == (401, "unauthenticated")


@pytest.mark.parametrize("role", [Role.VIEWER, Role.OPERATOR, Role.PUBLISHER])
def test_only_an_admin_manages_tokens(client_of: ClientOf, db: Database, role: Role) -> None:
    client, headers = client_of(None), a_token(db, role)
    before = acts(db)
    assert slug(client.get("/v1/tokens", headers=headers)) == (403, "forbidden")
    assert slug(client.post("/v1/tokens", headers=headers, json={"name": "x"})) == (403, "forbidden")
    assert acts(db) == before


def test_an_admin_creates_lists_and_revokes_a_token_under_its_own_name(client_of: ClientOf, db: Database) -> None:
    client, headers = client_of(None), a_token(db)
    made = client.post("/v1/tokens", headers=headers, json={"name": "bot", "role": "viewer", "expires_in_days": 7})
    assert (made.status_code, made.json()["token"]["created_by"]) == (201, "ci")
    assert made.headers["cache-control"] == "no-store"
    bot = {"Authorization": f"Bearer {made.json()['secret']}"}
    assert client.get("/v1/me", headers=bot).json()["name"] == "bot"
    listed = client.get("/v1/tokens", headers=headers)
    assert [each["name"] for each in listed.json()["items"]] == ["bot", "ci"]
    assert made.json()["secret"] not in listed.text
    assert client.delete(f"/v1/tokens/{made.json()['token']['id']}", headers=headers).status_code == 204
    assert client.get("/v1/me", headers=bot).status_code == 401
    assert acts(db)[1:] == [("ci", "token.create"), ("ci", "token.revoke")]


def test_a_repeat_creates_no_second_token_and_does_not_get_the_secret(client: TestClient, db: Database) -> None:
    first, again = (
        client.post("/v1/tokens", headers={"Idempotency-Key": "one"}, json={"name": "bot"}) for _ in range(2)
    )
    assert (again.status_code, again.headers["idempotency-replayed"]) == (201, "true")
    assert again.json() == {"secret": None, "token": first.json()["token"]}
    assert first.json()["secret"].startswith("pl_")
    assert len(Access(db).tokens()) == 1
    kept = one(db, "SELECT * FROM pipeline.api_requests")
    assert first.json()["secret"] not in b64decode(kept.answer["body"]).decode()


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"name": ""},
        {"name": "x", "role": "boss"},
        {"name": "x", "expires_in_days": 400},
        {"name": "x", "by": "eve"},
        {"name": "x", "created_by": "eve"},
        {"name": "x\u0000"},
        {"name": "x", "workflows": ["nothing"]},
        [],
    ],
    ids=str,
)
def test_bad_input_creates_no_token(client: TestClient, db: Database, body: Any) -> None:
    answer = client.post("/v1/tokens", json=body)
    assert answer.status_code in (404, 422)
    assert answer.headers["content-type"] == "application/problem+json"
    assert (Access(db).tokens(), acts(db)) == ([], [])


def test_a_scoped_admin_neither_gives_nor_sees_more_than_its_scope(client_of: ClientOf, db: Database) -> None:
    a_workflow(db)
    other = Access(db).create_token("all", Rights(role=Role.VIEWER), Actor(name="eva"))
    client, headers = client_of(None), a_token(db, workflows=frozenset({"billing"}))
    refused = client.post("/v1/tokens", headers=headers, json={"name": "x"})
    assert slug(refused) == (422, "invalid-input")
    assert [each["name"] for each in client.get("/v1/tokens", headers=headers).json()["items"]] == ["ci"]
    assert slug(client.delete(f"/v1/tokens/{other.token.id}", headers=headers)) == (404, "not-found")
    assert Access(db).token_identity(other.secret) is not None
