"""The order service publishes if and only if it commits."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from examples import order_service, receipts
from pipeline.client import database_url_of
from pipeline.testing import Inline, scripted


@pytest.fixture
def run(pipeline_run: Callable[..., Inline]) -> Inline:
    """The workflow that consumes paid orders."""
    return pipeline_run(receipts.receipts, connectors=[scripted("mail")])


@pytest.fixture
def database_url(run: Inline) -> str:
    """The URL of its database, as settings and guides print it."""
    return run.db.engine.url.set(drivername="postgresql").render_as_string(hide_password=False)


def messages(run: Inline) -> list[str]:
    return [event.message_id for event in run.events(receipts.paid)]


def test_an_order_and_its_event_are_written_together_or_not_at_all(run: Inline, database_url: str) -> None:
    engine = create_engine(database_url_of(database_url))
    try:
        with engine.connect() as connection:
            connection.execute(text(order_service.TABLES))
            connection.commit()
            assert order_service.pay(connection, "1", "a@example.org")
            connection.rollback()
            assert messages(run) == []
            assert order_service.pay(connection, "1", "a@example.org")
            connection.commit()
        assert messages(run) == ["order:1"]
    finally:
        with engine.begin() as connection:
            connection.execute(text("DROP TABLE orders"))
        engine.dispose()


def test_the_program_pays_once(run: Inline, database_url: str) -> None:
    command = [sys.executable, "-m", "examples.order_service", database_url, "pay", "4711", "a@example.org"]
    try:
        outputs = [
            subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent).stdout
            for _ in range(2)
        ]
        assert outputs == ["paid\n", "was paid before\n"]
        assert messages(run) == ["order:4711"]
        run.run()
    finally:
        engine = create_engine(database_url_of(database_url))
        with engine.begin() as connection:
            connection.execute(text("DROP TABLE IF EXISTS orders"))
        engine.dispose()


@pytest.mark.parametrize(
    "arguments", [(), ("postgresql://h/n", "refund", "4714", "a"), ("postgresql://h/n", "pay", "1")]
)
def test_wrong_arguments_print_the_usage(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert order_service.main(arguments) == 2
    assert capsys.readouterr().err.startswith("usage: ")
