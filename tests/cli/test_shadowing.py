"""A `pipeline` of the user in the working directory: the command, Celery and pytest name it, and none breaks a run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.environ import FEWER_PLUGINS, clean_environ

BIN = Path(sys.executable).parent
SENTENCE = "is imported as `pipeline` here, instead of the package of celery-durable-effects"
THEIRS = "from celery import Celery\napp = Celery('theirs', broker='memory://')\nanswer = 42\n"
TEST = """
import sys

def test_ours_was_not_imported():
    assert "pipeline" not in sys.modules

def test_theirs_is_imported():
    sys.path.insert(0, ".")
    import pipeline
    assert pipeline.answer == 42
"""


@pytest.fixture(params=["pipeline.py", "pipeline/__init__.py"])
def theirs(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    file = tmp_path / str(request.param)
    file.parent.mkdir(exist_ok=True)
    file.write_text(THEIRS)
    return file


def run(where: Path, *command: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in clean_environ().items() if not name.startswith("PYTEST_")}
    given = {**kept, **FEWER_PLUGINS, **environ}
    return subprocess.run(command, cwd=where, env=given, capture_output=True, text=True, check=False, timeout=100)


def test_a_command_names_the_other_module_in_one_sentence_and_goes_on(theirs: Path, tmp_path: Path) -> None:
    done = run(tmp_path, BIN / "pipeline", "--version")
    assert (done.returncode, done.stdout[:9]) == (0, "pipeline ")
    assert done.stderr.startswith(f"{theirs} {SENTENCE}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("arguments", "path"), [(["dev"], ""), (["--version"], ".")])
def test_a_command_that_cannot_use_ours_ends_with_the_sentence(
    arguments: list[str], path: str, theirs: Path, tmp_path: Path
) -> None:
    done = run(tmp_path, BIN / "pipeline", *arguments, **({"PYTHONPATH": path} if path else {}))
    assert (done.returncode, done.stdout) == (78, "")
    assert SENTENCE in done.stderr
    assert done.stderr.count("\n") == 1


def test_celery_names_the_other_module_and_runs_its_app(theirs: Path, tmp_path: Path) -> None:
    done = run(tmp_path, BIN / "celery", "-A", "pipeline", "report")
    assert done.stderr.startswith(f"{theirs} {SENTENCE}")
    assert "memory" in done.stdout
    assert done.returncode == 0


def test_celery_names_the_other_module_before_it_fails_on_it(tmp_path: Path) -> None:
    (tmp_path / "pipeline.py").write_text("answer = 42")
    for program in ([BIN / "celery"], [sys.executable, "-m", "celery"]):
        done = run(tmp_path, *program, "-A", "pipeline", "worker")
        assert SENTENCE in done.stderr.splitlines()[0]
        assert "Unable to load celery application" in done.stderr
        assert done.returncode == 2


def test_the_plugin_leaves_a_run_of_pytest_with_another_module_alone(theirs: Path, tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(TEST)
    for program in ([BIN / "pytest"], [sys.executable, "-m", "pytest"]):
        done = run(tmp_path, *program, "-q", "-p", "no:randomly", "-p", "no:cacheprovider", "-W", "error")
        assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_a_fixture_of_ours_fails_with_the_sentence_if_ours_is_hidden(theirs: Path, tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text("def test_it(pipeline_run): ...\n\ndef test_other(): ...\n")
    done = run(tmp_path, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert "1 passed, 1 error" in done.stdout, done.stdout + done.stderr
    assert f"{theirs} {SENTENCE}" in done.stdout
    assert "Traceback" not in done.stdout


def test_nothing_is_said_where_no_other_module_is_found(tmp_path: Path) -> None:
    (tmp_path / "pipeline").mkdir()  # no package
    assert run(tmp_path, BIN / "pipeline", "--version").stderr == ""
    assert SENTENCE not in run(tmp_path, BIN / "celery", "--help").stderr
    assert os.listdir(tmp_path) == ["pipeline"]
