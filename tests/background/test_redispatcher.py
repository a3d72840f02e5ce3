"""Runs without a holder are redispatched in turn; the doctor tells waiting runs from forgotten ones."""

from collections import Counter
from datetime import timedelta

import pytest

from pipeline import Workflow
from pipeline.domain.states import MutationId
from pipeline.store.database import Database
from pipeline.store.reads import invariants
from pipeline.testing import Does, Inline, scripted
from pipeline.testing.inline import TESTER
from pipeline.transitions import breakers, resolution, workflows
from pipeline.worker.crash_points import CrashPoint
from tests.support.scripted_consumers import Shop, statuses

MINUTE = timedelta(minutes=1)


def overdue(run: Inline) -> dict[str, str]:
    with run.db.transaction() as tx:
        return {found.invariant: f"{found.subject}: {found.detail}" for found in invariants.findings(tx)}


@pytest.mark.broken_on_purpose
def test_many_unclaimed_runs_delay_no_other_workflow(db: Database) -> None:
    other = Workflow("other", concurrency=200)
    crowd = other.topic("crowd")
    other.effect(crowd, name="gone")(lambda ctx, event: None)
    away = Inline(db, [other])
    away.publish(crowd, *({"n": n} for n in range(150)))
    away.scheduler.schedule(["other"])
    shop = Shop()
    run = shop.started(db)
    run.scheduler.schedule(["shop"])
    run.messages.clear()  # all of them are lost
    run.advance(timedelta(seconds=61))
    run.sweeps.tick()
    run.run()
    assert statuses(run, shop.orders) == ["consumed"]


@pytest.mark.broken_on_purpose
def test_the_run_that_waited_longest_is_redispatched_first(db: Database) -> None:
    shop = Shop(concurrency=200)
    run = shop.started(db, 150)
    run.scheduler.schedule(["shop"])
    rung: Counter[str] = Counter()
    for _ in range(2):
        run.messages.clear()
        run.advance(timedelta(seconds=61))
        run.sweeps.tick()
        rung.update(id_ for message in run.messages for id_ in message.run_ids)
    assert len(rung) == 150
    run.run()


def test_a_run_whose_workflow_was_given_up_by_its_workers_is_taken_back(db: Database) -> None:
    old = Workflow("before", concurrency=4)
    mails = old.topic("mails")
    old.effect(mails, name="send")(lambda ctx, event: None)
    Inline(db, [old]).publish(mails, *({"n": n} for n in range(6)))
    new = Workflow("after")
    new.effect(new.topic("mails"), name="send")(lambda ctx, event: None)
    run = Inline(db, [new])
    for _ in range(30):
        run.advance(MINUTE)
        run.sweeps.tick()
        run.run()
    assert sum(row.finished_at is None for row in run.runs()) <= 1
    assert "handler send of before" in overdue(run)["handlers-are-claimed"]
    with db.transaction() as tx:
        workflows.pause(tx, "before", TESTER)
    assert not overdue(run), "whoever paused it knows"
    with db.transaction() as tx:
        workflows.resume(tx, "before", TESTER)
    back = Inline(db, [old])
    back.run()
    assert statuses(back, mails) == ["consumed"] * 6


def test_a_run_whose_process_died_is_redispatched_alone(db: Database) -> None:
    shop = Shop(concurrency=50, on_uncertain="contain", on_logic_error="quarantine")
    run = shop.started(db, 10)
    with run.crash_at(CrashPoint.PREPARE_CLAIMED):
        run.run()
    run.advance(timedelta(minutes=5))
    run.sweeps.rescue()
    run.messages.clear()
    run.advance(timedelta(minutes=5))
    run.sweeps.tick()
    assert [len(message.run_ids) for message in run.messages] == [1] * 10
    run.run()
    assert statuses(run, shop.orders) == ["consumed"] * 10


@pytest.mark.broken_on_purpose
def test_a_queue_without_workers_is_overdue_however_often_it_is_redispatched(db: Database) -> None:
    shop = Shop()
    run = shop.started(db)
    run.broker = lambda message: () if message.task == "pipeline.mutate" else (message,)
    run.run()
    assert not overdue(run)
    for _ in range(15):
        run.advance(MINUTE)
        run.sweeps.tick()
        run.run()
    assert "prepared for Send of shop" in overdue(run)["active-runs-are-held"]
    with db.transaction() as tx:
        workflows.pause(tx, "shop", TESTER)
    assert not overdue(run)


def test_a_run_that_waits_while_its_handler_is_busy_is_not_overdue(db: Database) -> None:
    shop = Shop(concurrency=2)
    run = shop.started(db, 2)
    run.broker = lambda message: () if message.task == "pipeline.mutate" else (message,)
    run.run()
    run.broker = lambda message: (message,)
    run.advance(timedelta(minutes=20))
    seen = []
    first = [row.id for row in run.runs()][:1]
    with run.on_crash_points(lambda point: seen.append(overdue(run)) if point is CrashPoint.MUTATE_CLAIMED else None):
        run.runner.mutate(first, lambda _: None)
    assert seen == [{}]
    run.run_until_idle()


def test_runs_behind_an_open_breaker_and_those_they_keep_waiting_are_not_overdue(db: Database) -> None:
    shop = Shop(concurrency=2, on_uncertain="contain")
    shop.mail = scripted("mail", mutations=("send", "cancel"), can_reconcile=False, timeout=timedelta(seconds=30))
    shop.mail.will(Does.TIMES_OUT_BEFORE)
    run = shop.started(db)
    run.run()
    with db.transaction() as tx:
        breakers.open_by_operator(tx, ("mail", "send"), TESTER)
    run.publish(shop.orders, {"n": 1}, {"n": 2})
    run.run()
    doubt = next(row for row in run.ledger() if row.status == "indeterminate")
    with db.transaction() as tx:
        resolution.happened(tx, MutationId(doubt.id), TESTER, {"id": 1})
    for _ in range(20):
        run.advance(MINUTE)
        run.sweeps.tick()
        run.run()
    assert not overdue(run)
    with db.transaction() as tx:
        breakers.close_by_operator(tx, ("mail", "send"), TESTER)
    run.run_until_idle()
    assert statuses(run, shop.orders) == ["consumed"] * 3
