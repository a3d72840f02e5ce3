"""Retention: only what is not open, only after its time, a page at a time."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from pipeline import (
    AuthError,
    DeclarationError,
    LogicError,
    PrepareResult,
    ReconcilePolicy,
    Retention,
    TransientError,
    Workflow,
)
from pipeline.domain.values import Actor, NewEvent
from pipeline.store.database import Database, Statement
from pipeline.store.reads import invariants
from pipeline.testing import Does, Inline, RecordedEffect, scripted
from pipeline.transitions import events, housekeeping, resolution
from pipeline.workflows.registration import register_workflows
from tests.support.scripted_consumers import Shop, at_once, take_one
from tests.support.table_reads import rows
from tests.support.wait import wait_for

DAY = timedelta(days=1)
MONTH = Retention(done=30 * DAY, ledger=365 * DAY)
CLERK = Actor(name="clerk", reason="asked for it")
TABLES = ("events", "deliveries", "runs", "mutations", "sessions", "audit", "blocks", "archive")
_WAITING = Statement[Any]("SELECT pid FROM pg_locks WHERE NOT granted AND locktype = 'advisory'")
_SIZE = text("""
SELECT CAST(sum(pg_total_relation_size(t)) AS bigint)
FROM unnest(ARRAY['pipeline.events', 'pipeline.deliveries', 'pipeline.runs', 'pipeline.mutations']::regclass[]) AS t
""")


def counts(db: Database) -> dict[str, int]:
    """How many rows each table has, where it has any."""
    with db.transaction() as tx:
        found = {table: tx.all(Statement[Any](f"SELECT count(*) FROM pipeline.{table}"))[0][0] for table in TABLES}
    return {table: count for table, count in found.items() if count}


def swept(run: Inline, times: int = 2) -> dict[str, int]:
    """What two sweeps let go of: a run goes after the one that carried it forward, so one may not suffice."""
    total: dict[str, int] = {}
    for _ in range(times):
        for name, count in run.sweeps.retention().counts.items():
            total[name] = total.get(name, 0) + count
    with run.db.transaction() as tx:
        assert invariants.findings(tx) == []
    return total


def worked(run: Inline) -> None:
    """Everything that can be done is, and the group of runs is closed."""
    run.run()
    run.sweeps.sessions()


def silent(**options: Any) -> Shop:
    """A shop whose runs ask for no mutation."""
    return Shop(mutate=lambda ctx, prepared: None, **options)


def joined(shop: Shop, prepare: Callable[[Any], PrepareResult], **options: Any) -> None:
    """A second consumer of the orders."""
    members = {
        "prepare": lambda self, ctx, state: prepare(ctx),
        "mutate": lambda self, ctx, prepared: None,
        "next": lambda self, ctx, prepared, result: None,
    }
    shop.workflow.consumer(subscribes=[shop.orders], **options)(type("Late", (), members))


def test_a_workflow_without_retention_keeps_everything_for_ever(db: Database) -> None:
    run = Shop().started(db, orders=3)
    worked(run)
    before = counts(db)
    run.advance(3650 * DAY)
    assert swept(run) == {}
    assert counts(db) == before


def test_done_events_are_dropped_after_their_retention_and_not_before(db: Database) -> None:
    run = silent(retention=MONTH).started(db, orders=3)
    worked(run)
    run.advance(29 * DAY)
    assert swept(run) == {}
    run.advance(2 * DAY)
    gone = swept(run)
    assert (gone["events"], gone["sessions"]) == (3, 1)
    assert counts(db) == {}


def test_the_ledger_stays_longer_than_the_events_it_was_about(db: Database) -> None:
    run = Shop(retention=MONTH).started(db, orders=2)
    worked(run)
    run.advance(31 * DAY)
    assert swept(run)["events"] == 4  # the orders, and the receipts that nobody consumes
    assert counts(db) == {"mutations": 2, "runs": 2, "sessions": 1}
    run.advance(365 * DAY)
    swept(run)
    assert counts(db) == {}


def test_an_event_stays_while_one_of_its_consumers_is_not_done_with_it(db: Database) -> None:
    shop = silent(retention=MONTH)
    waits = [True]

    joined(shop, lambda ctx: PrepareResult.nothing() if waits[0] else take_one(ctx, shop.orders))
    run = shop.started(db, orders=1)
    worked(run)
    run.advance(60 * DAY)
    swept(run)
    assert counts(db)["events"] == 1
    assert counts(db)["runs"] == 1, "the run that has done its part of it stays beside it"
    waits[0] = False
    run.publish(shop.orders, {"n": 2})
    worked(run)
    swept(run)
    assert counts(db)["events"] == 2, "an event is kept from when the last of its consumers is done with it"
    run.advance(31 * DAY)
    swept(run)
    assert counts(db) == {}


def test_an_unknown_outcome_keeps_its_run_its_event_and_its_block(db: Database) -> None:
    shop = Shop(retention=MONTH)
    shop.mail = scripted("mail", policy=ReconcilePolicy(max_attempts=1, monitor_after=()))
    shop.mail.will(Does.TIMES_OUT_BEFORE)
    shop.mail.cannot_tell(2)
    run = shop.started(db, orders=1)
    run.run_until_idle()
    (row,) = run.ledger()
    assert row.status == "indeterminate"
    before = counts(db)
    run.advance(1000 * DAY)
    swept(run)
    assert counts(db) == before
    with db.transaction() as tx:
        resolution.skip(tx, row.id, CLERK)
    run.run_until_idle()
    run.advance(31 * DAY)
    swept(run)
    assert "events" not in counts(db)
    assert counts(db)["audit"] == before.get("audit", 0) + 1
    run.advance(365 * DAY)
    swept(run, times=3)
    left = counts(db)  # nothing of the run that asked, of the one that carried it forward, of block and act
    assert set(left) <= {"audit", "audit_links"}, "the links stay, and an act of retention names what it deleted"
    assert {row.act for row in rows(db, "SELECT act FROM pipeline.audit")} == {"audit.prune"}


def in_doubt(db: Database) -> tuple[Inline, Any]:
    """A mutation that was sent a thousand days ago, and whose outcome is unknown."""
    shop = Shop(retention=MONTH)
    shop.mail = scripted("mail", policy=ReconcilePolicy(max_attempts=1, monitor_after=()))
    shop.mail.will(Does.TIMES_OUT_BEFORE)
    shop.mail.cannot_tell(2)
    run = shop.started(db)
    run.run_until_idle()
    run.advance(1000 * DAY)
    (row,) = run.ledger()
    return run, row


def test_a_skipped_event_stays_until_the_retry_of_its_run_has_committed(db: Database) -> None:
    run, row = in_doubt(db)
    with db.transaction() as tx:
        resolution.skip(tx, row.id, CLERK)
    run.sweeps.retention()
    assert counts(db)["events"] == 1, "its run waits for a retry"
    run.scheduler.schedule(["shop"])
    run.sweeps.retention()
    assert counts(db)["events"] == 1, "the run that carries it forward has begun"
    run.messages.clear()
    run.run_until_idle()


def test_a_mutation_is_kept_from_when_it_was_resolved_and_not_from_when_it_was_sent(db: Database) -> None:
    run, row = in_doubt(db)
    with db.transaction() as tx:
        resolution.did_not_happen(tx, row.id, CLERK)
    worked(run)
    swept(run)
    assert row.id in {kept.id for kept in run.ledger()}


def test_a_run_that_is_being_retried_stays_with_its_mutation(db: Database) -> None:
    fails = [True]

    def next_(*_: Any) -> None:
        if fails[0]:
            raise TransientError("not now")

    shop = Shop(next=next_, retention=Retention(done=DAY, ledger=DAY), failures=at_once(max_failures=10))
    run = shop.started(db)
    run.scheduler.schedule(["shop"])
    for _ in range(3):
        run.deliver(run.messages.popleft())
    fails[0] = False
    run.advance(10 * DAY)
    run.scheduler.schedule(["shop"])
    before = counts(db)
    run.sweeps.retention()
    assert counts(db) == before
    worked(run)
    assert [kept.status for kept in run.ledger()] == ["applied"]
    assert len(shop.mail.effects) == 1


def test_a_run_that_blocks_a_workflow_stays_until_an_operator_has_resumed_it(db: Database) -> None:
    def fail(*_: Any) -> None:
        raise AuthError("the password has changed")

    run = Shop(mutate=fail, retention=Retention(done=DAY, ledger=DAY)).started(db)
    worked(run)
    assert counts(db)["blocks"] == 1
    run.advance(1000 * DAY)
    swept(run)
    assert (counts(db)["blocks"], counts(db)["runs"]) == (1, 1)


def test_a_quarantined_event_stays_until_an_operator_has_decided(db: Database) -> None:
    def refuse(*_: Any) -> None:
        raise LogicError("no")

    shop = Shop(mutate=refuse, retention=MONTH, on_logic_error="quarantine", failures=at_once(quarantine_after=1))
    run = shop.started(db, orders=1)
    run.run_until_idle()
    assert [row.status for row in run.deliveries(shop.orders)] == ["quarantined"]
    run.advance(1000 * DAY)
    swept(run)
    assert counts(db)["events"] == 1
    (event,) = run.events(shop.orders)
    with db.transaction() as tx:
        events.skip(tx, "shop", "Send", event.id, CLERK)
    swept(run)
    assert "events" not in counts(db)


@pytest.mark.broken_on_purpose
def test_a_late_effect_stays_until_an_operator_has_acknowledged_it(db: Database) -> None:
    shop = Shop(retention=MONTH)
    shop.mail = scripted("mail", policy=ReconcilePolicy(max_attempts=1, monitor_after=(500 * DAY,)))
    shop.mail.will(Does.TIMES_OUT_BEFORE)
    shop.mail.cannot_tell(2)
    run = shop.started(db)
    run.run_until_idle()
    (row,) = run.ledger()
    with db.transaction() as tx:
        resolution.did_not_happen(tx, row.id, CLERK)
    run.run_until_idle()
    run.advance(499 * DAY)
    run.sweeps.retention()
    assert row.id in {kept.id for kept in run.ledger()}, "it is still watched"
    shop.mail.effects.append(RecordedEffect(operation="send", key=row.idempotency_key, params=row.params))
    run.advance(2 * DAY)
    run.sweeps.reconcile()
    run.advance(1000 * DAY)
    run.sweeps.retention()
    (kept,) = [kept for kept in run.ledger() if kept.id == row.id]
    assert kept.found_late_at
    assert counts(db)["audit"] >= 2, "what people did to it stays beside it"
    with db.transaction() as tx:
        resolution.acknowledge(tx, row.id, CLERK)
    swept(run)
    assert row.id not in {kept.id for kept in run.ledger()}


def test_an_archive_has_everything_that_was_dropped(db: Database) -> None:
    shop = Shop(retention=Retention(done=DAY, ledger=2 * DAY, archive=True))
    run = shop.started(db, orders=2)
    worked(run)
    runs, events_, ledger = run.runs(), run.events(shop.orders), run.ledger()
    run.advance(3 * DAY)
    swept(run)
    assert list(counts(db)) == ["archive"]
    with db.transaction() as tx:
        rows = tx.all(Statement[Any]("SELECT * FROM pipeline.archive ORDER BY kind, id"))
    kept = {(row.kind, row.id): row.content for row in rows}
    for event in events_:
        content = kept["event", str(event.id)]
        assert (content["message_id"], content["payload"]) == (event.message_id, event.payload)
        assert [delivery["status"] for delivery in content["deliveries"]] == ["consumed"]
    for done in runs:
        assert kept["run", str(done.id)]["status"] == done.status
    archived = {content["mutation"]["id"]: content["mutation"] for content in kept.values() if content.get("mutation")}
    assert {id_: content["params"] for id_, content in archived.items()} == {str(row.id): row.params for row in ledger}


def test_a_message_id_is_remembered_as_long_as_its_event_and_no_longer(db: Database) -> None:
    shop = silent(retention=MONTH)
    run = shop.started(db, orders=1)
    worked(run)
    again = [NewEvent(topic="orders", message_id="m1", payload={"n": 0})]
    with db.transaction() as tx:
        assert events.publish(tx, "shop", again).new == {}
    run.advance(31 * DAY)
    swept(run)
    with db.transaction() as tx:
        assert len(events.publish(tx, "shop", again).new) == 1
    worked(run)


def test_pruning_continues_where_it_stopped_and_begins_again_at_the_end(db: Database) -> None:
    run = silent(retention=MONTH).started(db, orders=7)
    worked(run)
    run.advance(31 * DAY)
    found = []
    for _ in range(5):
        with db.transaction() as tx:
            page = housekeeping.prune_page(tx, "events", limit=2)
        found.append((page.dropped, page.is_last))
    assert found == [(2, False), (2, False), (2, False), (1, True), (0, True)]
    swept(run)


def test_young_rows_end_a_walk_so_that_it_does_not_read_the_present(db: Database) -> None:
    shop = silent(retention=MONTH)
    run = shop.started(db, orders=4)
    worked(run)
    run.advance(31 * DAY)
    run.publish(shop.orders, *({"n": n} for n in range(4, 14)))
    worked(run)
    with db.transaction() as tx:
        assert housekeeping.prune_page(tx, "events", limit=5) == housekeeping.PrunedPage(dropped=4, is_last=True)
    swept(run)
    assert counts(db)["events"] == 10


def test_a_consumer_that_joins_from_the_start_waits_for_the_page_and_is_handed_nothing_that_is_gone(
    db: Database,
) -> None:
    shop = silent(retention=MONTH)
    run = shop.started(db, orders=3)
    worked(run)
    run.advance(31 * DAY)
    joined(shop, lambda ctx: take_one(ctx, shop.orders), start_at="earliest")
    registering = threading.Thread(target=lambda: register_workflows(db, run.registry))
    with db.transaction() as tx:
        housekeeping.prune_page(tx, "events", limit=2)
        registering.start()
        wait_for(lambda: tx.all(_WAITING), why="the consumer waits for the page")
    registering.join(timeout=30)
    with db.transaction() as tx:
        late = tx.all(
            Statement[Any]("SELECT d.* FROM pipeline.deliveries d JOIN pipeline.events e ON e.id = d.event_id")
        )
        assert len(late) == counts(db)["deliveries"] == 2  # the one event that is left, for both consumers


def test_tables_that_are_cleaned_do_not_grow_with_the_work_that_went_through_them(db: Database) -> None:
    """The same work six times over, each time let go of: the space of the first rounds is used again."""
    shop = Shop(retention=Retention(done=DAY, ledger=DAY), concurrency=8, batch=1)
    run = shop.inline(db)
    sizes = []
    for lap in range(6):
        run.publish(shop.orders, *({"n": n} for n in range(40)), prefix=f"lap {lap} ")
        worked(run)
        run.advance(2 * DAY)
        swept(run)
        with db.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("VACUUM pipeline.events, pipeline.deliveries, pipeline.runs, pipeline.mutations"))
            sizes.append(connection.scalar(_SIZE))
    assert counts(db) == {}
    assert sizes[-1] <= 1.2 * sizes[1]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"done": timedelta(minutes=5)}, "greater than or equal to 1 hour"),
        ({"ledger": DAY}, "ledger 1 day, 0:00:00 is below done for ever"),
        ({"done": 2 * DAY, "ledger": DAY}, "expected ledger >= done"),
    ],
)
def test_a_retention_that_would_forget_too_soon_is_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Retention(**given)


def test_a_wrong_retention_is_refused_with_its_value() -> None:
    with pytest.raises(DeclarationError, match="retention"):
        Workflow("shop", retention=timedelta(days=1))  # type: ignore[arg-type]
