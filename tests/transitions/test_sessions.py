"""The count of a session when it ends, however many runs it had and whatever was dropped."""

from datetime import timedelta
from decimal import Decimal
from typing import Any

from sqlalchemy import text

from pipeline import Retention
from pipeline.store.database import Database
from pipeline.store.statements import Statement
from pipeline.store.writes.sessions import MAX_COUNTED_RUNS
from pipeline.testing import Inline
from pipeline.transitions import retention, sessions
from tests.support.concurrent_transactions import meanwhile, wait_until_blocked_by
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
        retention.prune_page(tx, "events")
    with meanwhile(db, lambda tx: sessions.finish(tx, [session(db).id])) as finish:
        with db.transaction() as tx:
            assert retention.prune_page(tx, "runs", limit=2).dropped == 2
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
