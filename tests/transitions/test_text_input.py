"""Text and numbers that come from outside: titles, errors, reasons, evidence, sizes.

Postgres stores no NUL and no half of a surrogate pair. Input of an operator or a caller is refused
by name; what an exception says is recorded all the same, because a run that cannot be stopped for its
error message is worse than a message with a character replaced.
"""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest

from pipeline.domain.errors import InvalidInputError, NotFoundError, PayloadError
from pipeline.domain.failures import Failure, FailureKind
from pipeline.domain.states import EventId, Evidence, Fence, Phase, RunStatus
from pipeline.domain.values import (
    Actor,
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
from pipeline.domain.workflows import HandlerKind
from pipeline.store.database import Database
from pipeline.store.reads import work
from pipeline.transitions import events, mutations, reconciliation, registration, runs, stops, workflows
from tests import factories as make
from tests.factories import IN, OUT, SOMEBODY
from tests.support.schema_catalog import contents

UNSTORABLE = {"nul": "a\0b", "half-a-surrogate-pair": "a\udc80b"}
unstorable = pytest.mark.parametrize("words", UNSTORABLE.values(), ids=UNSTORABLE.keys())


@unstorable
@pytest.mark.parametrize("field", ["title", "traceparent", "key"])
def test_an_event_with_text_that_cannot_be_stored_is_refused(db: Database, field: str, words: str) -> None:
    make.a_workflow(db)
    before = contents(db)
    with pytest.raises(PayloadError), db.transaction() as tx:
        events.publish(tx, "billing", [NewEvent(topic=IN, message_id="m", payload={}, **{field: words})])
    assert contents(db) == before


@unstorable
@pytest.mark.parametrize("phase", [Phase.PREPARING, Phase.MUTATING, Phase.EMITTING])
def test_a_run_is_stopped_whatever_its_error_text(db: Database, phase: Phase, words: str) -> None:
    make.a_workflow(db)
    make.some_events(db, "m-1")
    run = make.a_run(db, phase)
    failure = Failure(kind=FailureKind.AUTH, message=words, error_type="UnicodeDecodeError")
    with db.transaction() as tx:
        stops.stop(tx, [RunFailure(lease=make.held(run), failure=failure)]).only()
    assert make.the_run(db, run.id).status != RunStatus.ACTIVE


@unstorable
def test_a_mutation_is_failed_whatever_its_error_text(db: Database, words: str) -> None:
    make.a_workflow(db)
    make.some_events(db, "m-1")
    run = make.a_run(db, Phase.MUTATING)
    verdict = FailedMutation(
        mutation_id=run.mutation_id, error=words, evidence=Evidence.DEFINITE, fence=Fence(run.fence)
    )
    with db.transaction() as tx:
        mutations.fail(tx, [verdict]).only()
    assert make.the_mutation(db, run.mutation_id).status == "failed"


@unstorable
def test_a_mutation_is_escalated_whatever_its_reason(db: Database, words: str) -> None:
    make.a_workflow(db)
    make.some_events(db, "m-1")
    run = make.stopped(db, make.a_run(db, Phase.MUTATING))
    with db.transaction() as tx:
        (row,) = reconciliation.escalate(tx, [run.mutation_id], words)
    assert row.status == "indeterminate"


@unstorable
def test_a_reason_that_cannot_be_stored_is_refused(db: Database, words: str) -> None:
    make.a_workflow(db)
    before = contents(db)
    with pytest.raises(PayloadError), db.transaction() as tx:
        workflows.pause(tx, "billing", Actor(name="ada", reason=words))
    assert contents(db) == before


@pytest.mark.parametrize("evidence", [{"log": object()}, {"log": float("nan")}, {"log": "a\0b"}])
def test_evidence_that_is_not_json_is_refused(db: Database, evidence: dict[str, Any]) -> None:
    make.a_workflow(db)
    before = contents(db)
    with pytest.raises(PayloadError), db.transaction() as tx:
        workflows.pause(tx, "billing", Actor(name="ada", evidence=evidence))
    assert contents(db) == before


def test_params_that_are_null_are_stored_or_refused_by_name(db: Database) -> None:
    make.a_workflow(db)
    make.some_events(db, "m-1")
    run = make.a_run(db, Phase.PREPARED)
    try:
        with db.transaction() as tx:
            mutations.begin_mutation(tx, [make.a_request(run, params=None)]).only()
    except InvalidInputError:
        assert make.the_run(db, run.id).phase == Phase.PREPARED


@pytest.mark.parametrize("value", [MappingProxyType({"a": 1}), {"a": MappingProxyType({})}], ids=["outer", "inner"])
def test_a_mapping_that_is_no_dict_is_stored_as_an_object_or_refused_by_name(db: Database, value: Any) -> None:
    make.a_workflow(db)
    try:
        with db.transaction() as tx:
            events.publish(tx, "billing", [NewEvent(topic=IN, message_id="m", payload=value)])
    except PayloadError:
        assert contents(db)["events"] == []
    else:
        assert contents(db)["events"][0]["payload"] == value


def test_a_state_folded_by_merge_is_checked_like_a_returned_one(db: Database) -> None:
    make.a_workflow(db)
    make.some_events(db, "m-1")
    run = make.a_run(db, Phase.EMITTING)
    before = contents(db)
    item = RunOutput(lease=make.held(run), state={"n": 1}, has_state=True)
    with pytest.raises(PayloadError), db.transaction() as tx:
        runs.commit(tx, [item], merge={run.handler_id: lambda _, __: {"n": float("nan")}})
    assert contents(db) == before


@pytest.mark.parametrize("value", [object(), float("nan"), "a\0b"], ids=["object", "not-a-number", "nul"])
def test_a_topic_schema_that_is_not_json_is_refused(db: Database, value: Any) -> None:
    topic = TopicSpec(name="t", schema={"type": value})
    with pytest.raises(PayloadError), db.transaction() as tx:
        registration.register(tx, WorkflowSpec(name="w", topics=(topic,), handlers=()))
    assert contents(db)["workflows"] == []


BAD_SPECS: dict[str, Callable[[], WorkflowSpec]] = {
    "topic-twice": lambda: WorkflowSpec(name="w", topics=(TopicSpec(name="t"), TopicSpec(name="t")), handlers=()),
    "handler-twice": lambda: WorkflowSpec(
        name="w", topics=(), handlers=(HandlerSpec(name="h"), HandlerSpec(name="h", kind=HandlerKind.PRODUCER))
    ),
    "undeclared-topic": lambda: WorkflowSpec(
        name="w", topics=(TopicSpec(name="t"),), handlers=(HandlerSpec(name="h", subscribes=("t", "u")),)
    ),
    "no-concurrency": lambda: WorkflowSpec(name="w", topics=(), handlers=(), concurrency=0),
    "no-batch": lambda: WorkflowSpec(name="w", topics=(), handlers=(HandlerSpec(name="h", batch=0),)),
    "huge-concurrency": lambda: WorkflowSpec(name="w", topics=(), handlers=(), concurrency=2**31),
    "producer-that-subscribes": lambda: WorkflowSpec(
        name="w",
        topics=(TopicSpec(name="t"),),
        handlers=(HandlerSpec(name="h", kind=HandlerKind.PRODUCER, subscribes=("t",)),),
    ),
}


@pytest.mark.parametrize("kind", BAD_SPECS)
def test_a_workflow_that_makes_no_sense_is_refused_and_nothing_of_it_is_registered(db: Database, kind: str) -> None:
    before = contents(db)
    with pytest.raises(InvalidInputError) as refusal, db.transaction() as tx:
        registration.register(tx, BAD_SPECS[kind]())
    assert "'w'" in str(refusal.value)
    assert contents(db) == before


def test_a_refused_declaration_leaves_the_registered_workflow_as_it_was(db: Database) -> None:
    make.a_workflow(db)
    before = contents(db)
    broken = HandlerSpec(name="send", subscribes=("nothing",))
    with db.transaction() as tx, pytest.raises(NotFoundError, match="nothing"):
        registration.register(tx, WorkflowSpec(name="billing", topics=(TopicSpec(name=IN),), handlers=(broken,)))
    assert contents(db) == before


@pytest.mark.parametrize("event_id", [0, -(2**63), 2**63, 10**30])
def test_an_event_id_that_no_event_can_have_is_unknown(db: Database, event_id: int) -> None:
    make.a_workflow(db)
    with pytest.raises(NotFoundError, match=str(event_id)), db.transaction() as tx:
        events.skip(tx, "billing", "send", EventId(event_id), SOMEBODY)


def test_a_commit_to_an_unknown_topic_changes_nothing(db: Database) -> None:
    make.a_workflow(db)
    make.some_events(db, "m-1")
    run = make.a_run(db, Phase.EMITTING)
    before = contents(db)
    good = NewEvent(topic=OUT, message_id="out-1", payload={})
    bad = NewEvent(topic="nothing", message_id="out-2", payload={})
    with pytest.raises(NotFoundError, match="nothing"), db.transaction() as tx:
        runs.commit(tx, [RunOutput(lease=make.held(run), events=(good, bad))]).only()
    assert contents(db) == before
    make.committed(db, run)


def test_one_bad_value_in_a_cohort_writes_nothing_for_the_others(db: Database) -> None:
    """Checked before the statement runs: the caller must remove the bad one first."""
    make.a_workflow(db, concurrency=2)
    make.some_events(db, "m-1", "m-2")
    first, second = (make.a_run(db, Phase.PREPARING) for _ in range(2))
    before = contents(db)
    plans = [PreparedRun(lease=make.held(first)), PreparedRun(lease=make.held(second), data=object())]
    with db.transaction() as tx, pytest.raises(PayloadError, match=str(second.id)):
        runs.finish_prepare(tx, plans)
    assert contents(db) == before


def test_one_run_with_a_refused_request_does_not_delay_the_others(db: Database) -> None:
    make.a_workflow(db, concurrency=2)
    event, _ = make.some_events(db, "m-1", "m-2")
    first, second = (make.a_run(db, Phase.PREPARING) for _ in range(2))
    plans = [
        PreparedRun(lease=make.held(run), reservations=(Reservation(topic=IN, ids=(event,)),))
        for run in (first, second)
    ]
    with db.transaction() as tx:
        landing = runs.finish_prepare(tx, plans)
    assert [run.id for run in landing.updated] == [first.id]
    assert set(landing.refused) == {second.id}
    assert make.the_run(db, second.id) == second


def test_a_verdict_given_twice_in_one_cohort_is_recorded_once(db: Database) -> None:
    make.a_workflow(db)
    make.some_events(db, "m-1")
    run = make.a_run(db, Phase.MUTATING)
    applied = AppliedMutation(mutation_id=run.mutation_id, fence=Fence(run.fence))
    with db.transaction() as tx:
        landing = mutations.apply(tx, [applied, applied])
        assert len(landing.updated) == 1
        assert work.mutations(tx, [run.mutation_id])[0].status == "applied"
