"""Whom the servers run as, with which programs, and what a dead supervisor leaves behind for the next one."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.embedded import binaries, data_directory, processes, servers
from pipeline.embedded.supervisor import EmbeddedPostgres
from tests.embedded.conftest import User
from tests.embedded.test_servers import SLOWLY, sql, wait_until_down
from tests.support.wait import wait_for

AS_ROOT = os.geteuid() == 0


def wheel_trees() -> list[Path]:
    return binaries._wheel_postgres()


needs_wheel = pytest.mark.skipif(not wheel_trees(), reason="the wheel with Postgres has no build for this machine")
needs_root = pytest.mark.skipif(not AS_ROOT, reason="only root lends the servers another account")


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that every account may enter, unlike the ones pytest makes."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


def linked(source: str, target: str) -> str:
    """A copy that costs nothing where both are on one disk."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


@needs_wheel
def test_the_postgres_of_the_wheel_serves_as_well(new_home: Path, environ: dict[str, str]) -> None:
    newest = wheel_trees()[0]
    with servers.running(new_home, environ | {"PIPELINE_POSTGRES_BIN": str(newest / "bin")}) as found:
        assert sql(found.database_url, "SHOW server_version").startswith("18.")
        assert (new_home / "postgres" / "18").is_dir()


@needs_wheel
@needs_root
def test_a_wheel_in_a_directory_only_root_may_enter_is_copied_to_where_postgres_runs(
    new_home: Path, environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = wheel_trees()[0].parent
    hidden = tmp_path / "hidden"
    for name in (package.name, f"{package.name}.libs"):
        shutil.copytree(package.with_name(name), hidden / name, copy_function=linked)
    hidden.chmod(0o700)
    monkeypatch.setattr(binaries, "_package", lambda _name: [hidden / package.name])
    new_home.mkdir()
    server = EmbeddedPostgres(new_home, binaries.find_postgres({}))
    server.start()
    try:
        assert server.is_ready()
        assert server.command()[0] == new_home.joinpath("postgres").resolve() / "programs-18" / package.name / (
            "pginstall18/bin/postgres"
        )
    finally:
        server.stop()


@needs_root
def test_root_keeps_the_data_in_the_home_where_postgres_can_reach_it(
    open_directory: Path, environ: dict[str, str]
) -> None:
    home = open_directory / "home"
    with servers.running(home, environ):
        assert not (home / "postgres").is_symlink()
        assert (home / "postgres").stat().st_uid != 0
    servers.remove(home)


@needs_root
def test_root_keeps_the_data_elsewhere_when_postgres_cannot_reach_the_home(
    new_home: Path, environ: dict[str, str]
) -> None:
    with servers.running(new_home, environ):
        elsewhere = (new_home / "postgres").resolve()
        assert elsewhere.parent == Path(tempfile.gettempdir()).resolve()
    servers.remove(new_home)
    assert not elsewhere.exists()


@needs_root
def test_data_of_a_deleted_home_is_not_taken_over_by_the_next_one(new_home: Path, environ: dict[str, str]) -> None:
    with servers.running(new_home, environ) as found:
        sql(found.database_url, "CREATE TABLE old ()")
    wait_until_down(new_home)
    shutil.rmtree(new_home)
    with servers.running(new_home, environ) as found:
        assert sql(found.database_url, "SELECT to_regclass('old')") == "None"


def place_with_data(home: Path) -> Path:
    """Where a Postgres that ran in this home has its data."""
    home.mkdir(mode=0o711)
    place = data_directory.prepare_data_directory(home, processes.server_account())
    (place / "password").write_text("secret")
    return place


@needs_root
def test_data_of_deleted_homes_is_swept_away_and_that_of_others_is_not(tmp_path: Path, environ: dict[str, str]) -> None:
    gone, kept = (place_with_data(tmp_path / name) for name in ("gone", "kept"))
    shutil.rmtree(tmp_path / "gone")
    with servers.running(tmp_path / "next", environ):
        assert not gone.exists()
        assert (kept / "password").exists()
    for name in ("kept", "next"):
        servers.remove(tmp_path / name)


def test_a_cluster_that_was_made_halfway_is_made_again(new_home: Path, environ: dict[str, str]) -> None:
    found = binaries.find_postgres(environ)
    new_home.mkdir()
    halfway = data_directory.prepare_data_directory(new_home, processes.server_account()) / f".{found.major}.new"
    halfway.mkdir()
    (halfway / "PG_VERSION").write_text(f"{found.major}\n")
    with servers.running(new_home, environ) as running:
        assert sql(running.database_url, "SELECT 1") == "1"


@needs_root
def test_a_place_that_somebody_else_made_under_our_name_is_refused(new_home: Path) -> None:
    account = processes.server_account()
    assert account is not None
    new_home.mkdir()
    squatted = data_directory._temporary_directory(new_home)
    squatted.mkdir()
    os.chown(squatted, account.uid + 4242, account.gid)
    try:
        with pytest.raises(processes.ServersError, match="belongs to another account"):
            data_directory.prepare_data_directory(new_home, account)
    finally:
        squatted.rmdir()


def python_for_nobody(environ: dict[str, str]) -> str | None:
    """An interpreter of our version with which the account `nobody` can import what we import."""
    for candidate in (os.path.realpath(sys.executable), f"/usr/bin/python3.{sys.version_info.minor}"):
        command = [candidate, "-c", "import pipeline.embedded.supervisor"]
        try:
            done = subprocess.run(command, env=environ, user="nobody", check=False, cwd="/", capture_output=True)
        except OSError:
            continue
        if done.returncode == 0:
            return candidate
    return None


@needs_root
def test_without_root_everything_runs_under_the_one_account(open_directory: Path, environ: dict[str, str]) -> None:
    path = os.pathsep.join([str(Path(binaries.__file__).parents[2]), *filter(None, sys.path)])
    environ |= {"PYTHONPATH": path, "HOME": "/"}
    python = python_for_nobody(environ)
    if python is None:
        pytest.skip("the account nobody can reach no interpreter of this version, or not this checkout")
    shutil.chown(open_directory, "nobody")
    home = open_directory / "home"
    user = User(home, environ, python=python, user="nobody")
    try:
        database_url, _ = user.urls()
        seen = servers.status(home)
        assert seen is not None
        everyone = [seen.supervisor_pid, *seen.pids.values()]
        assert {Path(f"/proc/{pid}").owner() for pid in everyone} == {"nobody"}
        assert sql(database_url, "SELECT 1") == "1"
    finally:
        user.kill()
    wait_until_down(home)


@pytest.mark.parametrize("how", [signal.SIGCONT, signal.SIGKILL], ids=["still-running", "killed-not-collected"])
def test_a_postgres_left_behind_does_not_block_the_next_start(
    home: Path, environ: dict[str, str], how: signal.Signals
) -> None:
    server = EmbeddedPostgres(home, binaries.find_postgres(environ))
    server.prepare()
    server.port = processes.free_port()
    account = server.account
    orphan = subprocess.Popen(
        [str(part) for part in server.command()],
        user=account.uid if account else None,
        group=account.gid if account else None,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(server.is_ready, within=SLOWLY)
        orphan.send_signal(how)
        with servers.running(home, environ) as found:
            assert sql(found.database_url, "SELECT 1") == "1"
        assert not processes.is_running(orphan.pid)
    finally:
        orphan.kill()
        orphan.wait()


def test_a_process_that_got_the_number_of_a_dead_server_is_left_alone(home: Path, environ: dict[str, str]) -> None:
    environ |= {"PIPELINE_DATABASE_URL": "postgresql://there/db"}  # Redis alone will do
    with servers.running(home, environ):
        pass
    wait_until_down(home)
    bystander = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        (home / "redis" / "redis.pid").write_text(f"{bystander.pid}\n")
        with servers.running(home, environ):
            assert bystander.poll() is None
    finally:
        bystander.communicate()
