"""The wheel, installed where no checkout is near: what is inside it, and that it works from there."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from pipeline.embedded.servers import Servers
from pipeline.store import migrate
from tests.support import databases

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, cwd: Path) -> str:
    """The output of a command that has none of our settings and no path to the checkout."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PIPELINE_", "PYTHON"))}
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--outdir", target, ROOT, cwd=target)
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has the wheel, and our dependencies but not our checkout."""
    home = tmp_path_factory.mktemp("installed")
    venv.create(home, symlinks=True)
    installed = home / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", installed, "install", "--no-deps", "--no-index", wheel, cwd=home)
    site = Path(run(installed, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).strip())
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return installed


def test_the_wheel_has_migrations_and_celery_settings_and_no_tests(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"pipeline/celeryconfig.py", "pipeline/py.typed", "pipeline/config.py"} <= names
    for migration in ROOT.joinpath("migrations").rglob("*.py"):
        assert f"pipeline/{migration.relative_to(ROOT)}" in names
    outside = {name for name in names if not name.startswith(("pipeline/", "celery_durable_effects"))}
    assert not outside
    project = {f"pipeline/project/{file.name}" for file in ROOT.joinpath("examples/shop").iterdir() if file.is_file()}
    assert project <= names, "what `pipeline init` writes"
    assert not [name for name in names - project if "/test_" in name]


def test_the_celery_app_of_the_installed_wheel_has_our_settings(python: Path, tmp_path: Path) -> None:
    (tmp_path / "celeryconfig.py").write_text("worker_prefetch_multiplier = 7  # somebody else's file")
    script = "import pipeline.celery as it; print(it.__file__, it.app.conf.worker_prefetch_multiplier)"
    file, prefetch = run(python, "-c", script, cwd=tmp_path).split()
    assert Path(file).is_relative_to(python.parents[1])
    assert prefetch == "1"


def test_the_celery_command_finds_the_app_of_the_installed_wheel(python: Path, tmp_path: Path) -> None:
    shown = run(python, "-m", "celery", "-A", "pipeline", "report", cwd=tmp_path)
    assert "task_default_queue: 'pipeline.schedule'" in shown


def test_the_installed_wheel_migrates_an_empty_database(python: Path, tmp_path: Path, embedded: Servers) -> None:
    with databases.empty(embedded.database_url, f"wheel_{os.getpid()}") as url:
        said = run(python.parent / "pipeline", "--database-url", url, "db", "upgrade", cwd=tmp_path)
        assert said == f"The database is at schema version {migrate.expected_version()}.\n"
        assert "invariants hold" in run(python.parent / "pipeline", "--database-url", url, "doctor", cwd=tmp_path)
