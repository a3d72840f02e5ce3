"""From a stream to a topic: which event an entry becomes, and what becomes of one that cannot be one."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import text

from pipeline import AesGcm
from pipeline.domain.errors import InvalidInputError, MissingKeyError, NotFoundError
from pipeline.domain.values import Limits, TopicSpec, WorkflowSpec
from pipeline.ingest.bridge import Bridge, OnPoison, Route
from pipeline.ingest.errors import PoisonError, QueueError
from pipeline.ingest.queue import park_entry
from pipeline.store.codecs import Codecs
from pipeline.store.database import Database, Statement
from pipeline.testing import Inline, scripted
from pipeline.transitions import registration
from tests.factories import IN, OUT, a_workflow
from tests.ingest.ingest_processes import published
from tests.ingest.redis_streams import Place, in_thread
from tests.support.databases import stored_text
from tests.support.rule import rule
from tests.support.wait import wait_for
from tests.workflows.test_codec import K1, PLANTED, shop


class Order(BaseModel):
    """What the checked topic takes."""

    order: str
    cents: int


def a_bridge(place: Place, db: Database, *, on_poison: OnPoison = OnPoison.STOP, **route: Any) -> Bridge:
    a_workflow(db)
    given = {"workflow": "billing", "topic": IN, **route}
    return Bridge(place.queue(max_read_count=100), db, Route(**given), on_poison)


def rows(db: Database) -> list[Any]:
    with db.transaction() as tx:
        return list(tx.all(Statement[Any]("SELECT topic, message_id, key, payload FROM pipeline.events ORDER BY id")))


def one_turn(bridge: Bridge) -> None:
    """What is there, and no more."""
    bridge.read_once(block_ms=50)


def test_an_entry_becomes_an_event_named_by_its_stream_and_id_and_is_acknowledged(place: Place, db: Database) -> None:
    bridge = a_bridge(place, db)
    first, second = place.add({"order": "1"}, {"order": "2"})
    one_turn(bridge)
    assert [tuple(row) for row in rows(db)] == [
        (IN, f"{place.stream}:{first}", None, {"order": "1"}),
        (IN, f"{place.stream}:{second}", None, {"order": "2"}),
    ]
    assert place.pending() == {}
    assert (bridge.counts.published, bridge.counts.duplicates) == (2, 0)


def test_an_entry_for_an_encrypted_workflow_is_stored_encrypted(
    place: Place, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    Inline(db, [shop(AesGcm(K1))], [scripted("bank", mutations=["charge"])]).close()
    bridge = Bridge(place.queue(max_read_count=100), db, Route(workflow="shop", topic="orders"), OnPoison.STOP)
    place.add({"card": PLANTED})
    monkeypatch.setattr(db, "codecs", None)
    with pytest.raises(MissingKeyError, match="no codec"):
        one_turn(bridge)
    assert (rows(db), len(place.pending())) == ([], 1)
    place.add({"card": PLANTED})
    monkeypatch.setattr(db, "codecs", Codecs(default=AesGcm(K1)))
    bridge.read_once(block_ms=50)
    with db.transaction() as tx:
        stored = tx.all(Statement[Any]("SELECT workflow, topic, message_id, payload FROM pipeline.events"))
    assert [row.payload for row in stored] == [{"card": PLANTED}]
    assert PLANTED not in stored_text(db)


def test_fields_of_the_producer_name_message_id_key_and_topic(place: Place, db: Database) -> None:
    bridge = a_bridge(place, db, message_id_field="id", key_field="customer", topic_field="kind")
    (without,) = place.add({"kind": None})
    place.add({"id": "order:1", "customer": 7, "kind": OUT}, {"id": 4711})
    one_turn(bridge)
    assert [(row.topic, row.message_id, row.key) for row in rows(db)] == [
        (IN, f"{place.stream}:{without}", None),
        (OUT, "order:1", "7"),
        (IN, "4711", None),
    ]


def test_a_message_id_that_was_published_before_is_acknowledged_and_changes_nothing(place: Place, db: Database) -> None:
    bridge = a_bridge(place, db, message_id_field="id")
    place.add({"id": "a", "n": 1}, {"id": "a", "n": 2})
    one_turn(bridge)
    place.add({"id": "a", "n": 3})
    one_turn(bridge)
    assert [row.payload["n"] for row in rows(db)] == [1]
    assert (bridge.counts.published, bridge.counts.duplicates, place.pending()) == (1, 2, {})


POISON: dict[str, tuple[dict[str, Any] | bytes, str]] = {
    "not JSON": (b"{", "its data is not JSON"),
    "too large": ({"text": "x" * 2000}, "at most 1000 bytes"),
    "no such topic": ({"kind": "nowhere"}, "There is no topic of workflow 'billing' named 'nowhere'"),
    "not what the schema says": ({"kind": "checked", "order": "1"}, "as topic 'checked' declares"),
    "a message id of another kind": ({"id": ["a"]}, "it is an array"),
    "a message id that is true": ({"id": True}, "it is a boolean"),
    "an empty message id": ({"id": " "}, "expected non-empty text"),
    "a key that is too long": ({"customer": "x" * 300}, "at most 255"),
    "text that cannot be stored": ({"text": "\0"}, "NUL"),
}


def poisonable(place: Place, db: Database, on_poison: OnPoison = OnPoison.STOP) -> Bridge:
    bridge = a_bridge(
        place,
        db,
        on_poison=on_poison,
        message_id_field="id",
        key_field="customer",
        topic_field="kind",
        limits=Limits(payload=1000),
    )
    schema = Order.model_json_schema()
    spec = WorkflowSpec(
        name="billing",
        topics=(TopicSpec(name=IN), TopicSpec(name=OUT), TopicSpec(name="checked", schema=schema)),
        handlers=(),
        version=2,
    )
    with db.transaction() as tx:
        registration.register(tx, spec)
    return bridge


def add(place: Place, content: dict[str, Any] | bytes) -> str:
    return place.add_raw({b"data": content}) if isinstance(content, bytes) else place.add(content)[0]


@pytest.mark.parametrize("kind", POISON)
def test_an_entry_that_cannot_be_an_event_is_raised_and_stays_pending_and_the_rest_is_published(
    place: Place, db: Database, kind: str
) -> None:
    bridge = poisonable(place, db)
    content, expected = POISON[kind]
    place.add({"id": "before"})
    bad = add(place, content)
    place.add({"id": "after"})
    with pytest.raises(PoisonError) as caught:
        one_turn(bridge)
    (entry,) = caught.value.entries
    assert entry.id == bad
    assert expected in entry.problem
    assert not entry.problem.endswith("."), "it stands in a sentence"
    assert "Nothing was" not in entry.problem, "the rest of the batch was published"
    assert entry.fields == tuple(place.raw.xrange(place.stream, bad, bad)[0][1].items())  # type: ignore[index,union-attr]
    assert published(db) == {"before": 1, "after": 1}
    assert list(place.pending()) == [bad]


def test_a_payload_that_matches_the_schema_is_published(place: Place, db: Database) -> None:
    bridge = poisonable(place, db)
    place.add({"kind": "checked", "order": "1", "cents": 5, "id": "fits"})
    one_turn(bridge)
    assert published(db) == {"fits": 1}


def named(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The entries that have a line of ours, in its order."""
    return [record.getMessage().split()[1] for record in caplog.records if record.name == "pipeline.ingest"]


def test_with_leave_an_unusable_entry_is_logged_and_the_loop_goes_on(
    place: Place, db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    bridge = poisonable(place, db, OnPoison.LEAVE)
    bad = [add(place, content) for content, _ in POISON.values()]
    place.add({"id": "good"})
    with caplog.at_level(logging.ERROR, logger="pipeline.ingest"):
        one_turn(bridge)
    assert named(caplog) == sorted(bad, key=caplog.text.index)
    assert "xxxx" not in caplog.text, "payloads do not belong into logs"
    assert list(place.pending()) == bad
    assert (bridge.counts.published, bridge.counts.poison) == (1, len(bad))


def test_every_poison_entry_of_a_batch_is_named_and_the_error_counts_them(
    place: Place, db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    bridge = poisonable(place, db)
    bad = [place.add_raw({b"data": b"{"}) for _ in range(30)]
    with pytest.raises(PoisonError, match=r"^30 entries of stream .* cannot be used") as caught:
        one_turn(bridge)
    assert named(caplog) == bad
    assert "30 stay pending" in caught.value.summary
    assert bad[0] not in caught.value.summary


def test_one_poison_entry_is_written_in_the_singular(place: Place, db: Database) -> None:
    bridge = poisonable(place, db)
    add(place, {"kind": "nowhere"})
    with pytest.raises(PoisonError, match=r"^1 entry of stream .*receipts\.sent\)\. It stays pending: .* park it with"):
        one_turn(bridge)


def test_entries_that_were_trimmed_while_pending_are_named_and_counted_by_a_recovery(
    place: Place, db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    bridge = a_bridge(place, db, on_poison=OnPoison.LEAVE)
    gone, kept = place.add({"n": 1}, {"n": 2})
    place.queue("dead", max_read_count=2).read()
    place.make_stale()
    place.raw.xdel(place.stream, gone)
    assert bridge.recover_once() == 2
    assert (bridge.counts.published, bridge.counts.poison) == (1, 1)
    assert f"entry {gone} of stream {place.stream!r} cannot be used: it is gone" in caplog.text
    assert published(db) == {f"{place.stream}:{kept}": 1}


def test_an_entry_that_is_parked_keeps_every_pair_and_its_own_names(place: Place) -> None:
    queue = place.queue()
    entry = place.add_pairs(b"x", b"1", b"x", b"2", b"parked_from", b"the producer", b"parked2_for", b"it as well")
    with pytest.raises(PoisonError):
        queue.read()
    park_entry(queue, entry, reason="twice\ud800")
    ask: Any = place.raw.execute_command
    place.raw.response_callbacks.pop("XRANGE")
    ((_, fields),) = ask("XRANGE", f"{place.stream}:parked", "-", "+")
    assert fields[:8] == [b"x", b"1", b"x", b"2", b"parked_from", b"the producer", b"parked2_for", b"it as well"]
    origin = f"{place.stream} {entry}".encode()
    assert fields[8:] == [b"parked3_from", origin, b"parked3_for", b"workers", b"parked3_reason", b"twice?"]


def test_an_entry_that_was_trimmed_is_parked_without_its_fields(place: Place) -> None:
    queue = place.queue()
    (entry,) = place.add({"n": 1})
    queue.read()
    place.raw.xdel(place.stream, entry)
    park_entry(queue, entry)
    copies: Any = place.raw.xrange(f"{place.stream}:parked")
    assert (list(copies[0][1]), place.pending()) == ([b"parked_from", b"parked_for", b"parked_reason"], {})


def test_a_pending_entry_cannot_be_parked_into_its_own_stream(place: Place) -> None:
    queue = place.queue()
    (entry,) = place.add({"n": 1})
    queue.read()
    with pytest.raises(InvalidInputError, match="cannot be its own parking stream"):
        park_entry(queue, entry, to=place.stream)
    assert (place.raw.xlen(place.stream), list(place.pending())) == (1, [entry])


def test_an_entry_that_is_parked_is_copied_with_its_origin_and_no_longer_pending(place: Place, db: Database) -> None:
    bridge = poisonable(place, db)
    bad = place.add_raw({b"data": b"{", b"more": b"1"})
    with pytest.raises(PoisonError):
        one_turn(bridge)
    copy = park_entry(bridge.queue, bad, reason="sent by the old shop")
    assert place.pending() == {}
    assert place.raw.xrange(f"{place.stream}:parked") == [
        (
            copy.encode(),
            {
                b"data": b"{",
                b"more": b"1",
                b"parked_from": f"{place.stream} {bad}".encode(),
                b"parked_for": b"workers",
                b"parked_reason": b"sent by the old shop",
            },
        )
    ]
    with pytest.raises(InvalidInputError, match="is not pending"):
        park_entry(bridge.queue, bad)
    assert place.raw.xlen(f"{place.stream}:parked") == 1


@pytest.mark.parametrize("entry", ["nonsense", "-", "1-1\n", "1-1"])
def test_an_entry_that_cannot_be_parked_is_refused_and_nothing_changes(place: Place, entry: str) -> None:
    queue = place.queue()
    with pytest.raises(InvalidInputError):
        park_entry(queue, entry)
    assert not place.raw.exists(f"{place.stream}:parked")


def test_an_entry_whose_parking_stream_cannot_be_written_stays_pending(place: Place) -> None:
    (entry,) = place.add({"n": 1})
    queue = place.queue()
    queue.read()
    place.raw.set(f"{place.stream}:parked", "no stream")
    with pytest.raises(QueueError, match="park an entry"):
        park_entry(queue, entry)
    assert list(place.pending()) == [entry]


def test_an_error_of_the_database_leaves_the_batch_pending_and_is_raised(place: Place, db: Database) -> None:
    bridge = a_bridge(place, db)
    entries = place.add({"n": 1}, {"n": 2})
    with db.transaction() as tx:
        tx.execute(text("ALTER TABLE pipeline.deliveries RENAME TO elsewhere"))
    try:
        with pytest.raises(Exception, match="deliveries"):
            one_turn(bridge)
    finally:
        with db.transaction() as tx:
            tx.execute(text("ALTER TABLE pipeline.elsewhere RENAME TO deliveries"))
    assert list(place.pending()) == entries
    assert published(db) == {}


@pytest.fixture
def commits_fail(db: Database) -> Iterator[None]:
    """Make Postgres refuse the commit of every new event."""
    with db.transaction() as tx:
        tx.execute(
            text("""
            CREATE FUNCTION refuse_today() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not today'; END $$;
            CREATE CONSTRAINT TRIGGER not_today AFTER INSERT ON pipeline.events
            DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION refuse_today();
            """)
        )
    yield
    with db.transaction() as tx:
        tx.execute(text("DROP TRIGGER IF EXISTS not_today ON pipeline.events; DROP FUNCTION IF EXISTS refuse_today()"))


@rule("Q-3")
@pytest.mark.usefixtures("commits_fail")
def test_nothing_is_acknowledged_when_the_commit_fails(place: Place, db: Database) -> None:
    bridge = a_bridge(place, db)
    entries = place.add({"n": 1}, {"n": 2})
    with pytest.raises(Exception, match="not today"):
        one_turn(bridge)
    assert list(place.pending()) == entries
    assert (published(db), bridge.counts.published) == ({}, 0)


def test_a_stale_entry_is_published_once_by_a_recovery(place: Place, db: Database) -> None:
    bridge = a_bridge(place, db)
    entries = place.add({"n": 1}, {"n": 2})
    place.queue("dead", max_read_count=10).read()
    place.make_stale()
    assert bridge.recover_once() == 2
    assert bridge.recover_once() == 0
    assert published(db) == {f"{place.stream}:{entry}": 1 for entry in entries}
    assert place.pending() == {}


def test_a_recovery_goes_on_until_it_is_stopped(place: Place, db: Database) -> None:
    bridge = a_bridge(place, db)
    loop = in_thread(lambda: bridge.recover(every_ms=50))
    place.add({"n": 1})
    place.queue("dead").read()
    place.make_stale()
    wait_for(lambda: bridge.counts.published == 1)
    bridge.stop()
    loop.outcome()


@pytest.mark.parametrize(("workflow", "topic"), [("biling", IN), ("billing", "orders.payed")])
def test_a_target_that_does_not_exist_is_refused_before_anything_is_read(
    place: Place, db: Database, workflow: str, topic: str
) -> None:
    bridge = a_bridge(place, db, workflow=workflow, topic=topic)
    with pytest.raises(NotFoundError, match=r"Known: .*Nothing was read"):
        bridge.require_target()


def test_a_stream_whose_name_leaves_no_room_for_an_id_is_refused(place: Place, db: Database) -> None:
    queue = place.queue()
    object.__setattr__(queue.config, "stream", "s" * 250)
    with pytest.raises(InvalidInputError, match="cannot be part of a message id"):
        Bridge(queue, db, Route(workflow="billing", topic=IN))
