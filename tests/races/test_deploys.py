"""A deploy that changes subscriptions, beside publishers and workers of its own and of other workflows."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from threading import Event
from typing import Any

import pytest

from pipeline.background import backfiller, rescuer
from pipeline.domain.policies import Retention
from pipeline.domain.states import Phase
from pipeline.domain.values import HandlerSpec, NewEvent, PreparedRun, RunOutput, WorkflowSpec
from pipeline.domain.workflows import StartAt
from pipeline.store.database import Database, Transaction
from pipeline.store.reads import work
from pipeline.transitions import events, housekeeping, registration, runs
from pipeline.workflows.registration import register_workflows
from pipeline.workflows.registry import spec_of
from tests.factories import IN, OUT, a_run, a_workflow, claimed_next, committed, held, some_events
from tests.support.concurrent_transactions import meanwhile, raced, wait_until_blocked_by
from tests.support.scripted_consumers import Shop
from tests.support.table_reads import one

SHORT = timedelta(seconds=5)  #: a publisher that has to wait for a deploy fails by then


def joining(spec: WorkflowSpec, **options: Any) -> WorkflowSpec:
    """The next code of a workflow: one more consumer, from the start."""
    late = HandlerSpec(name="late", subscribes=(IN,), start_at=StartAt.EARLIEST, **options)
    return replace(spec, handlers=(*spec.handlers, late), fingerprint="next")


def deployed(db: Database, spec: WorkflowSpec, *, page_size: int) -> None:
    with db.transaction() as tx:
        registration.register(tx, spec, page_size=page_size)


def published(tx: Transaction, workflow: str, *message_ids: str) -> None:
    events.publish(tx, workflow, [NewEvent(topic=IN, message_id=each, payload={}) for each in message_ids])


def without_waiting(db: Database, act: Callable[[Transaction], object]) -> None:
    with db.transaction() as tx:
        tx.set_lock_timeout(SHORT)
        act(tx)


def delivered_to_late(db: Database) -> list[str]:
    sql = """SELECT array_agg(e.message_id ORDER BY e.id) AS ids FROM pipeline.deliveries d
             JOIN pipeline.handlers h ON h.id = d.handler_id AND h.name = 'late'
             JOIN pipeline.events e ON e.id = d.event_id"""
    return one(db, sql).ids or []


def test_a_deploy_with_a_backfill_holds_no_publisher_and_no_commit_of_another_workflow(db: Database) -> None:
    spec = a_workflow(db)
    some_events(db, "m1", "m2", "m3")
    a_workflow(db, "shop")
    some_events(db, "s1", workflow="shop")
    run = a_run(db, Phase.EMITTING, workflow="shop")
    made = NewEvent(topic=OUT, message_id="made", payload={})
    with db.transaction() as deploy:
        registration.register(deploy, joining(spec))
        without_waiting(db, lambda tx: published(tx, "shop", "s2"))
        without_waiting(db, lambda tx: runs.commit(tx, [RunOutput(lease=held(run), events=(made,))]).only())


def test_an_open_publisher_and_a_deploy_of_its_workflow_hold_no_commit_of_another(db: Database) -> None:
    spec = a_workflow(db)
    a_workflow(db, "shop")
    some_events(db, "s1", workflow="shop")
    run = a_run(db, Phase.EMITTING, workflow="shop")
    made = NewEvent(topic=OUT, message_id="made", payload={})
    with meanwhile(db, lambda tx: registration.register(tx, joining(spec))) as deploy:
        with db.transaction() as publisher:
            published(publisher, "billing", "m1")
            ended = deploy()
            wait_until_blocked_by(db, publisher)
            without_waiting(db, lambda tx: published(tx, "shop", "s2"))
            without_waiting(db, lambda tx: runs.commit(tx, [RunOutput(lease=held(run), events=(made,))]).only())
        ended.result(timeout=60)
    assert delivered_to_late(db) == ["m1"]


def test_a_commit_that_publishes_nothing_does_not_wait_for_a_deploy_of_its_own_workflow(db: Database) -> None:
    spec = a_workflow(db)
    some_events(db, "m1")
    run = a_run(db, Phase.EMITTING)
    with meanwhile(db, lambda tx: registration.register(tx, joining(spec))) as deploy:
        with db.transaction() as publisher:
            published(publisher, "billing", "m2")
            ended = deploy()
            wait_until_blocked_by(db, publisher)
            without_waiting(db, lambda tx: runs.commit(tx, [RunOutput(lease=held(run))]).only())
        ended.result(timeout=60)


def test_a_publisher_that_waited_for_a_deploy_delivers_to_the_consumer_that_it_added(db: Database) -> None:
    spec = a_workflow(db)
    raced(db, lambda tx: registration.register(tx, joining(spec)), lambda tx: published(tx, "billing", "m1")).result()
    assert delivered_to_late(db) == ["m1"]


def test_a_commit_that_waited_for_a_deploy_delivers_to_the_consumer_that_it_added(db: Database) -> None:
    spec = a_workflow(db)
    some_events(db, "m1")
    run = a_run(db, Phase.EMITTING)
    made = NewEvent(topic=IN, message_id="made", payload={})
    raced(
        db,
        lambda tx: registration.register(tx, joining(spec)),
        lambda tx: runs.commit(tx, [RunOutput(lease=held(run), events=(made,))]).only(),
    ).result()
    assert delivered_to_late(db) == ["m1", "made"]


def test_a_backfill_is_continued_page_by_page_and_delivers_every_event_once(db: Database) -> None:
    spec = a_workflow(db)
    some_events(db, "m5", "m2", "m4", "m1", "m3")
    deployed(db, joining(spec), page_size=2)
    some_events(db, "m0")  # sorts before the position, and is delivered by its publisher
    assert delivered_to_late(db) == ["m2", "m1", "m0"]
    backfiller.continue_backfills(db)
    assert delivered_to_late(db) == ["m5", "m2", "m4", "m1", "m3", "m0"]
    with db.transaction() as tx:
        assert work.open_backfills(tx) == []
        assert registration.backfill_page(tx, "billing") is False


@pytest.mark.parametrize("goes_on", ["worker", "sweep"])
def test_a_backfill_that_a_crash_interrupted_is_continued_by_the_next_worker_or_sweep(
    db: Database, goes_on: str
) -> None:
    shop = Shop(batch=1)
    run = shop.started(db, orders=5)
    shop.workflow.effect(shop.orders, name="late", start_at="earliest")(lambda ctx, event: None)
    with db.transaction() as tx:  # a worker that died after the first page
        registration.register(tx, spec_of(shop.workflow, tx.clock()), page_size=2)
    if goes_on == "worker":
        register_workflows(db, run.registry)
    else:
        run.sweeps.backfill()
    assert len(delivered_to_late(db)) == 5


def test_publishers_that_run_beside_a_backfill_lose_no_event_and_deliver_none_twice(db: Database) -> None:
    spec = a_workflow(db)
    some_events(db, *(f"old-{number}" for number in range(60)))
    ended = Event()

    def publish(name: str) -> int:
        number = 0
        while not ended.is_set() or number < 20:
            number += 1
            with db.transaction() as tx:
                published(tx, "billing", f"{name}-{number}", f"a{name}-{number}")
        return number * 2

    with ThreadPoolExecutor(max_workers=2) as pool:
        publishers = [pool.submit(publish, name) for name in ("left", "right")]
        try:
            deployed(db, joining(spec), page_size=3)
            is_open = True
            while is_open:
                with db.transaction() as tx:
                    is_open = registration.backfill_page(tx, "billing", page_size=3)
        finally:
            ended.set()
        written = 60 + sum(publisher.result(timeout=60) for publisher in publishers)
    assert len(delivered_to_late(db)) == len(set(delivered_to_late(db))) == written


def test_an_ordered_consumer_takes_no_event_of_a_key_before_the_earlier_ones_are_backfilled(db: Database) -> None:
    spec = a_workflow(db)
    some_events(db, "m9", "m5", key="a")
    deployed(db, joining(spec, ordered=True), page_size=1)
    some_events(db, "m7", key="a")
    assert delivered_to_late(db) == ["m5", "m7"]
    run = a_run(db, Phase.PREPARING, handler="late")
    with db.transaction() as tx:
        assert list(work.reservable_events(tx, run, IN, ordered=True)) == []
        assert not next(row for row in work.handler_facts(tx, "billing") if row.name == "late").has_unseen
    committed(db, claimed_next(db, _prepared_with_nothing(db, run)))
    backfiller.continue_backfills(db)
    run = a_run(db, Phase.PREPARING, handler="late")
    with db.transaction() as tx:
        offered = work.reservable_events(tx, run, IN, ordered=True)
        assert [row.message_id for row in offered][:1] == ["m9"]


def test_an_ordered_consumer_that_prepared_while_a_backfill_ended_is_due_again(db: Database) -> None:
    spec = a_workflow(db)
    some_events(db, "m1", "m2", key="a")
    deployed(db, joining(spec, ordered=True), page_size=1)
    is_open = True
    while is_open:
        run = a_run(db, Phase.PREPARING, handler="late")
        with db.transaction() as tx:
            assert list(work.reservable_events(tx, run, IN, ordered=True)) == []
            registration.backfill_page(tx, "billing", page_size=1)
            is_open = bool(work.open_backfills(tx))
        committed(db, claimed_next(db, _prepared_with_nothing(db, run)))
    with db.transaction() as tx:
        assert next(row for row in work.handler_facts(tx, "billing") if row.name == "late").has_unseen


def _prepared_with_nothing(db: Database, run: Any) -> Any:
    with db.transaction() as tx:
        return runs.finish_prepare(tx, [PreparedRun(lease=held(run))]).only()


def test_retention_keeps_what_a_consumer_is_yet_to_be_handed(db: Database) -> None:
    kept = Retention(done=timedelta(hours=1), ledger=timedelta(hours=1))
    spec = a_workflow(db, retention=kept)
    some_events(db, "m1", "m2")
    a_run(db, Phase.COMMITTED)
    a_run(db, Phase.COMMITTED)
    rescuer.recover(db)
    db.advance_clock(timedelta(days=1))
    deployed(db, joining(spec), page_size=1)
    with db.transaction() as tx:
        assert housekeeping.prune_page(tx, "events").dropped == 0
    backfiller.continue_backfills(db)
    assert delivered_to_late(db) == ["m1", "m2"]
