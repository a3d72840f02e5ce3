"""Schedulers decide what is due under the workflow's lock. What they read before may be out of date by then."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from pipeline import PrepareResult, Workflow
from pipeline.domain.errors import TransientError
from pipeline.store.database import Database, Statement
from pipeline.testing import Inline
from pipeline.transitions import starts
from tests.support.concurrent_transactions import wait_until_blocked_by
from tests.support.scripted_consumers import Shop

_LOCK_WORKFLOWS = Statement[Any]("SELECT 1 FROM pipeline.workflows FOR NO KEY UPDATE")


def schedule_across(run: Inline, workflow: str, happens: Callable[[], object]) -> None:
    """Let a second scheduler wait for the workflow's lock while something else becomes true."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        with run.db.transaction() as holder:
            holder.all(_LOCK_WORKFLOWS)
            ended = pool.submit(run.scheduler.schedule, [workflow])
            wait_until_blocked_by(run.db, holder)
            happens()
        ended.result(timeout=60)


def deliver_all(run: Inline) -> None:
    """Run what the messages name, without another look at what is due."""
    while run.messages:
        run.deliver(run.messages.popleft())


def test_a_producer_runs_once_for_a_slot_that_another_scheduler_took_meanwhile(db: Database) -> None:
    workflow, calls = Workflow("feed"), list[str]()
    workflow.producer(every=timedelta(hours=1), name="poll")(lambda ctx, state: calls.append("called"))
    run = Inline(db, [workflow])
    run.scheduler.schedule(["feed"])
    assert len(run.messages) == 1
    schedule_across(run, "feed", lambda: deliver_all(run))
    deliver_all(run)
    assert calls == ["called"]
    assert [row.status for row in run.runs()] == ["committed"]


def test_a_producer_whose_run_ends_after_the_scheduler_read_what_is_due_is_not_started_again(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    workflow, calls = Workflow("feed"), list[str]()
    workflow.producer(every=timedelta(hours=1), name="poll")(lambda ctx, state: calls.append("called"))
    run, start = Inline(db, [workflow]), starts.start

    def start_after_the_commit(*args: Any, **options: Any) -> Any:
        deliver_all(run)
        return start(*args, **options)

    run.scheduler.schedule(["feed"])
    monkeypatch.setattr(starts, "start", start_after_the_commit)
    run.scheduler.schedule(["feed"])
    deliver_all(run)
    assert calls == ["called"]
    assert [row.status for row in run.runs()] == ["committed"]


def test_a_consumer_that_declined_meanwhile_is_not_asked_again(db: Database) -> None:
    calls: list[int] = []

    def prepare(ctx: Any, _: Any) -> PrepareResult:
        calls.append(len(ctx.peek(shop.orders)))
        return PrepareResult.nothing()

    shop = Shop(prepare=prepare)
    run = shop.started(db, 1)
    run.scheduler.schedule(["shop"])
    schedule_across(run, "shop", lambda: deliver_all(run))
    deliver_all(run)
    assert calls == [1]


def test_a_backoff_that_began_meanwhile_holds_the_next_run(db: Database) -> None:
    calls: list[int] = []

    def prepare(ctx: Any, _: Any) -> PrepareResult:
        calls.append(len(calls))
        raise TransientError("not now")

    shop = Shop(prepare=prepare)
    run = shop.started(db, 1)
    run.scheduler.schedule(["shop"])
    with ThreadPoolExecutor(max_workers=2) as pool:
        with db.transaction() as holder:
            holder.all(_LOCK_WORKFLOWS)  # the stop waits for it as well, and comes first
            failing = pool.submit(deliver_all, run)
            wait_until_blocked_by(db, holder)
            scheduling = pool.submit(run.scheduler.schedule, ["shop"])
            wait_until_blocked_by(db, holder)
        failing.result(timeout=60)
        scheduling.result(timeout=60)
    deliver_all(run)
    assert calls == [0]
