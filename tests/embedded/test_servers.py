"""The embedded servers, with real processes: shared, stopped, killed, and found again with their data."""

import contextlib
import os
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import redis
from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.exc import OperationalError

from pipeline.embedded import locks, processes, servers
from pipeline.embedded.servers import Servers, ServersError
from tests.embedded.conftest import User
from tests.support.wait import wait_for

#: Seconds for a server to stop, to die or to come back, on a disk that others use too.
SLOWLY = 100


def sql(database_url: str, statement: str) -> str:
    """Run one statement in a session of its own; the first value of its answer, or nothing."""
    engine = create_engine(database_url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        result = connection.execute(text(statement))
        return str(result.scalar()) if result.returns_rows else ""


@contextlib.contextmanager
def broker(url: str) -> Iterator["redis.Redis"]:
    client = redis.Redis.from_url(url, decode_responses=True)
    try:
        yield client
    finally:
        client.close()


def is_down(home: Path) -> Callable[[], bool]:
    return lambda: not locks.is_held(home / "supervisor.lock")


def wait_until_down(home: Path) -> None:
    """Until the servers have stopped by themselves: Postgres writes everything to the disk first."""
    wait_for(is_down(home), within=SLOWLY)


def all_pids(home: Path) -> list[int]:
    found = servers.status(home)
    assert found is not None
    return list(found.pids.values())


def leave_a_word(found: Servers) -> str:
    """A new one in each server, and on their disks by now."""
    word = uuid4().hex
    sql(found.database_url, "DROP TABLE IF EXISTS kept")
    sql(found.database_url, f"CREATE TABLE kept AS SELECT '{word}' AS word")
    with broker(found.broker_url) as client:
        client.config_set("appendfsync", "always")  # the answer comes after the disk has it; WAITAOF is new in 7.2
        client.set("word", word)
        client.config_set("appendfsync", "everysec")
    return word


def assert_it_is_there(found: Servers, word: str) -> None:
    assert sql(found.database_url, "SELECT word FROM kept") == word
    with broker(found.broker_url) as client:
        assert client.get("word") == word


def test_the_servers_are_as_durable_as_in_production(new_home: Path, environ: dict[str, str]) -> None:
    with servers.running(new_home, environ) as found:
        for setting in ("fsync", "synchronous_commit", "full_page_writes", "data_checksums"):
            assert sql(found.database_url, f"SHOW {setting}") == "on"
        assert sql(found.database_url, "SHOW max_connections") == "200"
        assert sql(found.database_url, "SELECT current_database()") == "pipeline"
        with broker(found.broker_url) as client:
            assert client.config_get("append*")["appendonly"] == "yes"
            assert client.config_get("append*")["appendfsync"] == "everysec"


def test_only_whoever_can_read_the_home_gets_in(home: Path, environ: dict[str, str]) -> None:
    with servers.running(home, environ) as found:
        with pytest.raises(OperationalError, match="password"):
            sql(found.database_url.replace("pipeline:", "pipeline:wrong", 1), "SELECT 1")
        with broker(found.broker_url.replace("//:", "//:wrong")) as client, pytest.raises(redis.RedisError):
            client.ping()
        secret = ("servers.json", "redis/password", "redis/redis.conf", "postgres/password")
        assert {stat.S_IMODE((home / name).stat().st_mode) for name in secret} == {0o600}
        closed = {path for path in home.rglob("*") if path.is_dir() and not path.stat().st_mode & 0o077}
        seen = [path for path in home.rglob("*") if not closed.intersection((path, *path.parents))]
        assert [path.name for path in seen if path.stat().st_mode & 0o077] == []
        assert found.database_url not in f"{found!r} {servers.status(home)!r}"


def test_the_data_is_still_there_after_a_stop_and_a_start(home: Path, environ: dict[str, str]) -> None:
    with servers.running(home, environ) as found:
        word = leave_a_word(found)
    wait_until_down(home)
    with servers.running(home, environ) as found:
        assert_it_is_there(found, word)


def test_a_second_process_shares_the_same_pair(home: Path, environ: dict[str, str], a_user: Callable[[], User]) -> None:
    with servers.running(home, environ) as found:
        assert a_user().urls() == [found.database_url, found.broker_url]


def test_processes_that_start_at_once_agree_on_one_pair(home: Path, a_user: Callable[[], User]) -> None:
    users = [a_user() for _ in range(4)]
    assert len({tuple(user.urls()) for user in users}) == 1


def test_the_servers_stop_when_the_last_user_has_left(
    home: Path, environ: dict[str, str], a_user: Callable[[], User]
) -> None:
    other = a_user()
    database_url, _ = other.urls()
    with servers.running(home, environ):
        pids = all_pids(home)
    assert sql(database_url, "SELECT 1") == "1"
    other.leave()
    wait_until_down(home)
    assert servers.status(home) is None
    assert not any(processes.is_running(pid) for pid in pids)


def test_a_user_that_is_killed_does_not_keep_the_servers_up(home: Path, a_user: Callable[[], User]) -> None:
    user = a_user()
    user.urls()
    user.kill()
    wait_until_down(home)


def test_who_comes_while_the_servers_stop_gets_new_ones(home: Path, environ: dict[str, str]) -> None:
    with servers.running(home, environ):
        pass
    with servers.running(home, environ) as found:
        assert sql(found.database_url, "SELECT 1") == "1"


def test_killing_the_supervisor_takes_the_servers_along_and_loses_nothing(home: Path, environ: dict[str, str]) -> None:
    with servers.running(home, environ) as found:
        word = leave_a_word(found)
        pids = all_pids(home)
        seen = servers.status(home)
        assert seen is not None
        os.kill(seen.supervisor_pid, signal.SIGKILL)
        wait_for(lambda: servers.status(home) is None)
        wait_for(lambda: not any(processes.is_running(pid) for pid in pids), within=SLOWLY)
        assert (home / "servers.json").exists(), "the notice of the dead is left behind, and must not be believed"
        with servers.running(home, environ) as found_again:
            assert_it_is_there(found_again, word)


def test_a_start_right_after_the_supervisor_was_killed_works(home: Path, environ: dict[str, str]) -> None:
    with servers.running(home, environ) as found:
        word = leave_a_word(found)
        seen = servers.status(home)
        assert seen is not None
        os.kill(seen.supervisor_pid, signal.SIGKILL)
        wait_until_down(home)
        with servers.running(home, environ) as found_again:
            assert_it_is_there(found_again, word)


@pytest.mark.parametrize("name", ["postgres", "redis"])
def test_a_server_that_is_killed_comes_back_under_the_same_url(home: Path, environ: dict[str, str], name: str) -> None:
    with servers.running(home, environ) as found:
        word = leave_a_word(found)
        before = servers.status(home)
        assert before is not None
        os.kill(before.pids[name], signal.SIGKILL)
        wait_for(lambda: (now := servers.status(home)) and now.pids[name] != before.pids[name], within=SLOWLY)
        assert_it_is_there(found, word)


def test_stop_ends_the_servers_even_while_they_are_used(home: Path, environ: dict[str, str]) -> None:
    with servers.running(home, environ):
        assert servers.stop(home)
        assert servers.status(home) is None
        assert not servers.stop(home)


def test_servers_that_end_by_themselves_while_they_are_stopped_are_stopped(
    home: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with servers.running(home, environ):
        found = servers.status(home)
        servers.stop(home)
        monkeypatch.setattr(servers, "status", lambda _: found)  # what it saw the moment before
        assert servers.stop(home)


def test_urls_in_the_environment_win_and_nothing_is_started(new_home: Path, environ: dict[str, str]) -> None:
    given = {"PIPELINE_DATABASE_URL": "postgresql://there/db", "PIPELINE_BROKER_URL": "redis://there"}
    with servers.running(new_home, environ | given) as found:
        assert found == Servers(database_url="postgresql+psycopg2://there/db", broker_url="redis://there")
        assert not new_home.exists()


def test_one_url_in_the_environment_starts_only_the_other_server(new_home: Path, environ: dict[str, str]) -> None:
    given = {"PIPELINE_DATABASE_URL": "postgresql://there/db"}
    with servers.running(new_home, environ | given) as found:
        assert found.database_url == "postgresql+psycopg2://there/db"
        with broker(found.broker_url) as client:
            assert client.ping()
        seen = servers.status(new_home)
        assert seen is not None
        assert set(seen.pids) == {"redis"}
        with pytest.raises(ServersError, match="started without postgres"), servers.running(new_home, environ):
            pass


def test_a_home_that_cannot_be_made_is_named(tmp_path: Path, environ: dict[str, str]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ServersError, match="set PIPELINE_HOME"), servers.running(tmp_path / "file" / "home", environ):
        pass


@pytest.fixture
def in_the_way(home: Path) -> Iterator[None]:
    """A file where the directory of Redis should be."""
    directory, aside = home / "redis", home / "aside"
    directory.mkdir(exist_ok=True)
    directory.rename(aside)
    directory.write_text("in the way")
    yield
    directory.unlink()
    aside.rename(directory)


@pytest.mark.usefixtures("in_the_way")
def test_a_start_that_fails_says_why_and_leaves_nothing_running(home: Path, environ: dict[str, str]) -> None:
    with pytest.raises(ServersError, match="cannot start the servers of"), servers.running(home, environ):
        pass
    assert is_down(home)()
    assert servers.status(home) is None
