"""Command ``pipeline api``: a real process, its one-time link, its prefix, and where it refuses to listen."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from pipeline.admin.access import Access
from pipeline.domain.access import Rights, Role
from pipeline.domain.values import Actor
from pipeline.store.database import Database
from tests.cli.conftest import Pipeline, pipeline
from tests.support.environ import clean_environ

__all__ = ["pipeline"]  # the fixture of the command line's tests

Start = Callable[..., str]


@pytest.fixture
def start(db: Database, database_url: str, tmp_path: Path) -> Iterator[Start]:
    """Start the command on a free port; return what it prints first."""
    with ExitStack() as stack:

        def begin(*options: str) -> str:
            process = subprocess.Popen(
                [sys.executable, "-c", "from pipeline.cli.main import main; main()", "api", "--port", "0", *options],
                env={**clean_environ(), "PIPELINE_DATABASE_URL": database_url, "PIPELINE_WORKFLOWS": ""},
                cwd=tmp_path,
                stdout=subprocess.PIPE,
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


def test_with_a_token_it_prints_its_address_only(start: Start, db: Database) -> None:
    made = Access(db).create_token("ci", Rights(role=Role.VIEWER), Actor(name="eva"))
    address = start()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", address)
    answer = httpx.get(f"{address}/v1/me", headers={"Authorization": f"Bearer {made.secret}"})
    assert answer.json()["name"] == "ci"


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
        "The API needs packages that are not installed (uvicorn); install them with `pip install 'pipeline[console]'`.",
    )
