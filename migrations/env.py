"""Runs the migrations inside one transaction, one process at a time; or writes their SQL."""

from alembic import context
from sqlalchemy import Connection, text

from pipeline.store.schema import SCHEMA, metadata


def run(connection: Connection) -> None:
    """Migrate over the connection that ``pipeline.store.migrate`` opened and holds the lock of."""
    if not connection.scalar(text(f"SELECT to_regnamespace('{SCHEMA}') IS NOT NULL")):  # its owner may create no other
        connection.execute(text(f"CREATE SCHEMA {SCHEMA}"))
    context.configure(connection=connection, target_metadata=metadata, version_table_schema=SCHEMA)
    with context.begin_transaction():
        context.run_migrations()


def write_sql() -> None:
    """Write the SQL of the migrations for a database administrator, in one transaction, under the same lock."""
    context.configure(
        dialect_name="postgresql",
        dialect_opts={"paramstyle": "named"},  # else each percent sign is doubled
        target_metadata=metadata,
        version_table_schema=SCHEMA,
    )
    with context.begin_transaction():
        context.execute("SELECT pg_advisory_xact_lock(hashtext('pipeline.migrations'))")
        context.execute(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}")
        context.run_migrations()
        context.execute("ANALYZE")


if context.is_offline_mode():
    write_sql()
else:
    run(context.config.attributes["connection"])
