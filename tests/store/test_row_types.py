"""Row types describe what the statements return."""

import pkgutil
from collections.abc import Iterator
from importlib import import_module
from typing import Annotated, Any, Protocol

import pytest
from sqlalchemy import TextClause

from pipeline import store
from pipeline.domain.states import RunStatus
from pipeline.store import migrate
from pipeline.store.database import Command, Database, Statement
from tests.support import row_types


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
