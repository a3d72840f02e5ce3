"""A machine that was suspended between ledger and call sends nothing for a run that was resolved without it."""

import time
from datetime import timedelta

import pytest

from pipeline import ReconcilePolicy
from pipeline.store.database import Database
from pipeline.testing import Does, Inline, assert_consumed, scripted
from pipeline.worker import calls
from pipeline.worker.crash_points import CrashPoint
from tests.support.scripted_consumers import Shop

HOUR = timedelta(hours=1)


def suspended(db: Database, monkeypatch: pytest.MonkeyPatch, *done: Does) -> tuple[Shop, Inline]:
    """One order whose machine sleeps for an hour before its last call leaves; another machine goes on meanwhile."""
    shop = Shop(on_uncertain="contain", concurrency=2)
    shop.mail = scripted("mail", timeout=timedelta(seconds=20), policy=ReconcilePolicy(max_attempts=3))
    shop.mail.will(*done)
    run = shop.started(db)
    left = [len(done)]

    def sleep(point: CrashPoint) -> None:
        if point is not CrashPoint.IN_FLIGHT:
            return
        left[0] -= 1
        if left[0] == -1:
            asleep = calls.suspended_seconds() + HOUR.total_seconds()
            monkeypatch.setattr(calls, "suspended_seconds", lambda: asleep)
            other = Inline(Database(db.engine), [shop.workflow], [shop.mail])
            other.advance(HOUR)
            other.sweeps.rescue()
            other.advance(timedelta(minutes=5))
            other.sweeps.reconcile()
            other.advance(timedelta(minutes=5))
            other.sweeps.tick()
            other.run()
            run.advance(other.db.clock_offset)

    with run.on_crash_points(sleep):
        run.run()
    run.run_until_idle()
    return shop, run


def test_work_of_another_machine_during_a_suspension_is_not_done_again(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop, run = suspended(db, monkeypatch)
    assert len(shop.mail.effects) == 1
    assert [row.found_late_at for row in run.ledger() if row.found_late_at] == []
    assert_consumed(run, shop.orders)


def test_another_attempt_is_not_sent_by_a_machine_that_was_suspended_either(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop, run = suspended(db, monkeypatch, Does.FAILS)
    assert len(shop.mail.effects) == 1
    assert_consumed(run, shop.orders)


def test_a_platform_without_a_suspend_clock_was_never_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(time, "CLOCK_BOOTTIME", raising=False)
    assert calls.suspended_seconds() == 0.0


def test_the_suspended_time_of_a_running_machine_does_not_grow() -> None:
    before = calls.suspended_seconds()
    assert abs(calls.suspended_seconds() - before) < 30.0
