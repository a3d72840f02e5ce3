"""An answer that a worker has in its hands is written down, however the database refuses it for a while."""

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from pipeline.store.connections import PooledConnection
from pipeline.store.database import Database
from pipeline.testing import assert_consumed, scripted
from tests.support.scripted_consumers import Shop
from tests.support.statement_events import Listener, observed


@pytest.fixture
def narrow(database_url: str) -> Iterator[Database]:
    """A pool with one connection and a short wait for it."""
    engine = create_engine(database_url, pool_size=1, max_overflow=0, pool_timeout=0.1)
    yield Database(engine)
    engine.dispose()


def order_during_database_trouble(db: Database, meanwhile: Callable[[], None]) -> None:
    """One order whose mail is sent, while something happens to the database just then."""
    shop = Shop(on_uncertain="contain", concurrency=2)

    def answer(effect: Any) -> Any:
        meanwhile()
        return {"id": effect.key}

    shop.mail = scripted("mail", can_reconcile=False, make_result=answer, timeout=timedelta(seconds=30))
    run = shop.started(db)
    run.run()
    assert [row.status for row in run.ledger()] == ["applied"]
    assert_consumed(run, shop.orders)
    run.sweeps.sessions()


def test_a_result_is_kept_while_the_database_is_read_only(db: Database, narrow: Database) -> None:
    until = threading.Event()
    until.set()

    def begin(connection: PooledConnection) -> None:
        if not until.is_set():
            connection.run(text("SET TRANSACTION READ ONLY"), {})

    def turn() -> None:
        until.clear()
        threading.Timer(0.5, until.set).start()

    with observed(narrow, Listener(opened=begin)):
        order_during_database_trouble(narrow, turn)


def test_a_result_is_kept_while_every_connection_is_taken(db: Database, narrow: Database) -> None:
    taken = threading.Event()

    def hold() -> None:
        with narrow.engine.connect():
            taken.set()
            threading.Event().wait(0.5)

    def take() -> None:
        threading.Thread(target=hold).start()
        taken.wait(25)

    order_during_database_trouble(narrow, take)
