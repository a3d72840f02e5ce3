"""Calls that cannot be right are refused with a typed error, row by row, and change nothing."""

from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

import pytest

from pipeline.background import rescuer
from pipeline.background.scheduler import Scheduler
from pipeline.domain.errors import (
    IllegalTransitionError,
    InvalidInputError,
    NotFoundError,
    PayloadError,
    QuietPeriodError,
    ReservationError,
)
from pipeline.domain.failures import FailureKind, classify
from pipeline.domain.states import EventId, Evidence, Phase, Resolver
from pipeline.domain.values import FailedMutation, NewEvent, RunOutput
from pipeline.domain.workflows import HandlerKind
from pipeline.store.database import Database, Transaction
from pipeline.transitions import events, mutations, reconciliation, registration, runs, starts, stops, workflows
from pipeline.transitions.starts import LockedWorkflow
from tests.factories import (
    LEASE,
    NO_PAUSE,
    OUT,
    SOMEBODY,
    a_request,
    a_run,
    a_workflow,
    carried_forward,
    event_status,
    held,
    refused,
    some_events,
    stopped,
    the_mutation,
    the_run,
)
from tests.support.transition_steps import prepared, preparing, seen, started


def test_a_run_whose_mutation_was_refused_is_not_handed_back_but_stopped_by_recovery(db: Database) -> None:
    a_workflow(db)
    (event,) = some_events(db, "m1")
    run = a_run(db, Phase.MUTATING)
    failed = FailedMutation(mutation_id=run.mutation_id, error="422", evidence=Evidence.DEFINITE, fence=run.fence)
    with db.transaction() as tx:
        mutations.fail(tx, [failed]).only()
    with pytest.raises(IllegalTransitionError, match="hand back needs it to be"), db.transaction() as tx:
        runs.hand_back(tx, [held(run)]).only()
    db.advance_clock(LEASE * 2)
    (ended,) = rescuer.recover_crashed_runs(db)
    assert (ended.run_id, event_status(db, event)) == (run.id, "pending")


def test_retrying_no_runs_changes_nothing(db: Database) -> None:
    with db.transaction() as tx:
        assert starts.retry(tx, []).runs == ()


def test_runs_of_two_workflows_cannot_be_retried_in_one_call(db: Database) -> None:
    stopped_runs = []
    for workflow in ("first", "second"):
        a_workflow(db, workflow, failures=NO_PAUSE)
        some_events(db, "m1", workflow=workflow)
        stopped_runs.append(stopped(db, a_run(db, Phase.EMITTING, workflow=workflow), FailureKind.TRANSIENT).id)
    with pytest.raises(InvalidInputError, match="these are of first, second"), db.transaction() as tx:
        starts.retry(tx, stopped_runs)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_run_that_was_retried_with_the_same_plan_is_left_out_the_second_time(db: Database, concurrency: int) -> None:
    a_workflow(db, after_failed_mutation="mutate", failures=NO_PAUSE, concurrency=concurrency)
    some_events(db, "m1")
    run = refused(db, a_run(db, Phase.MUTATING), FailureKind.TRANSIENT)
    carried_forward(db, run)
    with db.transaction() as tx:
        assert starts.retry(tx, [run.id]).runs == ()


def test_a_scheduler_that_comes_second_to_a_run_that_waits_starts_nothing_and_does_not_fail(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other scheduler is quicker exactly before this one's lock."""
    a_workflow(db, failures=NO_PAUSE)
    some_events(db, "m1")
    run = stopped(db, a_run(db, Phase.EMITTING), FailureKind.TRANSIENT)

    def lock_after_another(tx: Transaction, workflow: str) -> LockedWorkflow:
        monkeypatch.undo()
        with db.transaction() as other:
            assert starts.retry(other, [run.id]).runs
        return starts.lock_workflow(tx, workflow)

    monkeypatch.setattr(starts, "lock_workflow", lock_after_another)
    assert not Scheduler(db, lambda _: None, cohort_time=LEASE).schedule(["billing"]).counts.get("runs")


def test_a_run_that_publishes_to_an_unknown_topic_does_not_keep_its_cohort_from_committing(db: Database) -> None:
    a_workflow(db, concurrency=2)
    first, second = some_events(db, "m1", "m2")
    bad, good = a_run(db, Phase.EMITTING), a_run(db, Phase.EMITTING)
    nowhere = NewEvent(topic="nowhere", message_id="x", payload={})
    somewhere = NewEvent(topic=OUT, message_id="y", payload={})
    with db.transaction() as tx:
        landing = runs.commit(
            tx, [RunOutput(lease=held(bad), events=(nowhere, somewhere)), RunOutput(lease=held(good))]
        )
    assert [row.id for row in landing.updated] == [good.id]
    assert isinstance(landing.refused[bad.id], NotFoundError)
    assert (event_status(db, first), event_status(db, second)) == ("reserved", "consumed")
    assert the_run(db, bad.id).phase == "emitting"


def test_a_consumer_cannot_become_a_producer_of_the_same_name(db: Database) -> None:
    spec = a_workflow(db)
    poll = replace(spec.handlers[0], kind=HandlerKind.PRODUCER, subscribes=())
    wrong = "was a consumer and is declared as a producer"
    with pytest.raises(InvalidInputError, match=wrong), db.transaction() as tx:
        registration.register(tx, replace(spec, handlers=(poll,)))


def test_a_definite_refusal_without_a_fence_waits_for_the_quiet_period_like_any_other(db: Database) -> None:
    a_workflow(db)
    some_events(db, "m1")
    run = stopped(db, a_run(db, Phase.MUTATING, settle=timedelta(hours=1)))
    claimed = FailedMutation(
        mutation_id=run.mutation_id, error="422", evidence=Evidence.DEFINITE, resolved_by=Resolver.RECONCILE
    )
    with pytest.raises(QuietPeriodError), db.transaction() as tx:
        mutations.fail(tx, [claimed]).only()
    assert the_mutation(db, run.mutation_id).status == "needs_reconcile"


@pytest.mark.parametrize(
    "span", [{"timeout": timedelta(seconds=-5)}, {"timeout": timedelta(0)}, {"settle": timedelta(seconds=-1)}]
)
def test_a_request_needs_a_positive_timeout_and_no_negative_settle_window(
    db: Database, span: dict[str, timedelta]
) -> None:
    a_workflow(db)
    some_events(db, "m1")
    run = a_run(db, Phase.PREPARED)
    with pytest.raises(InvalidInputError, match="expected a positive span"), db.transaction() as tx:
        mutations.begin_mutation(tx, [a_request(run, **span)])
    assert the_run(db, run.id).phase == "prepared"


@pytest.mark.parametrize("request_hash", ["", "\0"])
def test_a_request_needs_a_hash_that_can_be_stored(db: Database, request_hash: str) -> None:
    a_workflow(db)
    some_events(db, "m1")
    run = a_run(db, Phase.PREPARED)
    with pytest.raises(PayloadError, match="request hash"), db.transaction() as tx:
        mutations.begin_mutation(tx, [a_request(run, request_hash=request_hash)])


def test_a_run_cannot_request_two_mutations_in_one_cohort(db: Database) -> None:
    a_workflow(db)
    some_events(db, "m1")
    run = a_run(db, Phase.PREPARED)
    with pytest.raises(InvalidInputError, match="asks for two mutations at once"), db.transaction() as tx:
        mutations.begin_mutation(tx, [a_request(run), a_request(run)])


@pytest.mark.parametrize("count", [0, -1])
@pytest.mark.parametrize("handler", ["send", "poll"])
def test_fewer_than_one_run_cannot_be_started(db: Database, handler: str, count: int) -> None:
    a_workflow(db, concurrency=3)
    with pytest.raises(InvalidInputError, match="expected at least 1"), db.transaction() as tx:
        starts.start(tx, "billing", handler, count=count)


def test_an_act_on_an_event_of_an_unknown_workflow_names_the_workflow(db: Database) -> None:
    a_workflow(db)
    with pytest.raises(NotFoundError, match="There is no workflow 'nope'"), db.transaction() as tx:
        events.skip(tx, "nope", "send", EventId(1), SOMEBODY)


def test_an_unknown_workflow_cannot_enter_maintenance(db: Database) -> None:
    with pytest.raises(NotFoundError, match="There is no workflow 'nope'"), db.transaction() as tx:
        workflows.enter_maintenance(tx, "nope", "broken code")


def test_transitions_of_sets_return_nothing_for_unknown_ids(db: Database) -> None:
    with db.transaction() as tx:
        assert stops.rescue(tx, [uuid4()]) == ()
        assert runs.mark_dispatched(tx, [uuid4()]) == ()
        assert reconciliation.escalate(tx, [uuid4()], "nobody knows") == ()
        assert workflows.finish_sessions(tx, [uuid4()]) == ()


def test_an_event_lost_to_another_run_by_a_deploy_is_tried_again_and_is_not_the_authors_fault(db: Database) -> None:
    spec = a_workflow(db)
    some_events(db, "m1", "m2")
    alone = preparing(db, started(db)[0])
    shown = seen(db, alone)
    with db.transaction() as tx:
        registration.register(tx, replace(spec, concurrency=4))
    assert len(started(db, 3)) == 2
    with pytest.raises(ReservationError) as lost:
        prepared(db, alone, *shown)
    assert classify(lost.value).kind is FailureKind.TRANSIENT


def test_an_event_that_never_was_is_the_authors_fault(db: Database) -> None:
    a_workflow(db)
    with pytest.raises(ReservationError) as wrong:
        prepared(db, preparing(db, started(db)[0]), EventId(4711))
    assert classify(wrong.value).kind is FailureKind.LOGIC
