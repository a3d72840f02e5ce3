"""Runs of unclaimed and retired handlers do not use up the concurrency for ever."""

from datetime import datetime, timedelta
from typing import Any

import pytest

from pipeline import Topic, Workflow
from pipeline.admin import attention
from pipeline.admin.attention import AttentionItem
from pipeline.admin.quarantine import Quarantine, QuarantineAction, QuarantineFilter
from pipeline.admin.resolutions import Resolutions
from pipeline.background import rescuer
from pipeline.store.database import Database
from pipeline.store.reads import invariants, work
from pipeline.store.writes.workflows import LOCK_WORKFLOWS
from pipeline.testing import Inline, scripted
from pipeline.testing.inline import TESTER
from pipeline.transitions import events, stops
from pipeline.worker.crash_points import CrashPoint
from tests.support.concurrent_transactions import raced
from tests.support.scripted_consumers import take_one

MINUTE = timedelta(minutes=1)


def consumer(workflow: Workflow, topic: Topic, name: str, **options: Any) -> None:
    """A consumer that takes one event; with ``asks`` it mails it."""
    asks = options.pop("asks", False)
    members = {
        "prepare": lambda self, ctx, state: take_one(ctx, topic),
        "mutate": lambda self, ctx, prepared: ctx.mail.send(n=prepared.data["n"]) if asks else None,
        "next": lambda self, ctx, prepared, result: None,
    }
    workflow.consumer(subscribes=[topic], **options)(type(name, (), members))


def release(version: int, *names: str, concurrency: int = 1) -> tuple[Workflow, Topic]:
    workflow = Workflow("shop", version=version, concurrency=concurrency)
    orders = workflow.topic("orders")
    for name in names:
        consumer(workflow, orders, name)
    return workflow, orders


def pass_time(run: Inline, minutes: int) -> None:
    for _ in range(minutes):
        run.advance(MINUTE)
        for sweep in ("tick", "rescue", "sessions"):
            getattr(run.sweeps, sweep)()
        run.run()


def stands(run: Inline, topic: Topic, handler: str) -> set[str]:
    return {row.status for row in run.deliveries(topic) if row.handler == handler}


def unclaimed_since(run: Inline) -> dict[str, datetime | None]:
    with run.db.transaction() as tx:
        return {row.name: row.unclaimed_since for row in work.handlers(tx, "shop")}


def open_runs(run: Inline, handler: str) -> list[Any]:
    return [row for row in run.runs() if row.handler == handler and row.finished_at is None]


def waits(run: Inline) -> list[AttentionItem]:
    return attention.items(Resolutions(run.db))


def overdue(run: Inline) -> dict[str, str]:
    with run.db.transaction() as tx:
        return {found.invariant: f"{found.subject}: {found.detail}" for found in invariants.findings(tx)}


@pytest.mark.broken_on_purpose
@pytest.mark.parametrize("concurrency", [1, 4])
def test_an_unclaimed_handler_leaves_the_concurrency_to_known_handlers(db: Database, concurrency: int) -> None:
    Inline(db, [release(2, "send", "extra", concurrency=concurrency)[0]])
    older, orders = release(1, "send", concurrency=concurrency)
    run = Inline(db, [older])
    run.publish(orders, *({"n": n} for n in range(10)))
    pass_time(run, 12)
    assert stands(run, orders, "send") == {"consumed"}
    assert stands(run, orders, "extra") == {"pending"}
    item = next(item for item in waits(run) if item.kind == "unclaimed")
    assert (item.workflow, item.subject) == ("shop", "handler extra")
    assert item.since is not None
    assert "extra" in overdue(run)["handlers-are-claimed"]
    newer, _ = release(2, "send", "extra", concurrency=concurrency)
    back = Inline(db, [newer])
    back.sweeps.tick()
    back.run()
    assert stands(back, orders, "extra") == {"consumed"}, "served at once, not when its rest is over"
    assert not [item for item in waits(back) if item.kind == "unclaimed"]
    assert not overdue(back)


@pytest.mark.broken_on_purpose
def test_a_handler_is_unclaimed_from_the_first_withdrawal_until_a_worker_that_knows_it_starts(db: Database) -> None:
    Inline(db, [release(2, "send", "extra")[0]])
    older, orders = release(1, "send")
    run = Inline(db, [older])
    run.publish(orders, {"n": 1})
    assert unclaimed_since(run) == {"send": None, "extra": None}
    pass_time(run, 4)
    first = unclaimed_since(run)
    assert first["send"] is None
    assert first["extra"] is not None
    pass_time(run, 10)
    assert unclaimed_since(run) == first, "later withdrawals do not move it"
    Inline(db, [release(2, "send", "extra")[0]])
    assert unclaimed_since(run) == {"send": None, "extra": None}


@pytest.mark.broken_on_purpose
def test_an_unclaimed_handler_is_tried_with_one_run_after_a_growing_pause(db: Database) -> None:
    Inline(db, [release(2, "send", "extra", concurrency=4)[0]])
    older, orders = release(1, "send", concurrency=4)
    run = Inline(db, [older])
    run.publish(orders, *({"n": n} for n in range(8)))
    most = 0
    pass_time(run, 2)
    for _ in range(28):
        pass_time(run, 1)
        most = max(most, len(open_runs(run, "extra")))
    tries = [row.created_at for row in run.runs() if row.handler == "extra"]
    assert most == 1
    assert 6 <= len(tries) <= 9, "four at first, then one at a time, ever more seldom"
    assert {row.failures for row in run.deliveries(orders)} == {0}, "nobody was at fault"


def test_a_claim_ends_the_back_off_of_an_unclaimed_handler(db: Database) -> None:
    knows = Inline(db, [release(1, "send", "extra", concurrency=2)[0]])
    orders = release(1, "send")[1]
    other = Workflow("other")
    consumer(other, other.topic("x"), "idle")
    stranger = Inline(db, [other])
    knows.publish(orders, *({"n": n} for n in range(3)))
    for _ in range(3):
        stranger.advance(MINUTE)
        stranger.sweeps.tick()
        while stranger.messages:
            stranger.deliver(stranger.messages.popleft())
    assert {row.status for row in knows.runs()} <= {"paused:transient", "active"}
    assert [item.subject for item in waits(knows) if item.kind == "unclaimed"] == ["handler extra", "handler send"]
    pass_time(knows, 11)
    assert {row.status for row in knows.deliveries(orders)} == {"consumed"}
    assert not waits(knows)


@pytest.mark.broken_on_purpose
@pytest.mark.parametrize("lost", ["pipeline.mutate", "pipeline.next"])
def test_a_run_that_got_further_before_the_rollback_is_withdrawn_and_done_once_when_it_is_known_again(
    db: Database, lost: str
) -> None:
    mail = scripted("mail")

    def build(version: int) -> tuple[Workflow, Topic, Topic]:
        workflow = Workflow("shop", version=version)
        a, b = workflow.topic("a"), workflow.topic("b")
        consumer(workflow, a, "send", publishes=[b])
        if version > 1:
            consumer(workflow, b, "extra", asks=True)
        return workflow, a, b

    newer, a, b = build(2)
    run = Inline(db, [newer], [mail])
    run.publish(b, {"n": 1})
    run.broker = lambda message: () if message.task == lost else (message,)
    run.run()
    run = Inline(db, [build(1)[0]], [mail])
    run.publish(a, *({"n": n} for n in range(3)))
    pass_time(run, 11)
    assert stands(run, a, "send") == {"consumed"}
    assert [item.subject for item in waits(run) if item.kind == "unclaimed"] == ["handler extra"]
    back = Inline(db, [newer], [mail])
    pass_time(back, 2)
    assert stands(back, b, "extra") == {"consumed"}
    assert len(mail.effects) == 1
    assert {row.attempt for row in back.runs() if row.handler == "extra"} <= {0, 1}
    assert not waits(back)
    assert not overdue(back)


def old_and_new(*, is_old: bool) -> tuple[Workflow, Topic, Topic]:
    workflow = Workflow("shop", version=1 if is_old else 2)
    a, b = workflow.topic("a"), workflow.topic("b")
    consumer(workflow, a, "new", publishes=[b])
    if is_old:
        consumer(workflow, b, "old", asks=True, requires_approval=True)
    return workflow, a, b


def skipped(run: Inline) -> tuple[int, dict[str, str]]:
    """Skip all events of the retired handler, as the advice suggests."""
    desk = Quarantine(run.db)
    chosen = desk.entries(QuarantineFilter(workflow="shop", handler="old", is_waiting=True))
    done = desk.act(QuarantineAction.SKIP, chosen, TESTER)
    return len(done.updated), done.refused


@pytest.mark.broken_on_purpose
@pytest.mark.parametrize("how", ["pending", "approve", "reject"])
def test_runs_of_a_retired_handler_hold_nothing_and_are_listed_until_an_operator_ends_them(
    db: Database, how: str
) -> None:
    mail = scripted("mail")
    before, _, b = old_and_new(is_old=True)
    run = Inline(db, [before], [mail])
    run.publish(b, {"n": 1})
    if how == "pending":
        run.scheduler.schedule(["shop"])
        run.messages.clear()
    else:
        run.run()
    after, a, b = old_and_new(is_old=False)
    run = Inline(db, [after], [mail])
    if how != "pending":
        getattr(run, how)(run.ledger()[0])
    run.publish(a, *({"n": n} for n in range(5)))
    pass_time(run, 11)
    assert stands(run, a, "new") == {"consumed"}
    assert [item.subject for item in waits(run) if item.kind == "retired"] == ["handler old"]
    assert set(overdue(run)) == {"retired-handlers-hold-nothing"}
    assert skipped(run) == (1, {})
    assert stands(run, b, "old") == {"skipped"}
    assert not mail.effects
    assert not waits(run)
    assert not overdue(run)


def test_a_request_of_a_retired_handler_is_resolved_before_its_event_is_skipped(db: Database) -> None:
    before, _, b = old_and_new(is_old=True)
    run = Inline(db, [before], [scripted("mail")])
    run.publish(b, {"n": 1})
    run.run()
    run = Inline(db, [old_and_new(is_old=False)[0]], [scripted("mail")])
    taken, refused = skipped(run)
    assert not taken
    assert "reject its request" in str(refused)
    run.reject(run.ledger()[0])
    assert skipped(run) == (1, {})


def test_an_event_whose_effect_happened_is_consumed_when_its_retired_handler_is_given_up(db: Database) -> None:
    mail = scripted("mail")
    before, _, b = old_and_new(is_old=True)
    run = Inline(db, [before], [mail])
    run.publish(b, {"n": 1})
    run.run()
    run.approve(run.ledger()[0])
    with run.crash_at(CrashPoint.NEXT_CLAIMED):
        run.run()
    run = Inline(db, [old_and_new(is_old=False)[0]], [mail])
    pass_time(run, 5)
    assert skipped(run) == (1, {})
    assert stands(run, b, "old") == {"consumed"}
    assert len(mail.effects) == 1


def test_two_operators_who_skip_the_same_event_of_a_retired_handler_do_it_once(db: Database) -> None:
    before, _, b = old_and_new(is_old=True)
    run = Inline(db, [before], [scripted("mail")])
    run.publish(b, {"n": 1})
    run.run()
    run = Inline(db, [old_and_new(is_old=False)[0]], [scripted("mail")])
    run.reject(run.ledger()[0])
    (event,) = [row.event_id for row in run.deliveries(b)]
    both = [lambda tx: events.skip_with_run(tx, "shop", "old", event, TESTER)] * 2
    assert raced(db, *both).result() is None
    assert stands(run, b, "old") == {"skipped"}


@pytest.mark.broken_on_purpose
def test_a_run_that_is_claimed_or_held_meanwhile_is_not_withdrawn(db: Database, database_url: str) -> None:
    Inline(db, [release(2, "send", "extra", concurrency=4)[0]])
    older, orders = release(1, "send", concurrency=4)
    run = Inline(db, [older])
    run.publish(orders, {"n": 1})
    run.run()
    (left,) = open_runs(run, "extra")
    run.advance(2 * MINUTE)
    hurried = Database.connect(database_url, lock_timeout=timedelta(milliseconds=200))
    hurried.clock_offset = db.clock_offset
    with db.transaction() as tx:
        tx.all(LOCK_WORKFLOWS, names=["shop"])
        assert rescuer.recover_unclaimed_runs(hurried, older_than=MINUTE) == 0, "it is held, and left for the next tick"
    hurried.dispose()
    knows = Inline(db, [release(2, "send", "extra", concurrency=4)[0]])
    with knows.crash_at(CrashPoint.PREPARE_CLAIMED):
        knows.runner.prepare([left.id])
    with db.transaction() as tx:
        assert stops.withdraw_unclaimed(tx, [left.id]) == ()
