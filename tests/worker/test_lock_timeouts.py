"""A foreign transaction holds a lock and does not end: no process waits for ever, and nothing is lost."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import text

from pipeline import Workflow
from pipeline.background import rescuer
from pipeline.client import DatabaseClient, UnavailableError
from pipeline.domain.policies import Backoff, FailurePolicy
from pipeline.domain.values import NewEvent
from pipeline.store import migrate
from pipeline.store.connections import CallerConnection
from pipeline.store.database import Database, Transaction
from pipeline.tasks import publish as task
from pipeline.testing import Inline
from pipeline.transitions import events
from pipeline.worker import runner
from pipeline.worker.crash_points import CrashPoint
from pipeline.worker.settings import WorkerPolicy
from tests.support.scripted_consumers import Shop, each_once, statuses

PATIENT = FailurePolicy(backoff=Backoff(base=timedelta(minutes=10), cap=timedelta(minutes=10)))


@pytest.fixture
def quick(database_url: str, db: Database) -> Iterator[Database]:
    """The test's database, for a worker that does not wait long."""
    pool = Database.connect(database_url, lock_timeout=timedelta(milliseconds=300))
    yield pool
    db.clock_offset = pool.clock_offset
    pool.dispose()


@contextmanager
def publishing(db: Database, topic: str, *names: str, commits: bool = True, **options: Any) -> Iterator[None]:
    """A service that publishes in its own transaction and stays in it, until the end of the block."""
    with db.engine.connect() as connection:
        new = [NewEvent(topic=topic, message_id=name, payload={"n": -1}) for name in names]
        events.publish(Transaction(CallerConnection(connection)), "shop", new, **options)
        yield
        if commits:
            connection.commit()


@pytest.mark.parametrize("commits", [True, False], ids=["it commits at last", "it rolls back"])
def test_a_run_that_publishes_what_another_transaction_holds_stops_alone_and_continues_later(
    db: Database, quick: Database, commits: bool
) -> None:
    shop = Shop(concurrency=8, failures=PATIENT)
    run = shop.started(quick, 6)
    with publishing(db, "receipts", "receipt:2", commits=commits):
        run.run()
        assert statuses(run, shop.orders) == ["consumed"] * 2 + ["reserved"] + ["consumed"] * 3
        (stopped,) = [each for each in run.runs() if each.status != "committed"]
        assert stopped.status == "paused:transient"
        assert "another transaction holds what this run needs to write" in str(stopped.error)
    run.run_until_idle()
    assert statuses(run, shop.orders) == ["consumed"] * 6
    assert sorted(event.message_id for event in run.events(shop.receipts)) == [f"receipt:{n}" for n in range(6)]
    assert each_once(shop, range(6))


def test_a_cohort_with_many_lock_timeouts_hands_the_remaining_runs_back_in_time(
    db: Database, quick: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "SHORT_LOCK_TIMEOUT", timedelta(milliseconds=50))
    monkeypatch.setattr(runner, "_LOCK_BUDGET_SECONDS", 0.12)
    shop = Shop(concurrency=64, failures=PATIENT)
    run = shop.started(quick, 40)
    with publishing(db, "receipts", *(f"receipt:{n}" for n in range(40))):
        for task_name in ("prepare", "mutate", "next"):
            run.scheduler.schedule(["shop"] if task_name == "prepare" else [])
            message = run.messages.popleft()
            assert message.task == f"pipeline.{task_name}"
            run.messages.clear()
            run.deliver(message)
        held = [each for each in run.runs() if each.phase != "pending"]
        waited = [each for each in held if each.status == "paused:transient"]
        assert 1 <= len(waited) <= 3, "each waits for 50 ms, and nobody after 120 ms"
        assert {each.status for each in held} == {"paused:transient", "active"}
        assert all(each.lease_expires_at is None for each in held)
    run.run_until_idle()
    assert statuses(run, shop.orders) == ["consumed"] * 40
    assert each_once(shop, range(40))


def test_a_producer_whose_event_another_transaction_holds_runs_again(db: Database, quick: Database) -> None:
    workflow = Workflow("shop")
    out = workflow.topic("out")
    produce = workflow.producer(every=timedelta(hours=1), publishes=[out], failures=PATIENT)
    produce(lambda ctx, state: ctx.publish(out, message_id="daily", payload={"n": 1}))
    run = Inline(quick, [workflow])
    with publishing(db, "out", "daily", commits=False):
        run.run()
        assert [each.status for each in run.runs()] == ["paused:transient"]
    run.run_until_idle()
    assert [event.payload for event in run.events(out)] == [{"n": 1}]


def test_a_workflow_that_is_held_keeps_no_other_from_starting_or_being_rescued(db: Database, quick: Database) -> None:
    shop = Shop()
    other = Workflow("zoo")
    animals = other.topic("animals")
    other.effect(animals)(lambda ctx, event: None)
    run = Inline(quick, [shop.workflow, other], [shop.mail])
    for topic in (shop.orders, animals):
        run.publish(topic, {"n": 1})
    with publishing(db, "elsewhere", "x", replace=True):
        report = run.sweeps.tick()
        assert report.counts["locked"] == 1
        assert [each.workflow for each in run.runs()] == ["zoo"]
    run.scheduler.schedule(["shop"])
    with run.crash_at(CrashPoint.PREPARE_CLAIMED):
        run.runner.prepare([each.id for each in run.runs()])
    run.advance(timedelta(minutes=5))
    with publishing(db, "elsewhere", "y", replace=True):
        assert [ended.run.workflow for ended in rescuer.recover_crashed_runs(quick)] == ["zoo"]
    run.messages.clear()
    run.run_until_idle()
    assert statuses(run, shop.orders) == statuses(run, animals) == ["consumed"]


def test_a_rescue_that_met_a_held_workflow_waits_for_no_other_as_long(db: Database, quick: Database) -> None:
    shop = Shop()
    other = Workflow("zoo")
    animals = other.topic("animals")
    other.effect(animals)(lambda ctx, event: None)
    run = Inline(quick, [shop.workflow, other], [shop.mail])
    for topic, workflow in ((shop.orders, "shop"), (animals, "zoo")):
        run.publish(topic, {"n": 1})
        run.scheduler.schedule([workflow])
    with run.crash_at(CrashPoint.PREPARE_CLAIMED):
        run.runner.prepare([each.id for each in run.runs()])
    run.advance(timedelta(minutes=5))
    with publishing(db, "elsewhere", "x", replace=True):
        assert [ended.run.workflow for ended in rescuer.recover_crashed_runs(quick)] == ["zoo"]
    assert [ended.run.workflow for ended in rescuer.recover_crashed_runs(quick)] == ["shop"]
    run.messages.clear()
    run.run_until_idle()
    assert statuses(run, shop.orders) == statuses(run, animals) == ["consumed"]


def test_a_published_message_that_meets_a_held_one_is_sent_again(
    db: Database, quick: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = Shop()
    shop.inline(quick)
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(task, "current_process", lambda: SimpleNamespace(db=quick, policy=WorkerPolicy()))
    monkeypatch.setattr("pipeline.tasks.publish.messages.wake_workflow", lambda _: True)
    monkeypatch.setattr(task.publish, "apply_async", lambda args, kwargs, **how: sent.append({"kwargs": kwargs, **how}))
    given = {"workflow": "shop", "events": [{"topic": "orders", "message_id": "m", "payload": {"n": 1}}]}
    with publishing(db, "orders", "m", commits=False):
        assert task.publish.apply(kwargs=given).get() is None
    assert [(each["kwargs"], each["countdown"]) for each in sent] == [(given, 1)]
    assert task.publish.apply(kwargs=given).get()["new"] == ["m"]


def test_a_client_gets_an_error_when_another_transaction_holds_its_event(db: Database, database_url: str) -> None:
    Shop().inline(db)
    client = DatabaseClient(f"{database_url}?options=-clock_timeout%3D200ms")
    try:
        with (
            publishing(db, "orders", "m", commits=False),
            pytest.raises(UnavailableError, match="another transaction holds what this one needs"),
        ):
            client.publish("shop", [{"topic": "orders", "message_id": "m", "payload": {"n": 1}}])
        assert client.publish("shop", [{"topic": "orders", "message_id": "m", "payload": {"n": 1}}]).new == ("m",)
    finally:
        client.close()


def _lock_timeout(db: Database) -> str:
    with db.engine.begin() as connection:
        return str(connection.scalar(text("SHOW lock_timeout")))


def test_connections_wait_ten_seconds_for_a_lock_by_default_and_migrations_without_limit(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands, worker = Database.connect_unpooled(database_url), Database.connect(database_url)
    assert _lock_timeout(worker) == _lock_timeout(commands) == "10s"
    worker.dispose()
    seen: list[Any] = []
    ask = text("SHOW lock_timeout")
    monkeypatch.setattr(
        "alembic.command.upgrade", lambda config, _: seen.append(config.attributes["connection"].scalar(ask))
    )
    migrate.upgrade(commands)
    monkeypatch.setenv("PGOPTIONS", "-c lock_timeout=5s")
    told = Database.connect_unpooled(database_url)
    assert _lock_timeout(told) == "5s"
    migrate.upgrade(told)
    assert seen == ["0", "5s"]
