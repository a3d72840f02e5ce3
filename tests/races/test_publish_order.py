"""Two publishers of the same events in different orders: both must end well."""

from typing import Any

from pipeline.domain.values import NewEvent
from pipeline.store.database import Database, Statement, Transaction
from pipeline.transitions import events
from pipeline.transitions.events import PublishResult
from tests.factories import IN, a_workflow
from tests.support.concurrent_transactions import meanwhile
from tests.support.table_reads import one
from tests.support.wait import wait_for

_WAITING = Statement[Any]("""
SELECT count(*) AS n FROM pg_stat_activity WHERE datname = current_database() AND cardinality(pg_blocking_pids(pid)) > 0
""")


def waiting(db: Database) -> int:
    """How many connections to this database wait for another; asked anew: Postgres answers once per transaction."""
    with db.transaction() as tx:
        row = tx.first(_WAITING)
    assert row is not None
    return int(row.n)


def test_two_publishers_of_overlapping_events_in_opposite_orders_both_succeed(db: Database) -> None:
    a_workflow(db)

    def publish(tx: Transaction, *names: str) -> PublishResult:
        return events.publish(tx, "billing", [NewEvent(topic=IN, message_id=name, payload={}) for name in names])

    with (
        meanwhile(db, lambda tx: publish(tx, "a", "z1", "b")) as one_way,
        meanwhile(db, lambda tx: publish(tx, "b", "z2", "a")) as other_way,
    ):
        with db.transaction() as gate:
            publish(gate, "z1", "z2")
            ended = one_way(), other_way()
            wait_for(lambda: waiting(db) == 2, why="both publishers wait in the middle")
        assert [publisher.exception(timeout=60) for publisher in ended] == [None, None]
    assert one(db, "SELECT count(*) AS n FROM pipeline.events").n == 4
