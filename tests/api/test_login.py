"""Logins of the console: opened, bound to their browser, refused and ended."""

from datetime import timedelta
from typing import Any

import pytest
from starlette.testclient import TestClient

from pipeline.admin.access import Access
from pipeline.api import Person, Role
from pipeline.api.access import Viewer
from pipeline.api.login import FailedLogins
from pipeline.api.problems import ProblemError
from pipeline.domain.access import Rights
from pipeline.domain.values import Actor
from pipeline.store.database import Database
from tests.api.conftest import ORIGIN, ClientOf
from tests.api.test_tokens import acts, slug

FROM_HERE = {"Origin": ORIGIN}
HTML = {"Accept": "text/html"}
COOKIE = "__Host-pipeline_login"


def a_secret(db: Database, role: Role = Role.ADMIN) -> str:
    return Access(db).create_token("ada", Rights(role=role), Actor(name="eva")).secret


def logged_in(client: TestClient, db: Database, role: Role = Role.ADMIN) -> Any:
    """Log in with a token; return the answer."""
    return client.post("/login", data={"token": a_secret(db, role), "next": "/runs"}, headers=FROM_HERE)


def test_a_token_opens_a_login_whose_cookie_only_this_host_gets(client_of: ClientOf, db: Database) -> None:
    client = client_of(None)
    answer = logged_in(client, db)
    assert (answer.status_code, answer.headers["location"]) == (303, "/runs")
    (cookie,) = [each for each in answer.headers.get_list("set-cookie") if each.startswith(COOKIE)]
    assert {"Path=/", "HttpOnly", "SameSite=Lax", "Secure", "Max-Age=43200"} <= set(cookie.split("; "))
    me = client.get("/v1/me").json()
    assert (me["name"], me["authenticated_by"]) == ("ada", "token")
    assert acts(db)[-1] == ("ada", "login")


def test_over_plain_http_the_cookie_has_no_host_prefix(client_of: ClientOf, db: Database) -> None:
    client = client_of(None)
    client.base_url = "http://127.0.0.1:8080"
    answer = client.post("/login", data={"token": a_secret(db)}, headers={"Origin": "http://127.0.0.1:8080"})
    (cookie,) = [each for each in answer.headers.get_list("set-cookie") if each.startswith("pipeline_login=")]
    assert "Secure" not in cookie


@pytest.mark.parametrize("target", ["//evil.test/", "https://evil.test/", "/\\evil.test", "evil", "/a\r\nX: y"])
def test_a_login_leads_to_no_other_site(client_of: ClientOf, db: Database, target: str) -> None:
    answer = client_of(None).post("/login", data={"token": a_secret(db), "next": target}, headers=FROM_HERE)
    assert answer.headers["location"] == "/"


def test_a_forged_an_idle_and_an_expired_cookie_are_refused(client_of: ClientOf, db: Database) -> None:
    client = client_of(None)
    client.cookies.set(COOKIE, "forged", domain="pipeline.test")
    assert slug(client.get("/v1/me")) == (401, "unauthenticated")
    client.cookies.clear()
    logged_in(client, db)
    db.advance_clock(timedelta(hours=3))
    assert slug(client.get("/v1/me")) == (401, "unauthenticated")


def a_page(_: Viewer) -> str:
    return "shown"


def test_a_page_sends_a_person_without_a_login_to_the_login_page(client_of: ClientOf, db: Database) -> None:
    client = client_of(None)
    client.app.add_api_route("/needs", a_page, methods=["GET", "POST"])  # type: ignore[attr-defined]  # FastAPI's
    sent = client.get("/needs?x=1", headers=HTML)
    assert (sent.status_code, sent.headers["location"]) == (303, "/login?next=/needs%3Fx%3D1")
    assert slug(client.get("/needs")) == (401, "unauthenticated")
    form = client.post("/needs", headers=HTML, data={"reason": "typed"})
    assert (form.status_code, "send the form again" in form.text) == (401, True)
    shown = client.get(sent.headers["location"], headers=HTML)
    assert (shown.status_code, 'name="next" value="/needs?x=1"' in shown.text) == (200, True)


@pytest.mark.parametrize(
    ("headers", "refusal"),
    [
        ({}, "cross-site"),
        ({"Origin": "https://evil.test"}, "cross-site"),
        ({"Origin": "null"}, "cross-site"),
        ({"Origin": "http://pipeline.test"}, "cross-site"),
        ({"Sec-Fetch-Site": "cross-site"}, "cross-site"),
        ({"Sec-Fetch-Site": "same-site", "Origin": ORIGIN}, "cross-site"),
        ({"Origin": ORIGIN}, "csrf-token"),
        ({"Sec-Fetch-Site": "same-origin"}, "csrf-token"),
        ({"Origin": ORIGIN, "X-CSRF-Token": "0" * 64}, "csrf-token"),
    ],
    ids=str,
)
def test_an_act_of_a_login_needs_its_origin_and_its_csrf_token(
    client_of: ClientOf, db: Database, headers: dict[str, str], refusal: str
) -> None:
    client = client_of(None)
    logged_in(client, db)
    before = acts(db)
    assert slug(client.post("/v1/tokens", json={"name": "x"}, headers=headers)) == (403, refusal)
    assert acts(db) == before


def test_an_act_with_origin_and_csrf_token_is_done(client_of: ClientOf, db: Database) -> None:
    client = client_of(None)
    logged_in(client, db)
    headers = {**FROM_HERE, "X-CSRF-Token": client.get("/v1/me").json()["csrf_token"]}
    assert client.post("/v1/tokens", json={"name": "x"}, headers=headers).status_code == 201
    assert acts(db)[-1] == ("ada", "token.create")


def test_the_csrf_token_of_another_login_is_refused(client_of: ClientOf, db: Database) -> None:
    client, other = client_of(None), client_of(None)
    logged_in(client, db)
    logged_in(other, db)
    headers = {**FROM_HERE, "X-CSRF-Token": other.get("/v1/me").json()["csrf_token"]}
    assert slug(client.post("/v1/tokens", json={"name": "x"}, headers=headers)) == (403, "csrf-token")


def test_a_person_of_the_application_needs_a_csrf_token_too(client_of: ClientOf, db: Database) -> None:
    client = client_of(Person(name="ada", role=Role.ADMIN))
    assert slug(client.post("/v1/tokens", json={"name": "x"}, headers=FROM_HERE)) == (403, "csrf-token")
    headers = {**FROM_HERE, "X-CSRF-Token": client.get("/v1/me").json()["csrf_token"]}
    assert client.post("/v1/tokens", json={"name": "x"}, headers=headers).status_code == 201


def test_a_logout_ends_the_login_and_needs_the_csrf_token_of_its_form(client_of: ClientOf, db: Database) -> None:
    client = client_of(None)
    logged_in(client, db)
    cookies = dict(client.cookies)
    refused = client.post("/logout", headers=FROM_HERE, data={"csrf_token": "x"})
    assert slug(refused) == (403, "csrf-token")
    token = client.get("/v1/me").json()["csrf_token"]
    assert client.post("/logout", headers=FROM_HERE, data={"csrf_token": token}).headers["location"] == "/login"
    client.cookies.update(cookies)
    assert client.get("/v1/me").status_code == 401
    assert acts(db)[-1] == ("ada", "logout")


def test_a_login_from_another_site_is_refused(client_of: ClientOf, db: Database) -> None:
    answer = client_of(None).post("/login", data={"token": a_secret(db)}, headers={"Origin": "https://evil.test"})
    assert slug(answer) == (403, "cross-site")


def test_the_sixth_failed_login_of_a_minute_is_refused_even_with_a_good_token(
    client_of: ClientOf, db: Database
) -> None:
    client, wrong = client_of(None), {"token": "pl_wrong"}
    answers = [client.post("/login", data=wrong, headers=FROM_HERE).status_code for _ in range(5)]
    assert answers == [401] * 5
    assert slug(logged_in(client, db)) == (429, "too-many-logins")
    assert acts(db)[-1] == ("eva", "token.create")


def test_failed_logins_are_forgotten_after_a_minute_and_kept_for_bounded_addresses() -> None:
    now = [0.0]
    failures = FailedLogins(limit=2, clock=lambda: now[0])
    for number in range(10_001):
        failures.record(f"address {number}")
    failures.record("address 10000")
    with pytest.raises(ProblemError, match="try again in 61 s"):
        failures.check("address 10000")
    failures.check("address 0")
    now[0] = 60
    failures.check("address 10000")
    assert len(failures._failures) == 10_000


def test_a_one_time_link_logs_in_once_from_this_machine(client_of: ClientOf, db: Database) -> None:
    client = client_of(None)
    link = Access(db).create_link("ada", Rights(role=Role.ADMIN))
    assert f'value="{link}"' in client.get(f"/login?link={link}").text
    assert client.post("/login/link", data={"link": link}, headers=FROM_HERE).status_code == 303
    assert client.get("/v1/me").json()["authenticated_by"] == "link"
    again = client_of(None).post("/login/link", data={"link": link}, headers=FROM_HERE)
    assert again.status_code == 401
    assert "was used before" in again.text


@pytest.mark.parametrize(
    ("peer", "headers"), [("192.0.2.7", {}), ("", {}), ("127.0.0.1", {"X-Forwarded-For": "192.0.2.7"})]
)
def test_a_one_time_link_is_refused_from_another_machine(
    client_of: ClientOf, db: Database, peer: str, headers: dict[str, str]
) -> None:
    link = Access(db).create_link("ada", Rights(role=Role.ADMIN))
    client = client_of(None, peer=peer)
    refused = client.post("/login/link", data={"link": link}, headers={**FROM_HERE, **headers})
    assert slug(refused) == (403, "forbidden")
    assert Access(db).open_link(link, lifetime=timedelta(hours=1)) is not None
