"""The modules that only read: every statement of theirs runs in a read-only transaction."""

from collections.abc import Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import InternalError

from pipeline.domain.states import Phase
from pipeline.store.database import Database, Statement
from pipeline.store.reads import invariants, work
from pipeline.store.writes import mutations as mutation_store
from tests import factories

READ_ONLY = text("SET TRANSACTION READ ONLY")
#: Parameters whose type cannot be told from nothing.
VALUES: dict[str, Any] = {
    "redispatch_after": timedelta(seconds=1),
    "patience": timedelta(seconds=1),
    "limit": 10,
    "recent": 10,
}


def statements(module: ModuleType) -> Iterator[tuple[str, Statement[Any]]]:
    for name, value in vars(module).items():
        if isinstance(value, Statement):
            yield name, value


READS = [
    *statements(work),
    *((invariant.name, invariant.query) for invariant in invariants.INVARIANTS),
]


def run_read(db: Database, statement: Statement[Any]) -> None:
    wanted = {name: VALUES.get(name) for name in statement.compile().params}
    with db.transaction() as tx:
        tx.execute(READ_ONLY)
        tx.all(statement, **wanted)


@pytest.mark.parametrize(("name", "statement"), READS, ids=[name for name, _ in READS])
def test_a_read_writes_nothing_and_locks_nothing(db: Database, name: str, statement: Statement[Any]) -> None:
    factories.a_workflow(db)
    factories.some_events(db, "m-1")
    factories.a_run(db, Phase.MUTATING)
    run_read(db, statement)


def test_a_write_among_the_reads_would_be_refused(db: Database) -> None:
    for sql in ("DELETE FROM pipeline.runs", "SELECT FROM pipeline.workflows FOR UPDATE"):
        with pytest.raises(InternalError, match="read-only transaction"):
            run_read(db, Statement[Any](sql))


def test_the_search_finds_the_statements_of_a_module() -> None:
    assert {name for name, _ in statements(mutation_store)} >= {"BEGIN", "APPLY", "FAIL"}
