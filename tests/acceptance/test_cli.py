"""Run the ``pipeline`` command as a real process: its output and its exit code."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.engine import make_url

from pipeline.embedded.servers import Servers
from pipeline.store import migrate
from pipeline.store.database import Database
from tests.support import databases, forked_python
from tests.support.environ import clean_environ


@pytest.fixture
def unmigrated(embedded: Servers) -> Iterator[str]:
    with databases.empty(embedded.database_url, f"cli_{os.getpid()}") as url:
        yield url


def pipeline(*arguments: str, database_url: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = clean_environ()
    given = {**clean, "PIPELINE_DATABASE_URL": database_url, "COLUMNS": "200", **environ}
    return forked_python.run(*arguments, environ=given)


def test_upgrade_brings_an_empty_database_to_the_newest_version_and_may_be_repeated(unmigrated: str) -> None:
    before = pipeline("db", "current", database_url=unmigrated)
    assert (before.returncode, before.stdout) == (3, "")
    assert "schema version none" in before.stderr
    assert "pipeline db upgrade" in before.stderr
    for _ in range(2):
        done = pipeline("db", "upgrade", database_url=unmigrated)
        assert (done.returncode, done.stdout) == (
            0,
            f"The database is at schema version {migrate.expected_version()}.\n",
        )
    assert pipeline("db", "current", database_url=unmigrated).returncode == 0


def test_the_doctor_refuses_a_database_that_was_never_migrated(unmigrated: str) -> None:
    done = pipeline("doctor", database_url=unmigrated)
    assert done.returncode == 3
    assert "Traceback" not in done.stderr


def test_an_unreachable_database_is_reported_in_a_sentence_without_its_password() -> None:
    done = pipeline("doctor", database_url="postgresql://someone:s3cret@127.0.0.1:1/nowhere")
    assert done.returncode == 3
    assert "cannot be reached" in done.stderr
    assert "PIPELINE_DATABASE_URL" in done.stderr
    assert "s3cret" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_misspelt_setting_is_refused_with_its_name(database_url: str) -> None:
    done = pipeline("doctor", database_url=database_url, PIPELINE_DATABASE_ULR="x")
    assert done.returncode == 78
    assert "PIPELINE_DATABASE_ULR" in done.stderr


@pytest.mark.timeout(300)
def test_the_demo_kills_a_process_and_ends_by_itself_with_a_true_summary(tmp_path: Path) -> None:
    clean = clean_environ()
    done = subprocess.run(
        [sys.executable, "-m", "tools.demo"],
        env={**clean, "PIPELINE_HOME": str(tmp_path / "home"), "COLUMNS": "160"},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert "Orders committed: 200 of 200; processes killed: 1." in done.stdout
    assert "Effects counted outside: 200, of which twice: 0." in done.stdout
    assert "Invariants broken: 0." in done.stdout
    assert re.search(r"The console, .*: http://127\.0\.0\.1:\d+/login\?link=\S+", done.stdout)
    assert "Questions left in the inbox on purpose: 3," in done.stdout
    assert "pipeline trace demo-" in done.stdout


def test_a_role_without_rights_gets_a_sentence_and_an_exit_code(db: Database, database_url: str) -> None:
    role = f"weak_{os.getpid()}"
    with db.transaction() as tx:
        tx.execute(text(f"CREATE ROLE {role} LOGIN PASSWORD 'weak'"))
    try:
        url = make_url(database_url).set(username=role, password="weak").render_as_string(hide_password=False)
        done = pipeline("doctor", database_url=url)
    finally:
        with db.transaction() as tx:
            tx.execute(text(f"DROP ROLE {role}"))
    assert done.returncode == 3
    assert "permission denied" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_database_that_lost_a_table_gets_a_sentence_and_an_exit_code(unmigrated: str) -> None:
    pipeline("db", "upgrade", database_url=unmigrated)
    damaged = Database.connect_unpooled(unmigrated)
    with damaged.transaction() as tx:
        tx.execute(text("DROP TABLE pipeline.blocks"))
    done = pipeline("doctor", database_url=unmigrated)
    assert done.returncode == 3
    assert 'relation "pipeline.blocks" does not exist' in done.stderr
    assert "Traceback" not in done.stderr
