"""An idle consumer is woken by everything it has not seen, and by nothing that it has declined."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from pipeline.domain.failures import FailureKind
from pipeline.domain.policies import Backoff, FailurePolicy
from pipeline.domain.scheduling import DueReason
from pipeline.domain.states import Phase
from pipeline.store.database import Database
from pipeline.transitions import events, registration, resolution
from tests.factories import (
    NO_PAUSE,
    SOMEBODY,
    TIMEOUT,
    a_run,
    a_workflow,
    carried_forward,
    committed,
    event_status,
    some_events,
    stopped,
)
from tests.support.transition_steps import a_handler, done, prepared, preparing, reason_due, rested, seen, started

SLOW = FailurePolicy(backoff=Backoff(base=timedelta(minutes=5), jitter=0))
QUARANTINE = NO_PAUSE.model_copy(update={"quarantine_after": 1})


def test_an_ordered_consumer_that_was_idle_behind_a_held_key_gets_the_next_event_of_that_key(db: Database) -> None:
    a_workflow(db, ordered=True, on_uncertain="contain")
    first, second = some_events(db, "m1", "m2", key="k")
    doubted = stopped(db, a_run(db, Phase.MUTATING))
    (run,) = started(db)
    run = preparing(db, run)
    assert seen(db, run, ordered=True) == [], "an event waits while a run holds another of its key"
    rested(db, run)
    assert reason_due(db) is None
    with db.transaction() as tx:
        resolution.happened(tx, doubted.mutation_id, SOMEBODY)
    committed(db, carried_forward(db, doubted))
    assert (event_status(db, first), event_status(db, second)) == ("consumed", "pending")
    assert reason_due(db) is DueReason.EVENTS


def test_an_ordered_key_continues_after_an_operator_skipped_or_quarantined_its_first_event(db: Database) -> None:
    for act in (events.skip, events.quarantine):
        spec = a_workflow(db, ordered=True, concurrency=2, failures=SLOW)
        key = f"key of {act.__name__}"
        first, second = some_events(db, f"{key} 1", f"{key} 2", key=key)
        stopped(db, preparing(db, started(db)[0]), FailureKind.TRANSIENT)
        with db.transaction() as tx:
            registration.register(tx, replace(spec, concurrency=1))
        run = preparing(db, started(db)[0])
        assert seen(db, run, ordered=True) == [], "an event waits while one before it backs off"
        rested(db, run)
        assert reason_due(db) is None
        with db.transaction() as tx:
            act(tx, "billing", "send", first, SOMEBODY)
        assert reason_due(db) is DueReason.EVENTS
        done(db, prepared(db, preparing(db, started(db)[0]), second))


@pytest.mark.parametrize("places", [3, 1])
def test_an_ordered_key_continues_after_its_first_event_was_quarantined_for_its_failures(
    db: Database, places: int
) -> None:
    """Also when a deploy sets concurrency 1 while both runs are active."""
    spec = a_workflow(db, ordered=True, concurrency=3, on_logic_error="quarantine", failures=QUARANTINE)
    woken = a_woken_run(db)
    first, second = some_events(db, "m1", "m2", key="k")
    holder = a_run(db, Phase.PREPARED)
    with db.transaction() as tx:
        registration.register(tx, replace(spec, concurrency=places))
    rested(db, preparing(db, woken))
    stopped(db, holder, FailureKind.LOGIC)
    assert event_status(db, first) == "quarantined"
    assert reason_due(db) is DueReason.EVENTS
    (run,) = started(db)
    assert seen(db, preparing(db, run), ordered=True) == [second]


def test_an_ordered_key_continues_when_its_holder_commits_while_a_prepare_declines(db: Database) -> None:
    a_workflow(db, ordered=True, concurrency=3)
    woken = a_woken_run(db)
    some_events(db, "m1", "m2", key="k")
    holder = a_run(db, Phase.EMITTING)
    woken = preparing(db, woken)
    assert seen(db, woken, ordered=True) == []
    committed(db, holder)
    rested(db, woken)
    assert reason_due(db) is DueReason.EVENTS


def test_a_woken_run_does_not_see_an_event_whose_key_is_offered_to_another(db: Database) -> None:
    a_workflow(db, ordered=True, concurrency=3)
    woken = a_woken_run(db)
    some_events(db, "m1", "m2", key="k")
    assert len(started(db)) == 1
    assert seen(db, preparing(db, woken), ordered=True) == []


def test_ordered_slices_that_cannot_start_make_no_runs(db: Database) -> None:
    a_workflow(db, concurrency=4, ordered=True)
    some_events(db, "m1", "m2", key="k")
    run = stopped(db, a_run(db, Phase.EMITTING), FailureKind.TRANSIENT)
    assert started(db, 2) == []
    db.advance_clock(timedelta(hours=1))
    committed(db, carried_forward(db, run))
    assert reason_due(db) is DueReason.EVENTS
    assert len(started(db, 2)) == 1


def test_a_slice_with_work_keeps_the_wake_time_of_another_slice(db: Database) -> None:
    a_workflow(db, concurrency=2)
    declined, wanted = some_events(db, "m1", "m2")
    first, second = (preparing(db, run) for run in started(db, 2))
    with db.transaction() as tx:
        at = tx.clock() + timedelta(minutes=5)
    rested(db, first, wake_at=at)
    done(db, prepared(db, second, wanted))
    assert a_handler(db).wake_at == at
    db.advance_clock(timedelta(minutes=6))
    assert (reason_due(db), event_status(db, declined)) == (DueReason.WAKE, "pending")


def test_of_two_wake_times_of_slices_the_earlier_counts(db: Database) -> None:
    a_workflow(db, concurrency=2)
    some_events(db, "m1", "m2")
    first, second = (preparing(db, run) for run in started(db, 2))
    with db.transaction() as tx:
        now = tx.clock()
    rested(db, first, wake_at=now + timedelta(minutes=5))
    rested(db, second, wake_at=now + timedelta(minutes=9))
    assert a_handler(db).wake_at == now + timedelta(minutes=5)


def test_a_woken_run_keeps_the_wake_time_that_a_slice_set_meanwhile(db: Database) -> None:
    a_workflow(db, concurrency=3)
    woken = a_woken_run(db)
    some_events(db, "m1")
    slice_run = preparing(db, started(db)[0])
    woken = preparing(db, woken)
    with db.transaction() as tx:
        at = tx.clock() + timedelta(minutes=5)
    assert seen(db, woken) == [], "the event is offered to the slice"
    rested(db, slice_run, wake_at=at)
    rested(db, woken)
    assert a_handler(db).wake_at == at


def test_a_consumer_whose_time_has_come_gets_a_run_that_sees_everything_before_any_slice(db: Database) -> None:
    """It waits for slices that are still being chosen from, and for nothing that is chosen."""
    a_workflow(db, concurrency=4)
    declined, first, second = some_events(db, "m1", "m2", "m3")
    resting, choosing, chosen = (preparing(db, run) for run in started(db, 3))
    with db.transaction() as tx:
        at = tx.clock() + timedelta(minutes=5)
    rested(db, resting, wake_at=at)
    prepared(db, chosen, second)
    (new,) = some_events(db, "m4")
    db.advance_clock(timedelta(minutes=6))
    assert (reason_due(db), started(db)) == (DueReason.EVENTS, [])
    prepared(db, choosing, first)
    (woken,) = started(db, 2)
    assert woken.offered is None
    assert seen(db, preparing(db, woken)) == [declined, new]
    assert started(db) == [], "nobody else is offered what it chooses from"


def test_events_that_were_declined_do_not_keep_new_ones_from_being_offered(db: Database) -> None:
    a_workflow(db, concurrency=2)
    some_events(db, "m1", "m2")
    for run in started(db, 2):
        rested(db, preparing(db, run))
    assert reason_due(db) is None, "declined events alone are no reason to start"
    (new,) = some_events(db, "m3")
    assert reason_due(db) is DueReason.EVENTS
    offered = started(db, 2)
    assert [new] in [run.offered for run in offered]
    for run in offered:
        rested(db, preparing(db, run))
    assert reason_due(db) is None, "no busy loop"


def test_an_event_handed_back_by_a_slice_wakes_a_consumer_whose_woken_run_found_nothing(db: Database) -> None:
    a_workflow(db, concurrency=4, batch=2)
    woken = a_woken_run(db)
    first, second = some_events(db, "m1", "m2")
    slice_run = preparing(db, started(db)[0])
    woken = preparing(db, woken)
    assert (seen(db, woken), slice_run.offered) == ([], [first, second])
    prepared(db, slice_run, first)
    rested(db, woken)
    assert reason_due(db) is DueReason.EVENTS
    assert [run.offered for run in started(db)] == [[second]]


def test_an_event_that_backs_off_is_not_lost_when_a_deploy_sets_concurrency_one(db: Database) -> None:
    spec = a_workflow(db, concurrency=2, failures=SLOW)
    (backing_off,) = some_events(db, "m1")
    stopped(db, a_run(db, Phase.PREPARED), FailureKind.TRANSIENT)
    (other,) = some_events(db, "m2")
    with db.transaction() as tx:
        registration.register(tx, replace(spec, concurrency=1))
    run = preparing(db, started(db)[0])
    assert seen(db, run) == [other]
    rested(db, run)
    assert reason_due(db) is None
    db.advance_clock(timedelta(minutes=6))
    assert reason_due(db) is DueReason.EVENTS
    assert seen(db, preparing(db, started(db)[0])) == [backing_off, other]


@pytest.mark.parametrize("somebody_rested", [False, True])
def test_a_consumer_is_not_due_for_an_event_that_backs_off(db: Database, somebody_rested: bool) -> None:
    a_workflow(db, concurrency=2, failures=SLOW)
    woken = a_woken_run(db)
    some_events(db, "m1")
    run = a_run(db, Phase.PREPARED)
    if somebody_rested:
        rested(db, preparing(db, woken))
    stopped(db, run, FailureKind.TRANSIENT)
    assert reason_due(db) is None
    db.advance_clock(timedelta(minutes=6))
    assert reason_due(db) is DueReason.EVENTS


def test_an_event_released_after_a_doubt_wakes_a_consumer_that_became_idle_meanwhile(db: Database) -> None:
    a_workflow(db, on_uncertain="contain")
    (event,) = some_events(db, "m1")
    doubted = stopped(db, a_run(db, Phase.MUTATING))
    rested(db, preparing(db, started(db)[0]))
    assert reason_due(db) is None
    db.advance_clock(TIMEOUT)
    with db.transaction() as tx:
        resolution.did_not_happen(tx, doubted.mutation_id, SOMEBODY)
    assert (reason_due(db), event_status(db, event)) == (DueReason.EVENTS, "pending")


def test_an_event_that_an_operator_releases_wakes_a_consumer_that_became_idle_meanwhile(db: Database) -> None:
    a_workflow(db)
    aside, other = some_events(db, "m1", "m2")
    with db.transaction() as tx:
        events.quarantine(tx, "billing", "send", aside, SOMEBODY)
    run = preparing(db, started(db)[0])
    assert seen(db, run) == [other]
    rested(db, run)
    assert reason_due(db) is None
    with db.transaction() as tx:
        events.release(tx, "billing", "send", aside, SOMEBODY)
    assert reason_due(db) is DueReason.EVENTS


def test_an_ordered_consumer_that_waits_for_approval_gets_the_next_event_of_the_key_afterwards(db: Database) -> None:
    a_workflow(db, ordered=True)
    first, second = some_events(db, "m1", "m2", key="k")
    waiting = a_run(db, Phase.MUTATING, needs_approval=True)
    assert started(db) == []
    with db.transaction() as tx:
        resolution.reject(tx, waiting.mutation_id, SOMEBODY)
    committed(db, carried_forward(db, waiting))
    assert (event_status(db, first), reason_due(db)) == ("skipped", DueReason.EVENTS)
    run = preparing(db, started(db)[0])
    assert seen(db, run, ordered=True) == [second]
    done(db, prepared(db, run, second))


def a_woken_run(db: Database) -> Any:
    """A run that sees everything, as one that its own handler asked for."""
    (run,) = started(db, is_unsliced=True)
    return run
