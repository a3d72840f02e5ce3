"""Databases for tests: a migrated template, clones of it, and a fast way to empty one."""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.pool import NullPool

from pipeline.store import migrate
from pipeline.store.database import Database
from pipeline.store.schema import metadata

TEMPLATE = "pipeline_template"


@contextmanager
def clone_database(server_url: str, name: str) -> Iterator[str]:
    """A migrated database of this name, dropped at the end. The role must be allowed to create databases."""
    admin = create_engine(server_url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    template = f"{TEMPLATE}_{migrate.expected_version()}"
    with admin.connect() as connection:
        connection.execute(text("SELECT pg_advisory_lock(4711)"))
        if not connection.scalar(text("SELECT true FROM pg_database WHERE datname = :n"), {"n": template}):
            connection.execute(text(f'CREATE DATABASE "{template}"'))
            migrate.upgrade(Database.connect_unpooled(_url(server_url, template)))
        connection.execute(text(f'CREATE DATABASE "{name}" TEMPLATE "{template}"'))
        connection.execute(text("SELECT pg_advisory_unlock(4711)"))
    try:
        yield _url(server_url, name)
    finally:
        with admin.connect() as connection:
            connection.execute(text(f'DROP DATABASE "{name}" WITH (FORCE)'))


def delete_all_rows(db: Database) -> None:
    """Delete every row. Faster than a new clone, and the sequences go on, so no test can lean on an id."""
    with db.engine.begin() as connection:
        connection.execute(text("SET LOCAL session_replication_role = replica"))  # no trigger: rows may be in any state
        for table in reversed(metadata.sorted_tables):
            connection.execute(table.delete())


def _url(server_url: str, name: str) -> str:
    return make_url(server_url).set(database=name).render_as_string(hide_password=False)
