"""The doctor notices every sweep that has stopped working, by the work that it left lying."""

from dataclasses import replace
from datetime import timedelta

import pytest

from pipeline.domain.failures import FailureKind
from pipeline.domain.states import Phase
from pipeline.store.database import Database
from pipeline.store.reads import invariants
from pipeline.transitions import registration, workflows
from tests.factories import OUT, SOMEBODY, a_run, a_workflow, some_events, stopped
from tests.support.transition_steps import started

LATE = timedelta(minutes=30)


def overdue(db: Database) -> list[str]:
    with db.transaction() as tx:
        return sorted(finding.invariant for finding in invariants.findings(tx))


@pytest.mark.broken_on_purpose
def test_a_mutation_in_doubt_without_reconcile_attempts_is_overdue(db: Database) -> None:
    a_workflow(db, on_uncertain="contain")
    some_events(db, "m1")
    stopped(db, a_run(db, Phase.MUTATING))
    assert overdue(db) == []
    db.advance_clock(LATE)
    assert overdue(db) == ["reconciles-are-on-time"]


@pytest.mark.broken_on_purpose
def test_a_run_without_its_retry_is_overdue_unless_its_workflow_is_held(db: Database) -> None:
    a_workflow(db)
    some_events(db, "m1")
    stopped(db, a_run(db, Phase.EMITTING), FailureKind.TRANSIENT)
    assert overdue(db) == []
    db.advance_clock(LATE)
    assert overdue(db) == ["stopped-runs-are-carried-forward"]
    with db.transaction() as tx:
        workflows.pause(tx, "billing", SOMEBODY)
    assert overdue(db) == []


@pytest.mark.broken_on_purpose
def test_a_run_that_is_never_dispatched_is_overdue(db: Database) -> None:
    a_workflow(db)
    some_events(db, "m1")
    assert len(started(db)) == 1
    assert overdue(db) == []
    db.advance_clock(LATE)
    assert overdue(db) == ["active-runs-are-held"]


@pytest.mark.broken_on_purpose
def test_an_event_held_for_a_handler_that_is_gone_from_the_code_is_shown(db: Database) -> None:
    spec = a_workflow(db, consumers=("send", "copy"))
    some_events(db, "m1")
    a_run(db, Phase.PREPARED)
    with db.transaction() as tx:
        registration.register(tx, replace(spec, handlers=spec.handlers[1:]))
    assert "retired-handlers-hold-nothing" in overdue(db)


@pytest.mark.broken_on_purpose
def test_an_event_of_a_topic_its_consumer_has_left_is_shown(db: Database) -> None:
    spec = a_workflow(db)
    some_events(db, "m1")
    assert overdue(db) == []
    with db.transaction() as tx:
        registration.register(
            tx, replace(spec, handlers=(replace(spec.handlers[0], subscribes=(OUT,)), spec.handlers[1]))
        )
    assert overdue(db) == ["waiting-events-have-a-subscription"]
