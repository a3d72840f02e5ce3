"""Wiring only: one pair of servers for the whole run, one database per test process, invariants after each test."""

import gc
import logging
import os
from collections.abc import Generator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from sqlalchemy import event

from pipeline.embedded import servers
from pipeline.store.database import Database
from tests.support import databases, row_types, run_order

#: Whoever waits for a lock that a test holds goes on waiting while the machine stands still.
PATIENT = timedelta(minutes=1)

#: One example that is slow on a busy machine says nothing about the code.
hypothesis.settings.register_profile("patient", deadline=None)
#: For hours: `make fuzz`. Whatever it finds is kept in .hypothesis and tried first in the next run.
hypothesis.settings.register_profile("fuzz", deadline=None, max_examples=1_000_000)
hypothesis.settings.load_profile("patient")


def _stop_measuring_children() -> None:
    """Measure the test processes alone: tracing would slow the programs that they start."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ.pop("COVERAGE_PROCESS_CONFIG", None)


_stop_measuring_children()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark a test that needs a server, so that `make test-fast` leaves it out."""
    if "embedded" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.server)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the longest files and the slow folders first; within each the order stays as it was drawn."""
    items.sort(key=lambda item: run_order.rank(item.path))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave what the collection makes out of garbage collection: it lives until the end.

    Searching it for garbage costs a third of the collection's time, and some of each test's.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _checked_row_types() -> Iterator[None]:
    """Every row that a typed statement returns is what its type says."""
    with row_types.checked():
        yield


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Servers]:
    """A real Postgres and a real Redis, shared by all processes of this test run and gone after it."""
    base = tmp_path_factory.getbasetemp()
    home = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "servers"
    with servers.running(home) as urls:
        if not os.environ.get("PIPELINE_DATABASE_URL"):
            databases.make_logins_cheap(urls.database_url)
        yield urls


@pytest.fixture(scope="session")
def database_url(embedded: servers.Servers, worker_id: str) -> Iterator[str]:
    """A migrated database of this process's own, cloned from a template."""
    with databases.clone_database(embedded.database_url, f"test_{worker_id}_{os.getpid()}") as url:
        yield url


@pytest.fixture(scope="session")
def _pool(database_url: str) -> Iterator[Database]:
    database = Database.connect(database_url, pool_size=8, lock_timeout=PATIENT)
    event.listen(database.engine, "connect", _commit_in_memory)
    database.engine.pool._pre_ping = False  # this Postgres is not restarted; every fifth round trip was a ping
    yield database
    database.dispose()


def _commit_in_memory(connection: Any, _: object) -> None:
    """Let no commit wait for the disk: this Postgres is not killed, those that are belong to their tests."""
    with connection.cursor() as cursor:
        cursor.execute("SET synchronous_commit = off")
    connection.commit()


@pytest.fixture
def db(_pool: Database, request: pytest.FixtureRequest) -> Iterator[Database]:
    """An empty database. After the test every invariant must hold, unless the test broke one on purpose."""
    database = Database(_pool.engine)
    yield database
    try:
        if not request.node.get_closest_marker("broken_on_purpose"):
            with database.transaction() as tx:
                assert databases.invariant_findings(tx) == []
    finally:
        databases.delete_all_rows(database)


@pytest.fixture(autouse=True)
def _unchanged_logging() -> Iterator[None]:
    """Put levels and handlers back: a Celery worker in the test's process sets them for all that comes later."""
    loggers = [logging.getLogger(name) for name in (None, "pipeline", "celery")]
    before = [(each.level, each.propagate, each.disabled, [*each.handlers]) for each in loggers]
    yield
    for each, (level, propagate, disabled, handlers) in zip(loggers, before, strict=True):
        each.setLevel(level)
        each.propagate, each.disabled, each.handlers = propagate, disabled, handlers


@pytest.fixture
def project() -> Path:
    """The checkout."""
    return Path(__file__).parent.parent
