"""The table that remembers what was done, in the database where it was done.

A row is written in the same transaction as its effect, so either both are there or neither is. Its key is
unique, and that is the lock: whoever inserts a key first holds it until their transaction has ended, and
everybody else who tries, to do the same or to ask about it, waits for that end.
"""

from typing import Any

from sqlalchemy import (
    JSON,
    Column,
    Connection,
    DateTime,
    Engine,
    MetaData,
    String,
    Table,
    func,
    inspect,
    null,
    select,
)
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.schema import CreateTable

TABLE_NAME = "pipeline_effects"


def effects_table(schema: str | None = None) -> Table:
    """The table as SQLAlchemy knows it, for your own migrations too."""
    return Table(
        TABLE_NAME,
        MetaData(),
        Column("key", String(512), primary_key=True),
        Column("operation", String(255), nullable=False),
        Column("result", JSON),
        Column("at", DateTime(timezone=True), nullable=False, server_default=func.now()),
        schema=schema,
    )


def create_effects_table(engine: Engine, schema: str | None = None) -> None:
    """Create the table unless it is there. Two processes may do so at once."""
    try:
        with engine.begin() as connection:
            connection.execute(CreateTable(effects_table(schema), if_not_exists=True))
    except DBAPIError:
        if not inspect(engine).has_table(TABLE_NAME, schema=schema):
            raise


def claim(connection: Connection, table: Table, key: str, operation: str) -> bool:
    """Take the key for this transaction, waiting for whoever holds it. False when it was used: roll back, then read."""
    try:
        connection.execute(table.insert().values(key=key, operation=operation, result=null()))
    except IntegrityError:
        return False
    return True


def store_result(connection: Connection, table: Table, key: str, result: Any) -> bool:
    """Write the result beside the claim. False when the claim is gone, because somebody ended its transaction."""
    wanted = table.update().where(table.c.key == key).values(result=result)
    return connection.execute(wanted).rowcount == 1


def find_effect(connection: Connection, table: Table, key: str) -> tuple[str, Any] | None:
    """The operation that was carried out under this key and its result, as far as that is committed."""
    row = connection.execute(select(table.c.operation, table.c.result).where(table.c.key == key)).first()
    return None if row is None else (row[0], row[1])
