"""Runs the migrations inside one transaction, one process at a time."""

from alembic import context
from sqlalchemy import Connection, text

from pipeline.store.schema import SCHEMA, metadata


def run(connection: Connection) -> None:
    """Migrate over the connection that ``pipeline.store.migrate`` opened and holds the lock of."""
    connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}"))
    context.configure(connection=connection, target_metadata=metadata, version_table_schema=SCHEMA)
    with context.begin_transaction():
        context.run_migrations()


run(context.config.attributes["connection"])
