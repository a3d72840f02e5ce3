"""What a publish does: once per message id, to every consumer of its topic, all of a batch or none of it."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from pipeline.domain.errors import InvalidInputError, PipelineError
from pipeline.domain.states import DeliveryStatus, EventId, Phase
from pipeline.domain.values import HandlerSpec, NewEvent, TopicSpec, WorkflowSpec
from pipeline.domain.workflows import StartAt
from pipeline.store.connections import CallerConnection
from pipeline.store.database import Database, Transaction
from pipeline.store.reads import work
from pipeline.transitions import events, registration, starts
from tests import factories as make
from tests.factories import IN, OUT, SOMEBODY
from tests.support.schema_catalog import contents


def an_event(message_id: str = "m-1", **changes: Any) -> NewEvent:
    fields: dict[str, Any] = {"topic": IN, "payload": {"n": 1}, **changes}
    return NewEvent(message_id=message_id, **fields)


def publish(db: Database, *new: NewEvent, workflow: str = "billing", rewrite: bool = False) -> events.PublishResult:
    with db.transaction() as tx:
        return events.publish(tx, workflow, new, replace=rewrite)


def register(db: Database, spec: WorkflowSpec) -> None:
    with db.transaction() as tx:
        registration.register(tx, spec)


def delivered(db: Database) -> set[tuple[str, EventId]]:
    """Who was handed what."""
    rows = contents(db)
    names = {handler["id"]: handler["name"] for handler in rows["handlers"]}
    return {(names[row["handler_id"]], EventId(row["event_id"])) for row in rows["deliveries"]}


def payloads(db: Database) -> list[Any]:
    return [row["payload"] for row in contents(db)["events"]]


def test_publishing_again_changes_nothing(db: Database) -> None:
    make.a_workflow(db)
    first = publish(db, an_event())
    before = contents(db)
    again = publish(db, an_event(payload={"n": 2}, title="other", key="k"))
    assert (len(first.new), again.new, again.replaced) == (1, {}, {})
    assert contents(db) == before


def test_the_first_of_two_events_with_one_message_id_in_a_batch_wins(db: Database) -> None:
    make.a_workflow(db)
    published = publish(db, an_event(payload="first"), an_event(payload="second"))
    assert list(published.new) == [(IN, "m-1")]
    assert payloads(db) == ["first"]
    assert len(delivered(db)) == 1


def test_a_repeat_in_a_batch_does_not_keep_the_others_out(db: Database) -> None:
    make.a_workflow(db)
    publish(db, an_event("m-1"))
    assert set(publish(db, an_event("m-1"), an_event("m-2")).new) == {(IN, "m-2")}


def test_a_message_id_is_one_event_per_topic_and_workflow(db: Database) -> None:
    make.a_workflow(db)
    make.a_workflow(db, "shipping")
    here = publish(db, an_event(), an_event(topic=OUT))
    there = publish(db, an_event(), workflow="shipping")
    assert len({*here.new.values(), *there.new.values()}) == 3


def test_events_keep_the_order_of_their_batch(db: Database) -> None:
    make.a_workflow(db)
    names = [f"m-{n}" for n in (5, 3, 9, 1)]
    published = publish(db, *(an_event(name) for name in names)).new
    assert sorted(published, key=lambda key: published[key]) == [(IN, name) for name in names]


@pytest.mark.parametrize(
    "bad",
    [an_event("bad", payload=object()), an_event("bad", topic="nothing"), an_event(""), an_event("bad", key="")],
    ids=["payload", "topic", "message-id", "key"],
)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_one_bad_event_in_a_batch_publishes_nothing(db: Database, bad: NewEvent, position: int) -> None:
    make.a_workflow(db)
    before = contents(db)
    batch = [an_event("m-1"), an_event("m-2")]
    batch.insert(position, bad)
    with db.transaction() as tx, pytest.raises(InvalidInputError):
        events.publish(tx, "billing", batch)
    assert contents(db) == before


def test_an_event_exists_if_and_only_if_the_caller_s_transaction_commits(db: Database) -> None:
    make.a_workflow(db)
    with db.engine.connect() as connection:
        events.publish(Transaction(CallerConnection(connection)), "billing", [an_event()])
        connection.rollback()
    assert payloads(db) == []
    assert publish(db, an_event()).new


def test_an_empty_batch_is_nothing_to_do(db: Database) -> None:
    make.a_workflow(db)
    before = contents(db)
    assert publish(db) == events.PublishResult(new={}, replaced={})
    assert contents(db) == before


def test_replace_rewrites_an_event_that_no_run_was_offered(db: Database) -> None:
    make.a_workflow(db)
    (event,) = publish(db, an_event()).new.values()
    again = publish(db, an_event(payload={"n": 2}, title="two"), rewrite=True)
    assert (again.new, again.replaced) == ({}, {(IN, "m-1"): event})
    (row,) = contents(db)["events"]
    assert (row["payload"], row["title"]) == ({"n": 2}, "two")


def test_replace_publishes_an_event_that_was_not_there(db: Database) -> None:
    make.a_workflow(db)
    published = publish(db, an_event(), rewrite=True)
    assert (len(published.new), published.replaced) == (1, {})


def moved_on(db: Database, how: str, event: EventId) -> None:
    match how:
        case "offered":
            make.a_run(db)
        case "reserved":
            make.a_run(db, Phase.PREPARED)
        case "consumed":
            make.a_run(db, Phase.COMMITTED)
        case "skipped":
            with db.transaction() as tx:
                events.skip(tx, "billing", "send", event, SOMEBODY)
        case "quarantined":
            with db.transaction() as tx:
                events.quarantine(tx, "billing", "send", event, SOMEBODY)


@pytest.mark.parametrize("how", ["offered", "reserved", "consumed", "skipped", "quarantined"])
@pytest.mark.parametrize("consumers", [("send",), ("log", "send")], ids=["alone", "with-another-that-has-it-pending"])
def test_replace_leaves_an_event_that_is_no_longer_untouched(
    db: Database, how: str, consumers: tuple[str, ...]
) -> None:
    make.a_workflow(db, concurrency=2, consumers=consumers)
    (event,) = publish(db, an_event()).new.values()
    moved_on(db, how, event)
    before = contents(db)
    again = publish(db, an_event(payload={"n": 2}), rewrite=True)
    assert (again.new, again.replaced) == ({}, {})
    assert contents(db) == before


def test_an_event_is_delivered_to_every_consumer_of_its_topic_and_to_no_other(db: Database) -> None:
    handlers = (
        HandlerSpec(name="both", subscribes=("a", "b")),
        HandlerSpec(name="only-a", subscribes=("a",)),
        HandlerSpec(name="nothing"),
    )
    register(db, WorkflowSpec(name="w", topics=(TopicSpec(name="a"), TopicSpec(name="b")), handlers=handlers))
    new = publish(db, an_event(topic="a"), an_event(topic="b"), workflow="w").new
    a, b = new["a", "m-1"], new["b", "m-1"]
    assert delivered(db) == {("both", a), ("both", b), ("only-a", a)}


def test_the_status_of_an_event_for_one_consumer_does_not_affect_another(db: Database) -> None:
    make.a_workflow(db, consumers=("send", "log"))
    (event,) = make.some_events(db, "m-1")
    make.a_run(db, Phase.COMMITTED)
    assert make.event_status(db, event, "send") == DeliveryStatus.CONSUMED
    assert make.event_status(db, event, "log") == DeliveryStatus.PENDING


@pytest.mark.parametrize("start_at", StartAt)
def test_a_consumer_that_joins_later_gets_earlier_events_only_with_start_at_earliest(
    db: Database, start_at: StartAt
) -> None:
    spec = make.a_workflow(db)
    old = make.some_events(db, "m-1", "m-2")
    late = HandlerSpec(name="late", subscribes=(IN,), start_at=start_at)
    register(db, replace(spec, handlers=(*spec.handlers, late)))
    (new,) = make.some_events(db, "m-3")
    seen = {event for handler, event in delivered(db) if handler == "late"}
    assert seen == ({*old, new} if start_at is StartAt.EARLIEST else {new})


@pytest.mark.parametrize("start_at", StartAt)
def test_registering_again_changes_nothing(db: Database, start_at: StartAt) -> None:
    spec = make.a_workflow(db, start_at=start_at)
    make.some_events(db, "m-1")
    before = contents(db)
    register(db, spec)
    assert contents(db) == before


@pytest.mark.broken_on_purpose
def test_a_handler_gone_from_the_code_is_retired_with_its_deliveries_and_gets_no_new_ones(db: Database) -> None:
    spec = make.a_workflow(db, consumers=("send", "log"))
    (old,) = make.some_events(db, "m-1")
    register(db, replace(spec, handlers=tuple(handler for handler in spec.handlers if handler.name != "log")))
    (new,) = make.some_events(db, "m-2")
    assert delivered(db) == {("send", old), ("log", old), ("send", new)}
    with db.transaction() as tx:
        assert {row.name: row.retired for row in work.handlers(tx, "billing")}["log"]
        assert "log" not in {row.name for row in work.handler_facts(tx, "billing")}


@pytest.mark.broken_on_purpose
def test_a_retired_handler_starts_no_run(db: Database) -> None:
    """The scheduler may have read that it is due just before the code changed; its worker would not know it."""
    spec = make.a_workflow(db, consumers=("send", "log"))
    make.some_events(db, "m-1")
    register(db, replace(spec, handlers=spec.handlers[:1]))
    with db.transaction() as tx, suppress(PipelineError):
        starts.start(tx, "billing", "log")
    assert contents(db)["runs"] == []


def test_a_retired_handler_that_comes_back_continues_where_it_was(db: Database) -> None:
    spec = make.a_workflow(db, consumers=("send", "log"))
    (old,) = make.some_events(db, "m-1")
    register(db, replace(spec, handlers=spec.handlers[:1]))
    make.some_events(db, "m-2")
    register(db, spec)
    (new,) = make.some_events(db, "m-3")
    assert {event for handler, event in delivered(db) if handler == "log"} == {old, new}
    with db.transaction() as tx:
        assert "log" in {row.name for row in work.handler_facts(tx, "billing")}


@pytest.mark.broken_on_purpose
def test_a_consumer_that_leaves_a_topic_keeps_its_deliveries(db: Database) -> None:
    spec = make.a_workflow(db)
    (old,) = make.some_events(db, "m-1")
    register(db, replace(spec, handlers=(HandlerSpec(name="send", subscribes=(OUT,)), spec.handlers[1])))
    make.some_events(db, "m-2")
    (out,) = publish(db, an_event(topic=OUT)).new.values()
    assert delivered(db) == {("send", old), ("send", out)}
