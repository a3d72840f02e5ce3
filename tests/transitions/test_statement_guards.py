"""Guards of single statements, each with the row that only it protects."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from pipeline.background import rescuer
from pipeline.domain.errors import (
    IllegalTransitionError,
    QuietPeriodError,
    ReservationError,
    StaleWriteError,
    UnresolvedError,
)
from pipeline.domain.failures import FailureKind
from pipeline.domain.states import Evidence, Fence, MutationId, MutationStatus, Phase, PhaseTask
from pipeline.domain.values import AppliedMutation, FailedMutation, HandlerSpec, NewEvent, RunOutput
from pipeline.domain.workflows import OnUncertain, StartAt
from pipeline.store.database import Database, Statement
from pipeline.transitions import events, mutations, reconciliation, registration, resolution, runs, starts, workflows
from tests.factories import (
    IN,
    LEASE,
    OUT,
    SOMEBODY,
    a_delivery,
    a_request,
    a_run,
    a_workflow,
    carried_forward,
    committed,
    event_status,
    held,
    some_events,
    stopped,
    the_mutation,
    the_run,
)
from tests.support.table_reads import status_of
from tests.support.transition_steps import a_handler, prepared, preparing, started, watermark_at_least

_HEIR = Statement[Any]("""
INSERT INTO pipeline.runs (workflow, handler_id, session_id, phase, event_ids, retry_of)
SELECT workflow, handler_id, session_id, phase, event_ids, id FROM pipeline.runs WHERE id = :id RETURNING id
""")
_OUTCOME = text("UPDATE pipeline.runs SET mutation_outcome = :outcome WHERE id = :id")
_MOVE = text("UPDATE pipeline.deliveries SET run_id = :heir WHERE run_id = :id")
_IN_FLIGHT = text("UPDATE pipeline.mutations SET status = 'in_flight', next_reconcile_at = NULL WHERE id = :id")


def test_a_lease_covers_the_deadline_of_a_request_that_nothing_can_reconcile(db: Database) -> None:
    """Else operators are asked for an outcome that its worker may still find out."""
    a_workflow(db)
    some_events(db, "m1")
    run = a_run(db, Phase.PREPARED)
    with db.transaction() as tx:
        sent = mutations.begin_mutation(tx, [a_request(run, timeout=LEASE * 10, reconcilable=False)]).only()
    assert sent.sent_at is not None
    assert sent.send_deadline == sent.sent_at + LEASE * 10
    assert the_run(db, run.id).lease_expires_at == sent.send_deadline > run.lease_expires_at
    db.advance_clock(LEASE * 9)
    assert not rescuer.recover_crashed_runs(db)


def test_a_request_with_a_deadline_before_the_end_of_the_lease_does_not_shorten_it(db: Database) -> None:
    a_workflow(db)
    some_events(db, "m1")
    run = a_run(db, Phase.PREPARED)
    with db.transaction() as tx:
        mutations.begin_mutation(tx, [a_request(run, timeout=timedelta(seconds=1))]).only()
    assert the_run(db, run.id).lease_expires_at >= run.lease_expires_at


def test_a_request_that_can_be_reconciled_leaves_under_a_whole_lease_and_no_longer_one(db: Database) -> None:
    a_workflow(db)
    some_events(db, "m1")
    run = a_run(db, Phase.PREPARED)
    db.advance_clock(LEASE / 2)
    with db.transaction() as tx:
        sent = mutations.begin_mutation(tx, [a_request(run, timeout=LEASE * 10)]).only()
    assert sent.sent_at is not None
    assert the_run(db, run.id).lease_expires_at == sent.sent_at + LEASE


def test_a_rescue_before_the_deadline_of_a_request_proves_nothing_and_a_late_answer_counts(db: Database) -> None:
    a_workflow(db)
    some_events(db, "m1")
    run = a_run(db, Phase.PREPARED)
    with db.transaction() as tx:
        sent = mutations.begin_mutation(tx, [a_request(run, timeout=LEASE * 10)]).only()
    db.advance_clock(LEASE * 2)
    (ended,) = rescuer.recover_crashed_runs(db)
    assert ended.decision.doubt is MutationStatus.NEEDS_RECONCILE
    with db.transaction() as tx:
        absent = FailedMutation(mutation_id=MutationId(sent.id), error="not found", evidence=Evidence.ABSENCE)
        with pytest.raises(QuietPeriodError):
            mutations.fail(tx, [absent]).only()
    with db.transaction() as tx:
        late = AppliedMutation(mutation_id=MutationId(sent.id), result={}, fence=Fence(run.fence))
        with pytest.raises(StaleWriteError):
            mutations.apply(tx, [late]).only()
        mutations.apply(tx, [replace(late, fence=None)]).only()
    committed(db, carried_forward(db, the_run(db, run.id)))


def approved(db: Database) -> Any:
    """A claimed run whose request was approved."""
    run = a_run(db, Phase.MUTATING, needs_approval=True)
    with db.transaction() as tx:
        resolution.approve(tx, run.mutation_id, SOMEBODY, request_hash="abc")
    with db.transaction() as tx:
        (claimed,) = runs.claim(tx, PhaseTask.MUTATE, [run.id], lease_duration=LEASE, worker="w").claimed
    return claimed


SENDS: dict[str, tuple[Callable[[Database], Any], Callable[[Any, Any], Any], str]] = {
    "begin_mutation": (
        lambda db: a_run(db, Phase.PREPARED),
        lambda tx, run: mutations.begin_mutation(tx, [a_request(run)]),
        "",
    ),
    "send": (approved, lambda tx, run: mutations.send(tx, [held(run)]), "pending"),
    "resend": (
        lambda db: a_run(db, Phase.MUTATING),
        lambda tx, run: mutations.resend(tx, [held(run)]),
        "in_flight",
    ),
}


@pytest.mark.parametrize("name", SENDS)
def test_nothing_is_sent_under_a_lease_that_has_lapsed(db: Database, name: str) -> None:
    """The rescuer may stop the run at any moment now. It has not yet, so fence, phase and status still fit."""
    make, send, status = SENDS[name]
    a_workflow(db)
    some_events(db, "m1")
    run = make(db)
    before = the_mutation(db, run.mutation_id) if run.mutation_id else None
    assert before is None or before.status == status
    db.advance_clock(LEASE + timedelta(microseconds=1))
    with db.transaction() as tx:
        landing = send(tx, run)
    assert landing.updated == ()
    assert list(landing.refused) == [run.id]
    now = the_run(db, run.id)
    assert (now.fence, now.phase, now.status) == (run.fence, run.phase, "active")
    assert (now.mutation_id, now.lease_expires_at) == (run.mutation_id, run.lease_expires_at)
    if before is not None:
        assert the_mutation(db, run.mutation_id) == before


@pytest.mark.parametrize("name", SENDS)
def test_the_same_is_sent_while_the_lease_holds(db: Database, name: str) -> None:
    make, send, _ = SENDS[name]
    a_workflow(db)
    some_events(db, "m1")
    run = make(db)
    with db.transaction() as tx:
        sent = send(tx, run).only()
    assert sent.status == "in_flight"
    assert the_run(db, run.id).lease_expires_at >= sent.send_deadline


@pytest.mark.parametrize("then", ["reserved", "offered", "skipped"])
def test_a_run_that_stops_does_not_release_events_it_no_longer_has(db: Database, then: str) -> None:
    """It released this part of its slice; meanwhile an operator decided about it."""
    a_workflow(db, concurrency=3, batch=2)
    used, unused = some_events(db, "m1", "m2")
    run = prepared(db, preparing(db, started(db)[0]), used)
    if then == "skipped":
        with db.transaction() as tx:
            events.skip(tx, "billing", "send", unused, SOMEBODY)
    else:
        (other,) = started(db)
        if then == "reserved":
            prepared(db, preparing(db, other), unused)
    before = a_delivery(db, unused)
    with db.transaction() as tx:
        (claimed,) = runs.claim(tx, PhaseTask.MUTATE, [run.id], lease_duration=timedelta(minutes=1), worker="w").claimed
    stopped(db, claimed, FailureKind.TRANSIENT)
    assert a_delivery(db, unused) == before
    assert event_status(db, used) == "pending"


def test_a_run_in_doubt_is_not_retried(db: Database) -> None:
    a_workflow(db, on_uncertain="contain", concurrency=2)
    (event,) = some_events(db, "m1")
    run = stopped(db, a_run(db, Phase.MUTATING))
    with db.transaction() as tx:
        assert starts.retry(tx, [run.id]).runs == ()
    assert (the_run(db, run.id).retry_pending, event_status(db, event)) == (True, "reserved")


def test_an_event_cannot_be_reserved_under_the_name_of_another_topic(db: Database) -> None:
    a_workflow(db)
    (event,) = some_events(db, "m1")
    run = a_run(db, Phase.PREPARING)
    with pytest.raises(ReservationError, match=f"it is on topic '{IN}', not '{OUT}'"):
        prepared(db, run, event, topic=OUT)
    assert event_status(db, event) == "pending"


def test_a_reconcile_attempt_is_not_booked_again_by_a_worker_that_read_the_old_count(db: Database) -> None:
    a_workflow(db, on_uncertain="contain")
    some_events(db, "m1")
    run = stopped(db, a_run(db, Phase.MUTATING))
    look = (run.mutation_id, 0, timedelta(0))
    with db.transaction() as tx:
        assert len(reconciliation.book(tx, [look])) == 1
    with db.transaction() as tx:
        assert reconciliation.book(tx, [look]) == (), "due again, but counted meanwhile"
    assert the_mutation(db, run.mutation_id).reconcile_attempts == 1


@pytest.mark.parametrize("act", [events.skip, events.quarantine])
def test_an_operator_cannot_act_on_an_event_that_is_offered_to_a_run(db: Database, act: Callable[..., object]) -> None:
    a_workflow(db, concurrency=2)
    (event,) = some_events(db, "m1")
    (run,) = started(db)
    with pytest.raises(IllegalTransitionError, match="pending, offered to a run"), db.transaction() as tx:
        act(tx, "billing", "send", event, SOMEBODY)
    assert (a_delivery(db, event).status, a_delivery(db, event).offered_to) == ("pending", run.id)


@pytest.mark.broken_on_purpose
@pytest.mark.parametrize("outcome", ["success", "skipped"])
def test_a_commit_does_not_consume_what_another_run_has_reserved(db: Database, outcome: str) -> None:
    """No transition takes the inputs of a run that is moving; the guard stands for the day on which one does."""
    a_workflow(db)
    (event,) = some_events(db, "m1")
    run = a_run(db, Phase.EMITTING)
    with db.transaction() as tx:
        tx.execute(_OUTCOME, id=run.id, outcome=outcome)
        heir = tx.first(_HEIR, id=run.id)
        assert heir is not None
        tx.execute(_MOVE, id=run.id, heir=heir.id)
    lost = pytest.raises(IllegalTransitionError, match="owner of 0 of its 1 reserved events")
    with lost if outcome == "success" else nullcontext(), db.transaction() as tx:
        runs.commit(tx, [RunOutput(lease=held(run))])
    assert (a_delivery(db, event).status, a_delivery(db, event).run_id) == ("reserved", heir.id)


def test_a_topic_that_is_joined_from_its_start_is_seen_below_a_watermark_that_had_risen(db: Database) -> None:
    spec = a_workflow(db)
    with db.transaction() as tx:
        published = events.publish(tx, "billing", [NewEvent(topic=OUT, message_id="old", payload={})])
        (old,) = published.new.values()
    (event,) = some_events(db, "m1")
    a_run(db, Phase.COMMITTED)
    watermark_at_least(db, event)
    joined = HandlerSpec(name="send", subscribes=(IN, OUT), start_at=StartAt.EARLIEST)
    with db.transaction() as tx:
        registration.register(tx, replace(spec, handlers=(joined, *spec.handlers[1:])))
    assert a_handler(db).low_watermark < old
    run = a_run(db, Phase.PREPARING)
    assert prepared(db, run, old, topic=OUT).event_ids == [old]


def test_a_watermark_never_passes_an_event_that_is_still_pending(db: Database) -> None:
    a_workflow(db, consumers=("send", "copy"))
    (event,) = some_events(db, "m1")
    a_run(db, Phase.COMMITTED, handler="copy")
    watermark_at_least(db, event, "copy")
    assert a_handler(db).low_watermark < event


@pytest.mark.broken_on_purpose
def test_a_verdict_found_out_later_counts_only_for_a_mutation_in_doubt(db: Database) -> None:
    """No transition leaves a stopped run's mutation in flight; the guard stands for the day on which one does."""
    a_workflow(db)
    some_events(db, "m1")
    run = stopped(db, a_run(db, Phase.MUTATING))
    with db.transaction() as tx:
        tx.execute(_IN_FLIGHT, id=run.mutation_id)
    with db.transaction() as tx:
        assert mutations.apply(tx, [AppliedMutation(mutation_id=run.mutation_id)]).updated == ()
    assert the_mutation(db, run.mutation_id).status == "in_flight"


def test_an_indeterminate_mutation_blocks_a_workflow_that_changed_from_contain_to_pause(db: Database) -> None:
    spec = a_workflow(db, on_uncertain="contain")
    some_events(db, "m1")
    run = stopped(db, a_run(db, Phase.MUTATING))
    assert status_of(db) == "active"
    with db.transaction() as tx:
        registration.register(tx, replace(spec, on_uncertain=OnUncertain.PAUSE))
        reconciliation.escalate(tx, [run.mutation_id], "nobody answers")
    assert status_of(db) == "paused"
    with pytest.raises(UnresolvedError), db.transaction() as tx:
        workflows.resume(tx, "billing", SOMEBODY)


def test_a_commit_that_breaks_another_rule_of_the_schema_keeps_its_own_error(db: Database) -> None:
    a_workflow(db)
    some_events(db, "m1")
    run = a_run(db, Phase.EMITTING)
    with pytest.raises(IntegrityError, match="cost_is_not_negative"), db.transaction() as tx:
        runs.commit(tx, [RunOutput(lease=held(run), cost=Decimal(-1))])
