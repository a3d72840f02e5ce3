"""Which of two callers gets a run: claims, rescues, late workers and operators."""

from collections.abc import Callable
from typing import Any

import pytest

from pipeline.background import rescuer
from pipeline.domain.errors import IllegalTransitionError, StaleWriteError
from pipeline.domain.states import Evidence, Phase, PhaseTask, RunStatus
from pipeline.domain.values import AppliedMutation, FailedMutation, PreparedRun, RunFailure, RunLease, RunOutput
from pipeline.store.database import Database, Transaction
from pipeline.transitions import mutations, resolution, runs, stops
from pipeline.transitions.results import BatchResult
from tests.factories import (
    LEASE,
    SOMEBODY,
    TIMEOUT,
    a_failure,
    a_request,
    a_run,
    a_workflow,
    carried_forward,
    claimed_next,
    committed,
    event_status,
    held,
    some_events,
    the_mutation,
    the_run,
)
from tests.support.concurrent_transactions import raced

CLAIMS = {
    Phase.PENDING: PhaseTask.PREPARE,
    Phase.PREPARED: PhaseTask.MUTATE,
    Phase.MUTATED: PhaseTask.NEXT,
}


@pytest.mark.parametrize("phase", list(CLAIMS))
def test_of_two_claims_of_one_run_one_gets_it(db: Database, phase: Phase) -> None:
    a_workflow(db)
    some_events(db, "m1")
    run = a_run(db, phase)
    if run.lease_expires_at:
        with db.transaction() as tx:
            runs.hand_back(tx, [held(run)]).only()
    task = CLAIMS[phase]
    with db.transaction() as first:
        mine = runs.claim(first, task, [run.id], lease_duration=LEASE, worker="one")
        with db.transaction() as second:
            theirs = runs.claim(second, task, [run.id], lease_duration=LEASE, worker="two")
    with db.transaction() as tx:
        later = runs.claim(tx, task, [run.id], lease_duration=LEASE, worker="two")
    assert [row.worker for row in mine.claimed] == ["one"]
    assert (theirs.claimed, theirs.unavailable) == ((), (run.id,))
    assert (later.claimed, later.unavailable) == ((), (run.id,))


def test_a_heartbeat_that_comes_first_keeps_the_run_from_its_rescuer_who_does_not_wait(db: Database) -> None:
    run = lapsed_run(db, Phase.PREPARING)
    with db.transaction() as tx:
        runs.heartbeat(tx, [held(run)], lease_duration=LEASE).only()
        with db.transaction() as other:
            assert stops.rescue(other, [run.id]) == ()
    with db.transaction() as tx:
        assert stops.rescue(tx, [run.id]) == ()
    assert the_run(db, run.id).status == RunStatus.ACTIVE


def test_a_rescue_that_commits_first_leaves_the_worker_a_stale_fence(db: Database) -> None:
    run = lapsed_run(db, Phase.EMITTING)
    ended = raced(
        db,
        lambda tx: stops.rescue(tx, [run.id]),
        lambda tx: runs.commit(tx, [RunOutput(lease=held(run))]).only(),
    )
    with pytest.raises(StaleWriteError):
        ended.result()
    assert the_run(db, run.id).status == RunStatus.CRASHED


def test_a_run_that_commits_first_leaves_the_rescuer_nothing_to_wait_for(db: Database) -> None:
    run = lapsed_run(db, Phase.EMITTING)
    with db.transaction() as tx:
        runs.commit(tx, [RunOutput(lease=held(run))]).only()
        with db.transaction() as other:
            assert stops.rescue(other, [run.id]) == ()
    with db.transaction() as tx:
        assert stops.rescue(tx, [run.id]) == ()
    assert the_run(db, run.id).status == RunStatus.COMMITTED


def test_of_two_rescuers_one_rescues(db: Database) -> None:
    run = lapsed_run(db, Phase.MUTATING)
    ended = raced(db, lambda tx: stops.rescue(tx, [run.id]), lambda tx: stops.rescue(tx, [run.id]))
    assert ended.result() == ()
    assert the_mutation(db, run.mutation_id).status == "needs_reconcile"


ZOMBIE_WRITES: dict[str, tuple[Phase, Callable[[Transaction, Any], BatchResult[Any]]]] = {
    "finish_prepare": (Phase.PREPARING, lambda tx, run: runs.finish_prepare(tx, [PreparedRun(lease=held(run))])),
    "begin_mutation": (Phase.PREPARED, lambda tx, run: mutations.begin_mutation(tx, [a_request(run)])),
    "no_mutation": (Phase.PREPARED, lambda tx, run: runs.no_mutation(tx, [held(run)])),
    "apply": (
        Phase.MUTATING,
        lambda tx, run: mutations.apply(tx, [AppliedMutation(mutation_id=run.mutation_id, fence=run.fence)]),
    ),
    "fail": (
        Phase.MUTATING,
        lambda tx, run: mutations.fail(
            tx,
            [FailedMutation(mutation_id=run.mutation_id, error="", evidence=Evidence.DEFINITE, fence=run.fence)],
        ),
    ),
    "commit": (Phase.EMITTING, lambda tx, run: runs.commit(tx, [RunOutput(lease=held(run))])),
    "stop": (Phase.EMITTING, lambda tx, run: stops.stop(tx, [RunFailure(lease=held(run), failure=a_failure())])),
    "heartbeat": (Phase.EMITTING, lambda tx, run: runs.heartbeat(tx, [held(run)], lease_duration=LEASE)),
    "release": (Phase.EMITTING, lambda tx, run: runs.hand_back(tx, [held(run)])),
}


@pytest.mark.parametrize("verb", list(ZOMBIE_WRITES))
def test_a_worker_that_comes_back_after_its_lease_changes_nothing(db: Database, verb: str) -> None:
    phase, write = ZOMBIE_WRITES[verb]
    run = lapsed_run(db, phase)
    rescuer.recover_crashed_runs(db)
    before = the_run(db, run.id)
    with pytest.raises(StaleWriteError, match="came too late"), db.transaction() as tx:
        write(tx, run).only()
    assert the_run(db, run.id) == before


def test_a_worker_with_a_lapsed_lease_may_not_send_even_before_a_rescue(db: Database) -> None:
    run = lapsed_run(db, Phase.PREPARED)
    with pytest.raises(StaleWriteError, match="not leased"), db.transaction() as tx:
        mutations.begin_mutation(tx, [a_request(run)]).only()
    rescuer.recover_crashed_runs(db)


def test_an_old_claim_is_fenced_off_by_a_newer_one(db: Database) -> None:
    a_workflow(db)
    some_events(db, "m1")
    old = a_run(db, Phase.EMITTING)
    with db.transaction() as tx:
        runs.hand_back(tx, [held(old)]).only()
    new = claimed_next(db, old)
    assert new.fence == old.fence + 1
    with pytest.raises(StaleWriteError, match=f"fence {old.fence}"), db.transaction() as tx:
        runs.commit(tx, [RunOutput(lease=RunLease(old.id, old.fence))]).only()
    committed(db, new)


def test_of_a_skip_and_a_happened_at_once_the_first_counts(db: Database) -> None:
    run = lapsed_run(db, Phase.MUTATING)
    rescuer.recover_crashed_runs(db)
    ended = raced(
        db,
        lambda tx: resolution.skip(tx, run.mutation_id, SOMEBODY),
        lambda tx: resolution.happened(tx, run.mutation_id, SOMEBODY),
    )
    with pytest.raises(IllegalTransitionError, match="it is failed"):
        ended.result()
    assert the_run(db, run.id).mutation_outcome == "skipped"


def test_of_a_verdict_and_a_skip_at_once_the_first_counts_and_the_commit_consumes(db: Database) -> None:
    run = lapsed_run(db, Phase.MUTATING)
    rescuer.recover_crashed_runs(db)
    ended = raced(
        db,
        lambda tx: resolution.happened(tx, run.mutation_id, SOMEBODY),
        lambda tx: resolution.skip(tx, run.mutation_id, SOMEBODY),
    )
    with pytest.raises(IllegalTransitionError, match="it is applied"):
        ended.result()
    done = committed(db, carried_forward(db, the_run(db, run.id)))
    assert event_status(db, done.event_ids[0]) == "consumed"


def test_a_skip_against_the_commit_of_the_retry_is_refused(db: Database) -> None:
    run = lapsed_run(db, Phase.EMITTING)
    rescuer.recover_crashed_runs(db)
    retry = claimed_next(db, carried_forward(db, the_run(db, run.id)))
    with db.transaction() as tx:
        runs.commit(tx, [RunOutput(lease=held(retry))]).only()
        with pytest.raises(IllegalTransitionError), db.transaction() as person:
            resolution.skip(person, run.mutation_id, SOMEBODY)
    assert event_status(db, retry.event_ids[0]) == "consumed"


def lapsed_run(db: Database, phase: Phase) -> Any:
    """A run whose lease has lapsed and that was not rescued yet."""
    a_workflow(db)
    some_events(db, "m1")
    run = a_run(db, phase)
    db.advance_clock(LEASE + TIMEOUT)
    return run
