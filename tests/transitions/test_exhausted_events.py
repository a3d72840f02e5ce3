"""Which commits and failures tell whether an exhausted event fails by itself, and how limits of slices come and go."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from pipeline.background import rescuer
from pipeline.domain.failures import FailureKind
from pipeline.domain.states import Phase
from pipeline.domain.values import RunFailure
from pipeline.store.database import Database
from pipeline.transitions import events, stops, workflows
from tests.factories import (
    LEASE,
    NO_PAUSE,
    SOMEBODY,
    TIMEOUT,
    a_delivery,
    a_failure,
    a_run,
    a_workflow,
    applied,
    carried_forward,
    claimed_next,
    committed,
    event_status,
    held,
    some_events,
    stopped,
    the_run,
)
from tests.support.table_reads import one, rows
from tests.support.transition_steps import preparing, rested, seen, started

SETS_ASIDE: dict[str, Any] = {"on_logic_error": "quarantine", "on_exhausted": "quarantine", "concurrency": 4}
_HANDLER = "SELECT failing_since, failing_events FROM pipeline.handlers WHERE name = 'send'"


def a_strict_workflow(db: Database, max_failures: int = 1, **options: Any) -> None:
    policy = NO_PAUSE.model_copy(update={"max_failures": max_failures})
    a_workflow(db, failures=policy, **SETS_ASIDE | options)


def failing(db: Database) -> tuple[bool, list[int] | None]:
    """Whether the handler has failed since its last commit, and which events all its failures have in common."""
    row = one(db, _HANDLER)
    return row.failing_since is not None, row.failing_events


def fail_together(db: Database, *runs: Any) -> list[str]:
    """Stop runs in one transaction. Returns how they ended."""
    with db.transaction() as tx:
        failures = [RunFailure(lease=held(run), failure=a_failure(FailureKind.TRANSIENT)) for run in runs]
        return [str(item.decision.block or item.decision.quarantine) for item in stops.stop(tx, failures).updated]


def later(db: Database) -> None:
    """Let the clock go on, so that what follows began later."""
    db.advance_clock(timedelta(seconds=1))


def test_runs_that_fail_in_one_transaction_with_different_events_block_and_set_nothing_aside(db: Database) -> None:
    a_strict_workflow(db)
    some_events(db, "m1", "m2")
    assert fail_together(db, a_run(db, Phase.PREPARED), a_run(db, Phase.PREPARED)) == ["internal", "internal"]
    assert failing(db) == (True, [])


def test_a_run_that_began_before_the_first_failure_does_not_prove_that_others_succeed(db: Database) -> None:
    a_strict_workflow(db, max_failures=2)
    first, second, _ = some_events(db, "m1", "m2", "m3")
    bad, other, straggler = a_run(db, Phase.PREPARED), a_run(db, Phase.PREPARED), a_run(db, Phase.EMITTING)
    later(db)
    fail_together(db, bad, other)
    committed(db, straggler)
    assert failing(db) == (True, [])
    later(db)
    assert stopped(db, a_run(db, Phase.PREPARED), FailureKind.TRANSIENT).status == "failed:internal"
    assert (event_status(db, first), event_status(db, second)) == ("pending", "pending")


def test_a_run_that_began_later_proves_that_others_succeed(db: Database) -> None:
    a_strict_workflow(db, max_failures=2)
    bad, also_bad = some_events(db, "m1", "m2")
    fail_together(db, a_run(db, Phase.PREPARED), a_run(db, Phase.PREPARED))
    later(db)
    some_events(db, "m3")
    runs = [a_run(db, Phase.PREPARED), a_run(db, Phase.PREPARED), a_run(db, Phase.EMITTING)]
    committed(db, runs[-1])
    assert failing(db) == (False, None)
    later(db)
    assert fail_together(db, *runs[:2]) == ["True", "True"]
    assert (event_status(db, bad), event_status(db, also_bad)) == ("quarantined", "quarantined")


@pytest.mark.parametrize("begins_later", [True, False])
def test_the_retry_of_a_run_proves_what_its_mutation_proves(db: Database, begins_later: bool) -> None:
    a_strict_workflow(db, max_failures=5)
    some_events(db, "m1", "m2")
    early, bad = a_run(db, Phase.PREPARED if begins_later else Phase.MUTATING), a_run(db, Phase.PREPARED)
    later(db)
    stopped(db, bad, FailureKind.TRANSIENT)
    later(db)
    if begins_later:
        stopped(db, early, FailureKind.TRANSIENT)
        later(db)
        early = a_run(db, Phase.MUTATING)
    ran = stopped(db, claimed_next(db, applied(db, early)), FailureKind.TRANSIENT)
    later(db)
    committed(db, claimed_next(db, carried_forward(db, ran)))
    assert failing(db)[0] is not begins_later


def test_a_commit_without_input_proves_nothing(db: Database) -> None:
    a_strict_workflow(db, max_failures=5, concurrency=1)
    (bad,) = some_events(db, "m1")
    stopped(db, a_run(db, Phase.PREPARED), FailureKind.TRANSIENT)
    later(db)
    rested(db, preparing(db, started(db)[0]))
    assert failing(db) == (True, [bad])


def test_wrong_code_is_no_sign_of_an_outage(db: Database) -> None:
    a_strict_workflow(db, max_failures=5)
    some_events(db, "m1")
    stopped(db, a_run(db, Phase.PREPARED), FailureKind.LOGIC)
    assert failing(db) == (False, None)


def narrowed(db: Database, names: Sequence[str], **options: Any) -> list[Any]:
    """Events whose run failed once, in one slice."""
    a_strict_workflow(db, max_failures=5, batch=len(names), **options)
    ids = some_events(db, *names)
    run = stopped(db, a_run(db, Phase.PREPARED), FailureKind.TRANSIENT)
    assert run.event_ids == ids
    return ids


def test_a_failed_slice_is_offered_again_in_halves_and_counts_against_no_event(db: Database) -> None:
    ids = narrowed(db, ["m1", "m2", "m3", "m4", "m5"])
    assert [run.offered for run in started(db, 4)] == [ids[:3], ids[3:]]
    assert [a_delivery(db, event).failures for event in ids] == [0] * 5
    fresh = some_events(db, "m6", "m7")
    assert [run.offered for run in started(db, 4)] == [fresh], "others are not mixed with them"


def test_in_a_key_the_limit_of_the_first_event_counts(db: Database) -> None:
    a_strict_workflow(db, max_failures=5, batch=4, ordered=True)
    ids = some_events(db, "m1", "m2", "m3", "m4", key="ada")
    stopped(db, a_run(db, Phase.PREPARED), FailureKind.TRANSIENT)
    ids += some_events(db, "m5", key="ada")
    (run,) = started(db, 4)
    assert run.offered == ids[:2]


def test_a_run_that_would_see_everything_gets_the_slice_of_its_first_event(db: Database) -> None:
    a_strict_workflow(db)
    with db.transaction() as tx:
        wake_at = tx.clock() + timedelta(hours=1)
    rested(db, preparing(db, *started(db, is_unsliced=True)), wake_at=wake_at)
    ids = narrowed(db, ["m1", "m2", "m3"])
    db.advance_clock(timedelta(hours=2))
    (run,) = started(db, is_unsliced=True)
    assert run.offered == ids[:2]


def test_a_declined_half_is_offered_as_a_whole_again_and_not_narrowed_again(db: Database) -> None:
    ids = narrowed(db, ["m1", "m2"])
    for run in started(db, 4):
        rested(db, preparing(db, run))
    found = [a_delivery(db, event) for event in ids]
    assert [(row.slice_limit, row.narrowing_declined) for row in found] == [(None, True)] * 2
    (run,) = started(db, 4)
    assert run.offered == ids
    stopped(db, preparing(db, run), FailureKind.TRANSIENT)
    assert [a_delivery(db, event).failures for event in ids] == [1, 1]


@pytest.mark.parametrize("act", ["release", "resume"])
def test_limits_and_failures_are_forgotten_together(db: Database, act: str) -> None:
    ids = narrowed(db, ["m1", "m2"])
    with db.transaction() as tx:
        if act == "resume":
            workflows.resume(tx, "billing", SOMEBODY, forget_failures=True)
        else:
            for event in ids:
                events.quarantine(tx, "billing", "send", event, SOMEBODY)
                events.release(tx, "billing", "send", event, SOMEBODY)
    found = [a_delivery(db, event) for event in ids]
    kept = [(row.slice_limit, row.narrowing_declined, row.failing_since, row.failures) for row in found]
    assert kept == [(None, False, None, 0)] * 2
    assert failing(db) == ((True, ids) if act == "release" else (False, None))


def test_a_single_run_that_dies_twice_while_it_chooses_is_narrowed_down_to_what_it_could_see(db: Database) -> None:
    a_strict_workflow(db, max_failures=5, concurrency=1)
    ids = some_events(db, "m1", "m2")
    for _ in range(2):
        run = preparing(db, started(db)[0])
        assert seen(db, run) == ids
        db.advance_clock(LEASE + TIMEOUT)
        rescuer.recover_crashed_runs(db)
        assert the_run(db, run.id).status == "crashed"
    (run,) = started(db)
    assert run.offered == ids[:1]
    assert len(rows(db, "SELECT FROM pipeline.deliveries WHERE slice_limit = 1 AND failures = 0")) == 2
