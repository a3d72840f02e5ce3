"""Every transition, every sweep and every phase of a worker locks tables in one order.

Two transactions can wait for each other in a circle only if one of them locks against the order. So each is driven
alone, with every table held in turn by another connection, and the proof covers every pair of them.
"""

import ast
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from pipeline.background import rescuer
from pipeline.background.sweeps import DUTIES
from pipeline.domain.acts import ProposedAct, state_token
from pipeline.domain.failures import FailureKind
from pipeline.domain.lock_order import is_in_lock_order
from pipeline.domain.policies import BreakerPolicy, Retention
from pipeline.domain.states import Evidence, Phase, PhaseTask
from pipeline.domain.values import (
    AppliedMutation,
    FailedMutation,
    HandlerSpec,
    NewEvent,
    PreparedRun,
    Reservation,
    RunFailure,
    RunOutput,
    TopicSpec,
    WorkflowSpec,
)
from pipeline.domain.workflows import BlockKind, StartAt
from pipeline.store.database import Database, Statement, Transaction
from pipeline.store.reads import work
from pipeline.testing import Does
from pipeline.transitions import (
    breakers,
    events,
    housekeeping,
    late_effects,
    mutations,
    reconciliation,
    registration,
    renames,
    resolution,
    runs,
    starts,
    stops,
    workflows,
)
from pipeline.worker.crash_points import CrashPoint
from pipeline.worker.runner import process_name
from tests.factories import (
    IN,
    LEASE,
    OUT,
    SOMEBODY,
    TIMEOUT,
    a_failure,
    a_request,
    a_run,
    a_workflow,
    held,
    some_events,
    stopped,
    the_run,
)
from tests.support.concurrent_transactions import meanwhile, wait_until_blocked_by
from tests.support.held_tables import recorded_tables, tables_held_before_subscriptions, tables_held_too_early
from tests.support.scripted_consumers import Shop
from tests.support.source_code import ROOT
from tests.support.table_reads import one
from tests.support.transition_steps import prepared, preparing, started

Reach = Callable[[Database], Any]
Act = Callable[[Transaction, Any], object]

MAIL = ("mail", "send")
NEW = NewEvent(topic=IN, message_id="m9", payload={})
MADE = NewEvent(topic=OUT, message_id="made", payload={})
AGAIN = NewEvent(topic=IN, message_id="m3", payload={"n": 9})


def at(phase: Phase, **request: Any) -> Reach:
    return lambda db: a_run(db, phase, **request)


def crashed(db: Database) -> Any:
    run = a_run(db, Phase.MUTATING)
    db.advance_clock(LEASE + TIMEOUT)
    rescuer.recover_crashed_runs(db)
    return the_run(db, run.id)


def escalated(db: Database) -> Any:
    run = crashed(db)
    with db.transaction() as tx:
        reconciliation.escalate(tx, [run.mutation_id], "asked")
    return run


def lapsed(db: Database) -> Any:
    run = a_run(db, Phase.MUTATING)
    db.advance_clock(LEASE + TIMEOUT)
    return run


def before_a_clock_set_back(db: Database) -> Any:
    db.advance_clock(LEASE * 10)
    run = a_run(db, Phase.MUTATING)
    db.advance_clock(-LEASE * 10)
    return run


def to_be_retried(db: Database) -> Any:
    run = stopped(db, a_run(db, Phase.EMITTING), FailureKind.TRANSIENT)
    db.advance_clock(LEASE)
    return run


def failed(db: Database) -> Any:
    """A workflow in maintenance, with failures counted at its handler, at an event and at a run."""
    stopped(db, a_run(db, Phase.PREPARED), FailureKind.TRANSIENT)
    db.advance_clock(timedelta(hours=1))
    stopped(db, a_run(db, Phase.EMITTING), FailureKind.LOGIC)


def unclaimed(db: Database) -> Any:
    """A run that workers hand back, with reserved inputs."""
    run = a_run(db, Phase.PREPARED)
    with db.transaction() as tx:
        runs.hand_back(tx, [held(run)])
    with db.transaction() as tx:
        runs.claim(tx, PhaseTask.MUTATE, [run.id], lease_duration=LEASE, worker="w", known_handlers=set())
    return the_run(db, run.id)


def withdrawn(db: Database) -> Any:
    """A run of a handler that is unclaimed, since its last run was withdrawn."""
    run = unclaimed(db)
    with db.transaction() as tx:
        stops.withdraw_unclaimed(tx, [run.id])
    with db.transaction() as tx:
        (run,) = starts.start(tx, "billing", "send").runs
    return run


def retired(db: Database) -> Any:
    """A run whose handler is gone from the code, and that no worker holds."""
    run = a_run(db, Phase.PREPARED)
    with db.transaction() as tx:
        runs.hand_back(tx, [held(run)])
    a_workflow(db, consumers=("other",))
    return the_run(db, run.id)


def resolved_as_failed(db: Database) -> Any:
    run = crashed(db)
    with db.transaction() as tx:
        resolution.did_not_happen(tx, run.mutation_id, SOMEBODY)
    return run


def found_late(db: Database) -> Any:
    run = resolved_as_failed(db)
    with db.transaction() as tx:
        late_effects.record_late_effect(tx, run.mutation_id, {"id": 1}, SOMEBODY)
    return run


def quarantined(db: Database) -> Any:
    a_run(db, Phase.COMMITTED)
    with db.transaction() as tx:
        event = one(db, "SELECT max(id) AS id FROM pipeline.events").id
        events.quarantine(tx, "billing", "send", event, SOMEBODY)
    return event


def declined(db: Database) -> WorkflowSpec:
    """A workflow of several places with a declined event, and the next version of its code."""
    (run, *_) = started(db, 1)
    prepared(db, preparing(db, run))
    return declined_spec("new")


def declined_spec(fingerprint: str) -> WorkflowSpec:
    handlers = (HandlerSpec(name="send", subscribes=(IN,)),)
    return WorkflowSpec(name="billing", fingerprint=fingerprint, topics=(TopicSpec(name=IN),), handlers=handlers)


def joining(spec: WorkflowSpec) -> WorkflowSpec:
    """The code with a consumer that joins from the start."""
    late = HandlerSpec(name="late", subscribes=(IN,), start_at=StartAt.EARLIEST)
    return replace(spec, handlers=(*spec.handlers, late))


def backfilling(db: Database) -> None:
    """A consumer that was handed the first of three events only."""
    a_run(db, Phase.PREPARED)
    spec = declined_spec("newer")
    with db.transaction() as tx:
        registration.register(tx, joining(spec), page_size=1)


def renamed_spec() -> WorkflowSpec:
    """The next code, with another name for the workflow, its topic and its consumer."""
    return WorkflowSpec(
        name="invoices",
        renamed_from="billing",
        fingerprint="new",
        topics=(TopicSpec(name="orders", renamed_from=IN),),
        handlers=(HandlerSpec(name="invoice", renamed_from="send", subscribes=("orders",)),),
    )


def rename_everything(tx: Transaction) -> None:
    spec = renamed_spec()
    planned = renames.plan(tx, spec, renames.stored_workflow(tx, spec))
    starts.lock_workflow(tx, "billing")
    renames.move_work(tx, planned)
    renames.move_names(tx, planned)
    renames.save(tx, planned, spec, is_new_code=True)


def two_emitting(db: Database) -> Any:
    a_workflow(db, concurrency=2)
    return a_run(db, Phase.EMITTING), a_run(db, Phase.EMITTING)


def commit_beside_a_stop(tx: Transaction, both: Any) -> None:
    """A cohort of two runs, as a worker records it: one has failed, the other publishes."""
    failed, landed = both
    stops.lock_workflows(tx, [held(failed)], committing=[held(landed)])
    runs.commit(tx, [RunOutput(lease=held(landed), events=(MADE,))]).only()
    stops.stop(tx, [RunFailure(lease=held(failed), failure=a_failure(FailureKind.TRANSIENT))]).only()


def open_breaker(db: Database) -> Any:
    with db.transaction() as tx:
        breakers.open_by_operator(tx, MAIL, SOMEBODY)
    return a_run(db, Phase.PREPARED)


def approved(db: Database) -> Any:
    run = a_run(db, Phase.MUTATING, needs_approval=True)
    with db.transaction() as tx:
        resolution.approve(tx, run.mutation_id, SOMEBODY, request_hash="abc")
    with db.transaction() as tx:
        (row,) = runs.claim(tx, PhaseTask.MUTATE, [run.id], lease_duration=LEASE, worker="w").claimed
    return row


def pending(db: Database) -> int:
    a_run(db, Phase.COMMITTED)
    newest: int = one(db, "SELECT max(id) AS id FROM pipeline.events").id
    return newest


def past(db: Database) -> None:
    """Everything is so old that no workflow keeps it."""
    a_run(db, Phase.COMMITTED)
    a_run(db, Phase.COMMITTED)
    db.advance_clock(timedelta(days=1))


def a_producer_run(db: Database) -> Any:
    with db.transaction() as tx:
        (run,) = starts.start(tx, "billing", "poll").runs
        (run,) = runs.claim(tx, PhaseTask.PRODUCE, [run.id], lease_duration=LEASE, worker="w").claimed
    return run


def a_mutation(tx: Transaction, run: Any) -> Any:
    (row,) = work.mutations(tx, [run.mutation_id])
    return row


def reserving(tx: Transaction, run: Any) -> PreparedRun:
    found = tuple(row.id for row in work.reservable_events(tx, run, IN))
    return PreparedRun(lease=held(run), reservations=(Reservation(topic=IN, ids=found),))


def stop(kind: FailureKind) -> Act:
    return lambda tx, run: stops.stop(tx, [RunFailure(lease=held(run), failure=a_failure(kind))]).only()


def fail(tx: Transaction, run: Any, *, fence: Any = None, evidence: Evidence = Evidence.ABSENCE) -> object:
    item = FailedMutation(mutation_id=run.mutation_id, error="", evidence=evidence, fence=fence)
    return mutations.fail(tx, [item]).only()


#: Each transition that writes: how its state is reached, and the call. A name after a space tells two calls apart.
TRANSITIONS: dict[str, tuple[Reach, Act]] = {
    "starts.lock_workflow": (at(Phase.PREPARED), lambda tx, _: starts.lock_workflow(tx, "billing")),
    "starts.start": (at(Phase.COMMITTED), lambda tx, _: starts.start(tx, "billing", "send")),
    "starts.retry": (to_be_retried, lambda tx, run: starts.retry(tx, [run.id])),
    "runs.claim": (
        withdrawn,
        lambda tx, run: runs.claim(tx, PhaseTask.PREPARE, [run.id], lease_duration=LEASE, worker="w"),
    ),
    "runs.finish_prepare": (at(Phase.PREPARING), lambda tx, run: runs.finish_prepare(tx, [reserving(tx, run)]).only()),
    "runs.finish_prepare empty": (
        at(Phase.PREPARING),
        lambda tx, run: runs.finish_prepare(tx, [PreparedRun(lease=held(run))]).only(),
    ),
    "runs.no_mutation": (at(Phase.PREPARED), lambda tx, run: runs.no_mutation(tx, [held(run)]).only()),
    "runs.commit": (
        at(Phase.EMITTING),
        lambda tx, run: runs.commit(tx, [RunOutput(lease=held(run), state={"n": 1}, has_state=True)]).only(),
    ),
    "runs.commit beside a stop": (two_emitting, commit_beside_a_stop),
    "runs.commit_producer": (
        lambda db: a_producer_run(db),
        lambda tx, run: runs.commit_producer(tx, [RunOutput(lease=held(run), state={"n": 1}, has_state=True)]).only(),
    ),
    "runs.heartbeat": (at(Phase.PREPARED), lambda tx, run: runs.heartbeat(tx, [held(run)], lease_duration=LEASE)),
    "runs.hand_back": (at(Phase.PREPARED), lambda tx, run: runs.hand_back(tx, [held(run)]).only()),
    "runs.mark_dispatched": (unclaimed, lambda tx, run: runs.mark_dispatched(tx, [run.id])),
    "runs.expire_leases_of_process": (at(Phase.PREPARED), lambda tx, _: runs.expire_leases_of_process(tx, "w")),
    "runs.shorten_leases": (before_a_clock_set_back, lambda tx, _: runs.shorten_leases(tx)),
    "stops.stop": (at(Phase.MUTATING), stop(FailureKind.TRANSIENT)),
    "stops.stop wrong code": (at(Phase.PREPARED), stop(FailureKind.LOGIC)),
    "stops.rescue": (lapsed, lambda tx, run: stops.rescue(tx, [run.id])),
    "stops.lock_workflows": (at(Phase.PREPARED), lambda tx, run: stops.lock_workflows(tx, [held(run)])),
    "stops.withdraw_unclaimed": (unclaimed, lambda tx, run: stops.withdraw_unclaimed(tx, [run.id])),
    "mutations.begin_mutation": (at(Phase.PREPARED), lambda tx, run: mutations.begin_mutation(tx, [a_request(run)])),
    "mutations.send": (approved, lambda tx, run: mutations.send(tx, [held(run)]).only()),
    "mutations.resend": (at(Phase.MUTATING), lambda tx, run: mutations.resend(tx, [held(run)]).only()),
    "mutations.apply": (
        at(Phase.MUTATING),
        lambda tx, run: mutations.apply(tx, [AppliedMutation(mutation_id=run.mutation_id, fence=run.fence)]).only(),
    ),
    "mutations.fail": (
        at(Phase.MUTATING),
        lambda tx, run: fail(tx, run, fence=run.fence, evidence=Evidence.DEFINITE),
    ),
    "mutations.fail later": (crashed, fail),
    "reconciliation.book": (
        crashed,
        lambda tx, run: reconciliation.book(tx, [(run.mutation_id, 0, timedelta(minutes=1))]),
    ),
    "reconciliation.postpone": (crashed, lambda tx, run: reconciliation.postpone(tx, run.mutation_id, after=LEASE)),
    "reconciliation.defer": (crashed, lambda tx, run: reconciliation.defer(tx, a_mutation(tx, run), "not known here")),
    "reconciliation.add_cost": (
        crashed,
        lambda tx, run: reconciliation.add_cost(tx, run.mutation_id, Decimal("0.1")),
    ),
    "reconciliation.escalate": (crashed, lambda tx, run: reconciliation.escalate(tx, [run.mutation_id], "asked")),
    "resolution.happened": (escalated, lambda tx, run: resolution.happened(tx, run.mutation_id, SOMEBODY)),
    "resolution.did_not_happen": (escalated, lambda tx, run: resolution.did_not_happen(tx, run.mutation_id, SOMEBODY)),
    "resolution.skip": (escalated, lambda tx, run: resolution.skip(tx, run.mutation_id, SOMEBODY)),
    "resolution.try_again": (escalated, lambda tx, run: resolution.try_again(tx, run.mutation_id, SOMEBODY)),
    "resolution.approve": (
        at(Phase.MUTATING, needs_approval=True),
        lambda tx, run: resolution.approve(tx, run.mutation_id, SOMEBODY, request_hash="abc"),
    ),
    "resolution.reject": (
        at(Phase.MUTATING, needs_approval=True),
        lambda tx, run: resolution.reject(tx, run.mutation_id, SOMEBODY),
    ),
    "resolution.acknowledge": (found_late, lambda tx, run: resolution.acknowledge(tx, run.mutation_id, SOMEBODY)),
    "late_effects.begin_monitor_check": (
        resolved_as_failed,
        lambda tx, run: late_effects.begin_monitor_check(tx, run.mutation_id, LEASE),
    ),
    "late_effects.schedule_monitor_check": (
        resolved_as_failed,
        lambda tx, run: late_effects.schedule_monitor_check(tx, run.mutation_id, LEASE),
    ),
    "late_effects.discount_monitor_check": (
        resolved_as_failed,
        lambda tx, run: late_effects.discount_monitor_check(tx, run.mutation_id),
    ),
    "late_effects.stop_monitoring": (
        resolved_as_failed,
        lambda tx, run: late_effects.stop_monitoring(tx, a_mutation(tx, run), "gone"),
    ),
    "late_effects.record_late_effect": (
        resolved_as_failed,
        lambda tx, run: late_effects.record_late_effect(tx, run.mutation_id, {"id": 1}, SOMEBODY),
    ),
    "breakers.admit": (open_breaker, lambda tx, _: breakers.admit(tx, [MAIL])),
    "breakers.open_if_unknown": (
        crashed,
        lambda tx, run: breakers.open_if_unknown(tx, MAIL, BreakerPolicy(min_unknown=1), run.mutation_id),
    ),
    "breakers.close_after_probe": (open_breaker, lambda tx, _: breakers.close_after_probe(tx, MAIL)),
    "breakers.open_by_operator": (open_breaker, lambda tx, _: breakers.open_by_operator(tx, MAIL, SOMEBODY)),
    "breakers.close_by_operator": (open_breaker, lambda tx, _: breakers.close_by_operator(tx, MAIL, SOMEBODY)),
    "breakers.redispatch_waiting": (unclaimed, lambda tx, _: breakers.redispatch_waiting(tx)),
    "events.publish": (at(Phase.PREPARED), lambda tx, _: events.publish(tx, "billing", [NEW])),
    "events.publish again": (at(Phase.COMMITTED), lambda tx, _: events.publish(tx, "billing", [AGAIN], replace=True)),
    "events.skip": (pending, lambda tx, event: events.skip(tx, "billing", "send", event, SOMEBODY)),
    "events.quarantine": (pending, lambda tx, event: events.quarantine(tx, "billing", "send", event, SOMEBODY)),
    "events.release": (quarantined, lambda tx, event: events.release(tx, "billing", "send", event, SOMEBODY)),
    "events.skip_with_run": (
        retired,
        lambda tx, run: events.skip_with_run(tx, "billing", "send", run.event_ids[0], SOMEBODY),
    ),
    "registration.register": (declined, registration.register),
    "registration.register more topics": (
        declined,
        lambda tx, spec: registration.register(tx, joining(spec)),
    ),
    "registration.register new names": (
        at(Phase.PREPARING),
        lambda tx, _: registration.register(tx, renamed_spec()),
    ),
    **dict.fromkeys(
        ("renames.move_work", "renames.move_names", "renames.save"),
        (at(Phase.PREPARING), lambda tx, _: rename_everything(tx)),
    ),
    "registration.backfill_page": (
        backfilling,
        lambda tx, _: registration.backfill_page(tx, "billing"),
    ),
    "workflows.clear_unclaimed": (withdrawn, lambda tx, _: workflows.clear_unclaimed(tx, "billing", ["send"])),
    "workflows.pause": (at(Phase.PREPARED), lambda tx, _: workflows.pause(tx, "billing", SOMEBODY)),
    "workflows.resume": (failed, lambda tx, _: workflows.resume(tx, "billing", SOMEBODY)),
    "workflows.unblock": (escalated, lambda tx, _: workflows.unblock(tx, "billing", [BlockKind.RECONCILIATION])),
    "workflows.block": (
        at(Phase.PREPARED),
        lambda tx, run: workflows.block(
            tx, [{"workflow": "billing", "run": run.id, "kind": BlockKind.RECONCILIATION, "reason": "asked"}]
        ),
    ),
    "resolution.missing_confirmation": (
        at(Phase.MUTATING),
        lambda tx, run: resolution.missing_confirmation(
            tx, run.mutation_id, ProposedAct.HAPPENED, {"result": None}, SOMEBODY
        ),
    ),
    "resolution.propose": (
        at(Phase.MUTATING),
        lambda tx, run: resolution.propose(
            tx,
            run.mutation_id,
            ProposedAct.HAPPENED,
            {"result": None},
            SOMEBODY,
            state=state_token(work.mutations(tx, [run.mutation_id])[0]),
        ),
    ),
    "workflows.run_producer": (
        lambda _: None,
        lambda tx, _: workflows.run_producer(tx, "billing", "poll", SOMEBODY),
    ),
    "workflows.enter_maintenance": (
        at(Phase.PREPARED),
        lambda tx, _: workflows.enter_maintenance(tx, "billing", "wrong code"),
    ),
    "workflows.exit_maintenance": (failed, lambda tx, _: workflows.exit_maintenance(tx, "billing", SOMEBODY)),
    "workflows.open_maintenance_task": (failed, lambda tx, _: workflows.open_maintenance_task(tx, "billing")),
    "workflows.raise_watermarks": (at(Phase.PREPARED), lambda tx, _: workflows.raise_watermarks(tx)),
    "workflows.finish_sessions": (at(Phase.COMMITTED), lambda tx, run: workflows.finish_sessions(tx, [run.session_id])),
    **{
        f"housekeeping.prune_page {name}": (
            past,
            lambda tx, _, name=name: housekeeping.prune_page(tx, name),  # type: ignore[misc]
        )
        for name in housekeeping.PRUNED_TABLES
    },
}

#: Public functions of ``transitions`` that lock no row of the order.
LOCKLESS = {
    "access.create_link",
    "access.create_token",
    "access.end_login",
    "access.open_link",
    "access.open_login",
    "access.revoke_token",
    "access.touch_login",
    "access.touch_token",
    "access.begin_request",
    "access.forget_request",
    "access.save_answer",
    "audit.record",
    "audit.subject_of",
    "bulk.discard",
    "bulk.freeze",
    "bulk.record_progress",
    "bulk.take",
    "events.check_event",
    "events.event_rows",
    "events.unknown_topic_error",
    "housekeeping.mark_notice_delivered",
    "housekeeping.next_notices",
    "housekeeping.save_notice_position",
    "housekeeping.save_report",
    "housekeeping.chain_audit",
    "housekeeping.take_slot",
    "housekeeping.delete_old_samples",
    "housekeeping.record_worker",
    "housekeeping.remove_worker",
    "housekeeping.take_sample",
    "late_effects.is_one_effect",
    "late_effects.is_replacement_effect",
    "late_effects.late_effect_evidence",
    "late_effects.record_replacement_effect",
    "registration.register_operations",
    "registration.is_replaced",
    "late_effects.replacement_effect",
    "mutations.illegal_transition",
    "mutations.log_mutation",
    "mutations.record_time_to_resolution",
    "renames.plan",
    "renames.stored_workflow",
    "renames.waiting_events",
    "results.match_results",
    "results.requested_events",
    "results.reservation_error",
    "access.delete_view",
    "access.save_view",
    "resolution.note",
}


def public_functions() -> Iterator[str]:
    for path in sorted((ROOT / "pipeline/transitions").glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and path.stem != "payload_schemas":
                yield f"{path.stem}.{node.name}"


def test_every_transition_is_driven() -> None:
    assert {name.partition(" ")[0] for name in TRANSITIONS} | LOCKLESS == set(public_functions())


@pytest.mark.broken_on_purpose  # what is reached is left as it is: unfinished, unclaimed, or found late
@pytest.mark.parametrize("name", TRANSITIONS)
def test_a_transition_holds_no_later_table_while_it_waits_for_an_earlier_one(db: Database, name: str) -> None:
    reach, act = TRANSITIONS[name]
    a_workflow(db, retention=Retention(done=timedelta(hours=1), ledger=timedelta(hours=1)))
    some_events(db, "m1", "m2", "m3")
    state = reach(db)
    assert tables_held_too_early(db, lambda tx: act(tx, state)) == []


@pytest.mark.broken_on_purpose
@pytest.mark.parametrize("name", TRANSITIONS)
def test_a_transition_holds_no_row_while_it_waits_for_a_deploy_that_changes_subscriptions(
    db: Database, name: str
) -> None:
    reach, act = TRANSITIONS[name]
    a_workflow(db, retention=Retention(done=timedelta(hours=1), ledger=timedelta(hours=1)))
    some_events(db, "m1", "m2", "m3")
    state = reach(db)
    assert tables_held_before_subscriptions(db, "billing", lambda tx: act(tx, state)) == []


def test_phases_and_sweeps_lock_whole_transactions_in_the_order(db: Database) -> None:
    """Each statement of a worker and of every sweep is followed by a look at what its transaction holds."""
    shop = Shop(on_uncertain="contain", concurrency=4)
    shop.mail.will(Does.TIMES_OUT_BEFORE, Does.TIMES_OUT_AFTER, Does.REFUSES)
    shop.mail.cannot_tell(2)
    with recorded_tables(db) as transactions:
        run = shop.started(db, 6)
        with run.crash_at(CrashPoint.PREPARE_RAN):
            run.run()
        run.sweeps.recover_process(process_name())
        run.run_until_idle()
        for duty in DUTIES.values():
            run.advance(timedelta(hours=1))
            duty.run(run.sweeps)
    assert {tuple(tables) for tables in transactions if not is_in_lock_order(tables)} == set()
    assert {table for tables in transactions for table in tables} >= {"workflows", "runs", "mutations", "deliveries"}


def test_a_deploy_and_a_prepare_do_not_wait_for_each_other_in_a_circle(db: Database) -> None:
    """The worker holds an event and comes to the handler. The deploy must not hold the handler by then."""
    a_workflow(db, concurrency=4, batch=2)
    some_events(db, "m1", "m2")
    spec = declined(db)
    with db.transaction() as tx:
        (run,) = starts.start(tx, "billing", "send", is_unsliced=True).runs
    run = preparing(db, run)
    with meanwhile(db, lambda tx: registration.register(tx, spec)) as begin:
        with db.transaction() as worker:
            worker.all(Statement[Any]("SELECT 1 FROM pipeline.deliveries ORDER BY event_id FOR UPDATE"))
            ended = begin()
            wait_until_blocked_by(db, worker)
            runs.finish_prepare(worker, [PreparedRun(lease=held(run))]).only()
        ended.result(timeout=60)
