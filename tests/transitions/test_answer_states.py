"""An answer is refused when the mutation is no longer in the state that it was formed on."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from pipeline.domain.acts import state_token
from pipeline.domain.errors import IllegalTransitionError, NotFoundError, StateChangedError
from pipeline.domain.failures import FailureKind
from pipeline.domain.states import MutationId, Phase
from pipeline.store.database import Database, Transaction
from pipeline.transitions import reconciliation, resolution
from tests.cli import scenarios
from tests.factories import SOMEBODY, a_run, a_workflow, some_events, stopped, the_mutation
from tests.support.table_reads import rows

Act = Callable[[Transaction, MutationId, str | None], object]

RESOLVING: dict[str, Act] = {
    "happened": lambda tx, id_, state: resolution.happened(tx, id_, SOMEBODY, {"id": 1}, state=state),
    "did_not_happen": lambda tx, id_, state: resolution.did_not_happen(tx, id_, SOMEBODY, state=state),
    "skip": lambda tx, id_, state: resolution.skip(tx, id_, SOMEBODY, state=state),
    "try_again": lambda tx, id_, state: resolution.try_again(tx, id_, SOMEBODY, state=state),
}


def escalated(db: Database) -> Any:
    """Create an indeterminate mutation of an operation that can reconcile."""
    some_events(db, "m1")
    run = stopped(db, a_run(db, Phase.MUTATING), FailureKind.TRANSIENT)
    with db.transaction() as tx:
        reconciliation.escalate(tx, [run.mutation_id], "asked 5 times without an answer")
    return the_mutation(db, run.mutation_id)


def asked_again(db: Database, mutation_id: MutationId) -> None:
    """Let another operator try again: the reconciler asks, and gives up as before. The status is the same again."""
    with db.transaction() as tx:
        resolution.try_again(tx, mutation_id, SOMEBODY)
        reconciliation.escalate(tx, [mutation_id], "asked 5 times without an answer")


@pytest.mark.parametrize("verb", RESOLVING)
def test_an_answer_is_refused_although_the_status_is_the_same_again(db: Database, verb: str) -> None:
    a_workflow(db)
    seen = escalated(db)
    db.advance_clock(timedelta(minutes=5))
    asked_again(db, seen.id)
    now = the_mutation(db, seen.id)
    assert now.status == seen.status == "indeterminate"
    with (
        pytest.raises(StateChangedError, match=r"error changed, is .*asked 5 times") as refused,
        db.transaction() as tx,
    ):
        RESOLVING[verb](tx, seen.id, state_token(seen))
    assert "Nothing was changed" in str(refused.value)
    assert the_mutation(db, seen.id) == now
    acts = [row.act for row in rows(db, "SELECT act FROM pipeline.audit")]
    assert acts == ["mutation.try_again"], "a refused answer is not in the audit"


@pytest.mark.parametrize("verb", RESOLVING)
def test_an_answer_on_the_present_state_is_written(db: Database, verb: str) -> None:
    a_workflow(db)
    seen = escalated(db)
    db.advance_clock(timedelta(minutes=5))
    with db.transaction() as tx:
        RESOLVING[verb](tx, seen.id, state_token(seen))
    assert the_mutation(db, seen.id).status != "indeterminate"


def test_a_reconcile_attempt_that_began_meanwhile_refuses_the_answer(db: Database) -> None:
    a_workflow(db)
    some_events(db, "m1")
    run = stopped(db, a_run(db, Phase.MUTATING), FailureKind.TRANSIENT)
    seen = the_mutation(db, run.mutation_id)
    with db.transaction() as tx:
        assert reconciliation.book(tx, [(seen.id, seen.reconcile_attempts, timedelta(minutes=1))])
    with pytest.raises(StateChangedError, match="reconcile attempts was 0, is 1"), db.transaction() as tx:
        resolution.skip(tx, seen.id, SOMEBODY, state=state_token(seen))


def test_a_resolved_mutation_says_what_it_was_resolved_as(db: Database) -> None:
    a_workflow(db)
    seen = escalated(db)
    with db.transaction() as tx:
        resolution.happened(tx, seen.id, SOMEBODY, {"id": 1})
    with (
        pytest.raises(
            StateChangedError, match=r"status was indeterminate, is applied.*resolution changed, is operator"
        ),
        db.transaction() as tx,
    ):
        resolution.skip(tx, seen.id, SOMEBODY, state=state_token(seen))


def test_a_request_that_was_approved_meanwhile_is_not_rejected_or_approved(db: Database) -> None:
    a_workflow(db)
    seen = scenarios.a_pending_approval(db)
    with db.transaction() as tx:
        resolution.approve(tx, seen.id, SOMEBODY, request_hash=seen.request_hash, state=state_token(seen))
    with pytest.raises(StateChangedError, match="approval changed"), db.transaction() as tx:
        resolution.reject(tx, seen.id, SOMEBODY, state=state_token(seen))
    with pytest.raises(StateChangedError, match="approval changed"), db.transaction() as tx:
        resolution.approve(tx, seen.id, SOMEBODY, request_hash=seen.request_hash, state=state_token(seen))


@pytest.mark.broken_on_purpose
def test_a_late_effect_that_was_acknowledged_meanwhile_is_not_acknowledged_again(db: Database) -> None:
    a_workflow(db)
    seen = scenarios.a_late_effect(db)
    with db.transaction() as tx:
        resolution.acknowledge(tx, seen.id, SOMEBODY, state=state_token(seen))
    with pytest.raises(StateChangedError, match="late effect changed"), db.transaction() as tx:
        resolution.acknowledge(tx, seen.id, SOMEBODY, state=state_token(seen))
    with pytest.raises(IllegalTransitionError), db.transaction() as tx:
        resolution.acknowledge(tx, seen.id, SOMEBODY)


def test_an_answer_about_no_mutation_is_refused_as_such(db: Database) -> None:
    with pytest.raises(NotFoundError), db.transaction() as tx:
        resolution.skip(tx, MutationId(uuid4()), SOMEBODY, state="indeterminate.1")
