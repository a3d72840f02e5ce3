"""Publishing in a caller's own transaction: right in READ COMMITTED, refused in anything stricter."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from pipeline import InvalidInputError
from pipeline.client import publish
from pipeline.store.database import Database
from tests.client.test_publishing import by_connection, by_psycopg2, by_session
from tests.factories import IN, a_workflow
from tests.support.table_reads import one

Opened = Callable[[str], AbstractContextManager[Any]]
FACT = {"topic": IN, "message_id": "order:1", "payload": {"n": 1}}
WAYS = pytest.mark.parametrize("opened", [by_connection, by_session, by_psycopg2])


def run_sql(connection: Any, sql: str) -> None:
    """Run a statement on a connection of any kind, as its caller would."""
    if hasattr(connection, "cursor"):
        with connection.cursor() as cursor:
            cursor.execute(sql)
    else:
        connection.execute(text(sql))


def url_of(db: Database) -> str:
    return db.engine.url.render_as_string(hide_password=False)


@WAYS
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("replace", [False, True])
def test_a_stricter_transaction_is_refused_and_publishes_nothing(
    db: Database, opened: Opened, level: str, replace: bool
) -> None:
    a_workflow(db)
    with opened(url_of(db)) as connection:
        run_sql(connection, f"SET TRANSACTION ISOLATION LEVEL {level}")
        run_sql(connection, "SELECT count(*) FROM pipeline.events")
        a_workflow(db, consumers=("send", "audit"))
        with pytest.raises(InvalidInputError, match=f"{level}.*READ COMMITTED.*Nothing was published"):
            publish(connection, "billing", [FACT], replace=replace)
        connection.commit()
    assert one(db, "SELECT count(*) AS number FROM pipeline.events").number == 0


@WAYS
@pytest.mark.parametrize("level", ["READ COMMITTED", "READ UNCOMMITTED"])
def test_a_consumer_that_registered_during_the_transaction_gets_the_event(
    db: Database, opened: Opened, level: str
) -> None:
    a_workflow(db)
    with opened(url_of(db)) as connection:
        run_sql(connection, f"SET TRANSACTION ISOLATION LEVEL {level}")
        run_sql(connection, "SELECT count(*) FROM pipeline.events")
        a_workflow(db, consumers=("send", "audit"))
        assert publish(connection, "billing", [FACT]).new == ("order:1",)
        connection.commit()
    assert one(db, "SELECT count(*) AS number FROM pipeline.deliveries").number == 2


def test_an_autobegun_session_of_a_strict_engine_is_refused(db: Database) -> None:
    a_workflow(db)
    strict = db.engine.execution_options(isolation_level="REPEATABLE READ")
    with Session(strict) as session, pytest.raises(InvalidInputError, match="REPEATABLE READ"):
        publish(session, "billing", [FACT])
