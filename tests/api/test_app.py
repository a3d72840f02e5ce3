"""The app answers probes, names its caller, and can be mounted under a prefix."""

from fastapi import FastAPI
from starlette.testclient import TestClient

from pipeline.api import Person, Role, create
from pipeline.config import Settings
from pipeline.store.database import Database
from tests.api.conftest import ADA, ClientOf


def test_probes_need_no_caller(client_of: ClientOf) -> None:
    client = client_of(None)
    assert [client.get(path).status_code for path in ("/healthz", "/readyz", "/v1/me")] == [200, 200, 401]


def test_me_shows_the_authenticated_caller(client_of: ClientOf) -> None:
    person = Person(name="bob", role=Role.VIEWER, workflows=frozenset({"shop", "mail"}))
    shown = client_of(person).get("/v1/me").json()
    assert shown.pop("csrf_token")
    assert shown == {
        "name": "bob",
        "role": "viewer",
        "can_see_payloads": False,
        "workflows": ["mail", "shop"],
        "authenticated_by": "identify",
    }


def test_the_app_works_under_a_prefix_of_another_app(db: Database, database_url: str) -> None:
    outer = FastAPI()
    outer.mount("/ops/x", create(Settings(database_url=database_url), database=db, identify=lambda _: ADA))
    client = TestClient(outer)
    assert client.get("/ops/x/v1/me").json()["name"] == "ada"
    assert client.get("/ops/x/static/console.css").status_code == 200
    assert client.get("/ops/x/openapi.json").json()["openapi"].startswith("3.1")
    for path in ("/ops/x/login", "/ops/x/static/nothing", "/ops/x/nothing"):
        page = client.get(path, headers={"Accept": "text/html"}).text
        assert 'href="/ops/x/static/console.css' in page


def test_an_unknown_address_and_method_are_problems(client: TestClient) -> None:
    missing, wrong = client.get("/v1/nothing"), client.delete("/v1/me")
    assert (missing.status_code, missing.json()["type"]) == (404, "urn:pipeline:problem:no-such-page")
    assert (wrong.status_code, wrong.json()["type"]) == (405, "urn:pipeline:problem:method-not-allowed")
    assert missing.headers["content-type"] == "application/problem+json"
