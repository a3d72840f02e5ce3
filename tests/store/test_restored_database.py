"""A database that was dumped into a cluster whose transactions are counted anew goes on where it stood.

The numbers that a dump brings along are set by hand, far ahead of any that this cluster has used.
"""

from typing import Any

import pytest
from sqlalchemy import text

from pipeline import PrepareResult
from pipeline.store.database import Database
from pipeline.testing import Inline
from tests.support.scripted_consumers import Shop, statuses
from tests.support.table_reads import one
from tests.support.transition_steps import watermark_at_least

AHEAD = 900_000_000_000


def pairs() -> Shop:
    """A consumer that wants two orders at a time."""

    def prepare(ctx: Any, _: Any) -> PrepareResult:
        pending = ctx.peek(made.orders, limit=2)
        return PrepareResult(reserve=pending) if len(pending) == 2 else PrepareResult.nothing()

    made = Shop(prepare=prepare, mutate=lambda ctx, prepared: None, next=lambda ctx, prepared, result: None)
    return made


def moved(run: Inline) -> None:
    """What a dump keeps of an idle consumer and its snapshot."""
    with run.db.transaction() as tx:
        tx.execute(text(f"UPDATE pipeline.handlers SET idle_snapshot = '{AHEAD}:{AHEAD}:' WHERE name = 'Send'"))
        tx.execute(text(f"UPDATE pipeline.deliveries SET xid = '{AHEAD - 5}'"))


@pytest.fixture
def shop() -> Shop:
    return pairs()


@pytest.fixture
def run(db: Database, shop: Shop) -> Inline:
    run = shop.started(db)
    run.run()
    moved(run)
    return run


def test_a_consumer_idle_before_the_restore_gets_events_published_after_it(shop: Shop, run: Inline) -> None:
    run.publish(shop.orders, {"n": 2})
    run.run(max_messages=20)
    assert statuses(run, shop.orders) == ["consumed"] * 2


def test_a_consumer_that_declines_events_from_before_the_restore_again_stays_idle(shop: Shop, run: Inline) -> None:
    run.run(max_messages=10)
    assert len(run.runs()) == 2, "it looks once more, since nobody can tell what it has seen"
    run.publish(shop.orders, {"n": 2}, {"n": 3})
    run.run(max_messages=20)
    assert statuses(run, shop.orders) == ["consumed", "consumed", "pending"]


def test_a_snapshot_from_before_the_restore_is_forgotten_before_the_new_cluster_reaches_its_number(
    shop: Shop, run: Inline
) -> None:
    run.sweeps.retention()
    assert one(run.db, "SELECT idle_snapshot FROM pipeline.handlers WHERE name = 'Send'").idle_snapshot is None
    run.run(max_messages=10)
    rested = one(run.db, "SELECT idle_snapshot FROM pipeline.handlers WHERE name = 'Send'").idle_snapshot
    run.sweeps.retention()
    kept = one(run.db, "SELECT idle_snapshot FROM pipeline.handlers WHERE name = 'Send'").idle_snapshot
    assert kept == rested is not None, "one of this cluster is kept"


def test_watermarks_rise_again_after_the_restore(db: Database) -> None:
    shop = Shop(mutate=lambda ctx, prepared: None, next=lambda ctx, prepared, result: None)
    run = shop.started(db, 3)
    run.run()
    with db.transaction() as tx:
        tx.execute(text(f"UPDATE pipeline.handlers SET horizon = 1, horizon_xmax = '{AHEAD}'"))
    watermark_at_least(db, run.events(shop.orders)[-1].id, "Send")
