"""The table of effects, in the database that the effects are written to.

A row is written in the same transaction as its effect, so either both exist or neither does. The unique key is the
lock: the transaction that inserts a key first holds it until it ends. Every other transaction that inserts the key, to
send or to reconcile, waits for that end.
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
    """Return the table for SQLAlchemy. You may use it in your own migrations."""
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
    """Create the table unless it exists. Two processes may do this at once."""
    try:
        with engine.begin() as connection:
            connection.execute(CreateTable(effects_table(schema), if_not_exists=True))
    except DBAPIError:
        if not inspect(engine).has_table(TABLE_NAME, schema=schema):
            raise


def claim(connection: Connection, table: Table, key: str, operation: str) -> bool:
    """Take the key for this transaction, after waiting for its holder. False if it was used: roll back, then read."""
    try:
        connection.execute(table.insert().values(key=key, operation=operation, result=null()))
    except IntegrityError:
        return False
    return True


def store_result(connection: Connection, table: Table, key: str, result: Any) -> bool:
    """Store the result of a claimed key. False if the claim is gone because its transaction was ended."""
    wanted = table.update().where(table.c.key == key).values(result=result)
    return connection.execute(wanted).rowcount == 1


def find_effect(connection: Connection, table: Table, key: str) -> tuple[str, Any] | None:
    """Return the committed operation of this key and its result. None if there is none."""
    row = connection.execute(select(table.c.operation, table.c.result).where(table.c.key == key)).first()
    return None if row is None else (row[0], row[1])
