"""Databases for tests: those of the user's test kit, and one that was never migrated."""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.pool import NullPool

from pipeline.store.database import Database
from pipeline.testing.databases import TEMPLATE, clone_database, delete_all_rows, invariant_findings

__all__ = [
    "TEMPLATE",
    "clone_database",
    "copied",
    "delete_all_rows",
    "empty",
    "invariant_findings",
    "make_logins_cheap",
    "stored_text",
]


def make_logins_cheap(server_url: str) -> None:
    """Store the role's password with one round of hashing: thousands of logins cost 4096 rounds each otherwise."""
    url = make_url(server_url)
    engine = create_engine(url, poolclass=NullPool)
    with engine.begin() as connection:
        if (connection.dialect.server_version_info or ()) < (16,):
            return  # it knows no number of rounds
        connection.execute(text("SELECT pg_advisory_xact_lock(4712)"))
        connection.execute(text("SET LOCAL scram_iterations = 1"))
        password = connection.scalar(text("SELECT quote_literal(:password)"), {"password": url.password})
        connection.exec_driver_sql(f'ALTER ROLE "{url.username}" PASSWORD {password}')


def stored_text(db: Database) -> str:
    """Every row of every table, as text."""
    with db.engine.connect() as connection:
        tables = connection.scalars(text("SELECT tablename FROM pg_tables WHERE schemaname = 'pipeline'")).all()
        rows = [connection.scalars(text(f"SELECT t::text FROM pipeline.{name} t")) for name in tables]
        return "\n".join(row for found in rows for row in found)


@contextmanager
def empty(server_url: str, name: str) -> Iterator[str]:
    """A database that was never migrated, dropped at the end."""
    with _made(server_url, name, "") as url:
        yield url


@contextmanager
def copied(server_url: str, source: str, name: str) -> Iterator[str]:
    """A copy of a database that nobody is connected to, dropped at the end."""
    with create_engine(server_url, poolclass=NullPool).connect() as connection:
        version = connection.dialect.server_version_info or ()
    by_files = " STRATEGY FILE_COPY" if version >= (15,) else ""  # 14 knows no other way
    with _made(server_url, name, f'TEMPLATE "{source}"{by_files}') as url:
        yield url


@contextmanager
def _made(server_url: str, name: str, how: str) -> Iterator[str]:
    admin = create_engine(server_url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f'CREATE DATABASE "{name}" {how}'))
    try:
        yield make_url(server_url).set(database=name).render_as_string(hide_password=False)
    finally:
        with admin.connect() as connection:
            connection.execute(text(f'DROP DATABASE "{name}" WITH (FORCE)'))
