"""Row types describe what the tables and the statements return."""

import pkgutil
from collections.abc import Iterator
from datetime import datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from importlib import import_module
from typing import Annotated, Any, NewType, Protocol, get_args, get_origin
from uuid import UUID

import pytest
from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    CheckConstraint,
    Integer,
    Interval,
    Numeric,
    SmallInteger,
    Table,
    Text,
    TextClause,
    Uuid,
)
from sqlalchemy.dialects.postgresql import JSONB, TIMESTAMP

from pipeline import store
from pipeline.domain.states import RunStatus
from pipeline.store import migrate, rows, schema
from pipeline.store.database import Database
from pipeline.store.statements import Command, Statement
from tests.support import row_types

TABLES: dict[Table, Any] = {
    schema.workflows: rows.WorkflowRow,
    schema.topics: rows.TopicRow,
    schema.handlers: rows.HandlerRow,
    schema.subscriptions: rows.SubscriptionRow,
    schema.events: rows.EventRow,
    schema.deliveries: rows.DeliveryRow,
    schema.sessions: rows.SessionRow,
    schema.runs: rows.RunRow,
    schema.mutations: rows.MutationRow,
    schema.blocks: rows.BlockRow,
    schema.audit: rows.AuditRow,
    schema.breakers: rows.BreakerRow,
}
PYTHON_TYPES: dict[type[Any], object] = {
    Text: str,
    Integer: int,
    BigInteger: int,
    SmallInteger: int,
    Boolean: bool,
    Uuid: UUID,
    TIMESTAMP: datetime,
    Interval: timedelta,
    Numeric: Decimal,
    ARRAY: list,
    JSONB: Any,
    schema.Xid8: str,
    schema.PgSnapshot: str,
}


def enum_of(table: Table, column: str) -> list[str] | None:
    """The values that a column is checked against."""
    for constraint in table.constraints:
        if isinstance(constraint, CheckConstraint) and str(constraint.name).endswith(f"{column}_known"):
            return sorted(
                value.strip().strip("'") for value in str(constraint.sqltext).split("(", 1)[1][:-1].split(",")
            )
    return None


def plain(hint: Any) -> tuple[object, bool, list[str] | None]:
    """The Python type of an annotation, whether None is allowed, and the members of its enum."""
    parts = get_args(hint) if get_origin(hint) not in (Annotated, list) else (hint,)
    is_nullable = type(None) in parts
    (inner,) = [part for part in parts if part is not type(None)] or [hint]
    members = None
    if get_origin(inner) is Annotated:
        inner, enum = get_args(inner)
        assert issubclass(enum, StrEnum)
        members = sorted(enum)
    while isinstance(inner, NewType):
        inner = inner.__supertype__
    return get_origin(inner) or inner, is_nullable, members


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_the_row_type_of_a_table_has_its_columns_types_and_nulls(table: Table) -> None:
    fields = row_types.fields_of(TABLES[table])
    assert list(fields) == [column.name for column in table.columns]
    for column in table.columns:
        kind, is_nullable, members = plain(fields[column.name])
        assert kind == PYTHON_TYPES[type(column.type)], column
        assert kind is Any or is_nullable == column.nullable, column
        assert members == enum_of(table, column.name), column


def statements() -> Iterator[tuple[str, TextClause]]:
    for module in pkgutil.walk_packages(store.__path__, f"{store.__name__}."):
        if module.name == migrate.__name__:
            continue  # its statements run where the schema may not exist yet
        for name, value in vars(import_module(module.name)).items():
            for each in value.values() if isinstance(value, dict) else (value,):
                if isinstance(each, TextClause):
                    yield f"{module.name}.{name}", each


def test_every_statement_of_the_store_names_its_rows_or_has_none() -> None:
    found = dict(statements())
    assert len(found) > 100
    assert [name for name, each in found.items() if not isinstance(each, Statement | Command)] == []
    typed = {name: each.row_type() for name, each in found.items() if isinstance(each, Statement)}
    assert [name for name, row_type in typed.items() if row_type is Any] == []


class _Wrong(Protocol):
    id: int
    name: str


class _Status(Protocol):
    status: Annotated[str, RunStatus]


def test_a_statement_that_lacks_a_column_of_its_row_type_fails_in_the_test_that_runs_it(db: Database) -> None:
    with pytest.raises(row_types.RowTypeError, match="name"), db.transaction() as tx:
        tx.all(Statement[_Wrong]("SELECT 1 AS id WHERE false"))


@pytest.mark.parametrize("value", ["NULL", "1.5", "'a'", "true"])
def test_a_value_of_another_type_fails_in_the_test_that_runs_the_statement(db: Database, value: str) -> None:
    with pytest.raises(row_types.RowTypeError, match="id is"), db.transaction() as tx:
        tx.first(Statement[_Wrong](f"SELECT {value} AS id, 'a' AS name"))


def test_a_status_that_is_no_member_of_its_enum_fails_in_the_test_that_reads_it(db: Database) -> None:
    with db.transaction() as tx:
        assert tx.one(Statement[_Status]("SELECT 'active' AS status")).status == RunStatus.ACTIVE
    with pytest.raises(row_types.RowTypeError, match="status is 'gone'"), db.transaction() as tx:
        tx.all(Statement[_Status]("SELECT 'gone' AS status"))
