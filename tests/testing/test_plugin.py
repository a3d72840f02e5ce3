"""The fixtures that users get: they work in a project of its own, and disturb no other tests."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from celery_durable_effects import pytest_plugin
from pipeline.embedded.servers import Servers
from tests.support.environ import FEWER_PLUGINS

pytestmark = pytest.mark.timeout(300)

UNRELATED = """
import sys

def test_nothing_was_started():
    assert not [name for name in sys.modules if name.partition(".")[0] == "pipeline"]
"""
BROKEN = """
from sqlalchemy import text

def test_leaves_something_impossible_behind(pipeline_db):
    with pipeline_db.engine.begin() as connection:
        connection.execute(text("SET LOCAL session_replication_role = replica"))
        columns = "(event_id, handler_id, topic, status, run_id)"
        row = "(1, 1, 'orders', 'reserved', gen_random_uuid())"
        connection.execute(text(f"INSERT INTO pipeline.deliveries {columns} VALUES {row}"))

def test_finds_an_empty_database(pipeline_db):
    with pipeline_db.transaction() as tx:
        assert tx.first(text("SELECT 1 FROM pipeline.deliveries")) is None
"""


def pytest_in(directory: Path, *args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run pytest as a user would, away from our own configuration."""
    command = [sys.executable, "-m", "pytest", "--tb=short", "-p", "no:randomly", "-p", "no:cacheprovider", *args]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        command,
        cwd=directory,
        env={**kept, **FEWER_PLUGINS, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


@pytest.fixture
def urls(embedded: Servers) -> dict[str, str]:
    return {"PIPELINE_DATABASE_URL": embedded.database_url, "PIPELINE_BROKER_URL": embedded.broker_url}


def test_the_tests_of_the_examples_pass(project: Path, urls: dict[str, str]) -> None:
    files = sorted(f"examples/{file.name}" for file in (project / "examples").glob("test_*.py"))
    assert len(files) >= 7
    answer = pytest_in(project, "-c", "/dev/null", "--rootdir", str(project), *files, **urls)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert [file for file in files if f"{file} ." not in answer.stdout] == []


def test_every_example_is_in_the_table(project: Path) -> None:
    table = (project / "examples" / "README.md").read_text(encoding="utf-8")
    examples = [file.name for file in (project / "examples").glob("*.py") if not file.name.startswith("test_")]
    examples += [f"{file.parent.name}/README.md" for file in (project / "examples").glob("*/README.md")]
    assert [name for name in examples if f"]({name})" not in table] == []
    named = re.findall(r"\]\(([^#)\s]+)\)", table)
    assert [name for name in named if not (project / "examples" / name).exists()] == []


def test_a_run_of_pytest_without_our_fixtures_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_unrelated.py").write_text(UNRELATED)
    answer = pytest_in(tmp_path)
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_an_invariant_that_a_test_breaks_fails_that_test_and_not_the_next(tmp_path: Path, urls: dict[str, str]) -> None:
    (tmp_path / "test_broken.py").write_text(BROKEN)
    answer = pytest_in(tmp_path, **urls)
    assert "2 passed, 1 error" in answer.stdout, answer.stdout + answer.stderr
    assert "the test broke an invariant" in answer.stdout


def test_every_fixture_has_a_docstring() -> None:
    offered = [name for name in vars(pytest_plugin) if name.startswith("pipeline_")]
    assert offered == ["pipeline_servers", "pipeline_db", "pipeline_run"]
