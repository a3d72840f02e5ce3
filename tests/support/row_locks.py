"""Which rows a statement locks explicitly, read from its SQL."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

from pipeline.domain.lock_order import LOCK_ORDER
from pipeline.store.database import Database
from tests.support.statement_events import Listener, observed

_LOCK = re.compile(r"\bFOR\s+(?:NO\s+KEY\s+)?UPDATE\b(?:\s+OF\s+(\w+(?:\s*,\s*\w+)*))?")
_TABLE = re.compile(r"\bpipeline\.(\w+)(?:\s+(?:AS\s+)?(?!WHERE|JOIN|LEFT|ORDER|FOR|ON|SET)(\w+))?")


def locked_tables(sql: str) -> list[str]:
    """Tables of the order whose rows a statement locks with FOR UPDATE, as its text names them."""
    found = []
    for lock in _LOCK.finditer(sql):
        named = (match.groups() for match in _TABLE.finditer(_same_level(sql[: lock.start()])))
        tables = [(table, alias) for table, alias in named if table in LOCK_ORDER]
        names = {alias or table: table for table, alias in tables}
        found += [names[name.strip()] for name in lock[1].split(",")] if lock[1] else [table for table, _ in tables]
    return found


def _same_level(before: str) -> str:
    """The text of the SELECT that ends here, without what stands in brackets."""
    depth, kept = 0, []
    for char in reversed(before):
        depth += (char == ")") - (char == "(")
        if depth < 0:
            break
        if depth == 0:
            kept.append(char)
    return "".join(reversed(kept))


@contextmanager
def recorded_locks(db: Database) -> Iterator[list[list[str]]]:
    """For each transaction, the tables it locks explicitly, in order."""

    def note(_: Any, statement: str, tables: list[str]) -> None:
        tables += locked_tables(statement)

    with recorded_transactions(db, "before", note) as transactions:
        yield transactions


@contextmanager
def recorded_transactions(
    db: Database, moment: Literal["before", "after"], note: Callable[[Any, str, list[str]], None]
) -> Iterator[list[list[str]]]:
    """For each transaction, a list to which ``note`` adds before or after each of its statements."""
    transactions: list[list[str]] = []
    current: dict[Any, list[str]] = {}

    def opened(connection: Any) -> None:
        transactions.append(current.setdefault(connection, []))

    def execute(connection: Any, statement: str) -> None:
        if connection in current:
            note(connection, statement, current[connection])

    def closed(connection: Any) -> None:
        current.pop(connection, None)

    listener = Listener(opened=opened, closed=closed)
    with observed(db, replace(listener, before=execute) if moment == "before" else replace(listener, after=execute)):
        yield transactions
