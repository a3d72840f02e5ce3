"""Which events a run is shown, when a consumer is due, and how many runs may be active."""

from datetime import timedelta
from typing import Any, Protocol

import pytest

from pipeline.domain.errors import ReservationError
from pipeline.domain.failures import FailureKind
from pipeline.domain.policies import Backoff, FailurePolicy
from pipeline.domain.states import EventId, Phase, PhaseTask
from pipeline.domain.values import NewEvent, PreparedRun, Reservation
from pipeline.store.database import Database, Statement
from pipeline.store.reads import work
from pipeline.store.schema import RunRow
from pipeline.transitions import events, runs, starts
from tests.factories import (
    IN,
    LEASE,
    OUT,
    SOMEBODY,
    a_delivery,
    a_run,
    a_workflow,
    committed,
    event_status,
    held,
    some_events,
    stopped,
)
from tests.support.table_reads import one, rows
from tests.support.transition_steps import watermark_at_least


class UpdatesRow(Protocol):
    """How many updates of deliveries this session made, and how many of them wrote no index."""

    number: int
    without_index: int


_UPDATES = Statement[UpdatesRow]("""
SELECT n_tup_upd AS number, n_tup_hot_upd AS without_index FROM pg_stat_xact_user_tables
WHERE relid = 'pipeline.deliveries'::regclass
""")


def test_a_workflow_with_concurrency_one_shows_its_run_everything_pending(db: Database) -> None:
    a_workflow(db)
    ids = some_events(db, "m1", "m2", "m3")
    run = a_run(db, Phase.PREPARING)
    with db.transaction() as tx:
        assert [row.id for row in work.reservable_events(tx, run, IN)] == ids
        assert starts.start(tx, "billing", "send", count=5).hold_reason == "full"


def test_runs_of_a_parallel_workflow_get_slices_that_do_not_overlap(db: Database) -> None:
    a_workflow(db, concurrency=4, batch=2)
    ids = some_events(db, *[f"m{n}" for n in range(7)])
    with db.transaction() as tx:
        first = starts.start(tx, "billing", "send", count=2).runs
        second = starts.start(tx, "billing", "send", count=9).runs
    slices = [run.offered for run in (*first, *second)]
    assert slices == [ids[0:2], ids[2:4], ids[4:6], ids[6:7]]
    with db.transaction() as tx:
        assert starts.start(tx, "billing", "send").hold_reason == "full"
        shown = [[row.id for row in work.reservable_events(tx, run, IN)] for run in (*first, *second)]
    assert shown == slices


def test_offering_events_without_a_key_writes_no_index(db: Database) -> None:
    a_workflow(db, concurrency=2, batch=10)
    some_events(db, *[f"m{n}" for n in range(20)])
    with db.transaction() as tx:
        (before,) = tx.all(_UPDATES)
        assert len(starts.start(tx, "billing", "send", count=2).runs) == 2
        (after,) = tx.all(_UPDATES)
    assert (after.number - before.number, after.without_index - before.without_index) == (20, 20)


def test_a_run_cannot_reserve_what_was_offered_to_another(db: Database) -> None:
    a_workflow(db, concurrency=2)
    mine, theirs = some_events(db, "m1", "m2")
    with db.transaction() as tx:
        cohort = starts.start(tx, "billing", "send", count=2).runs
        (first,) = runs.claim(tx, PhaseTask.PREPARE, [cohort[0].id], lease_duration=LEASE, worker="w").claimed
        choice = PreparedRun(lease=held(first), reservations=(Reservation(topic=IN, ids=(mine, theirs)),))
        landing = runs.finish_prepare(tx, [choice])
    with pytest.raises(ReservationError, match=f"event {theirs}: it was offered to another run"):
        landing.only()
    assert event_status(db, mine) == "pending"


def test_events_that_a_slice_did_not_take_are_offered_again(db: Database) -> None:
    a_workflow(db, concurrency=2, batch=3)
    ids = some_events(db, "m1", "m2", "m3")
    with db.transaction() as tx:
        (run,) = starts.start(tx, "billing", "send", count=2).runs
        (run,) = runs.claim(tx, PhaseTask.PREPARE, [run.id], lease_duration=LEASE, worker="w").claimed
        runs.finish_prepare(tx, [reserving(run, ids[1])]).only()
        (other,) = starts.start(tx, "billing", "send").runs
    assert other.offered == [ids[0], ids[2]]


def test_events_of_one_key_are_offered_to_one_run_at_a_time_in_order(db: Database) -> None:
    a_workflow(db, concurrency=8, ordered=True)
    a1, a2 = some_events(db, "a1", "a2", key="a")
    (b1,) = some_events(db, "b1", key="b")
    (none1, none2) = some_events(db, "n1", "n2")
    with db.transaction() as tx:
        cohort = starts.start(tx, "billing", "send", count=8).runs
        assert [run.offered for run in cohort] == [[a1], [b1], [none1], [none2]]
        assert starts.start(tx, "billing", "send", count=8).runs == (), "a2 waits for a1"
    with db.transaction() as tx:
        run: RunRow
        (run,) = runs.claim(tx, PhaseTask.PREPARE, [cohort[0].id], lease_duration=LEASE, worker="w").claimed
        run = runs.finish_prepare(tx, [reserving(run, a1)]).only()
        (run,) = runs.claim(tx, PhaseTask.MUTATE, [run.id], lease_duration=LEASE, worker="w").claimed
        run = runs.no_mutation(tx, [held(run)]).only()
        assert starts.start(tx, "billing", "send", count=8).runs == (), "a1 is reserved"
    committed(db, run)
    with db.transaction() as tx:
        (run,) = starts.start(tx, "billing", "send", count=8).runs
    assert run.offered == [a2]


def test_an_ordered_key_waits_while_its_first_event_backs_off(db: Database) -> None:
    policy = FailurePolicy(backoff=Backoff(base=timedelta(minutes=5), jitter=0))
    a_workflow(db, concurrency=8, ordered=True, failures=policy)
    first, _ = some_events(db, "a1", "a2", key="a")
    (other,) = some_events(db, "b1", key="b")
    with db.transaction() as tx:
        cohort = starts.start(tx, "billing", "send", count=1).runs
        (run,) = runs.claim(tx, PhaseTask.PREPARE, [cohort[0].id], lease_duration=LEASE, worker="w").claimed
    stopped(db, run, FailureKind.TRANSIENT)
    with db.transaction() as tx:
        assert [run.offered for run in starts.start(tx, "billing", "send", count=8).runs] == [[other]]
    db.advance_clock(timedelta(minutes=6))
    with db.transaction() as tx:
        assert [run.offered for run in starts.start(tx, "billing", "send", count=8).runs] == [[first]]


def test_a_consumer_is_idle_after_an_empty_prepare_until_an_unseen_event_arrives(db: Database) -> None:
    a_workflow(db)
    some_events(db, "m1")
    assert is_unseen(db)
    decline_everything(db)
    assert not is_unseen(db)
    some_events(db, "m2")
    assert is_unseen(db)
    decline_everything(db)
    assert not is_unseen(db)


def test_a_released_event_wakes_an_idle_consumer(db: Database) -> None:
    a_workflow(db, concurrency=2)
    some_events(db, "m1", "m2")
    with db.transaction() as tx:
        both = starts.start(tx, "billing", "send", count=2).runs
        first, second = runs.claim(
            tx, PhaseTask.PREPARE, [run.id for run in both], lease_duration=LEASE, worker="w"
        ).claimed
        runs.finish_prepare(tx, [PreparedRun(lease=held(second))]).only()
    assert not is_unseen(db), "one event is offered, the other was declined"
    stopped(db, first, FailureKind.CRASH)
    assert is_unseen(db)


def test_a_slice_that_was_declined_is_offered_again_with_the_next_new_event(db: Database) -> None:
    a_workflow(db, concurrency=2, batch=2)
    (old,) = some_events(db, "m1")
    with db.transaction() as tx:
        (run,) = starts.start(tx, "billing", "send").runs
        (run,) = runs.claim(tx, PhaseTask.PREPARE, [run.id], lease_duration=LEASE, worker="w").claimed
        runs.finish_prepare(tx, [PreparedRun(lease=held(run))]).only()
    assert a_delivery(db, old).declined
    assert not is_unseen(db)
    (new,) = some_events(db, "m2")
    assert is_unseen(db)
    with db.transaction() as tx:
        (run,) = starts.start(tx, "billing", "send").runs
    assert run.offered == [old, new]


def test_a_prepare_may_set_a_wake_time_which_work_clears(db: Database) -> None:
    a_workflow(db)
    run = a_run(db, Phase.PREPARING)
    with db.transaction() as tx:
        at = tx.clock() + timedelta(minutes=5)
        committed_run = runs.finish_prepare(tx, [PreparedRun(lease=held(run), wake_at=at)]).only()
    assert handler(db).wake_at == at
    committed(db, committed_run)
    some_events(db, "m1")
    a_run(db, Phase.PREPARED)
    assert (handler(db).wake_at, handler(db).idle_snapshot) == (None, None)


def test_a_watermark_rises_behind_done_deliveries_and_never_over_open_ones(db: Database) -> None:
    a_workflow(db)
    some_events(db, "m1", "m2")
    a_run(db, Phase.COMMITTED)
    waiting = a_run(db, Phase.PREPARED).event_ids[0]
    watermark_at_least(db, waiting - 1)
    assert handler(db).low_watermark == waiting - 1


def test_a_released_event_is_found_below_the_watermark(db: Database) -> None:
    a_workflow(db)
    aside, _ = some_events(db, "m1", "m2")
    with db.transaction() as tx:
        events.quarantine(tx, "billing", "send", aside, SOMEBODY)
    a_run(db, Phase.COMMITTED)
    watermark_at_least(db, aside)
    with db.transaction() as tx:
        events.release(tx, "billing", "send", aside, SOMEBODY)
    assert is_unseen(db)
    assert a_run(db, Phase.PREPARED).event_ids == [aside]


def test_a_producer_is_not_started_twice(db: Database) -> None:
    a_workflow(db, concurrency=8)
    with db.transaction() as tx:
        assert len(starts.start(tx, "billing", "poll").runs) == 1
        assert starts.start(tx, "billing", "poll").runs == ()


def test_provenance_names_the_root_events_of_published_events(db: Database) -> None:
    a_workflow(db)
    (root,) = some_events(db, "m1")
    run = a_run(db, Phase.EMITTING)
    committed(db, run, published=[NewEvent(topic=OUT, message_id="r1", payload={})])
    (event,) = rows(db, "SELECT * FROM pipeline.events WHERE topic = :topic", topic=OUT)
    assert (event.caused_by, event.created_by_run_id) == ([root], run.id)


def reserving(run: Any, *ids: EventId) -> PreparedRun:
    return PreparedRun(lease=held(run), reservations=(Reservation(topic=IN, ids=ids),))


def decline_everything(db: Database) -> None:
    """A run of the consumer that sees everything and takes nothing."""
    run = a_run(db, Phase.PREPARING)
    with db.transaction() as tx:
        done = runs.finish_prepare(tx, [PreparedRun(lease=held(run))]).only()
    committed(db, done)


def is_unseen(db: Database) -> bool:
    with db.transaction() as tx:
        (facts,) = [row for row in work.handler_facts(tx, "billing") if row.name == "send"]
    return bool(facts.has_unseen)


def handler(db: Database) -> Any:
    return one(db, "SELECT * FROM pipeline.handlers WHERE name = 'send'")
