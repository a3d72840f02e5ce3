"""A worker that could lose or repeat work does not start: a sentence on stderr, and exit code 78."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.config import EXIT_AGAIN, EXIT_UNSAFE
from pipeline.dev import servers
from tests.support import databases
from tests.support.cluster import PROJECT, Installation


@pytest.fixture
def unmigrated(embedded: servers.Servers) -> Iterator[str]:
    """The URL of a database without our tables."""
    with databases.empty(embedded.database_url, f"unmigrated_{os.getpid()}") as url:
        yield url


def refusal(installation: Installation, **environ: str) -> subprocess.CompletedProcess[str]:
    """How a worker ends that should not have started."""
    command = [sys.executable, "-m", "celery", "-A", "pipeline", "worker", "--pool=solo"]
    return subprocess.run(
        command,
        env={**installation.environ, **environ},
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_database_that_is_not_migrated_is_refused(installation: Installation, unmigrated: str) -> None:
    ended = refusal(installation, PIPELINE_DATABASE_URL=unmigrated)
    assert (ended.returncode, "db upgrade" in ended.stderr) == (EXIT_UNSAFE, True), ended.stderr


def test_a_mutation_that_may_outlive_its_lease_is_refused(installation: Installation) -> None:
    ended = refusal(installation, PIPELINE_LEASE="2s", PIPELINE_HEARTBEAT="500ms")
    assert ended.returncode == EXIT_UNSAFE, ended.stderr
    assert "world.apply may take 2 s, which is not shorter than PIPELINE_LEASE (2 s)" in ended.stderr


def test_a_worker_whose_database_cannot_be_reached_asks_to_be_started_again(installation: Installation) -> None:
    ended = refusal(installation, PIPELINE_DATABASE_URL="postgresql://127.0.0.1:1/none")
    assert (ended.returncode, "onnection refused" in ended.stderr) == (EXIT_AGAIN, True), ended.stderr


def test_a_worker_that_knows_no_workflow_is_refused(installation: Installation) -> None:
    ended = refusal(installation, PIPELINE_WORKFLOWS="")
    assert (ended.returncode, "it knows no workflow" in ended.stderr) == (EXIT_UNSAFE, True), ended.stderr


def test_a_workflow_module_that_wants_to_end_the_worker_is_refused(installation: Installation, tmp_path: Path) -> None:
    (tmp_path / "leaving_module.py").write_text("raise SystemExit(0)\n")
    ended = refusal(installation, PIPELINE_WORKFLOWS="leaving_module", PYTHONPATH=str(tmp_path))
    assert (ended.returncode, "leaving_module" in ended.stderr) == (EXIT_UNSAFE, True), ended.stderr


def test_a_workflow_module_that_does_not_exist_is_refused(installation: Installation) -> None:
    ended = refusal(installation, PIPELINE_WORKFLOWS="no.such.module")
    assert (ended.returncode, "no.such.module" in ended.stderr) == (EXIT_UNSAFE, True), ended.stderr


def test_a_workflow_module_that_raises_when_imported_is_refused(installation: Installation, tmp_path: Path) -> None:
    (tmp_path / "broken_module.py").write_text("1 / 0\n")
    ended = refusal(installation, PIPELINE_WORKFLOWS="broken_module", PYTHONPATH=str(tmp_path))
    assert (ended.returncode, "broken_module" in ended.stderr) == (EXIT_UNSAFE, True), ended.stderr


def test_settings_that_contradict_each_other_are_refused(installation: Installation) -> None:
    ended = refusal(installation, PIPELINE_HEARTBEAT="1m")
    assert ended.returncode == EXIT_UNSAFE
    assert "Traceback" not in ended.stderr
    assert "PIPELINE_HEARTBEAT: expected less than half of PIPELINE_LEASE" in ended.stderr
