"""When a worker counts as deaf: idle for too long although messages wait for it."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from pipeline.domain.states import Phase
from pipeline.store.database import Database
from pipeline.tasks.watchdog import StallDetector
from pipeline.testing import Inline
from pipeline.transitions import workflows
from tests.factories import LEASE, SOMEBODY, a_run, a_workflow, event_status, some_events, stopped, the_run
from tests.support.rule import rule


@pytest.fixture
def stall() -> StallDetector:
    """A worker that has taken seven messages, and ten seconds of patience."""
    found = StallDetector(timedelta(seconds=10))
    assert not found.observe(taken=7, is_busy=False, has_waiting=False, now=0.0)
    return found


def is_stalled(stall: StallDetector, now: float, *, taken: int = 7, busy: bool = False, waiting: bool = True) -> bool:
    return stall.observe(taken=taken, is_busy=busy, has_waiting=waiting, now=now)


def test_idle_while_messages_wait_is_borne_for_a_while_and_not_longer(stall: StallDetector) -> None:
    assert [is_stalled(stall, now) for now in (5.0, 10.0, 14.9, 15.0, 20.0)] == [False, False, False, True, True]


@pytest.mark.parametrize(
    "sign",
    [{"taken": 8}, {"busy": True}, {"waiting": False}],
    ids=["took a message", "has work", "nothing waits"],
)
def test_any_progress_restarts_the_stall_timeout(stall: StallDetector, sign: dict[str, Any]) -> None:
    assert not is_stalled(stall, 5.0)
    assert not is_stalled(stall, 14.0, **sign)
    assert not is_stalled(stall, 16.0, taken=sign.get("taken", 7))
    assert not is_stalled(stall, 25.0, taken=sign.get("taken", 7))
    assert is_stalled(stall, 26.0, taken=sign.get("taken", 7))


def test_the_first_check_of_a_worker_that_has_just_started_detects_nothing() -> None:
    stall = StallDetector(timedelta(0))
    assert not is_stalled(stall, 0.0, taken=0)
    assert is_stalled(stall, 1.0, taken=0)


@pytest.mark.broken_on_purpose
@rule("X-B3")
def test_a_worker_that_starts_recovers_runs_and_reports_orphans_without_releasing_them(
    db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    a_workflow(db, concurrency=2)
    orphan, held = some_events(db, "m1", "m2")
    run = stopped(db, a_run(db, Phase.EMITTING))
    with db.transaction() as tx:
        tx.execute(text("UPDATE pipeline.runs SET retry_pending = false WHERE id = :id"), id=run.id)
        workflows.exit_maintenance(tx, "billing", SOMEBODY)
    crashed = a_run(db, Phase.PREPARED)
    db.advance_clock(LEASE)
    Inline(db, []).sweeps.recover_at_start()
    assert (event_status(db, orphan), event_status(db, held)) == ("reserved", "pending")
    assert the_run(db, crashed.id).status == "crashed"
    (line,) = [record.message for record in caplog.records if "reserved by run" in record.message]
    assert f"event {orphan}" in line
    assert str(run.id) in line
