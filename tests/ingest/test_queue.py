"""The queue itself: each call is one thing asked of Redis, and nothing is lost or hidden."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis
from opentelemetry.metrics import Meter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from pipeline.ingest.errors import NoStreamError, PoisonEntry, PoisonError, QueueError
from pipeline.ingest.queue import QueueMessage, RedisStreamsQueue, entries_of, payload_of
from tests.ingest.redis_streams import STALE, Place, in_thread
from tests.support.rule import rule
from tests.support.wait import wait_for

POISON: list[dict[bytes, bytes]] = [
    {b"data": b"{not json"},
    {b"data": b"[1, 2]"},
    {b"data": b'"text"'},
    {b"data": b'{"n": NaN}'},
    {b"data": b"\xff\xfe"},
    {b"data": '{"n": 1}'.encode("utf-16")},
    {b"data": '{"n": 1}'.encode("utf-8-sig")},
    {b"data": b'{"n": 1, "m": {"a": 1, "a": 2}}'},
    {b"data": b"[" * 100_000},
    {b"data": b"{}", b"extra": b"1"},
    {b"other": b"{}"},
]
CALLS: list[tuple[str, Callable[[RedisStreamsQueue], Any]]] = [
    ("add an entry", lambda queue: queue.enqueue({"n": 1})),
    ("read", lambda queue: queue.read()),
    ("acknowledge", lambda queue: queue.ack(message_of(queue))),
    ("list pending", lambda queue: queue.claim_stale()),
    ("count the backlog", lambda queue: queue.backlog_stats()),
]


def message_of(queue: RedisStreamsQueue) -> QueueMessage:
    config = queue.config
    return QueueMessage(stream=config.stream, group=config.group, id="1-1", payload={})


@pytest.fixture
def metered() -> tuple[Meter, Callable[[], dict[str, Any]]]:
    """A meter, and what it has counted so far for all streams."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)

    def counted() -> dict[str, Any]:
        data: Any = reader.get_metrics_data()
        resources = data.resource_metrics if data else ()
        found = [metric for each in resources for scope in each.scope_metrics for metric in scope.metrics]
        return {metric.name: metric.data.data_points[0] for metric in found}

    return provider.get_meter("test"), counted


@rule("Q-8")
@pytest.mark.parametrize(("what", "call"), CALLS, ids=[what for what, _ in CALLS])
def test_q3_whatever_redis_refuses_is_a_queue_error_with_its_cause(
    place: Place, what: str, call: Callable[[RedisStreamsQueue], Any]
) -> None:
    queue = place.queue()
    place.raw.delete(place.stream)
    place.raw.set(place.stream, "no stream")
    with pytest.raises(QueueError, match=what) as caught:
        call(queue)
    assert isinstance(caught.value.__cause__, redis.RedisError)


def test_q3_a_group_that_cannot_be_created_is_a_queue_error_with_its_cause(place: Place) -> None:
    place.raw.set(place.stream, "no stream")
    with pytest.raises(QueueError, match="create the group") as caught:
        place.queue()
    assert isinstance(caught.value.__cause__, redis.ResponseError)


def test_q3_a_wrong_name_is_distinguished_from_a_failure_of_redis(place: Place) -> None:
    queue = place.queue()
    place.raw.delete(place.stream)
    with pytest.raises(NoStreamError, match="Check both names"):
        queue.read()
    with pytest.raises(NoStreamError, match="Check both names"):
        queue.backlog_stats()
    place.raw.set(place.stream, "no stream")
    with pytest.raises(NoStreamError, match="does not hold a stream; correct the name"):
        queue.enqueue({"n": 1})


@pytest.mark.parametrize(
    "answer",
    ["NOGROUP No such key 'orders' or consumer group 'g'", "UNBLOCKED the stream key no longer exists"],
    ids=["7.2 and later", "older"],
)
def test_q3_a_stream_deleted_during_a_blocking_read_is_the_same_error_on_every_server(
    place: Place, answer: str
) -> None:
    with pytest.raises(NoStreamError, match="Check both names"), place.queue().translate_errors("read"):
        raise redis.ResponseError(answer)


def test_q3_a_deleted_stream_is_not_created_again_silently(place: Place) -> None:
    queue = place.queue()
    place.raw.delete(place.stream)
    for _ in range(2):
        with pytest.raises(QueueError, match="NOGROUP"):
            queue.read()
    assert not place.raw.exists(place.stream)


def test_q5_a_group_may_be_created_twice_and_sees_what_was_there_before_it(place: Place) -> None:
    entries = place.add({"n": 1}, {"n": 2})
    first, second = place.queue("one"), place.queue("two")
    assert [message.id for queue in (first, second) for message in queue.read()] == entries


def test_q5_what_is_enqueued_is_what_is_read_and_an_acknowledgement_may_be_repeated(place: Place) -> None:
    queue = place.queue()
    payload = {"text": "häkchen ✓", "deep": [{"n": 1.5}, None, True]}
    entry = queue.enqueue(payload)
    assert place.raw.xrange(place.stream) == [
        (entry.encode(), {b"data": json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode()})
    ]
    (message,) = queue.read()
    assert (message.id, message.payload) == (entry, payload)
    for _ in range(2):
        queue.ack(message)
        assert place.pending() == {}
    assert queue.read(block_ms=20) == []


@pytest.mark.parametrize("payload", [{"n": float("nan")}, {"n": {1}}, {"text": "\ud800"}, [1], "text"], ids=ascii)
def test_q5_a_payload_that_is_not_a_json_object_is_not_enqueued(place: Place, payload: Any) -> None:
    with pytest.raises(QueueError, match="Nothing was added"):
        place.queue().enqueue(payload)
    assert place.raw.xlen(place.stream) == 0


def test_q5_a_payload_that_is_nested_too_deeply_is_not_enqueued(place: Place) -> None:
    payload: dict[str, Any] = {}
    for _ in range(100_000):
        payload = {"n": payload}
    with pytest.raises(QueueError, match="Nothing was added"):
        place.queue().enqueue(payload)
    assert place.raw.xlen(place.stream) == 0


@pytest.mark.parametrize("fields", POISON, ids=lambda fields: str(fields)[:30])
def test_q5_an_entry_of_another_shape_is_named_with_its_fields_and_stays_pending(
    place: Place, fields: dict[bytes, bytes]
) -> None:
    entry = place.add_raw(fields)
    with pytest.raises(PoisonError, match=entry) as caught:
        place.queue().read()
    (named,) = caught.value.entries
    assert (named.id, named.fields) == (entry, tuple(fields.items()))
    assert isinstance(caught.value, QueueError)
    assert list(place.pending()) == [entry]


def test_q5_an_entry_with_a_duplicate_field_is_unusable_and_both_values_are_kept(place: Place) -> None:
    entry = place.add_pairs(b"data", b'{"a": 1}', b"data", b'{"a": 2}')
    with pytest.raises(PoisonError, match="its fields are data, data") as caught:
        place.queue().read()
    assert caught.value.entries[0].fields == ((b"data", b'{"a": 1}'), (b"data", b'{"a": 2}'))
    assert list(place.pending()) == [entry]


@pytest.mark.parametrize(
    "fields",
    [
        [b"x" * 500_000, b"1"],
        [part for n in range(20_000) for part in (f"field{n}".encode(), b"1")],
        [b"\x1b[31mRED\r\nERROR it is forged", b"1"],
        [b"data", b'{"' + b"k" * 100_000 + b'": 1, "' + b"k" * 100_000 + b'": 2}'],
        [b"data", b'{"\\u001b[31m\\n": 1, "\\u001b[31m\\n": 2}'],
    ],
    ids=["a long name", "many names", "a name that forges a line", "a long key", "a key that forges a line"],
)
def test_q5_the_description_of_an_entry_is_short_and_one_line(place: Place, fields: list[bytes]) -> None:
    place.add_pairs(*fields)
    with pytest.raises(PoisonError) as caught:
        place.queue().read()
    text = str(caught.value)
    assert (len(text) < 800, text.isprintable()) == (True, True), text[:1000]


def test_q5_of_many_fields_a_few_are_named_and_the_others_are_counted(place: Place) -> None:
    place.add_pairs(*(part for n in range(200) for part in (b"f%d" % n, b"1")))
    with pytest.raises(PoisonError, match="its fields are f0, f1, f2, f3, f4, 195 more; expected exactly one, data"):
        place.queue().read()


def test_q5_the_problem_of_an_entry_is_short_and_one_line() -> None:
    problem = PoisonEntry("1-0", (), "forged\r\n\x1b[31m" + "x" * 10_000).problem
    assert (len(problem) < 350, problem.isprintable(), problem[:9]) == (True, True, "forged\\r\\")


def test_q5_an_empty_acknowledgement_sends_no_command(quiet: Place) -> None:
    queue = quiet.queue()
    before = quiet.calls("xack")
    queue.ack()
    assert quiet.calls("xack") == before


def test_q5_good_entries_of_a_read_with_a_bad_one_come_with_the_error(place: Place) -> None:
    first, _ = place.add({"n": 1}), place.add_raw({b"data": b"bad"})
    last = place.add({"n": 2})
    queue = place.queue(max_read_count=10)
    with pytest.raises(PoisonError) as caught:
        queue.read()
    assert [message.id for message in caught.value.messages] == [*first, *last]
    queue.ack(*caught.value.messages)
    assert list(place.pending()) == [entry.id for entry in caught.value.entries]


def test_q5_a_read_of_more_than_the_queue_allows_is_refused_before_anything_is_delivered(place: Place) -> None:
    queue = place.queue(max_read_count=2)
    place.add({"n": 1}, {"n": 2}, {"n": 3})
    with pytest.raises(ValueError, match="expected at most max_read_count, which is 2"):
        queue.read(count=3)
    assert place.pending() == {}
    assert len(queue.read(count=2)) == 2


def test_q5_a_message_of_another_stream_or_group_is_not_acknowledged(place: Place) -> None:
    place.add({"n": 1})
    (message,) = place.queue(group="others").read()
    with pytest.raises(QueueError, match="belongs to group 'others'"):
        place.queue().ack(message)
    assert len(place.pending("others")) == 1


@rule("Q-19")
def test_q13_stale_entries_are_found_behind_fresh_ones(place: Place) -> None:
    place.queue("dead", max_read_count=100)
    place.add(*({"n": n} for n in range(12)))
    entries = [message.id for message in place.queue("dead", max_read_count=100).read()]
    place.make_stale(*entries[10:])
    claimed = place.queue("rescuer").claim_stale(count=2)
    assert [message.id for message in claimed] == entries[10:]


@rule("Q-19")
def test_q13_a_recovery_walks_through_fresh_entries_once_and_not_once_for_each_stale_one(quiet: Place) -> None:
    """Redis counts its own time, so a busy machine changes both figures alike."""
    with quiet.raw.pipeline(transaction=False) as adding:
        for number in range(20_100):
            adding.xadd(quiet.stream, {"data": f'{{"n": {number}}}'})
        adding.execute()
    owner = quiet.queue("owner", max_read_count=20_100)
    entries: Any = [message.id for message in owner.read()]
    quiet.raw.xclaim(quiet.stream, "workers", "dead", 0, entries[-100:], idle=STALE, justid=True)

    def server_time(work: Callable[[], object]) -> float:
        quiet.raw.config_resetstat()
        work()
        stats: Any = quiet.raw.info("commandstats")
        return float(stats["cmdstat_xpending"]["usec"])

    one_walk = server_time(lambda: owner.pending(1, min_idle_ms=2 * STALE))
    rescuer, found = quiet.queue("rescuer"), list[str]()

    def recover() -> None:
        while claimed := rescuer.claim_stale():
            found.extend(message.id for message in claimed)

    all_claims = server_time(recover)
    assert found == entries[-100:]
    assert all_claims < 20 * one_walk  # three walks and what a hundred calls cost; before, one walk for each


@rule("Q-19")
def test_q13_a_claim_goes_on_behind_the_last_and_then_starts_again_at_the_oldest(place: Place) -> None:
    entries = place.add(*({"n": n} for n in range(4)))
    place.queue("dead", max_read_count=4).read()
    place.make_stale(*entries[1:])
    queue = place.queue("rescuer")
    assert [message.id for message in queue.claim_stale(count=2)] == entries[1:3]
    place.make_stale(*entries[:2])  # older than the last claim: their turn comes after the others
    assert [message.id for message in queue.claim_stale(count=3)] == [entries[3], *entries[:2]]


def test_consumers_that_are_gone_are_removed_unless_an_entry_is_pending(place: Place) -> None:
    place.add({"n": 1}, {"n": 2})
    idle, holding, own = (place.queue(name) for name in ("idle", "holding", "own"))
    idle.ack(*idle.read())
    holding.read()
    assert own.read() == []
    assert own.remove_gone_consumers() == []  # no one was away for that long
    wait_for(lambda: own.remove_gone_consumers(min_idle_ms=1) == ["idle"])
    names = {row["name"] for row in place.raw.xinfo_consumers(place.stream, "workers")}
    assert names - {b"own"} == {b"holding"}
    assert len(place.pending()) == 1
    place.add({"n": 3})
    assert len(idle.read()) == 1  # it lives after all


@pytest.mark.parametrize("remove", ["delete", "unlink", "xgroup_destroy", "rename"])
def test_a_stream_or_group_that_disappears_under_a_waiting_read_is_reported_alike(place: Place, remove: str) -> None:
    queue = place.queue(block_ms=30_000)
    reading = in_thread(queue.read)
    place.wait_until_blocked()
    rest = {"xgroup_destroy": ("workers",), "rename": (f"{place.stream}:parked",)}.get(remove, ())
    getattr(place.raw, remove)(place.stream, *rest)
    with pytest.raises(NoStreamError, match="Check both names"):
        reading.outcome()


def test_q13_a_claim_is_bounded_and_takes_its_own_entries_too(place: Place) -> None:
    entries = place.add(*({"n": n} for n in range(5)))
    queue = place.queue("same name after a restart", max_read_count=5)
    queue.read()
    assert queue.claim_stale(count=5) == []
    place.make_stale()
    assert queue.claim_stale(min_idle_ms=2 * STALE, count=5) == []
    assert [message.id for message in queue.claim_stale()] == entries[:1]
    assert [message.id for message in queue.claim_stale(count=3)] == entries[1:4]


def test_q13_an_unusable_entry_in_a_claim_loses_no_good_one(place: Place) -> None:
    (good,) = place.add({"n": 1})
    bad = place.add_raw({b"data": b"bad"})
    with pytest.raises(PoisonError):
        place.queue("dead", max_read_count=2).read()
    place.make_stale()
    queue = place.queue("rescuer")
    with pytest.raises(PoisonError) as caught:
        queue.claim_stale(count=10)
    assert [message.id for message in caught.value.messages] == [good]
    assert [entry.id for entry in caught.value.entries] == [bad]
    assert place.pending() == {good: "rescuer", bad: "rescuer"}


def test_q13_of_many_that_claim_at_once_one_gets_each_entry(place: Place) -> None:
    entries = place.add(*({"n": n} for n in range(20)))
    place.queue("dead", max_read_count=20).read()
    place.make_stale()
    queues = [place.queue(f"rescuer {n}") for n in range(6)]
    with ThreadPoolExecutor(6) as pool:
        claims = list(pool.map(lambda queue: queue.claim_stale(count=20), queues))
    assert sorted(message.id for claim in claims for message in claim) == sorted(entries)


def test_q13_trimmed_entries_are_named_and_lose_no_good_one(place: Place) -> None:
    first, kept, last = place.add({"n": 1}, {"n": 2}, {"n": 3})
    place.queue("dead", max_read_count=3).read()
    place.make_stale()
    place.raw.xdel(place.stream, first, last)
    with pytest.raises(PoisonError, match="2 are lost") as caught:
        place.queue("rescuer").claim_stale(count=10)
    assert [(entry.id, entry.is_gone) for entry in caught.value.entries] == [(first, True), (last, True)]
    assert [message.id for message in caught.value.messages] == [kept]


def test_q13_an_entry_that_another_consumer_claimed_first_is_not_reported_as_lost(place: Place) -> None:
    entries = place.add({"n": 1}, {"n": 2})
    place.queue("dead", max_read_count=2).read()
    place.make_stale()
    slow = place.queue("slow")
    pending = slow.pending

    def overtaken(count: int, **options: Any) -> Any:
        found = pending(count, **options)
        place.queue("quick").claim_stale(count=2)
        return found

    slow.pending = overtaken  # type: ignore[method-assign]
    assert slow.claim_stale(count=2) == []
    assert place.pending() == dict.fromkeys(entries, "quick")


def test_q13_a_null_in_the_reply_to_a_claim_is_understood() -> None:
    """As Redis 6.2 does where an entry is gone."""
    assert entries_of([None, [b"1-0", [b"data", b"{}"]]]) == [(b"1-0", ((b"data", b"{}"),))]


@rule("Q-22")
def test_q15_the_backlog_is_counted_without_changing_it(place: Place) -> None:
    entries = place.add(*({"n": n} for n in range(7)))
    one, two = place.queue("one", max_read_count=3), place.queue("two")
    one.ack(one.read()[0])
    two.read()
    before = (place.pending(), place.raw.xinfo_groups(place.stream), place.raw.xinfo_stream(place.stream))
    stats = one.backlog_stats()
    assert (stats.length, stats.pending) == (7, 3)
    assert stats.lag == (3 if place.version() >= 7 else None), "older servers do not say"
    assert stats.by_consumer == {"one": 2, "two": 1}
    assert stats.oldest_pending_id == entries[1]
    assert stats.oldest_pending_idle_ms is not None
    assert before == (place.pending(), place.raw.xinfo_groups(place.stream), place.raw.xinfo_stream(place.stream))


def test_q15_an_empty_backlog_has_no_oldest_entry(place: Place) -> None:
    stats = place.queue().backlog_stats()
    assert (stats.length, stats.pending, stats.by_consumer, stats.oldest_pending_id) == (0, 0, {}, None)


@rule("Q-9")
def test_q16_reads_acknowledgements_and_claims_are_counted_by_the_queue(place: Place, metered: Any) -> None:
    meter, counted = metered
    queue = place.queue(meter=meter, max_read_count=5)
    queue.read(block_ms=20)
    place.add({"n": 1}, {"n": 2}, {"n": 3})
    messages = queue.read()
    queue.ack(messages[0])
    queue.ack(messages[0])
    place.make_stale()
    queue.claim_stale(count=5)
    found = counted()
    assert {name: point.value for name, point in found.items() if hasattr(point, "value")} == {
        "pipeline.queue.messages_read": 3,
        "pipeline.queue.acks": 2,
        "pipeline.queue.messages_claimed": 2,
    }
    assert found["pipeline.queue.read_latency"].count == 1, "an idle read has no latency to speak of"
    assert all(point.attributes == {"stream": place.stream} for point in found.values())


def test_q16_a_refused_command_is_not_counted(place: Place, metered: Any) -> None:
    meter, counted = metered
    queue = place.queue(meter=meter)
    place.raw.delete(place.stream)
    place.raw.set(place.stream, "no stream")
    for call in (queue.read, lambda: queue.ack(message_of(queue)), queue.claim_stale):
        with pytest.raises(QueueError):
            call()
    assert counted() == {}


def test_q16_a_failing_meter_does_not_reach_the_caller(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = MeterProvider(shutdown_on_exit=False).get_meter("test")

    def broken(*_: Any) -> None:
        raise RuntimeError("the exporter is gone")

    queue = place.queue(meter=meter)
    for instrument in vars(queue._metrics).values():
        for name in ("add", "record"):
            if hasattr(instrument, name):
                monkeypatch.setattr(instrument, name, broken)
    place.add({"n": 1})
    (message,) = queue.read()
    place.make_stale()
    queue.claim_stale()
    queue.ack(message)
    assert place.pending() == {}


@pytest.mark.parametrize("text", ['{"n": 1}', ' {"n": 1}', '{"n": 1} \n', '\t{"n": 1}\r\n'])
def test_q5_white_space_around_the_object_of_an_entry_is_allowed(text: str) -> None:
    assert payload_of(((b"data", text.encode()),)) == {"n": 1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"n": 1} {}', "its data is not JSON: Extra data"),
        ('{"n":', "its data is not JSON: Expecting value"),
        ('{"n": 1, "n": 2}', "its data is not JSON: the key .*n.* is there twice"),
        ('{"n": NaN}', "its data is not JSON: NaN is not JSON"),
        ("[1]", "its data is a JSON list; expected an object"),
    ],
)
def test_q5_what_is_wrong_with_the_json_of_an_entry_is_named(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        payload_of(((b"data", text.encode()),))
