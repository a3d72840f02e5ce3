"""Run statements in the open transaction of the caller's psycopg2 connection.

SQLAlchemy only compiles the statement here. The caller's connection runs it, and the caller commits.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from psycopg2 import extensions  # type: ignore[import-untyped]
from sqlalchemy import TextClause
from sqlalchemy.dialects.postgresql import psycopg2

from pipeline.store.database import Transaction

_DIALECT = psycopg2.dialect()  # type: ignore[no-untyped-call]


class Psycopg2Transaction(Transaction):
    """A transaction over a connection of psycopg2."""

    def __init__(self, raw: Any) -> None:
        super().__init__(raw)
        self._psycopg2_connection = raw

    def all(self, statement: TextClause, /, **params: Any) -> Sequence[Any]:
        """Every row the statement returns."""
        with self._cursor() as cursor:
            self._execute(cursor, statement, params)
            names = [column.name for column in cursor.description or ()]
            return [SimpleNamespace(**dict(zip(names, values, strict=True))) for values in cursor.fetchall()]

    def first(self, statement: TextClause, /, **params: Any) -> Any:
        """The first row, or None."""
        return next(iter(self.all(statement, **params)), None)

    def execute(self, statement: TextClause, /, **params: Any) -> int:
        """Run a statement that returns nothing and say how many rows it touched."""
        with self._cursor() as cursor:
            self._execute(cursor, statement, params)
            touched: int = cursor.rowcount
            return touched

    def _cursor(self) -> Any:
        """Open a cursor with plain rows, whatever the caller's connection returns by default."""
        return self._psycopg2_connection.cursor(cursor_factory=extensions.cursor)

    def _execute(self, cursor: Any, statement: TextClause, params: dict[str, Any]) -> None:
        cursor.execute(str(statement.compile(dialect=_DIALECT)), params)
