"""Operators are notified once of each open item, whatever a receiver does with other notices."""

import pytest

from pipeline.background import notifier
from pipeline.background.notifier import Notice
from pipeline.domain.states import EventId
from pipeline.store.database import Database
from pipeline.testing import Inline
from pipeline.testing.inline import TESTER
from pipeline.transitions import breakers, events
from tests.support.scripted_consumers import Shop, at_once, statuses
from tests.support.table_reads import one


class Receiver:
    """Keeps the notices it takes; refuses those of a kind that the test names."""

    def __init__(self) -> None:
        self.refuses, self.tried, self.told = "", 0, list[Notice]()

    def notify(self, notice: Notice) -> None:
        self.tried += 1
        if notice.kind == self.refuses:
            raise ConnectionError("422 of somebody's server")
        self.told.append(notice)

    def taken(self) -> list[tuple[str, str, str]]:
        """Kind, workflow and subject of the notices since the last call."""
        told, self.told = self.told, []
        return [(notice.kind, notice.workflow, notice.subject) for notice in told]


def attach_receiver(run: Inline) -> Receiver:
    receiver = Receiver()
    run.sweeps.notifier = receiver
    return receiver


def remembered(db: Database) -> int:
    return int(one(db, "SELECT count(*) AS n FROM pipeline.notices").n)


def open_breakers(db: Database, count: int) -> None:
    with db.transaction() as tx:
        for n in range(count):
            breakers.open_by_operator(tx, ("mail", f"send{n}"), TESTER)


def test_pending_approvals_of_a_workflow_are_one_notice(db: Database) -> None:
    shop = Shop(requires_approval=True, concurrency=3)
    run = shop.started(db, 3)
    receiver = attach_receiver(run)
    run.run()
    for _ in range(3):
        run.sweeps.notices()
    first = run.ledger()[0]
    assert str(first.id) in receiver.told[0].reason
    assert receiver.taken() == [("approval", "shop", "workflow shop")]
    for row in run.ledger():
        run.reject(row)
    run.run()
    run.sweeps.notices()
    assert (receiver.taken(), remembered(db)) == ([], 0)
    run.publish(shop.orders, {"n": 9})
    run.run()
    run.sweeps.notices()
    assert receiver.taken() == [("approval", "shop", "workflow shop")], "this is another time"


def test_quarantined_events_of_a_handler_are_one_notice(db: Database) -> None:
    shop = Shop(on_logic_error="quarantine", failures=at_once(quarantine_after=1), mutate=lambda ctx, prepared: 1 / 0)
    run = shop.started(db, 3)
    receiver = attach_receiver(run)
    run.run()
    assert statuses(run, shop.orders) == ["quarantined"] * 3
    for _ in range(3):
        run.sweeps.notices()
    assert receiver.taken() == [("quarantined", "shop", "handler Send of shop")]
    for row in run.deliveries(shop.orders):
        with db.transaction() as tx:
            events.skip(tx, "shop", "Send", EventId(row.event_id), TESTER)
    run.sweeps.notices()
    assert (receiver.taken(), remembered(db)) == ([], 0)


def test_many_refused_notices_delay_no_other_notice(db: Database) -> None:
    open_breakers(db, 120)
    run = Shop(requires_approval=True).started(db)
    receiver = attach_receiver(run)
    receiver.refuses = "breaker"
    run.run()
    run.sweeps.notices()
    assert receiver.taken() == []
    run.sweeps.notices()
    assert receiver.taken() == [("approval", "shop", "workflow shop")]
    receiver.refuses = ""
    for _ in range(3):
        run.sweeps.notices()
    assert len(receiver.taken()) == 120, "what was refused is tried again"


def test_a_receiver_that_never_answers_delays_neither_the_sweep_nor_the_next_notice(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_breakers(db, 3)
    run = Shop(requires_approval=True).started(db)
    receiver = attach_receiver(run)
    receiver.refuses = "breaker"
    run.run()
    monkeypatch.setattr(notifier, "_PASS_SECONDS", -1)  # its first call takes all the time there is
    for _ in range(3):
        run.sweeps.notices()
    assert (receiver.tried, receiver.taken()) == (3, [])
    run.sweeps.notices()
    assert receiver.taken() == [("approval", "shop", "workflow shop")]


def test_a_delivered_notice_is_forgotten_when_its_cause_is_over(db: Database) -> None:
    open_breakers(db, 2)
    run = Shop().inline(db)
    attach_receiver(run)
    run.sweeps.notices()
    assert remembered(db) == 2
    with db.transaction() as tx:
        for n in range(2):
            breakers.close_by_operator(tx, ("mail", f"send{n}"), TESTER)
    run.sweeps.notices()
    assert remembered(db) == 0
