"""A rename beside publishers, workers, sweeps and schedulers that still have the former names."""

from dataclasses import replace
from typing import Any

import pytest

from pipeline.background.scheduler import Scheduler
from pipeline.domain.errors import InvalidInputError
from pipeline.domain.failures import FailureKind
from pipeline.domain.states import Phase
from pipeline.domain.values import HandlerSpec, NewEvent, RunFailure, RunOutput, TopicSpec, WorkflowSpec
from pipeline.store.database import Database, Transaction
from pipeline.transitions import events, registration, runs, stops
from tests.factories import IN, LEASE, OUT, a_failure, a_run, a_workflow, held, some_events, the_run
from tests.support.concurrent_transactions import meanwhile, raced, wait_until_blocked_by
from tests.support.table_reads import one
from tests.support.wait import wait_for

NEXT = WorkflowSpec(
    name="invoices",
    renamed_from="billing",
    fingerprint="next",
    topics=(TopicSpec(name="orders", renamed_from=IN), TopicSpec(name=OUT)),
    handlers=(HandlerSpec(name="invoice", renamed_from="send", subscribes=("orders",)),),
)
NEW = NewEvent(topic=IN, message_id="new", payload={})
_NEW = """
SELECT e.workflow, e.topic, d.status FROM pipeline.events e JOIN pipeline.deliveries d ON d.event_id = e.id
WHERE e.message_id = 'new'
"""

_WAITING = """
SELECT count(*) AS number FROM pg_stat_activity WHERE datname = current_database() AND pg_blocking_pids(pid) <> '{}'
"""


def renamed(tx: Transaction) -> None:
    registration.register(tx, NEXT)


def test_a_publisher_that_waited_for_a_rename_publishes_under_the_new_names(db: Database) -> None:
    a_workflow(db)
    raced(db, renamed, lambda tx: events.publish(tx, "billing", [NEW])).result()
    assert tuple(one(db, _NEW)) == ("invoices", "orders", "pending")


def test_a_payload_is_replaced_by_a_publisher_that_waited_for_a_rename(db: Database) -> None:
    a_workflow(db)
    some_events(db, "m1")
    newer = NewEvent(topic=IN, message_id="m1", payload={"n": 7})
    ended = raced(db, renamed, lambda tx: events.publish(tx, "billing", [newer], replace=True)).result()
    assert list(ended.replaced) == [(IN, "m1")]
    assert one(db, "SELECT payload FROM pipeline.events").payload == {"n": 7}


def test_publishers_with_the_former_name_and_a_deploy_that_takes_the_rename_back_do_not_deadlock(db: Database) -> None:
    """They lock the former name first, then the present one; so does the deploy, whatever the two sort like."""
    spec = a_workflow(db, "w")
    there = replace(spec, name="a", renamed_from="w", fingerprint="there")
    back = replace(spec, name="w", renamed_from="a", fingerprint="back")
    with db.transaction() as tx:
        registration.register(tx, there)
    with (
        meanwhile(db, lambda tx: registration.register(tx, back)) as deploy,
        meanwhile(db, lambda tx: events.publish(tx, "w", [NEW], replace=True)) as publish,
    ):
        with db.transaction() as first:
            events.publish(first, "a", [NewEvent(topic=IN, message_id="m1", payload={})])
            deployed = deploy()
            wait_until_blocked_by(db, first)
            published = publish()
            wait_for(lambda: one(db, _WAITING).number == 2)
        deployed.result(timeout=60)
        published.result(timeout=60)
    assert tuple(one(db, _NEW)) == ("w", IN, "pending")


def test_a_commit_that_waited_for_a_rename_lands_under_the_new_names(db: Database) -> None:
    a_workflow(db)
    some_events(db, "m1")
    run = a_run(db, Phase.EMITTING)
    raced(db, renamed, lambda tx: runs.commit(tx, [RunOutput(lease=held(run), events=(NEW,))]).only()).result()
    assert tuple(one(db, _NEW)) == ("invoices", "orders", "pending")
    assert (the_run(db, run.id).workflow, the_run(db, run.id).status) == ("invoices", "committed")


def test_a_rename_waits_for_an_open_publisher_and_moves_what_it_has_written(db: Database) -> None:
    a_workflow(db)
    raced(db, lambda tx: events.publish(tx, "billing", [NEW]), renamed).result()
    assert tuple(one(db, _NEW)) == ("invoices", "orders", "pending")


def test_a_stop_that_waited_for_a_rename_locks_the_workflow_under_its_new_name(db: Database) -> None:
    a_workflow(db)
    some_events(db, "m1")
    run = a_run(db, Phase.PREPARED)
    failed = RunFailure(lease=held(run), failure=a_failure(FailureKind.LOGIC))
    with meanwhile(db, lambda tx: (stops.stop(tx, [failed]).only(), _holds_workflow(db))) as begin:
        with db.transaction() as tx:
            renamed(tx)
            ended = begin()
            wait_until_blocked_by(db, tx)
        _, is_held = ended.result(timeout=60)
    assert is_held
    assert one(db, "SELECT maintenance FROM pipeline.workflows WHERE name = 'invoices'").maintenance


def _holds_workflow(db: Database) -> bool:
    """Whether another transaction holds the row of the renamed workflow."""
    sql = "WITH free AS (SELECT 1 FROM pipeline.workflows WHERE name = 'invoices' FOR NO KEY UPDATE SKIP LOCKED) "
    return bool(one(db, f"{sql} SELECT count(*) = 0 AS is_held FROM free").is_held)


def test_a_scheduler_that_waited_for_a_rename_starts_nothing_and_does_not_fail(db: Database) -> None:
    a_workflow(db)
    some_events(db, "m1")
    sent: list[Any] = []
    scheduler = Scheduler(db, sent.append, cohort_time=LEASE)
    with meanwhile(db, lambda tx: scheduler.schedule(["billing"])) as begin:
        with db.transaction() as tx:
            renamed(tx)
            ended = begin()
            wait_until_blocked_by(db, tx)
        assert ended.result(timeout=60).counts == {"renamed": 1}
    scheduler.schedule(["billing", "invoices"])
    assert [message.description for message in sent] == ["invoices.invoice"]


@pytest.mark.parametrize("phase", [Phase.PREPARING, Phase.PREPARED, Phase.MUTATING, Phase.EMITTING])
def test_a_worker_that_held_a_run_before_the_rename_can_still_end_it(db: Database, phase: Phase) -> None:
    """All but a prepare, which is taken away: it may not have seen the events of the topic under its new name."""
    a_workflow(db)
    some_events(db, "m1")
    run = a_run(db, phase)
    with db.transaction() as tx:
        renamed(tx)
    with db.transaction() as tx:
        stopped = stops.stop(tx, [RunFailure(lease=held(run), failure=a_failure(FailureKind.TRANSIENT))])
    assert bool(stopped.updated) == (phase is not Phase.PREPARING)


def test_a_publisher_that_waited_for_a_deploy_without_its_topic_is_refused(db: Database) -> None:
    """No consumer would get the event."""
    spec = a_workflow(db)
    without = replace(spec, topics=(TopicSpec(name=OUT),), handlers=spec.handlers[1:], fingerprint="next")
    ended = raced(db, lambda tx: registration.register(tx, without), lambda tx: events.publish(tx, "billing", [NEW]))
    with pytest.raises(InvalidInputError, match=r"gone from the code.*Nothing was published"):
        ended.result()
    assert one(db, "SELECT count(*) AS number FROM pipeline.events").number == 0
