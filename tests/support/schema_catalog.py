"""What a database is made of, read from its own catalog, so that two of them can be compared.

Everything that can change what a statement does or refuses is in the picture: tables with their
storage options, columns, constraints, indexes, triggers, functions and sequences. Where a column
stands in its table is not, because a column added by a later migration comes last.
"""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Table, text

from pipeline.store.database import Database
from pipeline.store.schema import metadata

Picture = Mapping[str, list[tuple[Any, ...]]]

#: The migration tool's own table is how a database knows its version; it is no part of the schema.
_OURS = "n.nspname = 'pipeline' AND c.relname <> 'alembic_version'"

_PARTS = {
    "tables": f"""
        SELECT c.relname, c.relkind::text, c.relpersistence::text, c.reloptions, obj_description(c.oid, 'pg_class')
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE {_OURS} AND c.relkind IN ('r', 'p', 'v', 'm') ORDER BY 1""",
    "columns": f"""
        SELECT c.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity::text,
               a.attgenerated::text, a.attstorage::text, pg_get_expr(d.adbin, d.adrelid)
        FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
        LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
        WHERE {_OURS} AND c.relkind = 'r' AND a.attnum > 0 AND NOT a.attisdropped ORDER BY 1, 2""",
    "constraints": f"""
        SELECT c.relname, k.conname, k.contype::text, k.convalidated, pg_get_constraintdef(k.oid)
        FROM pg_constraint k JOIN pg_class c ON c.oid = k.conrelid JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE {_OURS} AND k.contype IN ('c', 'f', 'p', 'u', 'x') ORDER BY 1, 2""",
    "indexes": f"""
        SELECT c.relname, i.indexrelid::regclass::text, i.indisunique, i.indisvalid, pg_get_indexdef(i.indexrelid)
        FROM pg_index i JOIN pg_class c ON c.oid = i.indrelid JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE {_OURS} ORDER BY 1, 2""",
    "triggers": f"""
        SELECT c.relname, t.tgname, t.tgenabled::text, pg_get_triggerdef(t.oid)
        FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE {_OURS} AND NOT t.tgisinternal ORDER BY 1, 2""",
    "functions": """
        SELECT p.proname, pg_get_functiondef(p.oid), p.proacl IS NULL
        FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = 'pipeline' ORDER BY 1""",
    "sequences": """
        SELECT sequencename, data_type::text, start_value, increment_by, min_value, max_value, cycle, cache_size
        FROM pg_sequences WHERE schemaname = 'pipeline' ORDER BY 1""",
}

_REFUSALS = f"""
    SELECT k.conname AS name, pg_get_constraintdef(k.oid) AS definition
    FROM pg_constraint k JOIN pg_class c ON c.oid = k.conrelid JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE {_OURS} AND k.contype IN ('c', 'f', 'p', 'u', 'x')
    UNION
    SELECT x.relname, pg_get_indexdef(x.oid)
    FROM pg_index i JOIN pg_class c ON c.oid = i.indrelid JOIN pg_namespace n ON n.oid = c.relnamespace
    JOIN pg_class x ON x.oid = i.indexrelid
    WHERE {_OURS} AND i.indisunique AND NOT EXISTS (SELECT FROM pg_constraint k WHERE k.conindid = x.oid)
    UNION
    SELECT t.tgname, pg_get_triggerdef(t.oid)
    FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE {_OURS} AND NOT t.tgisinternal AND t.tgtype & 2 = 2 -- one that runs after a write refuses nothing
"""


_TABLES = metadata.sorted_tables
_FILLED = text(f"SELECT {', '.join(f'EXISTS (SELECT FROM {table.fullname})' for table in _TABLES)}")


def picture(connection: Connection) -> Picture:
    """Everything in the schema; two databases with equal pictures behave the same."""
    return {part: [tuple(row) for row in connection.execute(text(query))] for part, query in _PARTS.items()}


def refusals(connection: Connection) -> dict[str, str]:
    """Every constraint, unique index and trigger of the schema: its name and its definition."""
    return {row.name: row.definition for row in connection.execute(text(_REFUSALS))}


def contents(db: Database) -> dict[str, list[dict[str, Any]]]:
    """Every row of every table, to show that nothing was written. Tables without a row are not read one by one."""
    with db.engine.connect() as connection:
        filled = connection.execute(_FILLED).one()
        return {table.name: _rows(connection, table) if filled[n] else [] for n, table in enumerate(_TABLES)}


def _rows(connection: Connection, table: Table) -> list[dict[str, Any]]:
    query = text(f"SELECT * FROM {table.fullname} ORDER BY {_key(table)}")
    return [dict(row._mapping) for row in connection.execute(query)]


def _key(table: Table) -> str:
    return ", ".join(column.name for column in table.primary_key)
