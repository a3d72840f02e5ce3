"""Heartbeats cost little, wait for nothing, and say when they are late."""

from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from pipeline.config import Settings
from pipeline.domain.states import Phase
from pipeline.store.database import Database
from pipeline.tasks.process import WorkerProcess
from pipeline.worker.leases import Leases
from tests.factories import LEASE, a_run, a_workflow, held, some_events, the_run
from tests.support.statement_events import Listener, observed
from tests.support.table_reads import one


@pytest.fixture
def process(database_url: str) -> Iterator[WorkerProcess]:
    """The objects of a worker process with a pool of one connection, and one above it."""
    made = WorkerProcess(settings=Settings(database_url=database_url, pool_size=1), pid=0)
    yield made
    made.db.dispose()
    made.leases.db.dispose()


def two_runs(db: Database) -> tuple[Any, Any]:
    a_workflow(db, concurrency=2)
    some_events(db, "m1", "m2")
    return a_run(db, Phase.PREPARING), a_run(db, Phase.PREPARING)


def holding(db: Database, *runs: Any) -> Leases:
    leases = Leases(db, lease=LEASE, every=timedelta(hours=1))
    leases.hold([held(run) for run in runs])
    return leases


def version(db: Database, run: Any) -> Any:
    return one(db, "SELECT xmin FROM pipeline.runs WHERE id = :id", id=run.id).xmin


def test_a_lease_that_was_just_written_is_not_written_again(db: Database) -> None:
    run, _ = two_runs(db)
    leases, before = holding(db, run), version(db, run)
    assert leases.heartbeat()
    assert version(db, run) == before
    assert leases.is_held(held(run))
    db.advance_clock(LEASE / 4)
    assert leases.heartbeat()
    assert the_run(db, run.id).lease_expires_at > run.lease_expires_at
    leases.hand_back_all()


def test_a_run_that_another_transaction_holds_delays_no_heartbeat_and_is_not_lost(db: Database) -> None:
    locked, free = two_runs(db)
    leases = holding(db, locked, free)
    db.advance_clock(LEASE / 4)
    with db.transaction() as tx:
        tx.execute(text("SELECT 1 FROM pipeline.runs WHERE id = :id FOR UPDATE"), id=locked.id)
        assert leases.heartbeat()
    assert the_run(db, free.id).lease_expires_at > free.lease_expires_at
    assert leases.is_held(held(locked))
    assert not leases.is_lost(held(locked))
    leases.hand_back_all()


def test_a_pool_that_is_used_up_delays_no_heartbeat(db: Database, process: WorkerProcess) -> None:
    run, _ = two_runs(db)
    process.leases.hold([held(run)])
    with ExitStack() as taken:
        for _ in range(2):
            taken.enter_context(process.db.transaction())
        assert process.leases.heartbeat()
    assert process.leases.is_held(held(run))
    process.leases.hand_back_all()


def test_the_connection_of_heartbeats_notices_a_vanished_server_within_a_lease(process: WorkerProcess) -> None:
    with process.leases.db.engine.connect() as connection:
        found = connection.connection.driver_connection.info.dsn_parameters  # type: ignore[union-attr]
    assert (found["connect_timeout"], found["tcp_user_timeout"]) == ("2", "4000")


def test_a_heartbeat_later_than_a_lease_lasts_is_logged(db: Database, caplog: pytest.LogCaptureFixture) -> None:
    run, _ = two_runs(db)
    leases = holding(db, run)
    leases.heartbeat()
    assert "later than they lasted" not in caplog.text
    leases._extended_at -= 2 * LEASE.total_seconds()
    leases.heartbeat()
    assert "the leases of 1 runs were extended" in caplog.text
    assert "0 of them were taken from this process" in caplog.text
    leases.hand_back_all()


def test_a_heartbeat_that_fails_in_any_way_is_tried_again(db: Database) -> None:
    run, _ = two_runs(db)
    leases = holding(db, run)

    def fail(*_: object) -> None:
        raise ValueError("filedescriptor out of range in select()")

    with observed(db, Listener(before=fail)):
        assert not leases.heartbeat()
    assert leases.heartbeat()
    assert leases.is_held(held(run))
    leases.hand_back_all()
