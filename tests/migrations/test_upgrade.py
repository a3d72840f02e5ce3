"""The migrations build what the code declares, forwards and backwards, however they are started."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from uuid import uuid4

import psycopg2  # type: ignore[import-untyped]
import pytest
from sqlalchemy import Connection, text
from sqlalchemy.engine import make_url

from pipeline.domain.errors import InvalidInputError, SchemaVersionError, UnsupportedSchemaError
from pipeline.embedded import servers
from pipeline.store import functions, migrate
from pipeline.store.database import Database
from pipeline.store.reads import invariants
from pipeline.store.schema import SCHEMA, metadata
from tests.support import databases, schema_catalog
from tests.support.scripted_consumers import Shop
from tests.support.wait import wait_for

BASE = "base"

_TABLES = text("""
SELECT n.nspname || '.' || c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname NOT LIKE 'pg\\_%' AND n.nspname <> 'information_schema'
  AND c.relkind IN ('r', 'v', 'm', 'S', 'f', 'p') ORDER BY 1
""")
_ROUTINES = text("""
SELECT p.proname FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = 'pipeline'
""")
_TYPES = text("""
SELECT t.typname FROM pg_type t JOIN pg_namespace n ON n.oid = t.typnamespace
WHERE n.nspname = 'pipeline' AND t.typrelid = 0 AND t.typelem = 0
""")
_WAITING = text("""
SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database
WHERE l.locktype = 'advisory' AND NOT l.granted AND d.datname = current_database()
""")


def picture(db: Database) -> schema_catalog.Picture:
    with db.engine.connect() as connection:
        return schema_catalog.picture(connection)


def created(db: Database) -> None:
    """Build the schema from the code alone, without a migration."""
    with db.engine.begin() as connection:
        connection.execute(text(f"CREATE SCHEMA {SCHEMA}"))
        for statement in functions.BEFORE_TABLES:
            literally(connection, statement)
        metadata.create_all(connection)
        for statement in functions.AFTER_TABLES:
            literally(connection, statement)


def literally(connection: Connection, statement: str) -> None:
    """Run a statement in which a percent sign means itself."""
    connection.exec_driver_sql(statement.replace("%", "%%"))


#: Makes the code of a later release current: it has one more revision, of these statements. Gives its version.
NextRelease = Callable[..., AbstractContextManager[str]]


@pytest.fixture
def next_release(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NextRelease:
    @contextmanager
    def code_with(*statements: str) -> Iterator[str]:
        place = tmp_path / "migrations"
        shutil.copytree(project / "migrations", place, ignore=shutil.ignore_patterns("__pycache__"))
        before = migrate.expected_version()
        version = f"{int(before) + 1:04}"
        (place / "versions" / f"{version}_add_moods.py").write_text(_REVISION.format(version, before, statements))
        with monkeypatch.context() as patch:
            patch.setattr(migrate, "migrations_path", lambda: place)
            yield version

    return code_with


_REVISION = """from alembic import op
revision, down_revision = {0!r}, {1!r}

def upgrade():
    for statement in {2!r}:
        op.execute(statement)
"""


@pytest.fixture(scope="module")
def pictures(embedded: servers.Servers) -> tuple[schema_catalog.Picture, schema_catalog.Picture]:
    """The schema as the migrations build it, and as the code declares it."""
    name = f"picture_{os.getpid()}"
    with databases.empty(embedded.database_url, name) as url:
        migrate.upgrade(Database.connect_unpooled(url))
        migrated = picture(Database.connect_unpooled(url))
    with databases.empty(embedded.database_url, name) as url:
        created(Database.connect_unpooled(url))
        declared = picture(Database.connect_unpooled(url))
    return migrated, declared


@pytest.mark.parametrize("part", ["tables", "columns", "constraints", "indexes", "triggers", "functions", "sequences"])
def test_migrating_from_empty_builds_exactly_what_the_code_declares(
    pictures: tuple[schema_catalog.Picture, schema_catalog.Picture], part: str
) -> None:
    migrated, declared = pictures
    assert migrated[part], f"the picture shows no {part} at all"
    assert migrated[part] == declared[part]


def test_the_picture_has_no_part_that_is_not_compared(
    pictures: tuple[schema_catalog.Picture, schema_catalog.Picture],
) -> None:
    migrated, declared = pictures
    assert migrated == declared


def test_upgrade_returns_the_head_and_the_database_is_at_it(bare: Database) -> None:
    assert migrate.upgrade(bare) == migrate.expected_version() != ""
    with bare.engine.connect() as connection:
        assert migrate.current_version(connection) == migrate.expected_version()


def test_going_down_leaves_nothing_but_the_schema_and_the_version_table(bare: Database) -> None:
    migrate.upgrade(bare)
    migrate.downgrade(bare, BASE)
    with bare.engine.connect() as connection:
        assert connection.scalars(_TABLES).all() == ["pipeline.alembic_version"]
        assert connection.scalars(_ROUTINES).all() == []
        assert connection.scalars(_TYPES).all() == []
        assert migrate.current_version(connection) is None


def test_up_down_up_leaves_the_same_database_as_up(bare: Database) -> None:
    migrate.upgrade(bare)
    once = picture(bare)
    migrate.downgrade(bare, BASE)
    migrate.upgrade(bare)
    assert picture(bare) == once


def test_an_upgrade_of_a_current_database_changes_nothing(bare: Database) -> None:
    migrate.upgrade(bare)
    once = picture(bare)
    assert migrate.upgrade(bare) == migrate.expected_version()
    assert picture(bare) == once


def test_an_upgrade_shares_a_database_with_tables_of_others(bare: Database) -> None:
    with bare.engine.begin() as connection:
        connection.execute(text("CREATE TABLE public.runs (mine integer)"))
        connection.execute(text("INSERT INTO public.runs VALUES (1)"))
    migrate.upgrade(bare)
    migrate.downgrade(bare, BASE)
    with bare.engine.connect() as connection:
        assert connection.scalars(text("SELECT mine FROM public.runs")).all() == [1]


def test_two_upgrades_at_once_are_one_after_the_other(bare: Database) -> None:
    """Both are known to wait at the door before it opens, so neither can have come late by luck."""
    answers: list[str] = []
    threads = [threading.Thread(target=lambda: answers.append(migrate.upgrade(bare))) for _ in range(2)]
    with bare.engine.begin() as door:
        door.execute(text("SELECT pg_advisory_xact_lock(hashtext('pipeline.migrations'))"))
        for thread in threads:
            thread.start()
        wait_for(lambda: door.scalar(_WAITING) == 2, why="both upgrades wait")
    for thread in threads:
        thread.join(timeout=30)
    assert answers == [migrate.expected_version()] * 2
    migrate.require_current(bare)


def test_a_migration_that_fails_leaves_the_database_as_it_was(bare: Database, next_release: NextRelease) -> None:
    migrate.upgrade(bare)
    before, at = picture(bare), migrate.expected_version()
    with next_release(*_ADDS, "CREATE TABLE pipeline.audit (mine integer)"), pytest.raises(Exception, match="audit"):
        migrate.upgrade(bare)
    assert picture(bare) == before
    with bare.engine.connect() as connection:
        assert migrate.current_version(connection) == at


def test_a_first_migration_that_fails_leaves_nothing(bare: Database, next_release: NextRelease) -> None:
    with next_release("CREATE TABLE pipeline.audit (mine integer)"), pytest.raises(Exception, match="audit"):
        migrate.upgrade(bare)
    with bare.engine.connect() as connection:
        assert connection.scalars(_TABLES).all() == []
        assert migrate.current_version(connection) is None


#: What the migrations before the first release left: some tables, and the version they were at.
_OLD_TABLES = (
    "CREATE SCHEMA pipeline",
    "CREATE TABLE pipeline.walks (name text PRIMARY KEY)",
    "CREATE FUNCTION pipeline.works_with() RETURNS text LANGUAGE sql IMMUTABLE AS $$ SELECT '0007' $$",
)
_OLD_VERSION = (
    "CREATE TABLE pipeline.alembic_version (version_num varchar(32) PRIMARY KEY)",
    "INSERT INTO pipeline.alembic_version VALUES ('{version}')",
)


@pytest.mark.parametrize(
    ("version", "found"),
    [
        ("0001", "is at version 0001, from before the first release"),
        ("0008", "is at version 0008, from before the first release"),
        (None, "has tables or functions but no version"),
    ],
)
def test_a_database_from_before_the_first_release_is_refused_in_one_sentence(
    bare: Database, version: str | None, found: str
) -> None:
    with bare.engine.begin() as connection:
        for statement in _OLD_TABLES + (_OLD_VERSION if version else ()):
            literally(connection, statement.format(version=version))
    before = picture(bare)
    for refused in (migrate.upgrade, migrate.require_current):
        with pytest.raises(UnsupportedSchemaError) as refusal:
            refused(bare)
        assert str(refusal.value) == (
            f"The schema `pipeline` {found}; expected an empty schema or version 0100 or later: create a new database, "
            "or drop this schema with all its data, and run `pipeline db upgrade` again."
        )
        assert refusal.value.found == version
    assert picture(bare) == before


@pytest.mark.parametrize("statement", ["CREATE FUNCTION pipeline.clock() RETURNS int LANGUAGE sql AS $$ SELECT 1 $$"])
def test_a_function_alone_makes_a_schema_that_is_not_empty(bare: Database, statement: str) -> None:
    with bare.engine.begin() as connection:
        literally(connection, "CREATE SCHEMA pipeline")
        literally(connection, statement)
    with pytest.raises(UnsupportedSchemaError):
        migrate.upgrade(bare)


def test_an_empty_schema_that_an_administrator_made_is_migrated(bare: Database) -> None:
    with bare.engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA pipeline"))
    assert migrate.upgrade(bare) == migrate.expected_version()


def test_old_code_does_not_migrate_a_database_of_newer_code(bare: Database, next_release: NextRelease) -> None:
    with next_release(*_ADDS) as version:
        assert migrate.upgrade(bare) == version
    with pytest.raises(SchemaVersionError, match="migrated by newer code") as refusal:
        migrate.upgrade(bare)
    assert (refusal.value.found, refusal.value.expected) == (version, migrate.expected_version())


def test_a_database_that_was_never_migrated_is_refused_with_the_command_to_run(bare: Database) -> None:
    with pytest.raises(SchemaVersionError, match="pipeline db upgrade") as refusal:
        migrate.require_current(bare)
    assert (refusal.value.found, refusal.value.expected) == (None, migrate.expected_version())
    assert "none" in str(refusal.value)


#: A release that takes something away says which code it still works with.
_TAKES_AWAY = (
    "ALTER TABLE pipeline.runs DROP COLUMN cost",
    "CREATE OR REPLACE FUNCTION pipeline.oldest_compatible_code() RETURNS text LANGUAGE sql AS $$ SELECT '0101' $$",
)
_ADDS = (
    "ALTER TABLE pipeline.runs ADD COLUMN mood text NOT NULL DEFAULT 'fine'",
    "ALTER TABLE pipeline.events ADD COLUMN colour text",
    "ALTER TABLE pipeline.mutations ADD COLUMN price numeric CHECK (price > 0)",
    "CREATE TABLE pipeline.moods (name text PRIMARY KEY)",
    "CREATE INDEX runs_mood ON pipeline.runs (mood)",
)


def test_a_database_of_older_code_is_refused_with_both_versions_named(
    bare: Database, next_release: NextRelease
) -> None:
    older = migrate.upgrade(bare)
    with next_release(*_ADDS) as newer:
        with pytest.raises(SchemaVersionError, match="Run `pipeline db upgrade`") as refusal:
            migrate.require_current(bare)
        assert migrate.upgrade(bare) == newer
        migrate.require_current(bare)
    assert (refusal.value.found, refusal.value.expected) == (older, newer)
    assert f"{older}, this code needs {newer}" in str(refusal.value)


def test_a_database_of_newer_code_that_took_something_away_is_refused_with_both_versions_named(
    bare: Database, next_release: NextRelease
) -> None:
    with next_release(*_TAKES_AWAY) as newer:
        migrate.upgrade(bare)
        migrate.require_current(bare)
    with pytest.raises(SchemaVersionError, match="migrated by newer code") as refusal:
        migrate.require_current(bare)
    assert (refusal.value.found, refusal.value.expected) == (newer, migrate.expected_version())
    assert f"{newer}, this code needs {migrate.expected_version()}" in str(refusal.value)


def test_this_code_continues_and_restarts_on_a_schema_to_which_a_later_release_only_added(
    bare: Database, next_release: NextRelease
) -> None:
    migrate.upgrade(bare)
    shop = Shop()
    run = shop.started(bare, orders=2)
    run.run()
    with next_release(*_ADDS):
        migrate.upgrade(bare)
    migrate.require_current(bare)
    run.publish(shop.orders, {"n": 7})
    run.run()
    again = shop.inline(bare)
    again.publish(shop.orders, {"n": 8})
    again.run()
    again.sweeps.retention()
    assert [row.status for row in again.ledger()] == ["applied"] * 4
    with bare.transaction() as tx:
        assert invariants.findings(tx) == []


def test_a_database_that_was_taken_down_again_is_refused(bare: Database) -> None:
    migrate.upgrade(bare)
    migrate.require_current(bare)
    migrate.downgrade(bare, BASE)
    with pytest.raises(SchemaVersionError, match="pipeline db upgrade"):
        migrate.require_current(bare)


def test_migrations_run_from_a_path_and_with_a_password_that_have_percent_signs(
    bare: Database, project: Path, tmp_path: Path
) -> None:
    place = tmp_path / "100%s of %(it)s"
    shutil.copytree(project / "pipeline", place / "pipeline", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(project / "migrations", place / "migrations", ignore=shutil.ignore_patterns("__pycache__"))
    role, password = f"r%{uuid4().hex[:8]}", "p%40s%%s:@/?"
    url = make_url(bare.engine.url).set(username=role, password=password)
    with bare.engine.begin() as connection:
        literally(connection, f"CREATE ROLE \"{role}\" SUPERUSER LOGIN PASSWORD '{password}'")
    code = (
        "import os, sys; from pipeline.store import migrate; from pipeline.store.database import Database;"
        "print(migrate.__file__); print(migrate.upgrade(Database.connect_unpooled(os.environ['TARGET'])))"
    )
    environ = {**os.environ, "PYTHONPATH": str(place), "TARGET": url.render_as_string(hide_password=False)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=place,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        where, version = done.stdout.split("\n")[:2]
        assert where.startswith(str(place))
        assert version == migrate.expected_version()
        migrate.require_current(bare)
    finally:
        with bare.engine.begin() as connection:
            literally(connection, f'REASSIGN OWNED BY "{role}" TO CURRENT_USER')
            literally(connection, f'DROP ROLE "{role}"')


def test_the_sql_for_an_administrator_builds_the_same_schema(bare: Database, db: Database) -> None:
    run_sql(bare, migrate.upgrade_sql())
    assert picture(bare) == picture(db)
    migrate.require_current(bare)
    assert migrate.upgrade(bare) == migrate.expected_version(), "nothing is left to do"


def test_the_sql_since_a_version_leads_to_the_newest(bare: Database, next_release: NextRelease) -> None:
    migrate.upgrade(bare)
    with next_release("CREATE TABLE pipeline.moods (name text)") as version:
        run_sql(bare, migrate.upgrade_sql(migrate._versions()[0]))
        with bare.engine.connect() as connection:
            assert migrate.current_version(connection) == version
            assert connection.scalar(text("SELECT to_regclass('pipeline.moods') IS NOT NULL"))
    with pytest.raises(InvalidInputError, match="There is no schema version '9999'"):
        migrate.upgrade_sql("9999")


def run_sql(db: Database, script: str) -> None:
    """Run a script as psql does: it opens and commits its own transaction."""
    connection = psycopg2.connect(db.engine.url.set(drivername="postgresql").render_as_string(hide_password=False))
    try:
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute(script)
    finally:
        connection.close()
