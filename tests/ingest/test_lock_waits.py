"""Two ways into one topic: no deadlock, and no wait without end."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from pipeline.domain.values import Limits, NewEvent
from pipeline.ingest.bridge import Bridge, OnPoison, Route
from pipeline.ingest.errors import LockedError
from pipeline.store.connections import CallerConnection
from pipeline.store.database import Database, Statement, Transaction
from pipeline.transitions import events
from tests.factories import IN, a_workflow
from tests.ingest.ingest_processes import published
from tests.ingest.redis_streams import Place, in_thread
from tests.support.statement_events import Listener, observed
from tests.support.wait import wait_for

SHORT = timedelta(milliseconds=100)
_WAITING = Statement[Any](
    "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
)


def a_bridge(place: Place, db: Database, **options: Any) -> Bridge:
    queue = place.queue("bridge", max_read_count=500)
    route = Route(workflow="billing", topic=IN, message_id_field="id", limits=Limits(payload=1000))
    return Bridge(queue, db, route, **{"lock_wait": SHORT, **options})


@contextmanager
def holding(db: Database, *ids: str) -> Iterator[None]:
    """Publish these in a transaction that stays open, as a frozen process would."""
    with db.engine.connect() as connection, connection.begin():
        events.publish(
            Transaction(CallerConnection(connection)),
            "billing",
            [NewEvent(topic=IN, message_id=id_, payload={}) for id_ in ids],
        )
        yield
        connection.rollback()


@contextmanager
def when_it_fails(db: Database, act: Callable[[], None]) -> Iterator[None]:
    """Act after a statement has failed and before its caller gets the error."""

    def on_error(_: object) -> None:
        act()

    with observed(db, Listener(failed=on_error)):
        yield


def stale(place: Place, ids: list[str]) -> list[str]:
    """Entries with these message ids that a consumer read and left pending."""
    reader = place.queue("dead", max_read_count=500)
    entries = place.add(*({"id": id_} for id_ in ids))
    reader.read()
    place.make_stale()
    return entries


def test_two_batches_with_the_same_ids_in_opposite_order_and_a_bad_entry_in_each_do_not_deadlock(
    place: Place, db: Database
) -> None:
    a_workflow(db)
    other = Place(place.url, f"{place.stream}-other", place.raw)
    both = [a_bridge(each, db, on_poison=OnPoison.LEAVE, lock_wait=timedelta(seconds=60)) for each in (place, other)]
    gate = threading.Barrier(2)

    def work(bridge: Bridge) -> int:
        gate.wait(30)
        return bridge.read_once()

    for turn in range(3):
        ids = [f"order:{turn}.{n}" for n in range(300)]
        for each, order in ((place, ids), (other, ids[::-1])):
            each.add({"text": "too long" * 200}, *({"id": id_} for id_ in order))
        loops = [in_thread(partial(work, bridge)) for bridge in both]
        assert [loop.outcome(90) for loop in loops] == [301, 301]
    assert sum(bridge.counts.published for bridge in both) == 900
    assert [bridge.counts.poison for bridge in both] == [3, 3]
    other.close()


def test_a_batch_waits_for_another_transaction_for_a_limited_time(place: Place, db: Database) -> None:
    a_workflow(db)
    bridge = a_bridge(place, db)
    entries = place.add({"id": "a"}, {"id": "b"})
    with holding(db, "b"), pytest.raises(LockedError, match=f"from {entries[0]} to {entries[1]} .*pg_stat_activity"):
        bridge.read_once()
    assert (published(db), list(place.pending())) == ({}, entries)


def test_a_recovery_publishes_unlocked_entries_and_leaves_the_rest_pending(
    place: Place, db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    a_workflow(db)
    ids = [f"order:{n}" for n in range(20)]
    entries = stale(place, ids)
    bridge = a_bridge(place, db)
    with holding(db, ids[3], ids[11]):
        assert bridge.recover_once() == 20
    assert set(published(db)) == set(ids) - {ids[3], ids[11]}
    assert list(place.pending()) == [entries[3], entries[11]]
    assert (bridge.counts.published, bridge.counts.locked) == (18, 2)
    assert [entry for entry in entries if f"entry {entry} " in caplog.text] == [entries[3], entries[11]]
    place.make_stale()
    bridge.recover_once()
    assert (set(published(db)), place.pending()) == (set(ids), {})


def test_a_recovery_that_is_stopped_during_a_wait_attempts_nothing_further(place: Place, db: Database) -> None:
    a_workflow(db)
    entries = stale(place, ["a", "b", "c"])
    bridge = a_bridge(place, db)
    with holding(db, "b"), when_it_fails(db, bridge.stop):
        bridge.recover()
    assert (published(db), list(place.pending()), bridge.counts.locked) == ({}, entries, 3)


def test_a_recovery_probes_for_locked_entries_a_limited_number_of_times(
    place: Place, db: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a_workflow(db)
    ids = [f"order:{n}" for n in range(8)]
    stale(place, ids)
    bridge = a_bridge(place, db)
    monkeypatch.setattr("pipeline.ingest.bridge._MAX_LOCK_PROBES", 5)
    with holding(db, *ids):
        assert bridge.recover_once() == 8
    assert (bridge.counts.locked, len(place.pending())) == (8, 8)
    assert "6 more entries of the same batch were not attempted" in caplog.text


def test_an_error_of_the_database_that_is_no_lock_is_raised_as_it_is(place: Place, db: Database) -> None:
    a_workflow(db)
    stale(place, ["a"])
    bridge = a_bridge(place, db, lock_wait=timedelta(seconds=60))
    with holding(db, "a"):
        loop = in_thread(bridge.recover_once)
        wait_for(lambda: waiting(db))
        with db.transaction() as tx:
            tx.all(
                Statement[Any](
                    "SELECT pg_cancel_backend(pid) FROM pg_stat_activity "
                    "WHERE wait_event_type = 'Lock' AND datname = current_database()"
                )
            )
        with pytest.raises(Exception, match="canceling statement due to user request"):
            loop.outcome()
    assert len(place.pending()) == 1


def waiting(db: Database) -> int:
    with db.transaction() as tx:
        return int(tx.all(_WAITING)[0][0])
