"""A worker refuses a Postgres that may forget commits, and the doctor reports it."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import text

from pipeline.background import doctor
from pipeline.config import Settings
from pipeline.embedded import binaries, servers, supervisor
from pipeline.store import connections
from pipeline.store.database import Database
from pipeline.store.reads.invariants import durability_findings
from pipeline.worker.startup_checks import UnsafeError, require_safe
from tests.support import databases
from tests.support.scripted_consumers import Shop

Changed = Callable[[str], Database]


@pytest.fixture
def changed(embedded: servers.Servers) -> Iterator[Changed]:
    """Change a setting of a database of this test's own, and connect to it."""
    with databases.clone_database(embedded.database_url, f"durable_{os.getpid()}") as url:

        def change(setting: str) -> Database:
            database = Database.connect_unpooled(url)
            with database.engine.begin() as connection:
                connection.execute(text(f'ALTER DATABASE "{database.engine.url.database}" SET {setting}'))
            return database

        yield change


def start(db: Database, **settings: Any) -> None:
    require_safe(db, Shop().inline(db).registry, Settings(**settings))


def test_a_worker_refuses_commits_that_do_not_wait_for_the_disk(changed: Changed) -> None:
    db = changed("synchronous_commit = off")
    with pytest.raises(
        UnsafeError, match="synchronous_commit is off; expected on, remote_write or remote_apply"
    ) as error:
        start(db)
    assert "PIPELINE_ALLOWED_UNSAFE_SETTINGS" in str(error.value)
    assert doctor.check(db).counts["broken: commits-are-durable"] == 1


def test_a_worker_starts_when_the_unsafe_setting_is_allowed(changed: Changed) -> None:
    db = changed("synchronous_commit = off")
    start(db, allowed_unsafe_settings="synchronous_commit")
    allowed = Settings(allowed_unsafe_settings="synchronous_commit, fsync").allowed_unsafe_settings
    assert "broken: commits-are-durable" not in doctor.check(db, allowed_unsafe_settings=allowed).counts
    with pytest.raises(UnsafeError, match="synchronous_commit"):
        start(db, allowed_unsafe_settings="fsync,full_page_writes")


@pytest.mark.parametrize("value", ["local", "remote_write", "on", "remote_apply"])
def test_a_worker_accepts_every_commit_that_waits_for_the_disk(changed: Changed, value: str) -> None:
    db = changed(f"synchronous_commit = {value}")
    start(db)
    assert "broken: commits-are-durable" not in doctor.check(db).counts


def test_a_worker_refuses_a_default_of_its_role(changed: Changed) -> None:
    db = changed("application_name = 'durable'")
    role = db.engine.url.username
    database = db.engine.url.database
    with db.engine.begin() as connection:
        connection.execute(text(f'ALTER ROLE "{role}" IN DATABASE "{database}" SET synchronous_commit = off'))
    with pytest.raises(UnsafeError, match="synchronous_commit is off"):
        start(db)


def test_a_worker_refuses_a_level_that_is_not_what_it_asks_for(
    changed: Changed, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = changed("default_transaction_isolation = 'serializable'")
    start(db)
    monkeypatch.setattr(connections, "_BEGIN", "BEGIN; ")  # as if a proxy dropped the level of each BEGIN
    with pytest.raises(UnsafeError, match=r"isolation level serializable .* READ COMMITTED"):
        start(db)


def test_every_unsafe_setting_of_a_server_is_named(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsafe = {
        "fsync": "off",
        "full_page_writes": "off",
        "synchronous_commit": "local",
        "synchronous_standby_names": "*",
    }
    monkeypatch.setattr(supervisor, "SETTINGS", supervisor.SETTINGS | unsafe)
    server = supervisor.EmbeddedPostgres(tmp_path_factory.mktemp("unsafe"), binaries.find_postgres(os.environ))
    server.start()
    try:
        with Database.connect_unpooled(server.url).transaction() as tx:
            found = [f"{finding.subject} {finding.detail}" for finding in durability_findings(tx)]
            assert durability_findings(tx, allowed=unsafe) == []
    finally:
        server.stop()
    assert found == [
        "Postgres's fsync is off; expected on",
        "Postgres's full_page_writes is off; expected on",
        "Postgres's synchronous_commit is local; expected on, remote_write or remote_apply",
    ]
