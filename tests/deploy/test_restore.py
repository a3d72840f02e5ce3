"""What a restore to a point in time forgets, and what the guide advises. Outside systems are not restored."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from itertools import count

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.pool import NullPool

from pipeline.domain.states import EventId
from pipeline.embedded import servers
from pipeline.store.database import Database
from pipeline.store.reads import invariants
from pipeline.testing import Inline, RecordedEffect, scripted
from pipeline.testing.inline import TESTER
from pipeline.transitions import breakers, events, workflows
from pipeline.worker.crash_points import CrashPoint
from tests.support import databases
from tests.support.scripted_consumers import Shop
from tests.support.wait import wait_for

SEND = ("mail", "send")
_NUMBERS = count()
_USERS = text("SELECT FROM pg_stat_activity WHERE datname = :name AND backend_type = 'client backend'")


class Place:
    """A shop, its database, and an outside system that remembers what a database may forget."""

    def __init__(self, server_url: str, stack: ExitStack) -> None:
        self.server_url, self.stack = server_url, stack
        self.shop = Shop()
        self.shop.mail = scripted("mail", timeout=timedelta(seconds=30))  # no pause of the machine leaves a doubt
        self.name = f"restore_{os.getpid()}_{next(_NUMBERS)}"
        url = stack.enter_context(databases.clone_database(server_url, self.name))
        self.live = self.shop.inline(Database.connect_unpooled(url))

    def backup(self) -> Inline:
        """The database as it is now, to go on from later."""
        copy = f"{self.name}_restored"
        admin = create_engine(self.server_url, poolclass=NullPool, isolation_level="AUTOCOMMIT")

        def drop() -> None:
            with admin.connect() as connection:
                connection.execute(text(f'DROP DATABASE "{copy}" WITH (FORCE)'))

        with admin.connect() as connection:
            wait_for(lambda: not connection.execute(_USERS, {"name": self.name}).all(), why="everybody has left")
            connection.execute(text(f'CREATE DATABASE "{copy}" TEMPLATE "{self.name}"'))
        self.stack.callback(drop)
        url = make_url(self.server_url).set(database=copy).render_as_string(hide_password=False)
        return self.shop.inline(Database.connect_unpooled(url))


@pytest.fixture
def place(embedded: servers.Servers) -> Iterator[Place]:
    with ExitStack() as stack:
        yield Place(embedded.database_url, stack)


def is_whole(run: Inline) -> bool:
    with run.db.transaction() as tx:
        return invariants.findings(tx) == []


def test_mutations_in_flight_at_the_restore_point_are_reconciled_and_not_sent_again(place: Place) -> None:
    live, mail = place.live, place.shop.mail
    live.publish(place.shop.orders, {"n": 1})
    with live.crash_at(CrashPoint.IN_FLIGHT):
        live.run()
    restored = place.backup()
    (row,) = live.ledger()
    mail.effects.append(
        RecordedEffect(operation="send", key=row.idempotency_key, params={"n": 1})
    )  # it arrived after all
    restored.run_until_idle()
    assert [row.status for row in restored.ledger()] == ["applied"]
    assert mail.times(n=1) == 1
    assert is_whole(restored)


def test_runs_prepared_at_the_restore_point_send_again_under_the_same_key(place: Place) -> None:
    live, mail = place.live, place.shop.mail
    live.publish(place.shop.orders, {"n": 1})
    with live.crash_at(CrashPoint.PREPARE_SAVED):
        live.run()
    restored = place.backup()
    for each in (live, restored):
        each.run_until_idle()
    assert mail.times(n=1) == 2
    assert len({effect.key for effect in mail.effects}) == 1


def test_events_pending_at_the_restore_point_are_sent_again_under_the_same_key(place: Place) -> None:
    live, mail = place.live, place.shop.mail
    live.publish(place.shop.orders, {"n": 1})
    restored = place.backup()
    for each in (live, restored):
        each.run()
    assert mail.times(n=1) == 2
    assert len({effect.key for effect in mail.effects}) == 1


def test_with_a_pause_and_open_breakers_nothing_is_sent_until_the_window_is_checked(place: Place) -> None:
    live, mail, orders = place.live, place.shop.mail, place.shop.orders
    live.publish(orders, {"n": 1}, {"n": 2})
    restored = place.backup()
    with live.crash_at(CrashPoint.COMMITTED):  # one order is done, then the old database is lost
        live.run()
    assert len(mail.effects) == 1
    (done,) = [effect.params["n"] for effect in mail.effects]

    with restored.db.transaction() as tx:
        workflows.pause(tx, "shop", TESTER)
        breakers.open_by_operator(tx, SEND, TESTER)
    restored.run_until_idle()
    assert len(mail.effects) == 1, "an open breaker let something through"
    waiting = {row.payload["n"]: row for row in restored.deliveries(orders)}
    with restored.db.transaction() as tx:
        events.skip(tx, "shop", "Send", EventId(waiting[done].event_id), TESTER)
        breakers.close_by_operator(tx, SEND, TESTER)
        workflows.resume(tx, "shop", TESTER)
    restored.run_until_idle()
    assert (mail.times(n=1), mail.times(n=2)) == (1, 1)
    assert is_whole(restored)


def test_dispatched_runs_go_on_in_a_pause_and_wait_at_an_open_breaker(place: Place) -> None:
    live, mail = place.live, place.shop.mail
    live.publish(place.shop.orders, {"n": 1})
    with live.crash_at(CrashPoint.PREPARE_SAVED):
        live.run()
    restored = place.backup()
    for each in (live, restored):
        with each.db.transaction() as tx:
            workflows.pause(tx, "shop", TESTER)
    with restored.db.transaction() as tx:
        breakers.open_by_operator(tx, SEND, TESTER)
    for each in (live, restored):
        for _ in range(3):  # behind a breaker it comes back for ever, and sends nothing
            each.advance(timedelta(minutes=15))
            each.sweeps.tick()
            each.run()
    assert [run.phase for run in live.runs()] == ["committed"]
    assert [run.phase for run in restored.runs()] == ["prepared"]
    assert mail.times(n=1) == 1
