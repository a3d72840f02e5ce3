"""What guards every request: limits of bodies, headers of answers, errors without internals, listed proxies only."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI, Request
from sqlalchemy import text
from starlette.testclient import TestClient

from pipeline.admin import system
from pipeline.admin.access import Access
from pipeline.api import Person
from pipeline.api.access import Caller, CurrentCaller
from pipeline.api.context import services
from pipeline.domain.errors import InvalidInputError, PayloadError
from pipeline.store.database import Database
from tests.api.conftest import ClientOf
from tests.api.test_tokens import slug

PROXIED: dict[str, Any] = {
    "api_trusted_proxies": "10.0.0.0/8",
    "api_identity_header": "X-User",
    "api_groups_header": "X-Groups",
    "api_roles": "oncall=operator+payloads,shop=viewer@shop",
}


def app_of(client: TestClient) -> FastAPI:
    assert isinstance(client.app, FastAPI)
    return client.app


@pytest.mark.parametrize("path", ["/healthz", "/v1/me", "/login", "/nothing", "/static/console.css", "/openapi.json"])
def test_every_answer_has_the_security_headers(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'self';")
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "same-origin"
    assert ("no-store" in headers["cache-control"]) is not path.startswith("/static")


def in_pieces(size: int) -> Iterator[bytes]:
    """A body without a declared length."""
    yield b'{"name": "'
    for _ in range(size // 1000):
        yield b"x" * 1000
    yield b'"}'


@pytest.mark.parametrize("is_declared", [True, False])
def test_a_body_over_the_limit_is_refused_while_it_is_read(
    client_of: ClientOf, db: Database, is_declared: bool
) -> None:
    client = client_of(api_max_body_bytes=10_000)
    body = b"".join(in_pieces(20_000)) if is_declared else in_pieces(20_000)
    answer = client.post("/v1/tokens", content=body, headers={"Content-Type": "application/json"})
    assert slug(answer) == (413, "too-large")
    assert Access(db).tokens() == []


def test_only_a_file_for_an_import_may_be_larger(client_of: ClientOf) -> None:
    client = client_of(api_max_body_bytes=10_000, api_max_upload_bytes=50_000)

    async def take(request: Request) -> int:
        return len(await request.body())

    for path in ("/v1/tests/imports", "/v1/others"):
        app_of(client).add_api_route(path, take, methods=["POST"])
    sizes = [("/v1/tests/imports", 20_000), ("/v1/tests/imports", 60_000), ("/v1/others", 20_000)]
    answers = [client.post(path, files={"file": b"x" * size}).status_code for path, size in sizes]
    assert answers == [200, 413, 413]


def test_an_unexpected_error_is_logged_under_a_reference_and_shows_no_internals(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        message = "the secret of the house"  # a message may quote a payload; the log has where it was raised
        raise RuntimeError(message)

    app_of(client).add_api_route("/v1/fail", fail)
    with caplog.at_level(logging.ERROR):
        answer = client.get("/v1/fail")
    assert slug(answer) == (500, "internal")
    assert "secret" not in answer.text
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.json()["reference"] in caplog.text
    assert "RuntimeError" in caplog.text
    assert "in fail" in caplog.text
    assert "the secret of the house" not in caplog.text


def test_an_error_of_the_database_is_a_problem_without_its_statement(client: TestClient) -> None:
    """A statement that can succeed later is 503; one that is wrong is a fault."""

    def fail(request: Request, sql: str) -> None:
        with services(request).db.transaction() as tx:
            tx.execute(text(sql))

    app_of(client).add_api_route("/v1/fail", fail)
    away = client.get("/v1/fail", params={"sql": "SELECT secret FROM nowhere"})
    assert slug(away) == (503, "database-unavailable")
    assert "nowhere" not in away.text
    assert slug(client.get("/v1/fail", params={"sql": "SELECT 1 / 0"})) == (500, "internal")


@pytest.mark.parametrize("digits", ["9" * 5000, "9" * 20])
def test_a_number_that_is_no_id_is_refused_however_long_it_is(client: TestClient, db: Database, digits: str) -> None:
    for path in (f"/v1/events/{digits}", f"/search?q={digits}", f"/v1/search?q={digits}"):
        assert client.get(path).status_code in (200, 404, 422), path
    assert client.post("/bulk/events", data={"act": "release_event", "events": digits}).status_code == 422
    with pytest.raises(InvalidInputError, match="is no head of the audit"):
        system.findings(db, noted_head=f"{digits}:abc")


def test_a_body_that_is_not_as_documented_is_a_problem_that_names_each_field(client: TestClient) -> None:
    answer = client.post("/v1/tokens", json={"name": "", "role": "boss"})
    assert slug(answer) == (422, "invalid-request")
    assert [each["at"] for each in answer.json()["errors"]] == ["body/name", "body/role"]
    broken = client.post("/v1/tokens", content=b"{", headers={"Content-Type": "application/json"})
    assert slug(broken) == (422, "invalid-request")


def test_a_trusted_proxy_names_the_person_and_its_groups_give_the_role(client_of: ClientOf) -> None:
    client = client_of(None, peer="10.1.2.3", **PROXIED)
    me = client.get("/v1/me", headers={"X-User": "ada", "X-Groups": "others, oncall"}).json()
    assert (me["name"], me["role"], me["can_see_payloads"], me["workflows"]) == ("ada", "operator", True, None)
    assert me["authenticated_by"] == "proxy"
    me = client.get("/v1/me", headers={"X-User": "bob", "X-Groups": "shop"}).json()
    assert (me["role"], me["workflows"]) == ("viewer", ["shop"])


@pytest.mark.parametrize(
    ("peer", "headers", "refusal"),
    [
        ("192.0.2.7", [("X-User", "ada"), ("X-Groups", "oncall")], (403, "untrusted-proxy")),
        ("192.0.2.7", [("X-User", "ada"), ("X-Forwarded-For", "10.1.2.3")], (403, "untrusted-proxy")),
        ("", [("X-User", "ada")], (403, "untrusted-proxy")),
        ("10.1.2.3", [("X-User", "ada"), ("X-Groups", "others")], (403, "forbidden")),
        ("10.1.2.3", [("X-User", "ada")], (403, "forbidden")),
        ("10.1.2.3", [("X-User", "ada"), ("X-User", "eve")], (400, "bad-request")),
        ("10.1.2.3", [], (401, "unauthenticated")),
        ("10.1.2.3", [("X-User", " "), ("X-Groups", "oncall")], (400, "bad-request")),
    ],
    ids=str,
)
def test_a_person_that_no_trusted_proxy_names_is_refused(
    client_of: ClientOf, peer: str, headers: list[tuple[str, str]], refusal: tuple[int, str]
) -> None:
    client = client_of(None, peer=peer, **PROXIED)
    assert slug(client.get("/v1/me", headers=headers)) == refusal


def test_forwarded_headers_count_only_from_a_listed_proxy(client_of: ClientOf) -> None:
    def shown(request: Request) -> list[Any]:
        return [request.client and request.client.host, request.scope["scheme"], request.headers["host"]]

    sent = {
        "X-Forwarded-For": "203.0.113.9, 198.51.100.4, 10.0.0.2",
        "X-Forwarded-Proto": "http",
        "X-Forwarded-Host": "ops.example",
    }
    seen = []
    for peer in ("10.1.2.3", "192.0.2.7"):
        client = client_of(peer=peer, api_trusted_proxies="10.0.0.0/8")
        app_of(client).add_api_route("/v1/shown", shown)
        seen.append(client.get("/v1/shown", headers=sent).json())
    assert seen == [["198.51.100.4", "http", "ops.example"], ["192.0.2.7", "https", "pipeline.test"]]


@pytest.mark.parametrize("is_async", [True, False])
def test_identify_may_wait_or_not_and_knows_no_caller_at_times(
    db: Database, client_of: ClientOf, is_async: bool
) -> None:
    async def identify_async(request: Request) -> Person | None:
        return identify(request)

    def identify(request: Request) -> Person | None:
        name = request.headers.get("x-application-user")
        return Person(name=name) if name else None

    client = client_of(None)
    app_of(client).state.identify = identify_async if is_async else identify
    assert client.get("/v1/me", headers={"X-Application-User": "ada"}).json()["name"] == "ada"
    assert client.get("/v1/me").status_code == 401


def test_a_workflow_out_of_scope_is_not_found(client_of: ClientOf) -> None:
    def read(name: str, caller: CurrentCaller) -> str:
        caller.check_workflow(name)
        return caller.actor("asked").name

    client = client_of(Person(name="bob", workflows=frozenset({"shop"})))
    app_of(client).add_api_route("/v1/read/{name}", read)
    assert client.get("/v1/read/shop").json() == "bob"
    assert slug(client.get("/v1/read/billing")) == (404, "not-found")


def test_a_caller_has_a_name_that_the_audit_can_store() -> None:
    with pytest.raises(PayloadError, match="control characters"):
        Caller(name="a\0b", role=Person(name="x").role, can_see_payloads=False, workflows=None, is_authenticated_by="x")
