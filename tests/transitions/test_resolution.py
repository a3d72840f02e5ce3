"""Doubt and its resolution by an operator: quiet periods, escalation, approval, and what is refused."""

from datetime import timedelta
from typing import Any

import pytest

from pipeline.background import rescuer
from pipeline.domain.errors import (
    IllegalTransitionError,
    QuietPeriodError,
    StaleWriteError,
    UnresolvedError,
)
from pipeline.domain.failures import FailureKind
from pipeline.domain.states import EventId, Evidence, Fence, Phase, PhaseTask, RunStatus
from pipeline.domain.values import Actor, FailedMutation
from pipeline.domain.workflows import WorkflowStatus
from pipeline.store.database import Database
from pipeline.transitions import mutations, reconciliation, resolution, runs, workflows
from tests.factories import (
    LEASE,
    SOMEBODY,
    TIMEOUT,
    a_run,
    a_workflow,
    applied,
    carried_forward,
    committed,
    event_status,
    held,
    some_events,
    stopped,
    the_mutation,
    the_run,
)
from tests.support.table_reads import rows, status_of

SETTLE = timedelta(minutes=2)


def test_absence_is_not_evidence_before_the_settle_window_is_over(db: Database) -> None:
    run, event = in_doubt(db, settle=SETTLE)
    with pytest.raises(QuietPeriodError, match="may still arrive"), db.transaction() as tx:
        resolution.did_not_happen(tx, run.mutation_id, SOMEBODY)
    assert the_mutation(db, run.mutation_id).status == "needs_reconcile"
    db.advance_clock(SETTLE)
    with db.transaction() as tx:
        resolution.did_not_happen(tx, run.mutation_id, SOMEBODY)
    assert event_status(db, event) == "pending"


def test_a_not_found_verdict_of_the_worker_must_wait_too_but_a_refusal_counts_at_once(db: Database) -> None:
    a_workflow(db)
    some_events(db, "m1")
    run = a_run(db, Phase.MUTATING, settle=SETTLE)
    for evidence, refused in ((Evidence.ABSENCE, True), (Evidence.DEFINITE, False)):
        item = FailedMutation(mutation_id=run.mutation_id, error="404", evidence=evidence, fence=Fence(run.fence))
        with db.transaction() as tx:
            assert bool(mutations.fail(tx, [item]).refused) is refused
    stopped(db, the_run(db, run.id))


def test_an_operator_may_resolve_it_as_happened_at_any_time_and_next_gets_the_result(db: Database) -> None:
    run, event = in_doubt(db, settle=SETTLE)
    with db.transaction() as tx:
        resolution.happened(tx, run.mutation_id, SOMEBODY, result={"id": "r-9"})
    retry = carried_forward(db, the_run(db, run.id))
    with db.transaction() as tx:
        (claimed,) = runs.claim(tx, PhaseTask.NEXT, [retry.id], lease_duration=LEASE, worker="w").claimed
    assert (claimed.mutation_status, claimed.mutation_result) == ("applied", {"id": "r-9"})
    committed(db, claimed)
    assert event_status(db, event) == "consumed"


def test_resuming_is_refused_with_the_mutation_named_while_its_outcome_is_unknown(db: Database) -> None:
    run, _ = in_doubt(db)
    with pytest.raises(UnresolvedError, match=str(run.mutation_id)), db.transaction() as tx:
        workflows.resume(tx, "billing", SOMEBODY)
    assert status_of(db) is WorkflowStatus.PAUSED
    with db.transaction() as tx:
        resolution.skip(tx, run.mutation_id, SOMEBODY)
        workflows.resume(tx, "billing", SOMEBODY)
    assert status_of(db) is WorkflowStatus.ACTIVE


def test_a_contained_doubt_holds_only_its_own_events(db: Database) -> None:
    run, event = in_doubt(db, concurrency=2, on_uncertain="contain")
    assert status_of(db) is WorkflowStatus.ACTIVE
    (other,) = some_events(db, "m2")
    a_run(db, Phase.COMMITTED)
    assert (event_status(db, event), event_status(db, other)) == ("reserved", "consumed")
    with db.transaction() as tx:
        reconciliation.escalate(tx, [run.mutation_id], "asked five times")
    assert status_of(db) is WorkflowStatus.ACTIVE


def test_an_exhausted_reconcile_escalates_and_an_operator_can_try_it_again(db: Database) -> None:
    run, _ = in_doubt(db)
    with db.transaction() as tx:
        look = (run.mutation_id, 0, timedelta(seconds=10))
        (booked,) = reconciliation.book(tx, [look])
        assert reconciliation.book(tx, [look]) == (), "booked before the look begins, and once"
    assert booked.reconcile_attempts == 1
    with db.transaction() as tx:
        (escalated,) = reconciliation.escalate(tx, [run.mutation_id], "asked five times")
        assert reconciliation.escalate(tx, [run.mutation_id], "again") == ()
    assert (escalated.status, escalated.next_reconcile_at) == ("indeterminate", None)
    assert status_of(db) is WorkflowStatus.PAUSED
    with db.transaction() as tx:
        again = resolution.try_again(tx, run.mutation_id, SOMEBODY)
    assert (again.status, again.reconcile_attempts) == ("needs_reconcile", 0)


def test_an_operation_that_cannot_reconcile_cannot_be_tried_again(db: Database) -> None:
    run, _ = in_doubt(db, reconcilable=False)
    assert the_mutation(db, run.mutation_id).status == "indeterminate"
    with pytest.raises(IllegalTransitionError, match="can reconcile"), db.transaction() as tx:
        resolution.try_again(tx, run.mutation_id, SOMEBODY)


@pytest.mark.parametrize("verb", ["happened", "did_not_happen", "skip", "try_again"])
def test_a_resolved_mutation_takes_no_second_verdict(db: Database, verb: str) -> None:
    a_workflow(db)
    some_events(db, "m1")
    run = applied(db, a_run(db, Phase.MUTATING))
    before = the_mutation(db, run.mutation_id)
    with pytest.raises(IllegalTransitionError, match="it is applied"), db.transaction() as tx:
        getattr(resolution, verb)(tx, run.mutation_id, SOMEBODY)
    assert the_mutation(db, run.mutation_id) == before


@pytest.mark.parametrize("verb", ["happened", "did_not_happen", "skip"])
def test_a_mutation_that_its_worker_still_holds_cannot_be_resolved(db: Database, verb: str) -> None:
    a_workflow(db)
    some_events(db, "m1")
    run = a_run(db, Phase.MUTATING)
    db.advance_clock(TIMEOUT)
    with pytest.raises(IllegalTransitionError, match="in_flight"), db.transaction() as tx:
        getattr(resolution, verb)(tx, run.mutation_id, SOMEBODY)
    applied(db, run)


def test_an_approved_request_is_sent_exactly_as_it_was_approved(db: Database) -> None:
    run, event = waiting_for_approval(db)
    with db.transaction() as tx:
        assert runs.claim(tx, PhaseTask.MUTATE, [run.id], lease_duration=LEASE, worker="w").claimed == ()
        approved = resolution.approve(tx, run.mutation_id, SOMEBODY, request_hash="abc")
    assert (approved.approved_by, approved.status) == ("ada", "pending")
    with db.transaction() as tx:
        (claimed,) = runs.claim(tx, PhaseTask.MUTATE, [run.id], lease_duration=LEASE, worker="w").claimed
        sent = mutations.send(tx, [held(claimed)]).only()
    assert (sent.status, sent.params, sent.id) == ("in_flight", {"to": "someone@example.org"}, run.mutation_id)
    committed(db, applied(db, the_run(db, run.id)))
    assert event_status(db, event) == "consumed"


def test_an_approval_of_another_request_is_void(db: Database) -> None:
    run, _ = waiting_for_approval(db)
    with pytest.raises(StaleWriteError, match="abc"), db.transaction() as tx:
        resolution.approve(tx, run.mutation_id, SOMEBODY, request_hash="something else")
    assert the_run(db, run.id).status == RunStatus.PAUSED_APPROVAL


def test_a_rejected_request_is_never_sent_and_next_runs_with_skipped(db: Database) -> None:
    run, event = waiting_for_approval(db)
    with db.transaction() as tx:
        resolution.reject(tx, run.mutation_id, SOMEBODY)
    mutation = the_mutation(db, run.mutation_id)
    assert (mutation.status, mutation.sent_at, event_status(db, event)) == ("failed", None, "skipped")
    retry = carried_forward(db, the_run(db, run.id))
    assert retry.mutation_outcome == "skipped"
    committed(db, retry)
    with pytest.raises(IllegalTransitionError, match="failed"), db.transaction() as tx:
        resolution.approve(tx, run.mutation_id, SOMEBODY, request_hash="abc")


def test_only_a_pending_request_can_be_rejected_and_only_a_doubted_one_skipped(db: Database) -> None:
    waiting, _ = waiting_for_approval(db)
    with pytest.raises(IllegalTransitionError, match="pending"), db.transaction() as tx:
        resolution.skip(tx, waiting.mutation_id, SOMEBODY)
    with db.transaction() as tx:
        resolution.reject(tx, waiting.mutation_id, SOMEBODY)


def test_an_approved_run_whose_worker_dies_before_sending_releases_its_inputs(db: Database) -> None:
    run, event = waiting_for_approval(db)
    with db.transaction() as tx:
        resolution.approve(tx, run.mutation_id, SOMEBODY, request_hash="abc")
        runs.claim(tx, PhaseTask.MUTATE, [run.id], lease_duration=LEASE, worker="w")
    db.advance_clock(LEASE + TIMEOUT)
    (ended,) = rescuer.recover_crashed_runs(db)
    assert (ended.decision.status, event_status(db, event)) == (RunStatus.CRASHED, "pending")
    mutation = the_mutation(db, run.mutation_id)
    assert (mutation.status, mutation.resolved_by, mutation.sent_at) == ("failed", "void", None)


def test_every_act_of_an_operator_is_in_the_audit_with_name_reason_and_evidence(db: Database) -> None:
    run, _ = in_doubt(db)
    by = Actor(name="grace", reason="saw it in the provider's export", evidence={"line": 17})
    with db.transaction() as tx:
        workflows.pause(tx, "billing", by)
        resolution.happened(tx, run.mutation_id, by)
        workflows.resume(tx, "billing", by)
    acts = rows(db, "SELECT * FROM pipeline.audit ORDER BY id")
    assert [row.act for row in acts] == ["workflow.pause", "mutation.happened", "workflow.resume"]
    assert {(row.actor, row.reason, row.evidence["line"]) for row in acts} == {("grace", by.reason, 17)}


def test_the_same_plan_is_tried_again_with_the_same_inputs_where_a_consumer_wants_that(db: Database) -> None:
    a_workflow(db, after_failed_mutation="mutate")
    (event,) = some_events(db, "m1")
    run = a_run(db, Phase.MUTATING)
    with db.transaction() as tx:
        item = FailedMutation(
            mutation_id=run.mutation_id, error="429", evidence=Evidence.DEFINITE, fence=Fence(run.fence)
        )
        mutations.fail(tx, [item]).only()
    run = stopped(db, the_run(db, run.id), FailureKind.TRANSIENT)
    assert (run.retry_pending, event_status(db, event)) == (True, "reserved")
    db.advance_clock(LEASE)
    retry = carried_forward(db, run)
    assert (retry.phase, retry.attempt, retry.event_ids) == (Phase.PREPARED, 2, [event])


def in_doubt(db: Database, **options: Any) -> tuple[Any, EventId]:
    """A run whose worker vanished while its mutation was in flight."""
    request = {key: options.pop(key) for key in ("settle", "reconcilable") if key in options}
    a_workflow(db, **options)
    (event,) = some_events(db, "m1")
    run = a_run(db, Phase.MUTATING, **request)
    db.advance_clock(LEASE + timedelta(seconds=1))
    rescuer.recover_crashed_runs(db)
    return the_run(db, run.id), event


def waiting_for_approval(db: Database) -> tuple[Any, EventId]:
    a_workflow(db)
    (event,) = some_events(db, "m1")
    run = a_run(db, Phase.MUTATING, needs_approval=True)
    assert (run.status, run.lease_expires_at) == (RunStatus.PAUSED_APPROVAL, None)
    return run, event
