"""Text that Postgres cannot store, in errors, titles and reasons."""

from typing import Any

import pytest

from pipeline.domain.errors import PayloadError
from pipeline.domain.failures import FailureKind, classify
from pipeline.domain.states import Evidence, Fence, MutationId, Phase
from pipeline.domain.values import Actor, FailedMutation, NewEvent, RunFailure
from pipeline.store.database import Database
from pipeline.transitions import events, mutations, resolution, stops
from tests import factories

UNSTORABLE = ["a NUL \0 inside", "half a pair \ud800 inside"]


def a_held_run(db: Database, phase: Phase) -> Any:
    factories.a_workflow(db)
    factories.some_events(db, "m-1")
    return factories.a_run(db, phase)


@pytest.mark.parametrize("words", UNSTORABLE, ids=["nul", "surrogate"])
def test_a_run_is_stopped_whatever_its_error_text(db: Database, words: str) -> None:
    run = a_held_run(db, Phase.PREPARED)
    with db.transaction() as tx:
        stops.stop(tx, [RunFailure(lease=factories.held(run), failure=classify(ValueError(words)))]).only()
    assert factories.the_run(db, run.id).status == "failed:logic"


@pytest.mark.parametrize("words", UNSTORABLE, ids=["nul", "surrogate"])
def test_a_mutation_is_resolved_whatever_text_the_outside_system_returned(db: Database, words: str) -> None:
    run = a_held_run(db, Phase.MUTATING)
    with db.transaction() as tx:
        fence = Fence(run.fence)
        item = FailedMutation(mutation_id=run.mutation_id, error=words, evidence=Evidence.DEFINITE, fence=fence)
        mutations.fail(tx, [item]).only()
        failure = factories.a_failure(FailureKind.LOGIC)
        stops.stop(tx, [RunFailure(lease=factories.held(run), failure=failure)]).only()
    assert factories.the_mutation(db, run.mutation_id).status == "failed"


@pytest.mark.parametrize("words", UNSTORABLE, ids=["nul", "surrogate"])
@pytest.mark.parametrize("where", ["title", "traceparent"])
def test_an_event_with_unstorable_text_is_refused_with_our_error(db: Database, where: str, words: str) -> None:
    factories.a_workflow(db)
    extra: dict[str, Any] = {where: words}
    new = NewEvent(topic=factories.IN, message_id="m-1", payload={}, **extra)
    with pytest.raises(PayloadError), db.transaction() as tx:
        events.publish(tx, "billing", [new])


@pytest.mark.parametrize(
    "words",
    [
        {"reason": "a\0b"},
        {"reason": "\ud800"},
        {"evidence": {"log": "a\0b"}},
        {"evidence": {"seen": float("nan")}},
        {"evidence": {"at": object()}},
    ],
    ids=["reason nul", "reason surrogate", "evidence nul", "evidence nan", "evidence object"],
)
def test_an_operators_unstorable_reason_is_refused_before_the_act(words: dict[str, Any]) -> None:
    with pytest.raises(PayloadError, match="ada"):
        Actor(name="ada", **words)


def test_an_approval_with_an_unstorable_hash_is_refused_with_our_error(db: Database) -> None:
    factories.a_workflow(db)
    factories.some_events(db, "m-1")
    run = factories.a_run(db, Phase.MUTATING, needs_approval=True)
    with pytest.raises(PayloadError), db.transaction() as tx:
        resolution.approve(tx, MutationId(run.mutation_id), factories.SOMEBODY, request_hash="a\0b")
