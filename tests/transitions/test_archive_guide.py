"""The recipe that empties the archive, run as the guide prints it."""

import csv
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg2  # type: ignore[import-untyped]
from sqlalchemy import text

from pipeline.store.database import Database, Statement
from tests.support.wait import wait_for

#: Rows on both sides of the recipe's limit of a day, one per 100 ms: some pass it while the recipe runs.
_ROWS = text("""
INSERT INTO pipeline.archive (kind, id, content, archived_at)
SELECT 'run', CAST(n AS text), '{}', clock_timestamp() - interval '1 day' + n * interval '100 ms'
FROM generate_series(-50, 600) AS n
""")
_AGED = "SELECT count(*) FROM pipeline.archive WHERE archived_at < clock_timestamp() - interval '1 day'"
_IDS = Statement[Any]("SELECT id FROM pipeline.archive")


def recipe(project: Path) -> list[str]:
    """The statements of the guide, in their order."""
    page = (project / "docs" / "guides" / "retention.md").read_text()
    block = re.search(r"```sql\n(.*?)```", page, re.DOTALL)
    assert block is not None
    return [statement.strip() for statement in block[1].split(";") if statement.strip()]


def aged(cursor: Any) -> int:
    """How many rows are older than a day now."""
    cursor.execute(_AGED)
    return int(cursor.fetchone()[0])


def followed(cursor: Any, statements: list[str]) -> set[str]:
    """Type them one after the other, without haste; the ids that were copied."""
    copied = io.StringIO()
    for statement in statements:
        if statement.startswith("COPY"):
            cursor.copy_expert(statement, copied)
            wait_for(
                lambda: aged(cursor) > copied.getvalue().count("\n")
            )  # while a large archive is copied, time passes
        else:
            cursor.execute(statement)
    copied.seek(0)
    return {row[1] for row in csv.reader(copied)}


@contextmanager
def psql(db: Database) -> Iterator[Any]:
    """A cursor that begins a transaction only where it is told to, as psql does."""
    connection = db.engine.raw_connection()
    assert connection.driver_connection is not None
    try:
        connection.driver_connection.autocommit = True
        yield connection.cursor()
    finally:
        connection.driver_connection.autocommit = False
        connection.close()


def ids(db: Database) -> set[str]:
    with db.transaction() as tx:
        return {row.id for row in tx.all(_IDS)}


def test_the_guides_recipe_deletes_from_the_archive_exactly_what_it_copied(db: Database, project: Path) -> None:
    with db.transaction() as tx:
        tx.execute(_ROWS)
    before = ids(db)
    with psql(db) as cursor:
        copied = followed(cursor, recipe(project))
    assert len(copied) >= 50
    assert before - ids(db) == copied


def test_a_copy_that_fails_keeps_the_guides_recipe_from_deleting(db: Database, project: Path) -> None:
    with db.transaction() as tx:
        tx.execute(_ROWS)
    before = ids(db)
    with psql(db) as cursor:
        for statement in recipe(project):
            with suppress(psycopg2.Error):  # and psql goes on with the next, unless it is told not to
                cursor.execute(statement.replace("COPY (", "COPY (SELECT 1 / 0 FROM ("))
    assert ids(db) == before
