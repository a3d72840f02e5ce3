"""Who may import whom. Every contract is seen to hold, and seen to break when it should."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.source import PACKAGE, ROOT

LAYERS = "Layers point downwards"
WRITES = "Only the execution model writes state"
PURE = "The domain is pure"
CELERY = "Celery stays at the edge"

#: A contract, a module that must not do it, and the line it must not have.
BAD: list[tuple[str, str, str]] = [
    (LAYERS, "domain/runs.py", "import pipeline.store.views"),
    (LAYERS, "domain/runs.py", "from pipeline.execution import runs"),
    (LAYERS, "telemetry/lines.py", "from pipeline.domain import runs"),
    (LAYERS, "store/views.py", "from pipeline.execution import runs"),
    (LAYERS, "store/views.py", "def late():\n    from pipeline.engine import steps"),
    (LAYERS, "execution/runs.py", "from pipeline.connectors import steps"),
    (LAYERS, "execution/runs.py", "from pipeline.runtime import steps"),
    (LAYERS, "runtime/steps.py", "from pipeline.schedules import steps"),
    (LAYERS, "schedules/steps.py", "from pipeline.ingest import steps"),
    (LAYERS, "client/steps.py", "from pipeline.tasks import steps"),
    (LAYERS, "tasks/steps.py", "from pipeline.api import steps"),
    (LAYERS, "api/steps.py", "from pipeline.dev import servers"),
    (WRITES, "store/views.py", "from pipeline.store import runs"),
    (WRITES, "dev/servers.py", "from pipeline.store import events"),
    (WRITES, "runtime/steps.py", "from pipeline.store.mutations import BEGIN"),
    (WRITES, "cli/steps.py", "import pipeline.store.workflows"),
    (PURE, "domain/runs.py", "import sqlalchemy"),
    (PURE, "domain/runs.py", "from redis import Redis"),
    (PURE, "domain/runs.py", "from pydantic_settings import BaseSettings"),
    (CELERY, "execution/runs.py", "from celery import shared_task"),
    (CELERY, "schedules/steps.py", "import kombu.utils"),
    (CELERY, "dev/servers.py", "import celery"),
]
GOOD: list[tuple[str, str]] = [
    ("tasks/steps.py", "from celery import shared_task"),
    ("testing/steps.py", "import celery"),
    ("cli/steps.py", "import celery\nfrom pipeline.dev import servers\nfrom pipeline.testing import steps"),
    ("schedules/steps.py", "from pipeline.execution import runs\nfrom pipeline.store import views"),
    ("domain/runs.py", "import pydantic"),
]
#: Packages the contracts speak of before they exist; a copy of the package gets an empty one.
PLANNED = ["cli", "testing", "api", "tasks", "client", "schedules", "ingest", "runtime", "connectors", "engine"]


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package and its contracts, to be spoiled."""
    shutil.copytree(PACKAGE, tmp_path / "pipeline", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name in PLANNED:
        package = tmp_path / "pipeline" / name
        package.mkdir(exist_ok=True)
        (package / "__init__.py").touch()
        (package / "steps.py").touch()
    return tmp_path


def write(copy: Path, module: str, line: str) -> None:
    with (copy / "pipeline" / module).open("a") as file:
        file.write(f"\n{line}\n")


def test_every_contract_holds() -> None:
    answer = lint(ROOT)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert " 0 broken" in answer.stdout


def test_every_contract_is_seen_to_break_by_a_case_here() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert {contract["name"] for contract in declared} == {contract for contract, _, _ in BAD}


@pytest.mark.parametrize(("contract", "module", "line"), BAD)
def test_a_forbidden_import_breaks_its_contract(copy: Path, contract: str, module: str, line: str) -> None:
    write(copy, module, line)
    answer = lint(copy)
    assert answer.returncode == 1, answer.stdout + answer.stderr
    assert f"{contract} BROKEN" in answer.stdout
    assert f"pipeline.{module.removesuffix('.py').replace('/', '.')}" in answer.stdout.split("Broken contracts")[1]


def test_imports_the_design_allows_break_nothing(copy: Path) -> None:
    for module, line in GOOD:
        write(copy, module, line)
    answer = lint(copy)
    assert answer.returncode == 0, answer.stdout + answer.stderr
