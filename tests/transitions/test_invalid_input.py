"""Bad input to transitions: a typed error that names what was asked and what is known, and nothing written."""

import math
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from types import MappingProxyType
from typing import Any
from uuid import UUID

import pytest

from pipeline.domain.errors import NotFoundError, PayloadError, ReservationError
from pipeline.domain.states import EventId, Evidence, Fence, MutationId, Phase, PhaseTask, RunId
from pipeline.domain.values import (
    Actor,
    AppliedMutation,
    FailedMutation,
    HandlerSpec,
    Limits,
    NewEvent,
    PreparedRun,
    Reservation,
    RunFailure,
    RunLease,
    RunOutput,
    TopicSpec,
    WorkflowSpec,
)
from pipeline.store.database import Database, Transaction
from pipeline.transitions import (
    events,
    mutations,
    reconciliation,
    registration,
    resolution,
    runs,
    starts,
    stops,
    workflows,
)
from tests import factories as make
from tests.factories import IN, LEASE, OUT, SOMEBODY
from tests.support.schema_catalog import contents

Act = Callable[[Transaction], object]

NOBODY = UUID(int=0)
STRANGER = RunLease(RunId(NOBODY), Fence(1))
UNKNOWN_ID = MutationId(NOBODY)
NO_EVENT = EventId(-1)


def an_event(**changes: Any) -> NewEvent:
    fields: dict[str, Any] = {"topic": IN, "message_id": "m-1", "payload": {}, **changes}
    return NewEvent(**fields)


def _operator_on_event(verb: Callable[..., object], workflow: str, handler: str) -> Act:
    return lambda tx: verb(tx, workflow, handler, NO_EVENT, SOMEBODY)


def _operator_on_mutation(verb: Callable[..., object]) -> Act:
    return lambda tx: verb(tx, UNKNOWN_ID, SOMEBODY)


UNKNOWN: dict[str, tuple[Act, str]] = {
    "publish-workflow": (lambda tx: events.publish(tx, "nowhere", [an_event()]), "nowhere"),
    "publish-topic": (lambda tx: events.publish(tx, "billing", [an_event(topic="nothing")]), "nothing"),
    "start-workflow": (lambda tx: starts.start(tx, "nowhere", "send"), "nowhere"),
    "start-handler": (lambda tx: starts.start(tx, "billing", "nobody"), "nobody"),
    "retry-run": (lambda tx: starts.retry(tx, [NOBODY]), str(NOBODY)),
    "pause": (lambda tx: workflows.pause(tx, "nowhere", SOMEBODY), "nowhere"),
    "resume": (lambda tx: workflows.resume(tx, "nowhere", SOMEBODY), "nowhere"),
    "exit-maintenance": (lambda tx: workflows.exit_maintenance(tx, "nowhere", SOMEBODY), "nowhere"),
    **{
        f"{verb.__name__}-{what}": (_operator_on_event(verb, *target), named)
        for verb in (events.skip, events.quarantine, events.release)
        for what, target, named in (
            ("workflow", ("nowhere", "send"), "nowhere"),
            ("handler", ("billing", "nobody"), "nobody"),
            ("event", ("billing", "send"), "-1"),
        )
    },
    **{
        verb.__name__: (_operator_on_mutation(verb), str(NOBODY))
        for verb in (
            resolution.happened,
            resolution.did_not_happen,
            resolution.skip,
            resolution.reject,
            resolution.try_again,
        )
    },
    "approve": (lambda tx: resolution.approve(tx, UNKNOWN_ID, SOMEBODY, request_hash="abc"), str(NOBODY)),
    "apply": (lambda tx: mutations.apply(tx, [AppliedMutation(mutation_id=UNKNOWN_ID)]).only(), str(NOBODY)),
    "fail": (
        lambda tx: mutations.fail(
            tx, [FailedMutation(mutation_id=UNKNOWN_ID, error="", evidence=Evidence.DEFINITE, fence=Fence(1))]
        ).only(),
        str(NOBODY),
    ),
    "finish_prepare": (lambda tx: runs.finish_prepare(tx, [PreparedRun(lease=STRANGER)]).only(), str(NOBODY)),
    "no_mutation": (lambda tx: runs.no_mutation(tx, [STRANGER]).only(), str(NOBODY)),
    "commit": (lambda tx: runs.commit(tx, [RunOutput(lease=STRANGER)]).only(), str(NOBODY)),
    "commit_producer": (lambda tx: runs.commit_producer(tx, [RunOutput(lease=STRANGER)]).only(), str(NOBODY)),
    "heartbeat": (lambda tx: runs.heartbeat(tx, [STRANGER], lease_duration=LEASE).only(), str(NOBODY)),
    "release-run": (lambda tx: runs.hand_back(tx, [STRANGER]).only(), str(NOBODY)),
    "send": (lambda tx: mutations.send(tx, [STRANGER]).only(), str(NOBODY)),
    "stop": (
        lambda tx: stops.stop(tx, [RunFailure(lease=STRANGER, failure=make.a_failure())]).only(),
        str(NOBODY),
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_name_or_id_that_nothing_is_known_by_is_named_and_nothing_is_written(db: Database, name: str) -> None:
    act, asked = UNKNOWN[name]
    make.a_workflow(db)
    before = contents(db)
    with db.transaction() as tx, pytest.raises(NotFoundError) as refusal:
        act(tx)
    assert asked in str(refusal.value)
    assert contents(db) == before


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("publish-workflow", {"billing"}),
        ("publish-topic", {IN, OUT}),
        ("start-workflow", {"billing"}),
        ("start-handler", {"send", "poll"}),
        ("pause", {"billing"}),
        ("skip-handler", {"send", "poll"}),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_names(db: Database, name: str, known: set[str]) -> None:
    make.a_workflow(db)
    with db.transaction() as tx, pytest.raises(NotFoundError) as refusal:
        UNKNOWN[name][0](tx)
    assert set(refusal.value.known) == known
    assert all(each in str(refusal.value) for each in known)


def test_unknown_runs_and_mutations_in_a_sweep_are_left_out(db: Database) -> None:
    make.a_workflow(db)
    before = contents(db)
    with db.transaction() as tx:
        for task in PhaseTask:
            claims = runs.claim(tx, task, [NOBODY], lease_duration=LEASE, worker="w")
            assert (claims.claimed, claims.passed, claims.unavailable) == ((), (), (RunId(NOBODY),))
        assert runs.mark_dispatched(tx, [NOBODY]) == ()
        assert stops.rescue(tx, [NOBODY]) == ()
        assert reconciliation.escalate(tx, [NOBODY], "nobody can know") == ()
        assert reconciliation.book(tx, [(UNKNOWN_ID, 0, LEASE)]) == ()
    assert contents(db) == before


def test_a_prepare_cannot_reserve_what_it_was_not_shown(db: Database) -> None:
    """Each event is refused for its own reason, and the one that could have been reserved is not."""
    make.a_workflow(db, consumers=("send", "log"))
    taken, free = make.some_events(db, "m-1", "m-2")
    with db.transaction() as tx:
        elsewhere = events.publish(tx, "billing", [an_event(topic=OUT, message_id="out")]).new[OUT, "out"]
        events.quarantine(tx, "billing", "send", taken, SOMEBODY)
    run = make.a_run(db, Phase.PREPARING)
    before = contents(db)
    asked = Reservation(topic=IN, ids=(free, taken, elsewhere, EventId(2**62)))
    with db.transaction() as tx, pytest.raises(ReservationError) as refusal:
        runs.finish_prepare(tx, [PreparedRun(lease=make.held(run), reservations=(asked,))]).only()
    assert set(refusal.value.refused) == {taken, elsewhere, 2**62}
    assert refusal.value.refused[taken] == "it is quarantined"
    assert refusal.value.refused[elsewhere] == f"it is on topic {OUT!r}, not {IN!r}"
    assert refusal.value.refused[2**62] == "there is no such event"
    assert contents(db) == before


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


NOT_JSON: dict[str, Any] = {
    "object": object(),
    "set": {1},
    "bytes": b"x",
    "decimal": Decimal(1),
    "instant": datetime(2026, 1, 1, tzinfo=UTC),
    "uuid": NOBODY,
    "not-a-number": math.nan,
    "infinity": {"x": [-math.inf]},
    "nul": "a\0b",
    "half-a-surrogate-pair": {"x": "\ud800"},
    "number-as-key": {1: "x"},
    "nul-in-a-key": {"a\0": 1},
    "too-deep": nested(100),
    "far-too-deep": nested(100_000),
    "generator": (n for n in range(3)),
    "longer-than-python-prints": 10**5000,
    "read-only-mapping-of-a-set": MappingProxyType({"a": {1}}),
}

#: Where a workflow's own values come in, and the limit each is held to.
PLACES: dict[str, str] = {
    "payload": "payload",
    "data": "prepare_result",
    "ui": "prepare_result",
    "params": "params",
    "result": "result",
    "state": "state",
}


def offered(db: Database, place: str) -> Callable[[Transaction, Any, Limits], object]:
    """The transition that takes such a value, and a run that is ready for it."""
    make.a_workflow(db)
    if place == "payload":
        return lambda tx, value, limits: events.publish(tx, "billing", [an_event(payload=value)], limits=limits)
    make.some_events(db, "m-0")
    if place in ("data", "ui"):
        run = make.a_run(db, Phase.PREPARING)
        return lambda tx, value, limits: runs.finish_prepare(
            tx, [PreparedRun(lease=make.held(run), **{place: value})], limits
        ).only()
    if place == "params":
        run = make.a_run(db, Phase.PREPARED)
        return lambda tx, value, limits: mutations.begin_mutation(
            tx, [make.a_request(run, params=value)], limits
        ).only()
    if place == "result":
        run = make.a_run(db, Phase.MUTATING)
        return lambda tx, value, limits: mutations.apply(
            tx, [AppliedMutation(mutation_id=run.mutation_id, result=value, fence=run.fence)], limits=limits
        ).only()
    run = make.a_run(db, Phase.EMITTING)
    return lambda tx, value, limits: runs.commit(
        tx, [RunOutput(lease=make.held(run), state=value, has_state=True)], limits=limits
    ).only()


@pytest.mark.parametrize("kind", NOT_JSON)
@pytest.mark.parametrize("place", PLACES)
def test_a_value_that_is_not_json_is_refused_wherever_it_comes_in(db: Database, place: str, kind: str) -> None:
    act = offered(db, place)
    before = contents(db)
    with db.transaction() as tx, pytest.raises(PayloadError) as refusal:
        act(tx, NOT_JSON[kind], Limits())
    assert "expected" in str(refusal.value)
    assert contents(db) == before


@pytest.mark.parametrize("place", PLACES)
def test_a_value_one_byte_above_its_limit_is_refused_and_one_at_it_is_stored(db: Database, place: str) -> None:
    """Bytes are counted, not characters: the euro sign is three."""
    act = offered(db, place)
    frame = len('{"reservations":[],"data":null,"ui":"","approval":false}') if place in ("data", "ui") else len('""')
    limits = Limits(**{PLACES[place]: frame + 9})
    before = contents(db)
    with db.transaction() as tx, pytest.raises(PayloadError, match=f"at most {frame + 9} bytes"):
        act(tx, "€€€x", limits)
    assert contents(db) == before
    with db.transaction() as tx:
        act(tx, "€€€", limits)
    assert contents(db) != before


@pytest.mark.parametrize(
    "value",
    [None, True, 0, 10**300, -1.5, "", "€ 😀 \x7f", [], {}, {"": [None, {"a": [1]}]}, nested(60)],
    ids=["null", "true", "zero", "huge", "float", "empty", "unicode", "list", "dict", "mixed", "deep"],
)
def test_every_json_value_comes_back_as_it_went_in(db: Database, value: Any) -> None:
    make.a_workflow(db)
    with db.transaction() as tx:
        events.publish(tx, "billing", [an_event(payload=value)])
    (row,) = contents(db)["events"]
    assert row["payload"] == value


BAD_NAMES = {
    "empty": "",
    "blank": "  ",
    "too-long": "x" * 256,
    "newline": "a\nb",
    "nul": "a\0b",
    "half-a-surrogate-pair": "\udfff",
    "none": None,
    "number": 7,
}


def spec(**changes: Any) -> WorkflowSpec:
    fields: dict[str, Any] = {"name": "w", "topics": (TopicSpec(name="t"),), "handlers": (), **changes}
    return WorkflowSpec(**fields)


NAMED: dict[str, Callable[[Transaction, Any], object]] = {
    "topic": lambda tx, name: events.publish(tx, "billing", [an_event(topic=name)]),
    "message-id": lambda tx, name: events.publish(tx, "billing", [an_event(message_id=name)]),
    "workflow": lambda tx, name: registration.register(tx, spec(name=name)),
    "declared-topic": lambda tx, name: registration.register(tx, spec(topics=(TopicSpec(name=name),))),
    "declared-handler": lambda tx, name: registration.register(tx, spec(handlers=(HandlerSpec(name=name),))),
    "person": lambda tx, name: workflows.pause(tx, "billing", Actor(name=name)),
}


@pytest.mark.parametrize("kind", BAD_NAMES)
@pytest.mark.parametrize("noun", NAMED)
def test_a_name_that_cannot_be_a_key_is_refused(db: Database, noun: str, kind: str) -> None:
    make.a_workflow(db)
    before = contents(db)
    with pytest.raises(PayloadError), db.transaction() as tx:
        NAMED[noun](tx, BAD_NAMES[kind])
    assert contents(db) == before


@pytest.mark.parametrize("field", ["connector", "operation", "request_hash"])
@pytest.mark.parametrize("kind", BAD_NAMES)
def test_a_request_with_a_name_that_cannot_be_a_key_is_refused(db: Database, field: str, kind: str) -> None:
    make.a_workflow(db)
    make.some_events(db, "m-1")
    run = make.a_run(db, Phase.PREPARED)
    before = contents(db)
    with db.transaction() as tx, pytest.raises(PayloadError):
        mutations.begin_mutation(tx, [make.a_request(run, **{field: BAD_NAMES[kind]})])
    assert contents(db) == before
