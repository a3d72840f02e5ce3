"""Replacing a payload: only while no run can have seen it, and then every run sees the new one."""

import pytest

from pipeline.domain.scheduling import DueReason
from pipeline.domain.states import Phase
from pipeline.store.database import Database
from tests.factories import IN, a_delivery, a_run, a_workflow, some_events, the_run
from tests.support.table_reads import one
from tests.support.transition_steps import prepared, preparing, reason_due, republished, rested, seen, started

_EVENT = "SELECT * FROM pipeline.events"


def test_a_replaced_event_wakes_a_consumer_that_declined_the_old_payload(db: Database) -> None:
    a_workflow(db)
    (event,) = some_events(db, "m1")
    rested(db, preparing(db, started(db)[0]))
    assert reason_due(db) is None
    assert republished(db, "m1", {"ready": True}).replaced == {(IN, "m1"): event}
    assert reason_due(db) is DueReason.EVENTS
    assert one(db, _EVENT).payload == {"ready": True}


def test_a_replaced_event_wakes_a_consumer_whose_slice_declined_the_old_payload(db: Database) -> None:
    a_workflow(db, concurrency=2)
    (event,) = some_events(db, "m1")
    rested(db, preparing(db, started(db)[0]))
    assert (a_delivery(db, event).declined, reason_due(db)) == (True, None)
    republished(db, "m1", {"ready": True})
    assert (a_delivery(db, event).declined, reason_due(db)) == (False, DueReason.EVENTS)


@pytest.mark.parametrize("concurrency", [1, 2])
@pytest.mark.parametrize("phase", [Phase.PENDING, Phase.PREPARING, Phase.PREPARED, Phase.MUTATING])
def test_an_event_that_a_run_may_have_seen_keeps_its_payload(db: Database, concurrency: int, phase: Phase) -> None:
    a_workflow(db, concurrency=concurrency)
    some_events(db, "m1", payload={"amount": 1})
    a_run(db, phase)
    assert republished(db, "m1", {"amount": 999}).replaced == {}
    assert one(db, _EVENT).payload == {"amount": 1}


def test_a_run_that_peeked_reserves_the_payload_it_peeked(db: Database) -> None:
    a_workflow(db)
    (event,) = some_events(db, "m1", payload={"amount": 1})
    run = preparing(db, started(db)[0])
    assert seen(db, run) == [event]
    republished(db, "m1", {"amount": 999})
    prepared(db, run, event, data={"amount": 1})
    assert the_run(db, run.id).prepare_result["data"] == one(db, _EVENT).payload


def test_an_event_that_one_of_two_consumers_has_consumed_is_not_replaced_for_the_other(db: Database) -> None:
    a_workflow(db, consumers=("send", "copy"))
    some_events(db, "m1", payload={"amount": 1})
    a_run(db, Phase.COMMITTED)
    assert republished(db, "m1", {"amount": 999}).replaced == {}
    assert one(db, _EVENT).payload == {"amount": 1}


def test_replacing_changes_the_title_only_if_one_is_given_and_never_the_key(db: Database) -> None:
    a_workflow(db, ordered=True)
    some_events(db, "m1", key="k")
    republished(db, "m1", 2, title="Order 1", key="other")
    assert (one(db, _EVENT).title, one(db, _EVENT).key) == ("Order 1", "k")
    republished(db, "m1", 3)
    assert (one(db, _EVENT).title, one(db, _EVENT).key, one(db, _EVENT).payload) == ("Order 1", "k", 3)
