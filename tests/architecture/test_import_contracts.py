"""Who may import whom. Every contract is seen to hold, and seen to break when it should."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.source_code import PACKAGE, ROOT

LAYERS = "Layers point downwards"
WRITES = "Only transitions write state"
EMBEDDED = "Development servers and chaos stay out of production code"
PURE = "The domain is pure"
CELERY = "Celery stays at the edge"
API = "The API reads and acts only through admin"
CONSOLE = "Only the API needs the extra console"
FRAMEWORK = "Only the module of a framework needs it"

#: A contract, a module that must not do it, and the line it must not have.
BAD: list[tuple[str, str, str]] = [
    (LAYERS, "domain/states.py", "import pipeline.store.reads.work"),
    (LAYERS, "telemetry/logs.py", "from pipeline.domain import states"),
    (LAYERS, "store/reads/work.py", "from pipeline.transitions import runs"),
    (LAYERS, "store/reads/work.py", "def late():\n    from pipeline.consumer_engine import bounded"),
    (LAYERS, "transitions/runs.py", "from pipeline.connectors import sdk"),
    (LAYERS, "transitions/runs.py", "from pipeline.workflows import registry"),
    (LAYERS, "workflows/registry.py", "from pipeline.worker import leases"),
    (LAYERS, "worker/leases.py", "from pipeline.background import sweeps"),
    (LAYERS, "background/sweeps.py", "from pipeline.admin import runs"),
    (LAYERS, "client/publishing.py", "from pipeline.tasks import process"),
    (LAYERS, "api/app.py", "from pipeline.tasks import process"),
    (WRITES, "store/reads/work.py", "from pipeline.store.writes import runs"),
    (WRITES, "worker/leases.py", "from pipeline.store.writes.mutations import BEGIN"),
    (WRITES, "cli/main.py", "import pipeline.store.writes.workflows"),
    (EMBEDDED, "tasks/process.py", "from pipeline.embedded import servers"),
    (EMBEDDED, "admin/runs.py", "from pipeline.chaos import run"),
    (PURE, "domain/states.py", "import sqlalchemy"),
    (PURE, "domain/states.py", "from redis import Redis"),
    (PURE, "domain/states.py", "from pydantic_settings import BaseSettings"),
    (CELERY, "transitions/runs.py", "from celery import shared_task"),
    (CELERY, "background/sweeps.py", "import kombu.utils"),
    (CELERY, "embedded/servers.py", "import celery"),
    (API, "api/access.py", "from pipeline.store.reads import work"),
    (API, "api/v1/tokens.py", "from pipeline.transitions import runs"),
    (API, "api/app.py", "from pipeline.workflows import registry"),
    (CONSOLE, "admin/runs.py", "import fastapi"),
    (CONSOLE, "cli/top.py", "import uvicorn"),
    (FRAMEWORK, "client/publishing.py", "from django.db import connections"),
    (FRAMEWORK, "fastapi.py", "import flask"),
]
GOOD: list[tuple[str, str]] = [
    ("tasks/process.py", "from celery import shared_task"),
    ("testing/inline.py", "import celery"),
    ("cli/main.py", "import celery\nfrom pipeline.embedded import servers"),
    ("background/sweeps.py", "from pipeline.transitions import runs\nfrom pipeline.store.reads import work"),
    ("domain/states.py", "import pydantic"),
    ("django/checks.py", "import django.db\nfrom pipeline.cli import main"),
    ("api/app.py", "from pipeline.admin import runs\nfrom pipeline.client import publish\nimport starlette"),
]
#: An import that is a whole chain: no further step follows it.
_HOP = re.compile(r"^- +(\S+) -> \S+ \(l\.(\d+)\)\n(?! )", re.MULTILINE)


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package and its contracts, to be spoiled."""
    shutil.copytree(PACKAGE, tmp_path / "pipeline", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def write(copy: Path, module: str, line: str) -> int:
    """Add a line to a module of the copy; return the number of its last line."""
    file = copy / "pipeline" / module
    text = f"{file.read_text()}\n{line}\n"
    file.write_text(text)
    return text.count("\n")


def refused(answer: str) -> dict[str, set[tuple[str, int]]]:
    """For each broken contract the imports that break it by themselves: the module and the line."""
    _, _, broken = answer.partition("Broken contracts")
    parts = re.split(r"^(.+)\n-+\n", broken, flags=re.MULTILINE)[1:]
    return {
        name: {(module, int(line)) for module, line in _HOP.findall(text)}
        for name, text in zip(parts[::2], parts[1::2], strict=True)
    }


def test_every_contract_holds() -> None:
    answer = lint(ROOT)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert " 0 broken" in answer.stdout


def test_every_contract_is_seen_to_break_by_a_case_here() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert {contract["name"] for contract in declared} == {contract for contract, _, _ in BAD}


def test_every_forbidden_import_breaks_its_contract(copy: Path) -> None:
    """All of them stand in one copy: a line counts only where its contract names it alone, not as a part of a chain."""
    wanted = [(contract, module, line, write(copy, module, line)) for contract, module, line in BAD]
    answer = lint(copy)
    assert answer.returncode == 1, answer.stdout + answer.stderr
    found = refused(answer.stdout)
    names = {module: f"pipeline.{module.removesuffix('.py').replace('/', '.')}" for _, module, _ in BAD}
    missed = [case for *case, line in wanted if (names[case[1]], line) not in found.get(case[0], set())]
    assert missed == [], answer.stdout


def test_imports_the_design_allows_break_nothing(copy: Path) -> None:
    for module, line in GOOD:
        write(copy, module, line)
    answer = lint(copy)
    assert answer.returncode == 0, answer.stdout + answer.stderr
