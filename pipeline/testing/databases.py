"""Databases for tests: a migrated template, clones of it, and fast ways to check and to empty one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.pool import NullPool

from pipeline.store import migrate
from pipeline.store.database import Database, Statement, Transaction
from pipeline.store.reads import invariants
from pipeline.store.reads.invariants import Finding, Severity
from pipeline.store.schema import metadata


class _CheckRow(Protocol):
    is_broken: bool


TEMPLATE = "pipeline_template"
#: Without triggers, since rows may be in any state.
_DELETE_ALL = "; ".join(
    [
        "SET LOCAL session_replication_role = replica",
        *(str(table.delete()) for table in reversed(metadata.sorted_tables)),
    ]
)


@contextmanager
def clone_database(server_url: str, name: str) -> Iterator[str]:
    """Create a migrated database, and drop it at the end. The role must be allowed to create databases."""
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
    """Delete every row. It is faster than a new clone. Sequences go on, so a test cannot rely on an id."""
    with db.engine.begin() as connection:
        connection.exec_driver_sql(_DELETE_ALL)


def invariant_findings(tx: Transaction, *severities: Severity) -> list[Finding]:
    """List every row that breaks an invariant of these severities, of any when none is named.

    One statement says first whether there is such a row.
    """
    wanted = severities or tuple(Severity)
    queries = [invariant.query.text for invariant in invariants.INVARIANTS if invariant.severity in wanted]
    broken = " OR ".join(f"EXISTS ({query})" for query in queries)
    is_broken = tx.one(Statement[_CheckRow](f"SELECT {broken} AS is_broken"), recent=10_000, limit=1).is_broken
    return [found for found in invariants.findings(tx) if found.severity in wanted] if is_broken else []


def _url(server_url: str, name: str) -> str:
    return make_url(server_url).set(database=name).render_as_string(hide_password=False)
