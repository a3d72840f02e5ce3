"""Events between two connections: reserved once, never missed, never passed over."""

from typing import Any

import pytest
from sqlalchemy import text

from pipeline.domain.errors import IllegalTransitionError, InvalidInputError, ReservationError
from pipeline.domain.states import EventId, Phase
from pipeline.domain.values import HandlerSpec, NewEvent, PreparedRun, Reservation, TopicSpec, WorkflowSpec
from pipeline.domain.workflows import StartAt
from pipeline.store.database import Database, Statement, Transaction
from pipeline.store.reads import work
from pipeline.transitions import events, registration, runs, starts, workflows
from tests.factories import IN, SOMEBODY, a_run, a_workflow, committed, event_status, held, some_events
from tests.support.concurrent_transactions import meanwhile, raced, wait_until_blocked_by
from tests.support.table_reads import one
from tests.support.transition_steps import watermark_at_least

_TWIN = text("""
INSERT INTO pipeline.runs (workflow, handler_id, session_id, phase, fence, lease_expires_at)
SELECT workflow, handler_id, session_id, phase, fence, lease_expires_at FROM pipeline.runs WHERE id = :id
""")


def test_an_event_is_reserved_by_the_run_that_saw_it_or_offered_to_another_never_both(db: Database) -> None:
    a_workflow(db)
    first, second = some_events(db, "m1", "m2")
    alone = a_run(db, Phase.PREPARING)
    a_workflow(db, concurrency=2)
    ended = raced(
        db,
        lambda tx: runs.finish_prepare(tx, [reserving(alone, first)]).only(),
        lambda tx: starts.start(tx, "billing", "send", count=1).runs,
    )
    (sliced,) = ended.result()
    assert (event_status(db, first), sliced.offered) == ("reserved", [second])


def test_an_offer_that_commits_first_refuses_the_run_that_saw_the_event(db: Database) -> None:
    a_workflow(db)
    (event,) = some_events(db, "m1")
    alone = a_run(db, Phase.PREPARING)
    a_workflow(db, concurrency=2)
    ended = raced(
        db,
        lambda tx: starts.start(tx, "billing", "send"),
        lambda tx: runs.finish_prepare(tx, [reserving(alone, event)]).only(),
    )
    with pytest.raises(ReservationError, match="offered to another run"):
        ended.result()


def test_two_runs_of_one_cohort_cannot_reserve_one_event(db: Database) -> None:
    """Two runs that both run alone exist only while a released run and its successor overlap: built raw."""
    a_workflow(db)
    (event,) = some_events(db, "m1")
    first = a_run(db, Phase.PREPARING)
    with db.transaction() as tx:
        tx.execute(_TWIN, id=first.id)
        twin = tx.first(Statement[Any]("SELECT * FROM pipeline.runs WHERE id <> :id"), id=first.id)
        assert twin is not None
        landing = runs.finish_prepare(tx, [reserving(first, event), reserving(twin, event)])
    assert len(landing.updated) == 1
    (refused,) = landing.refused.values()
    assert isinstance(refused, ReservationError)
    assert one(db, "SELECT run_id FROM pipeline.deliveries").run_id == landing.updated[0].id


def test_a_skip_that_commits_first_refuses_the_run_that_wanted_the_event(db: Database) -> None:
    a_workflow(db)
    (event,) = some_events(db, "m1")
    run = a_run(db, Phase.PREPARING)
    ended = raced(
        db,
        lambda tx: events.skip(tx, "billing", "send", event, SOMEBODY),
        lambda tx: runs.finish_prepare(tx, [reserving(run, event)]).only(),
    )
    with pytest.raises(ReservationError, match="it is skipped"):
        ended.result()


def test_a_reservation_that_commits_first_refuses_the_operators_skip(db: Database) -> None:
    a_workflow(db)
    (event,) = some_events(db, "m1")
    run = a_run(db, Phase.PREPARING)
    ended = raced(
        db,
        lambda tx: runs.finish_prepare(tx, [reserving(run, event)]).only(),
        lambda tx: events.skip(tx, "billing", "send", event, SOMEBODY),
    )
    with pytest.raises(IllegalTransitionError, match="it is reserved"):
        ended.result()


def test_of_two_publishers_of_one_message_id_one_writes(db: Database) -> None:
    a_workflow(db)
    event = NewEvent(topic=IN, message_id="m1", payload={"from": "either"})
    ended = raced(
        db,
        lambda tx: events.publish(tx, "billing", [event]),
        lambda tx: events.publish(tx, "billing", [event]),
    )
    assert ended.result().new == {}
    assert one(db, "SELECT count(*) AS n FROM pipeline.deliveries").n == 1


def test_an_event_committed_late_by_a_slow_publisher_is_not_missed_by_an_idle_consumer(db: Database) -> None:
    """The slow publisher's id is older than events the consumer has long seen; its commit is not."""
    a_workflow(db)
    with db.transaction() as slow:
        events.publish(slow, "billing", [NewEvent(topic=IN, message_id="slow", payload={})])
        some_events(db, "fast")
        run = a_run(db, Phase.PREPARING)
        with db.transaction() as tx:
            assert [row.message_id for row in work.reservable_events(tx, run, IN)] == ["fast"]
            rested = runs.finish_prepare(tx, [PreparedRun(lease=held(run))]).only()
        committed(db, rested)
        assert not has_unseen(db), "what could be seen was seen"
    assert has_unseen(db), "the slow event came after"
    run = a_run(db, Phase.PREPARING)
    with db.transaction() as tx:
        assert [row.message_id for row in work.reservable_events(tx, run, IN)] == ["slow", "fast"]


def test_an_event_committed_between_claim_and_idle_snapshot_is_not_missed(db: Database) -> None:
    a_workflow(db)
    run = a_run(db, Phase.PREPARING)
    some_events(db, "m1")
    with db.transaction() as tx:
        runs.finish_prepare(tx, [PreparedRun(lease=held(run))]).only()
    assert has_unseen(db)


def test_a_watermark_never_passes_an_event_that_a_slow_publisher_has_not_committed(db: Database) -> None:
    a_workflow(db)
    with db.transaction() as slow:
        published = events.publish(slow, "billing", [NewEvent(topic=IN, message_id="slow", payload={})])
        (slow_id,) = published.new.values()
        some_events(db, "fast")
        a_run(db, Phase.COMMITTED)
        for _ in range(3):
            with db.transaction() as tx:
                workflows.raise_watermarks(tx)
        assert watermark(db) < slow_id
    assert a_run(db, Phase.COMMITTED).event_ids == [slow_id]
    watermark_at_least(db, slow_id)


def test_a_watermark_waits_for_the_very_first_publisher_as_well(db: Database) -> None:
    """No transaction began after the slow one: the newest visible id is its own."""
    a_workflow(db)
    with db.transaction() as slow:
        published = events.publish(slow, "billing", [NewEvent(topic=IN, message_id="slow", payload={})])
        (slow_id,) = published.new.values()
        for _ in range(3):
            with db.transaction() as tx:
                workflows.raise_watermarks(tx)
            assert watermark(db) < slow_id
    assert has_unseen(db)
    assert a_run(db, Phase.PREPARED).event_ids == [slow_id]


def test_watermarks_cannot_be_raised_by_a_transaction_that_has_written_already(db: Database) -> None:
    """Its own id would be older than the horizon it notes, and prove nothing about publishers in between."""
    a_workflow(db)
    with db.transaction() as tx:
        events.publish(tx, "billing", [NewEvent(topic=IN, message_id="m1", payload={})])
        with pytest.raises(InvalidInputError, match="first act"):
            workflows.raise_watermarks(tx)


def test_a_consumer_that_joins_from_the_start_gets_the_event_a_publisher_had_not_committed(db: Database) -> None:
    a_workflow(db)
    some_events(db, "before")
    with meanwhile(db, join_from_the_start) as begin:
        with db.transaction() as slow:
            events.publish(slow, "billing", [NewEvent(topic=IN, message_id="during", payload={})])
            ended = begin()
            wait_until_blocked_by(db, slow)
        ended.result(timeout=60)
    some_events(db, "after")
    run = a_run(db, Phase.PREPARING, handler="audit")
    with db.transaction() as tx:
        assert [row.message_id for row in work.reservable_events(tx, run, IN)] == ["before", "during", "after"]


def join_from_the_start(tx: Transaction) -> None:
    spec = WorkflowSpec(
        name="billing",
        topics=(TopicSpec(name=IN),),
        handlers=(
            HandlerSpec(name="send", subscribes=(IN,)),
            HandlerSpec(name="audit", subscribes=(IN,), start_at=StartAt.EARLIEST),
        ),
    )
    registration.register(tx, spec)


def reserving(run: Any, *ids: EventId) -> PreparedRun:
    return PreparedRun(lease=held(run), reservations=(Reservation(topic=IN, ids=ids),))


def has_unseen(db: Database) -> bool:
    with db.transaction() as tx:
        (facts,) = [row for row in work.handler_facts(tx, "billing") if row.name == "send"]
    return bool(facts.has_unseen)


def watermark(db: Database) -> int:
    return int(one(db, "SELECT low_watermark AS w FROM pipeline.handlers WHERE name = 'send'").w)
