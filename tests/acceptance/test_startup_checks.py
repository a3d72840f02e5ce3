"""A worker that could lose or repeat work does not start: a sentence on stderr, and exit code 78."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.config import EXIT_RESTART, EXIT_UNSAFE
from pipeline.embedded import servers
from tests.support import databases, forked_python
from tests.support.installation import PROJECT, Installation

Refusal = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def refusal(installation: Installation) -> Refusal:
    """Start a worker that refuses to start; return its exit code and what it printed."""

    def ended(log: Path, **environ: str) -> tuple[int, str]:
        command = ["-A", "pipeline", "worker", "--pool=solo"]
        worker = forked_python.start("celery", command, environ={**installation.environ, **environ}, output=log)
        return worker.wait(120), log.read_text()

    return ended


@pytest.fixture
def unmigrated(embedded: servers.Servers) -> Iterator[str]:
    """The URL of a database without our tables."""
    with databases.empty(embedded.database_url, f"unmigrated_{os.getpid()}") as url:
        yield url


def really_started(installation: Installation, **environ: str) -> tuple[int, str]:
    """The same of a process of its own, from its very beginning."""
    command = [sys.executable, "-m", "celery", "-A", "pipeline", "worker", "--pool=solo"]
    given = {**installation.environ, **environ}
    ended = subprocess.run(command, env=given, cwd=PROJECT, capture_output=True, text=True, timeout=120, check=False)
    return ended.returncode, ended.stderr


def test_a_database_that_is_not_migrated_is_refused(installation: Installation, unmigrated: str) -> None:
    code, said = really_started(installation, PIPELINE_DATABASE_URL=unmigrated)
    assert (code, "db upgrade" in said) == (EXIT_UNSAFE, True), said


def test_settings_that_contradict_each_other_are_refused(refusal: Refusal, tmp_path: Path) -> None:
    code, said = refusal(tmp_path / "log", PIPELINE_HEARTBEAT="1m")
    assert (code, "Traceback" in said) == (EXIT_UNSAFE, False), said
    assert "PIPELINE_HEARTBEAT: expected at most a third of PIPELINE_LEASE" in said


def test_a_worker_whose_database_cannot_be_reached_ends_with_the_restart_code(refusal: Refusal, tmp_path: Path) -> None:
    code, said = refusal(tmp_path / "log", PIPELINE_DATABASE_URL="postgresql://127.0.0.1:1/none")
    assert (code, "onnection refused" in said) == (EXIT_RESTART, True), said


def test_a_worker_without_a_workflow_is_refused(refusal: Refusal, tmp_path: Path) -> None:
    code, said = refusal(tmp_path / "log", PIPELINE_WORKFLOWS="")
    assert (code, "it knows no workflow" in said) == (EXIT_UNSAFE, True), said


def test_a_workflow_module_that_does_not_exist_is_refused(refusal: Refusal, tmp_path: Path) -> None:
    code, said = refusal(tmp_path / "log", PIPELINE_WORKFLOWS="no.such.module")
    assert (code, "no.such.module" in said) == (EXIT_UNSAFE, True), said


@pytest.mark.parametrize("statement", ["raise SystemExit(0)", "1 / 0"], ids=["it wants to end the worker", "it raises"])
def test_a_workflow_module_that_cannot_be_imported_is_refused(refusal: Refusal, tmp_path: Path, statement: str) -> None:
    (tmp_path / "broken_module.py").write_text(f"{statement}\n")
    code, said = refusal(tmp_path / "log", PIPELINE_WORKFLOWS="broken_module", PYTHONPATH=str(tmp_path))
    assert (code, "broken_module" in said) == (EXIT_UNSAFE, True), said


def test_a_fault_in_an_imported_module_of_a_workflow_is_named_with_its_line(refusal: Refusal, tmp_path: Path) -> None:
    (tmp_path / "broken_shop.py").write_text("import broken_mail\n")
    (tmp_path / "broken_mail.py").write_text("server = 'x'\nport = sever\n")
    code, said = refusal(tmp_path / "log", PIPELINE_WORKFLOWS="broken_shop", PYTHONPATH=str(tmp_path))
    assert (code, "Traceback" in said) == (EXIT_UNSAFE, False), said
    assert "NameError: name 'sever' is not defined" in said
    assert "The fault is at broken_mail.py:2; correct it, and start again." in said
