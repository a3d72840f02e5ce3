"""A clock that was set back, a database in another zone, and workers that start when the database cannot be used."""

import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import text

from pipeline import Workflow
from pipeline.background.sweeps import PERIODS
from pipeline.config import EXIT_RESTART
from pipeline.embedded import servers
from pipeline.store.database import Database, Statement
from pipeline.store.reads import gauges, invariants, work
from pipeline.tasks import process, signals
from pipeline.testing import Inline
from pipeline.transitions import housekeeping
from tests.support import databases
from tests.support.scripted_consumers import Shop


@pytest.fixture
def own(embedded: servers.Servers) -> Iterator[Database]:
    """A database whose own settings a test may change."""
    with databases.clone_database(embedded.database_url, f"own_{os.getpid()}") as url:
        yield Database.connect_unpooled(url)


def next_slot(db: Database) -> datetime:
    """When the only producer runs next."""
    with db.transaction() as tx:
        row = tx.first(Statement[Any]("SELECT next_run_at FROM pipeline.handlers"))
    assert row is not None
    return row.next_run_at  # type: ignore[no-any-return]


def changed(db: Database, setting: str) -> None:
    with db.engine.begin() as connection:
        connection.execute(text(f'ALTER DATABASE "{db.engine.url.database}" SET {setting}'))


def test_sweeps_continue_at_once_when_the_clock_of_postgres_is_set_back(db: Database) -> None:
    run = Shop().inline(db)
    run.sweeps.periods = dict.fromkeys(PERIODS, timedelta(minutes=10))
    run.advance(timedelta(hours=1))
    for name in PERIODS:
        assert run.sweeps.run(name) is not None
    db.clock_offset = timedelta(0)
    with db.transaction() as tx:
        assert work.overdue_sweeps(tx, PERIODS) == [*PERIODS]
        assert all(row.age > 3000 for row in gauges.sweeps(tx))
        assert {finding.invariant for finding in invariants.findings(tx)} == {"sweeps-ran-in-the-past"}
    assert [name for name in PERIODS if run.sweeps.run(name) is None] == []
    assert [name for name in PERIODS if run.sweeps.run(name) is not None] == []


@pytest.mark.parametrize("schedule", [{"every": timedelta(hours=1)}, {"cron": "0 * * * *"}], ids=["every", "cron"])
def test_a_producer_runs_once_for_a_slot_though_its_claim_began_before_it(
    db: Database, schedule: dict[str, Any]
) -> None:
    workflow, seen = Workflow("feed"), list[datetime]()
    workflow.producer(publishes=[workflow.topic("news")], **schedule)(lambda ctx, state: seen.append(ctx.now))
    run = Inline(db, [workflow])
    run.run()
    slot = next_slot(db)
    run.advance(slot - run.now() + timedelta(minutes=20))
    run.scheduler.schedule(["feed"])
    db.clock_offset -= timedelta(minutes=40)
    run.deliver(run.messages.popleft())
    assert seen[-1] > slot
    assert next_slot(db) == slot + timedelta(hours=1)


def test_a_slot_that_a_slightly_younger_transaction_took_is_not_taken_again(db: Database) -> None:
    every = timedelta(minutes=1)
    db.advance_clock(timedelta(seconds=1))
    with db.transaction() as tx:
        assert housekeeping.take_slot(tx, "tick", every)
    db.clock_offset = timedelta(0)
    with db.transaction() as tx:
        assert not housekeeping.take_slot(tx, "tick", every)


def test_cron_is_in_utc_whatever_the_zone_of_the_database(own: Database) -> None:
    changed(own, "timezone = 'America/New_York'")
    workflow = Workflow("shop")
    out = workflow.topic("out")
    workflow.producer(cron="30 6 * * *", publishes=[out])(lambda ctx, state: None)
    run = Inline(own, [workflow])
    for _ in range(2):
        assert next_slot(own).astimezone(UTC).strftime("%H:%M") == "06:30"
        run.advance(timedelta(days=1))
        run.run()
    assert [each.status for each in run.runs()] == ["committed", "committed"]


def test_a_worker_ends_with_the_restart_code_when_the_database_is_read_only(
    own: Database, embedded: servers.Servers, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changed(own, "default_transaction_read_only = on")
    for name, value in {
        "PIPELINE_DATABASE_URL": own.engine.url.render_as_string(hide_password=False),
        "PIPELINE_BROKER_URL": embedded.broker_url,
        "PIPELINE_WORKFLOWS": "tests.support.load_workflow",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(process, "_processes", {})
    with pytest.raises(SystemExit) as ended:
        signals.check_startup(SimpleNamespace(pool_cls=SimpleNamespace))
    assert ended.value.code == EXIT_RESTART
    assert "this database is read-only" in capsys.readouterr().err
