"""Logins by an OpenID Connect provider: a small real one in this process, since no third party can be reached."""

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from joserfc.jwk import ECKey
from starlette.testclient import TestClient

from pipeline.admin.system import clock
from pipeline.store.database import Database
from tests.api.conftest import ClientOf
from tests.api.test_tokens import acts, slug
from tests.support.oidc_provider import CLIENT, SECRET, OidcProvider, running_provider


@pytest.fixture(scope="module")
def _served() -> Iterator[OidcProvider]:
    with running_provider() as provider:
        yield provider


@pytest.fixture
def provider(_served: OidcProvider, db: Database) -> OidcProvider:
    """The provider, as it is before any test changed it."""
    fresh = OidcProvider()
    for name in ("key", "codes", "claims", "overrides", "signing_key"):
        setattr(_served, name, getattr(fresh, name))
    _served.now = int(clock(db).timestamp())
    return _served


@pytest.fixture
def client(client_of: ClientOf, provider: OidcProvider) -> TestClient:
    return client_of(
        None,
        oidc_issuer=provider.issuer,
        oidc_client_id=CLIENT,
        oidc_client_secret=SECRET,
        api_roles="oncall=operator+payloads",
    )


def way_back(client: TestClient, target: str = "/runs?x=1") -> str:
    """Log in at the provider, as a browser does; return where it sends the browser back to."""
    sent = client.get("/login/oidc", params={"next": target})
    assert sent.status_code == 303
    return httpx.get(sent.headers["location"]).headers["location"]


def test_a_person_logs_in_by_the_provider_with_the_role_of_its_group(client: TestClient, db: Database) -> None:
    assert 'href="/login/oidc?next=' in client.get("/login").text
    entered = client.get(way_back(client))
    assert (entered.status_code, entered.headers["location"]) == (303, "/runs?x=1")
    me = client.get("/v1/me").json()
    assert (me["name"], me["role"], me["can_see_payloads"]) == ("ada@example.test", "operator", True)
    assert me["authenticated_by"] == "oidc"
    assert acts(db) == [("ada@example.test", "login")]


def test_the_provider_is_asked_with_pkce_state_and_nonce(client: TestClient) -> None:
    asked = httpx.URL(client.get("/login/oidc").headers["location"]).params
    assert (asked["code_challenge_method"], asked["response_type"]) == ("S256", "code")
    assert asked["redirect_uri"] == "https://pipeline.test/login/oidc/callback"
    assert all(len(asked[name]) >= 43 for name in ("state", "nonce", "code_challenge"))


def wrong_state(client: TestClient, _: OidcProvider) -> str:
    return way_back(client).replace("state=", "state=x")


def another_browser(client: TestClient, _: OidcProvider) -> str:
    back = way_back(client)
    client.cookies.clear()
    return back


def used_code(client: TestClient, provider: OidcProvider) -> str:
    back = way_back(client)
    provider.codes.clear()
    return back


def refusal_of_provider(client: TestClient, _: OidcProvider) -> str:
    state = httpx.URL(client.get("/login/oidc").headers["location"]).params["state"]
    return f"/login/oidc/callback?error=access_denied&state={state}"


def other_key(client: TestClient, provider: OidcProvider) -> str:
    provider.signing_key = ECKey.generate_key("P-256", {"kid": "1"})
    return way_back(client)


def with_claim(**claims: Any) -> Callable[[TestClient, OidcProvider], str]:
    def change(client: TestClient, provider: OidcProvider) -> str:
        provider.overrides = claims
        return way_back(client)

    return change


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (wrong_state, (400, "login-failed")),
        (another_browser, (400, "login-failed")),
        (used_code, (400, "login-failed")),
        (refusal_of_provider, (400, "login-failed")),
        (other_key, (400, "login-failed")),
        (with_claim(nonce="another"), (400, "login-failed")),
        (with_claim(aud="another client"), (400, "login-failed")),
        (with_claim(iss="https://evil.test"), (400, "login-failed")),
        (with_claim(exp=1), (400, "login-failed")),
        (with_claim(email_verified=False), (400, "login-failed")),
        (with_claim(email=None), (400, "login-failed")),
        (with_claim(groups=["others"]), (403, "forbidden")),
        (with_claim(groups=None), (403, "forbidden")),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_login_that_the_provider_does_not_vouch_for_is_refused(
    client: TestClient,
    provider: OidcProvider,
    db: Database,
    change: Callable[[TestClient, OidcProvider], str],
    refusal: tuple[int, str],
) -> None:
    assert slug(client.get(change(client, provider))) == refusal
    assert client.get("/v1/me").status_code == 401
    assert acts(db) == []


def test_a_new_key_of_the_provider_is_fetched(client: TestClient, provider: OidcProvider) -> None:
    assert client.get(way_back(client)).status_code == 303
    provider.key = ECKey.generate_key("P-256", {"kid": "1"})
    assert client.get(way_back(client)).status_code == 303


def test_a_provider_that_is_away_is_a_problem(client_of: ClientOf) -> None:
    away = client_of(None, oidc_issuer="http://127.0.0.1:1", oidc_client_id=CLIENT, api_roles="*=viewer")
    assert slug(away.get("/login/oidc")) == (502, "identity-provider")
