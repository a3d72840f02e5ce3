"""Rows that a benchmark makes and removes in a database of its own, beside the transitions."""

from typing import Any

from pipeline.store.schema import metadata

_TABLES = ", ".join(str(table) for table in metadata.sorted_tables)


def clear(cursor: Any) -> None:
    """Remove every row. The database was empty when the benchmark began."""
    cursor.execute(f"TRUNCATE {_TABLES} CASCADE")
