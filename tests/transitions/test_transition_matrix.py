"""Every transition from every state of a run or mutation: the allowed ones succeed, no other changes a row.

The refusal is caught inside the transaction and the transaction commits, so that an unchanged row is
the transition's doing and not that of a rollback.
"""

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from pipeline.domain.errors import IllegalTransitionError, NotFoundError, PipelineError, StaleWriteError
from pipeline.domain.states import Evidence, Fence, MutationId, MutationStatus, Phase, PhaseTask
from pipeline.domain.values import AppliedMutation, FailedMutation, PreparedRun, RunFailure, RunLease, RunOutput
from pipeline.store.database import Database, Transaction
from pipeline.transitions import mutations, reconciliation, resolution, runs, starts, stops
from tests import factories as make
from tests.factories import LEASE, SOMEBODY
from tests.support.schema_catalog import contents

Verb = Callable[[Transaction, Any], object]

PENDING, PREPARING, PREPARED, MUTATING, MUTATED, EMITTING, COMMITTED = Phase


def ledger_id(run: Any) -> MutationId:
    """The run's mutation, or an unknown id when it has none yet."""
    return MutationId(run.mutation_id or uuid4())


def failed(run: Any, fence: Fence | None) -> FailedMutation:
    return FailedMutation(mutation_id=ledger_id(run), error="422", evidence=Evidence.DEFINITE, fence=fence)


#: What the worker that holds a run may call, and the phases of a consumer's run in which that is a move.
WORKER: dict[str, tuple[Verb, set[Phase]]] = {
    "finish_prepare": (
        lambda tx, run: runs.finish_prepare(tx, [PreparedRun(lease=make.held(run))]).only(),
        {PREPARING},
    ),
    "no_mutation": (lambda tx, run: runs.no_mutation(tx, [make.held(run)]).only(), {PREPARED}),
    "begin_mutation": (lambda tx, run: mutations.begin_mutation(tx, [make.a_request(run)]).only(), {PREPARED}),
    "send": (lambda tx, run: mutations.send(tx, [make.held(run)]).only(), set()),
    "apply": (
        lambda tx, run: mutations.apply(tx, [AppliedMutation(mutation_id=ledger_id(run), fence=run.fence)]).only(),
        {MUTATING},
    ),
    "fail": (lambda tx, run: mutations.fail(tx, [failed(run, run.fence)]).only(), {MUTATING}),
    "commit": (lambda tx, run: runs.commit(tx, [RunOutput(lease=make.held(run))]).only(), {EMITTING}),
    "commit_producer": (lambda tx, run: runs.commit_producer(tx, [RunOutput(lease=make.held(run))]).only(), set()),
    "heartbeat": (
        lambda tx, run: runs.heartbeat(tx, [make.held(run)], lease_duration=2 * LEASE).only(),
        {PREPARING, PREPARED, MUTATING, EMITTING},
    ),
    "release": (lambda tx, run: runs.hand_back(tx, [make.held(run)]).only(), {PREPARING, PREPARED, EMITTING}),
    "stop": (
        lambda tx, run: stops.stop(tx, [RunFailure(lease=make.held(run), failure=make.a_failure())]).only(),
        set(Phase) - {COMMITTED},
    ),
}


def check(refusal: PipelineError) -> None:
    """The error names what was asked, what was found, and what would have been allowed."""
    match refusal:
        case IllegalTransitionError(verb=asked, found=found, allowed=allowed):
            assert asked
            assert allowed
            parts = [str(refusal.key), asked, found, *allowed]
        case StaleWriteError(verb=asked, expected=held, found=found):
            parts = [str(refusal.key), asked, str(held), str(found)]
        case NotFoundError(key=key):
            parts = [str(key)]
        case _:
            raise AssertionError(f"{refusal!r} is none of the errors a refused move may raise")
    assert all(part in str(refusal) for part in parts)


def a_run(db: Database, phase: Phase) -> Any:
    make.a_workflow(db)
    make.some_events(db, "m-1")
    return make.a_run(db, phase)


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("verb", WORKER)
def test_a_workers_transition_succeeds_only_from_the_phases_that_allow_it(
    db: Database, verb: str, phase: Phase
) -> None:
    act, phases = WORKER[verb]
    run = a_run(db, phase)
    before = contents(db)
    with db.transaction() as tx:
        if phase in phases:
            act(tx, run)
        else:
            with pytest.raises(PipelineError) as refusal:
                act(tx, run)
            check(refusal.value)
    assert (contents(db) != before) == (phase in phases)


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("verb", WORKER)
def test_a_worker_that_lost_its_run_changes_nothing_in_any_phase(db: Database, verb: str, phase: Phase) -> None:
    run = a_run(db, phase)
    zombie: Any = SimpleNamespace(**{**run._asdict(), "fence": run.fence - 1})
    before = contents(db)
    with db.transaction() as tx, pytest.raises((StaleWriteError, NotFoundError)) as refusal:
        WORKER[verb][0](tx, zombie)
    check(refusal.value)
    assert contents(db) == before


#: For a run nobody holds: what each claim makes of it.
CLAIMS = {
    PENDING: ("claimed", "left", "left"),
    PREPARING: ("claimed", "left", "left"),
    PREPARED: ("passed", "claimed", "left"),
    MUTATING: ("passed", "left", "left"),
    MUTATED: ("passed", "passed", "claimed"),
    EMITTING: ("passed", "passed", "claimed"),
    COMMITTED: ("passed", "passed", "passed"),
}


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("position", range(3), ids=["prepare", "mutate", "next"])
def test_a_claim_takes_passes_on_or_leaves_a_run_by_its_phase(db: Database, position: int, phase: Phase) -> None:
    run = a_run(db, phase)
    if phase in (PREPARING, PREPARED, EMITTING):
        with db.transaction() as tx:
            runs.hand_back(tx, [make.held(run)]).only()
    before = contents(db)
    task = (PhaseTask.PREPARE, PhaseTask.MUTATE, PhaseTask.NEXT)[position]
    with db.transaction() as tx:
        claims = runs.claim(tx, task, [run.id], lease_duration=LEASE, worker="other")
    found = {"claimed": [row.id for row in claims.claimed], "passed": [*claims.passed], "left": [*claims.unavailable]}
    assert {name for name, ids in found.items() if ids} == {CLAIMS[phase][position]}
    assert (contents(db) != before) == (CLAIMS[phase][position] == "claimed")


@pytest.mark.parametrize("phase", [PREPARING, PREPARED, MUTATING, EMITTING])
@pytest.mark.parametrize("task", PhaseTask)
def test_no_claim_takes_a_run_that_a_worker_holds(db: Database, task: PhaseTask, phase: Phase) -> None:
    run = a_run(db, phase)
    before = contents(db)
    with db.transaction() as tx:
        assert runs.claim(tx, task, [run.id], lease_duration=LEASE, worker="other").claimed == ()
    assert contents(db) == before


@pytest.mark.parametrize("phase", Phase)
def test_a_consumer_s_run_is_never_claimed_to_produce(db: Database, phase: Phase) -> None:
    run = a_run(db, phase)
    before = contents(db)
    with db.transaction() as tx:
        assert runs.claim(tx, PhaseTask.PRODUCE, [run.id], lease_duration=LEASE, worker="w").claimed == ()
    assert contents(db) == before


@pytest.mark.parametrize("verb", sorted(set(WORKER) - {"heartbeat", "release", "stop", "commit_producer"}))
def test_a_producers_run_has_no_transition_of_a_consumer(db: Database, verb: str) -> None:
    make.a_workflow(db)
    with db.transaction() as tx:
        (run,) = starts.start(tx, "billing", "poll").runs
        (run,) = runs.claim(tx, PhaseTask.PRODUCE, [run.id], lease_duration=LEASE, worker="w").claimed
    before = contents(db)
    with db.transaction() as tx, pytest.raises(PipelineError) as refusal:
        WORKER[verb][0](tx, run)
    check(refusal.value)
    assert contents(db) == before


@pytest.mark.parametrize("phase", Phase)
def test_only_a_stopped_run_that_kept_its_inputs_is_retried(db: Database, phase: Phase) -> None:
    run = a_run(db, phase)
    before = contents(db)["runs"]
    with db.transaction() as tx:
        assert starts.retry(tx, [run.id]).runs == ()
    assert contents(db)["runs"] == before


@pytest.mark.parametrize("phase", [PENDING, PREPARING, PREPARED])
def test_a_run_stopped_before_its_mutation_is_not_retried(db: Database, phase: Phase) -> None:
    run = make.stopped(db, a_run(db, phase))
    before = contents(db)
    with db.transaction() as tx, pytest.raises(IllegalTransitionError) as refusal:
        starts.retry(tx, [run.id])
    check(refusal.value)
    assert contents(db) == before


def a_mutation(db: Database, status: str) -> Any:
    """A run whose mutation has this status; ``approved`` is pending with an approval."""
    make.a_workflow(db)
    make.some_events(db, "m-1")
    run = make.a_run(db, MUTATING, needs_approval=status in ("pending", "approved"))
    match status:
        case "approved":
            with db.transaction() as tx:
                resolution.approve(tx, run.mutation_id, SOMEBODY, request_hash="abc")
        case MutationStatus.APPLIED:
            make.applied(db, run)
        case MutationStatus.FAILED:
            make.refused(db, run)
        case MutationStatus.NEEDS_RECONCILE | MutationStatus.INDETERMINATE:
            make.stopped(db, run)
    if status == MutationStatus.INDETERMINATE:
        with db.transaction() as tx:
            reconciliation.escalate(tx, [run.mutation_id], "nobody can know")
    db.advance_clock(timedelta(seconds=30))
    return make.the_run(db, run.id)


STANDINGS = [*(status.value for status in MutationStatus), "approved"]
DOUBTED = {"needs_reconcile", "indeterminate"}

PERSON: dict[str, tuple[Verb, set[str]]] = {
    "happened": (lambda tx, run: resolution.happened(tx, run.mutation_id, SOMEBODY, {"id": 1}), DOUBTED),
    "did_not_happen": (lambda tx, run: resolution.did_not_happen(tx, run.mutation_id, SOMEBODY), DOUBTED),
    "skip": (lambda tx, run: resolution.skip(tx, run.mutation_id, SOMEBODY), DOUBTED),
    "try_again": (lambda tx, run: resolution.try_again(tx, run.mutation_id, SOMEBODY), {"indeterminate"}),
    "approve": (
        lambda tx, run: resolution.approve(tx, run.mutation_id, SOMEBODY, request_hash="abc"),
        {"pending"},
    ),
    "reject": (lambda tx, run: resolution.reject(tx, run.mutation_id, SOMEBODY), {"pending", "approved"}),
    "apply-found-later": (
        lambda tx, run: mutations.apply(tx, [AppliedMutation(mutation_id=run.mutation_id)]).only(),
        DOUBTED,
    ),
    "fail-found-later": (lambda tx, run: mutations.fail(tx, [failed(run, None)]).only(), DOUBTED),
}


@pytest.mark.parametrize("standing", STANDINGS)
@pytest.mark.parametrize("verb", PERSON)
def test_a_mutation_is_resolved_only_from_statuses_that_allow_the_verdict(
    db: Database, verb: str, standing: str
) -> None:
    act, allowed = PERSON[verb]
    run = a_mutation(db, standing)
    before = contents(db)
    with db.transaction() as tx:
        if standing in allowed:
            act(tx, run)
        else:
            with pytest.raises(IllegalTransitionError) as refusal:
                act(tx, run)
            check(refusal.value)
            assert refusal.value.found.startswith(standing.replace("approved", "pending"))
    assert (contents(db) != before) == (standing in allowed)


@pytest.mark.parametrize("standing", STANDINGS)
def test_a_sweep_escalates_and_books_only_mutations_in_reconciliation(db: Database, standing: str) -> None:
    run = a_mutation(db, standing)
    before = contents(db)
    asked = standing == MutationStatus.NEEDS_RECONCILE
    with db.transaction() as tx:
        assert len(reconciliation.book(tx, [(MutationId(run.mutation_id), 0, LEASE)])) == asked
        assert len(reconciliation.escalate(tx, [run.mutation_id], "nobody can know")) == asked
    assert (contents(db) != before) == asked


def test_an_approval_of_another_request_is_refused_as_stale(db: Database) -> None:
    run = a_mutation(db, "pending")
    before = contents(db)
    with db.transaction() as tx, pytest.raises(StaleWriteError) as refusal:
        resolution.approve(tx, run.mutation_id, SOMEBODY, request_hash="another")
    check(refusal.value)
    assert contents(db) == before


def test_only_an_approved_mutation_is_sent_and_only_by_its_holder(db: Database) -> None:
    run = a_mutation(db, "approved")
    with db.transaction() as tx:
        (claimed,) = runs.claim(tx, PhaseTask.MUTATE, [run.id], lease_duration=LEASE, worker="w").claimed
        refused = mutations.send(tx, [RunLease(claimed.id, Fence(claimed.fence - 1))]).refused
        assert isinstance(refused[claimed.id], StaleWriteError)
        assert mutations.send(tx, [make.held(claimed)]).only().status == MutationStatus.IN_FLIGHT
