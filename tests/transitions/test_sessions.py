"""The count of a session when it ends, however many runs it had, and that no decision reads a session."""

from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import text

from pipeline import PrepareResult, Retention, TransientError
from pipeline.store.database import Database, Statement
from pipeline.store.writes.sessions import MAX_COUNTED_RUNS
from pipeline.testing import Does, Inline, assert_consumed, assert_runs
from pipeline.transitions import housekeeping, workflows
from tests.support.concurrent_transactions import meanwhile, wait_until_blocked_by
from tests.support.rule import rule
from tests.support.scripted_consumers import Shop

_MANY = text("""
INSERT INTO pipeline.runs (workflow, handler_id, session_id, phase, status, created_at, finished_at, cost)
SELECT r.workflow, r.handler_id, r.session_id, r.phase, r.status, r.created_at, r.finished_at, r.cost
FROM pipeline.runs r CROSS JOIN generate_series(1, :count)
""")


def busy(db: Database, orders: int, **options: Any) -> Inline:
    """A workflow that has done its orders and has an active run, so that its session stays open."""
    shop = Shop(mutate=lambda ctx, prepared: None, next=lambda ctx, prepared, result: None, concurrency=3, **options)
    run = shop.started(db, orders)
    run.run()
    with db.transaction() as tx:
        tx.execute(text("UPDATE pipeline.runs SET cost = 0.5"))
    run.publish(shop.orders, {"n": -1})
    run.scheduler.schedule(["shop"])
    return run


def session(db: Database) -> Any:
    with db.transaction() as tx:
        (row,) = tx.all(Statement[Any]("SELECT * FROM pipeline.sessions"))
    return row


def test_runs_that_retention_dropped_while_their_session_was_open_are_counted(db: Database) -> None:
    run = busy(db, 5, retention=Retention(done=timedelta(hours=1)))
    run.advance(timedelta(hours=3))
    for _ in range(2):
        run.sweeps.retention()
    assert len(run.runs()) == 1
    run.run()
    run.sweeps.sessions()
    ended = session(db)
    assert (ended.result, ended.run_count, ended.cost) == ("completed", 6, Decimal("2.5"))


def test_a_run_that_is_dropped_while_its_session_ends_is_counted_once(db: Database) -> None:
    run = busy(db, 5, retention=Retention(done=timedelta(hours=1)))
    run.run()
    run.advance(timedelta(hours=3))
    with db.transaction() as tx:
        housekeeping.prune_page(tx, "events")
    with meanwhile(db, lambda tx: workflows.finish_sessions(tx, [session(db).id])) as finish:
        with db.transaction() as tx:
            assert housekeeping.prune_page(tx, "runs", limit=2).dropped == 2
            ended = finish()
            wait_until_blocked_by(db, tx)
        assert len(ended.result(timeout=60)) == 1
    assert session(db).run_count == 6


def test_a_session_with_too_many_runs_ends_without_a_count(db: Database) -> None:
    run = busy(db, 1)
    run.run()
    with db.transaction() as tx:
        tx.execute(_MANY, count=MAX_COUNTED_RUNS // 2)
    run.sweeps.sessions()
    ended = session(db)
    assert (ended.result, ended.run_count, ended.cost) == ("completed", None, None)


@rule("X-24")
@pytest.mark.parametrize("result", [None, "completed", "failed"])
def test_runs_go_the_same_way_whatever_their_sessions_say(db: Database, result: str | None) -> None:
    """Before every message each session is ended with this result, or left as it is."""
    failures = iter([TransientError("not now")])

    def fail_once(ctx: Any, prepared: Any, _: Any) -> None:
        if prepared.data["n"] == 1 and (error := next(failures, None)):
            raise error

    def end_sessions(_: int) -> int:
        with db.transaction() as tx:
            tx.execute(
                text("UPDATE pipeline.sessions SET result = :r, error = 'x', finished_at = now() WHERE :r <> ''"),
                r=result,
            )
        return 0

    shop = Shop(next=fail_once)
    shop.mail.will(Does.TIMES_OUT_AFTER, when=lambda params: params["n"] == 0)
    shop.mail.cannot_tell()
    shop.mail.will(Does.FAILS, when=lambda params: params["n"] == 2)
    run = shop.started(db, 3)
    run.pick_next = end_sessions
    run.run_until_idle()
    assert_runs(
        run,
        "paused:reconciliation",
        "committed",  # after the reconcile attempt
        "paused:transient",
        "committed",  # the retry of next
        "paused:transient",
        "committed",  # a fresh run: nothing was sent
    )
    assert_consumed(run, shop.orders)
    assert [effect.params["n"] for effect in shop.mail.effects] == [0, 1, 2]


def a_shop_that_asks() -> Shop:
    """A shop in which every second order needs approval."""

    def prepare(ctx: Any, _: Any) -> PrepareResult:
        found = ctx.peek(shop.orders, limit=1)
        if not found:
            return PrepareResult.nothing()
        return PrepareResult(reserve=found, data=found[0].payload, approval=bool(found[0].payload["n"] % 2))

    shop = Shop(prepare=prepare, concurrency=2)
    return shop


@rule("X-7")
def test_a_run_that_waits_for_approval_does_not_keep_its_session_open(db: Database) -> None:
    shop = a_shop_that_asks()
    run = shop.started(db, 2)
    run.run()
    run.sweeps.sessions()
    ended = session(db)
    assert (ended.result, ended.run_count) == ("completed", 1)
    (request,) = [row for row in run.ledger() if row.status == "pending"]
    run.approve(request)
    run.run()
    run.sweeps.sessions()
    with db.transaction() as tx:
        first, second = tx.all(Statement[Any]("SELECT * FROM pipeline.sessions ORDER BY started_at, id"))
    assert (first.id, first.run_count) == (ended.id, 1), "an ended session stays as it is"
    assert (second.result, second.run_count) == ("completed", 1), "the approved run joined a session of its own"


def test_an_approved_run_joins_the_session_that_is_open(db: Database) -> None:
    shop = a_shop_that_asks()
    run = shop.started(db, 2)
    run.run()
    (request,) = [row for row in run.ledger() if row.status == "pending"]
    run.approve(request)
    run.run()
    run.sweeps.sessions()
    assert session(db).run_count == 2
