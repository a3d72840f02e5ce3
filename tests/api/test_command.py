"""Command ``pipeline api``: a real process, its one-time link, its prefix, and where it refuses to listen."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from sqlalchemy import text
from sqlalchemy.engine import make_url

from pipeline.admin.access import Access
from pipeline.domain.access import Rights, Role
from pipeline.domain.values import Actor
from pipeline.store.database import Database
from tests.cli.conftest import Pipeline, pipeline
from tests.factories import IN, a_workflow
from tests.support.environ import clean_environ

__all__ = ["pipeline"]  # the fixture of the command line's tests

Start = Callable[..., str]


@pytest.fixture
def start(db: Database, database_url: str, tmp_path: Path) -> Iterator[Start]:
    """Start the command on a free port; return what it prints first."""
    settings = {"PIPELINE_WORKFLOWS": ""}
    with ExitStack() as stack:

        def begin(*options: str, level: str = "warning", url: str = database_url) -> str:
            log = stack.enter_context((tmp_path / "api.log").open("w"))
            process = subprocess.Popen(
                [sys.executable, "-c", "from pipeline.cli.main import main; main()", "api", "--port", "0", *options],
                env={**clean_environ(), **settings, "PIPELINE_DATABASE_URL": url, "PIPELINE_LOG_LEVEL": level},
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            stack.callback(_stop, process)
            assert process.stdout is not None
            return process.stdout.readline().strip()

        yield begin


def _stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode in (0, -signal.SIGTERM)


def test_the_first_start_prints_a_link_that_logs_in_once(start: Start) -> None:
    link = start("--prefix", "/ops/x")
    found = re.fullmatch(r"(http://127\.0\.0\.1:\d+)/ops/x/login\?link=([\w-]+)", link)
    assert found is not None, link
    origin, secret = found[1], found[2]
    with httpx.Client(base_url=f"{origin}/ops/x", headers={"Origin": origin}) as browser:
        assert browser.get("/healthz").status_code == 200
        assert 'action="/ops/x/login/link"' in browser.get("/login", params={"link": secret}).text
        entered = browser.post("/login/link", data={"link": secret})
        assert (entered.status_code, entered.headers["location"]) == (303, "/ops/x/")
        me = browser.get("/v1/me").json()
        assert (me["role"], me["authenticated_by"]) == ("admin", "link")
        assert "server" not in entered.headers
        chunks = (b"x" * 100_000 for _ in range(12))
        refused = browser.post("/v1/tokens", content=chunks, headers={"X-CSRF-Token": me["csrf_token"]})
        assert refused.status_code == 413
    with httpx.Client(base_url=f"{origin}/ops/x", headers={"Origin": origin}) as other:
        assert other.post("/login/link", data={"link": secret}).status_code == 401


@pytest.mark.broken_on_purpose  # a table is away for a moment
def test_planted_secrets_are_in_no_line_of_its_log(start: Start, db: Database, tmp_path: Path) -> None:
    a_workflow(db)
    link = start(level="debug")
    origin, secret = link.partition("/login?link=")[::2]
    made = Access(db).create_token("ci", Rights(role=Role.ADMIN, can_see_payloads=True), Actor(name="eva"))
    events = f"/v1/workflows/billing/topics/{IN}/events"
    with httpx.Client(base_url=origin, headers={"Origin": origin}, timeout=60) as browser:
        browser.get("/login", params={"link": secret, "next": "/search?q=PLANTED-NEXT"})
        browser.post("/login/link", data={"link": secret})
        browser.get("/search", params={"q": "PLANTED-SEARCH"}, headers={"Accept": "text/html"})
        browser.post("/login", data={"token": "pl_PLANTED-LOGIN"})
        browser.get("/v1/me", headers={"Authorization": "Bearer pl_PLANTED-TOKEN"})
        csrf = browser.get("/v1/me").json()["csrf_token"]
    with httpx.Client(base_url=origin, headers={"Authorization": f"Bearer {made.secret}"}, timeout=60) as program:
        order = {"message_id": "m1", "payload": {"password": "PLANTED-PAYLOAD"}}
        assert program.post(events, json=order, headers={"Idempotency-Key": "PLANTED-KEY"}).status_code == 201
        assert program.post(events, json={**order, "color": "PLANTED-FIELD"}).status_code == 422
        assert program.post(events, content=b'{"payload": "PLANTED-JSON').status_code == 422
        token = program.post("/v1/tokens", json={"name": "made"}).json()["secret"]
        for statement in ("ALTER TABLE pipeline.events RENAME TO gone", "ALTER TABLE pipeline.gone RENAME TO events"):
            failed = program.post(events, json={**order, "message_id": "m2"})
            with db.engine.begin() as connection:
                connection.execute(text(statement))
        assert (failed.status_code, failed.json()["reference"] != "") == (503, True)
    log = (tmp_path / "api.log").read_text()
    assert failed.json()["reference"] in log
    assert f"POST {events} 201 in " in log
    assert " by ci" in log
    assert [each for each in ("PLANTED", secret, made.secret, csrf, token) if each in log] == []


def test_with_a_token_it_prints_its_address_only(start: Start, db: Database) -> None:
    made = Access(db).create_token("ci", Rights(role=Role.VIEWER), Actor(name="eva"))
    address = start()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", address)
    answer = httpx.get(f"{address}/v1/me", headers={"Authorization": f"Bearer {made.secret}"})
    assert answer.json()["name"] == "ci"


@pytest.fixture
def limited(db: Database, database_url: str) -> Iterator[tuple[str, str]]:
    """A role that Postgres can refuse by its limit of connections, and the URL of the database for it."""
    role = f"limited_{os.getpid()}"
    rights = ("USAGE ON SCHEMA", "ALL ON ALL TABLES IN SCHEMA", "ALL ON ALL FUNCTIONS IN SCHEMA")
    with db.engine.begin() as connection:
        connection.execute(text(f"CREATE ROLE {role} LOGIN PASSWORD 'secret'"))
        for right in rights:
            connection.execute(text(f"GRANT {right} pipeline TO {role}"))
    yield role, make_url(database_url).set(username=role, password="secret").render_as_string(hide_password=False)
    with db.engine.begin() as connection:
        connection.execute(text(f"DROP OWNED BY {role}"))
        connection.execute(text(f"DROP ROLE {role}"))


def test_without_a_free_connection_it_answers_503_and_recovers(
    start: Start, db: Database, limited: tuple[str, str], pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    role, url = limited
    made = Access(db).create_token("ci", Rights(role=Role.VIEWER), Actor(name="eva"))

    def allow(connections: int) -> None:
        """Set the limit, and end the connections that there are."""
        with db.engine.begin() as connection:
            connection.execute(text(f"ALTER ROLE {role} CONNECTION LIMIT {connections}"))
        with db.engine.begin() as connection:
            ended = "SELECT pg_terminate_backend(pid, 30000) FROM pg_stat_activity WHERE usename = :role"
            connection.execute(text(ended), {"role": role})

    with httpx.Client(
        base_url=start(url=url), headers={"Authorization": f"Bearer {made.secret}"}, timeout=60
    ) as program:
        assert program.get("/v1/workflows").status_code == 200
        allow(0)
        for path in ("/v1/workflows", "/readyz"):
            answer = program.get(path)
            assert (answer.status_code, answer.headers["content-type"]) == (503, "application/problem+json"), path
            assert answer.json()["type"] == "urn:pipeline:problem:database-unavailable"
            assert "max_connections" in answer.json()["detail"]
        assert program.get("/healthz").status_code == 200
        monkeypatch.setenv("PIPELINE_DATABASE_URL", url)
        refused = pipeline("workflows")
        assert (refused.code, "max_connections" in refused.err, "correct the URL" in refused.err) == (3, True, False)
        allow(-1)
        assert program.get("/v1/workflows").status_code == 200
    assert pipeline("workflows").code == 0


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "example.test"])
def test_without_a_source_of_identity_it_listens_on_no_address_that_others_reach(
    pipeline: Pipeline, db: Database, host: str
) -> None:
    refused = pipeline("api", "--host", host)
    assert refused.code == 2
    assert f"does not listen on {host}" in refused.err
    assert "pipeline tokens create NAME" in refused.err


def test_a_prefix_that_is_no_path_is_refused(pipeline: Pipeline) -> None:
    assert "cannot be a prefix" in pipeline("api", "--prefix", "ops?x").err


def test_roles_that_cannot_be_read_are_wrong_settings(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINE_API_ROLES", "oncall=boss")
    refused = pipeline("api", "--port", "0")
    assert (refused.code, "PIPELINE_API_ROLES: 'oncall=boss' maps no group" in refused.err) == (78, True)


def test_without_the_extra_it_names_what_to_install(tmp_path: Path, database_url: str) -> None:
    hide = "import sys; sys.modules['uvicorn'] = None; from pipeline.cli.main import main; main(['api'])"
    done = subprocess.run(
        [sys.executable, "-c", hide],
        env={**clean_environ(), "PIPELINE_DATABASE_URL": database_url},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr.strip()) == (
        2,
        "The API needs packages that are not installed (uvicorn); "
        "install them with `pip install 'celery-durable-effects[console]'`.",
    )
