"""Unreadable messages and unknown tasks are kept unchanged and never shown; an operator decides."""

import base64
import bz2
import gzip
import json
import lzma
import pickle
import zlib
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
import redis
from celery import Celery

from pipeline.client import BrokerClient
from pipeline.domain.values import TopicSpec, WorkflowSpec
from pipeline.tasks import message_limits
from pipeline.transitions import registration
from tests.support import dead_letter_scenario
from tests.support.installation import RARE, Installation
from tests.support.prometheus_scrapes import free_port, scrape
from tests.support.wait import wait_for

SECRET = "SECRET-4242"
EVENT = {"topic": "orders", "message_id": "kept", "payload": {"card": SECRET}}
GIVEN = {"workflow": "shop", "events": [EVENT]}
PORT = free_port()
JSON = {"content_type": "application/json", "content_encoding": "utf-8"}


def begin(shop: Installation) -> None:
    """Start a worker that stays from test to test and receives only what a test sends."""
    shop.sweep_nothing()
    shop.worker(**RARE, PIPELINE_LOG_FORMAT="json", PIPELINE_METRICS_PORT=str(PORT))


@pytest.fixture
def theirs(shop: Installation) -> Iterator[Celery]:
    """A Celery app of a service that pickles its own tasks."""
    with Celery("theirs", broker=shop.broker_url) as app:
        app.conf.task_serializer = "pickle"
        yield app


@pytest.fixture
def broker(shop: Installation) -> Iterator[redis.Redis]:
    """The broker, with nothing kept by a test before, and all that it had sent refused and counted."""
    with redis.Redis.from_url(shop.broker_url) as client:
        wait_for(lambda: client.hlen("pipeline.unacked") == 0, within=60, why="nothing is left in anybody's hands")
        client.delete("pipeline.dead_letters")
        yield client


def dead_letters(broker: redis.Redis) -> list[dict[str, Any]]:
    return [json.loads(entry) for entry in broker.lrange("pipeline.dead_letters", 0, -1)]


def put(theirs: Celery, body: bytes, **headers: Any) -> None:
    """A message as something that is no Celery may send it."""
    queue = "pipeline.schedule"
    with theirs.connection_for_write() as connection:
        connection.Producer().publish(body, exchange=queue, routing_key=queue, headers=headers, **JSON)


def test_a_service_that_pickles_its_own_tasks_publishes_with_our_client(shop: Installation, theirs: Celery) -> None:
    BrokerClient(theirs).publish("shop", [{**EVENT, "message_id": "of a pickling app"}])
    shop.published.append("of a pickling app")
    shop.all_done_once()


def send_unusable_messages(theirs: Celery) -> dict[str, int]:
    """Send one message of every kind that no worker can use; return how many of each kind."""
    for serializer in ("pickle", "yaml"):
        theirs.send_task("pipeline.publish", kwargs=GIVEN, queue="pipeline.schedule", serializer=serializer)
    theirs.send_task("pipeline.publish", kwargs=GIVEN, queue="pipeline.schedule", compression="gzip")
    for queue in ("pipeline.schedule", "pipeline.mutate"):
        theirs.send_task("pipeline.publsh", kwargs=GIVEN, queue=queue, serializer="json")
    text = json.dumps([[], GIVEN, {}]).encode()
    publish = {"id": "strange", "task": "pipeline.publish"}
    put(theirs, text[:-9], **publish)
    put(theirs, gzip.compress(text)[:-9], **publish, compression="application/x-gzip")
    put(theirs, text)
    put(theirs, text, id="strange", task=["pipeline.publish"])
    put(theirs, b"5", **publish)
    put(theirs, json.dumps([[], [SECRET], {}]).encode(), **publish)
    return {"unreadable": 5, "unknown task": 2, "no task": 1, "invalid": 3}


def test_unreadable_and_unknown_messages_are_kept_unchanged_and_never_shown(
    shop: Installation, theirs: Celery, broker: redis.Redis
) -> None:
    before = scrape(PORT).by("pipeline_dead_letters_total", "kind")
    assert set(before) == {"unpublishable", "unreadable", "invalid", "unknown task", "no task"}, "all begin at zero"
    expected = send_unusable_messages(theirs)
    wait_for(lambda: broker.llen("pipeline.dead_letters") == sum(expected.values()), within=60, every=0.1)
    wait_for(lambda: broker.hlen("pipeline.unacked") == 0, within=60, why="nothing is left in anybody's hands")
    found = dead_letters(broker)
    kinds = [entry["headers"]["dead-letter-kind"] for entry in found]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == expected
    pickled = [entry for entry in found if entry["content-type"] == "application/x-python-serialize"]
    assert [pickle.loads(base64.b64decode(entry["body"]))[1] for entry in pickled] == [GIVEN, GIVEN]
    said = shop.nodes[0].log.read_text()
    assert (SECRET in said, base64.b64encode(SECRET.encode()).decode()[:8] in said) == (False, False)
    assert "pipeline.publsh" in said
    after = scrape(PORT).by("pipeline_dead_letters_total", "kind")
    assert {kind: after[kind] - before[kind] for kind in expected} == expected


def test_a_deeply_nested_body_or_a_compressed_bomb_is_kept_and_ends_no_worker(
    shop: Installation, theirs: Celery, broker: redis.Redis
) -> None:
    methods: dict[str, Callable[[bytes], bytes]] = {
        "x-gzip": zlib.compress,
        "x-bz2": bz2.compress,
        "x-lzma": lzma.compress,
    }
    deep: Any = 0
    for _ in range(480):
        deep = [deep]
    event = {**EVENT, "message_id": "deep", "payload": deep}
    theirs.send_task(
        "pipeline.publish", kwargs={"workflow": "shop", "events": [event]}, queue="pipeline.schedule", serializer="json"
    )
    put(theirs, b"[" * 100_000, id="deeper", task="pipeline.publish")
    for method, compress in methods.items():
        bomb = compress(b'["' + b"0" * (message_limits.MAX_BODY + 1) + b'"]')
        put(theirs, bomb, id="bomb", task="pipeline.publish", compression=f"application/{method}")
    wait_for(lambda: broker.llen("pipeline.dead_letters") == 5, within=60, every=0.1, why="all five are kept")
    wait_for(lambda: broker.hlen("pipeline.unacked") == 0, within=60, why="nothing is left in anybody's hands")
    reasons = sorted(entry["headers"]["dead-letter-reason"] for entry in dead_letters(broker))
    assert [("nested" in reason, "cannot be read" in reason) for reason in reasons] == [(False, True)] * 4 + [
        (True, False)
    ], reasons
    with dead_letter_scenario.shell(shop) as refused:
        assert len(refused.listed()) == 5, "the command unpacks no more than the worker"
    BrokerClient(theirs).publish("shop", [{**EVENT, "message_id": "after the bombs"}])
    shop.published.append("after the bombs")
    shop.all_done_once()
    assert shop.nodes[0].process.poll() is None, "the worker lives on"


def entry(body: Any = ((), GIVEN, {}), *, headers: Any = None, **properties: Any) -> dict[str, Any]:
    """An entry of a queue as Celery writes it, with some parts replaced."""
    where = {"exchange": "pipeline.schedule", "routing_key": "pipeline.schedule"}
    given = {"delivery_tag": str(uuid4()), "delivery_info": where, "body_encoding": "base64", "priority": 0}
    return {
        "body": base64.b64encode(json.dumps(body).encode()).decode(),
        **{name.replace("_", "-"): value for name, value in JSON.items()},
        "headers": {"id": "raw", "task": "pipeline.publish", **(headers or {})},
        "properties": given | properties,
    }


def nested(levels: int) -> Any:
    return json.loads("[" * levels + "]" * levels)


#: What kombu cannot read as a message: each of these ended the worker, and the next one if it was delivered again.
NO_MESSAGES: list[Any] = [
    "garbage", "", "[" * 100_000, "5", "null", "[]", "{}",
    entry() | {"properties": None},
    entry() | {"headers": [1]},
    entry() | {"body": None},
    entry() | {"body": 5},
    entry() | {"content-encoding": {}},
    entry(delivery_tag={}),
    entry(delivery_info=None),
    entry(delivery_info={}),
    entry(body_encoding="rot13"),
    entry(reply_to=nested(480)),
    entry(headers={"stamps": nested(480)}),
    nested(900),
    [entry(), "", ""],
    {"properties": {"__type__": "uuid", "__value__": {"hex": "0" * 32}}},
]  # fmt: skip
#: Messages whose task would fail before our code, or be sent again and again, or be dropped by Celery.
NO_TASKS: list[Any] = [
    entry([{"a": 1}, GIVEN, {}]),
    entry([[], [], {}]),
    entry([[], GIVEN | {"self": 1}, {}]),
    entry([[], GIVEN, "follows"]),
    entry([[], GIVEN, {"chain": [{"task": "pipeline.publish"}]}]),
    entry([[], GIVEN, {"callbacks": 5}]),
    entry(headers={"eta": "0001-01-01T00:00:00+14:00"}),
]


def test_raw_data_in_a_queue_is_kept_and_ends_no_worker(shop: Installation, broker: redis.Redis) -> None:
    raw = [each if isinstance(each, str) else json.dumps(each) for each in (*NO_MESSAGES, *NO_TASKS)]
    broker.lpush("pipeline.schedule", *raw)
    wait_for(lambda: broker.llen("pipeline.dead_letters") == len(raw), within=60, every=0.1, why="all are kept")
    kinds = [each["headers"]["dead-letter-kind"] for each in dead_letters(broker)]
    assert (kinds.count("no task"), kinds.count("invalid")) == (len(NO_MESSAGES), len(NO_TASKS))
    kept = {base64.b64decode(each["body"]).decode() for each in dead_letters(broker)}
    assert {"garbage", "[" * 100_000, "null"} < kept, "unchanged"
    broker.lpush("pipeline.dead_letters", "garbage", json.dumps(entry(delivery_info=None)))
    with dead_letter_scenario.shell(shop) as refused:
        assert len(refused.listed()) == len(raw) + 2, "the command reads what the worker reads"
        assert refused("drop", "--all", "--yes")[0] == 0
    assert broker.hlen("unacked") == 0
    assert shop.nodes[0].process.poll() is None


def test_raw_data_among_unacknowledged_messages_is_kept_and_ends_no_worker(
    shop: Installation, broker: redis.Redis
) -> None:
    raw = ["garbage", "5", "[]", json.dumps([[], "", ""]), json.dumps([entry(), [], ""]), "[" * 100_000]
    tags: dict[Any, Any] = {
        f"tag {number}": each for number, each in enumerate([*(each.encode() for each in raw), b"\xff\xfe"])
    }
    broker.hset("pipeline.unacked", mapping=tags)
    broker.zadd("pipeline.unacked_index", dict.fromkeys(tags, 1))
    wait_for(lambda: broker.llen("pipeline.dead_letters") == len(tags), within=60, every=0.1, why="all are kept")
    assert {each["headers"]["dead-letter-kind"] for each in dead_letters(broker)} == {"no task"}
    assert set(raw) < {base64.b64decode(each["body"]).decode() for each in dead_letters(broker)}, "unchanged"
    assert (broker.hlen("pipeline.unacked"), broker.zcard("pipeline.unacked_index")) == (0, 0)
    assert shop.nodes[0].process.poll() is None, "the worker lives on"


def test_headers_of_the_sender_neither_lose_an_event_nor_end_a_process(shop: Installation, broker: redis.Redis) -> None:
    children = shop.nodes[0].children()
    strange: list[dict[str, Any]] = [
        {"timelimit": ["a", "b"]},
        {"timelimit": [0.001, 0.001]},
        {"retries": 10**400},
        {"traceparent": {"a": 1}, "tracestate": [5], "baggage": 7},
        {"argsrepr": {}, "kwargsrepr": 5, "origin": [1], "shadow": "\x1b[31m\u202e"},
    ]
    for number, headers in enumerate(strange):
        event = {**EVENT, "message_id": f"strange {number}"}
        body = [[], {"workflow": "shop", "events": [event]}, {}]
        broker.lpush("pipeline.schedule", json.dumps(entry(body, headers=headers)))
        shop.published.append(f"strange {number}")
    body = [[], {"workflow": "missing", "events": [EVENT]}, {}]
    broker.lpush("pipeline.schedule", json.dumps(entry(body, headers={"traceparent": {}})))
    wait_for(lambda: broker.llen("pipeline.dead_letters") == 1, within=60, every=0.1, why="the refused one is kept")
    shop.all_done_once()
    assert set(children) <= set(shop.nodes[0].children()), "no process of the pool was ended"


def test_an_operator_lists_sends_back_and_drops_unreadable_messages(
    shop: Installation, theirs: Celery, broker: redis.Redis
) -> None:
    count = sum(send_unusable_messages(theirs).values())
    wait_for(lambda: broker.llen("pipeline.dead_letters") == count, within=60, every=0.1)
    with dead_letter_scenario.shell(shop) as refused:
        before = sorted(refused.listed(), key=lambda each: json.dumps(each))
        again = sorted(refused.listed(), key=lambda each: json.dumps(each))
        assert again == before, "a look changes nothing"
        code, said = refused("list", "--check")
        assert (code, "unknown task" in said, SECRET in said) == (4, True, False), said
        unknown = next(each for each in before if each["kind"] == "unknown task")
        assert (unknown["task"], unknown["message_ids"]) == ("pipeline.publsh", ["kept"])
        code, said = refused("send-back", unknown["id"], "--yes")
        assert (code, "it comes back here unless the workers have that task" in said) == (0, True), said
        wait_for(lambda: broker.llen("pipeline.dead_letters") == count, within=60, every=0.1, why="refused again")
        nothing = next(each for each in before if each["kind"] == "no task")
        code, said = refused("send-back", nothing["id"], "--yes")
        assert (code, "stays" in said, broker.llen("pipeline.dead_letters")) == (1, True, count), said
        pickled = next(each for each in before if "python" in each["content_type"])
        assert "unless the workers accept its content type" in refused("send-back", pickled["id"])[1]
        assert refused("drop", nothing["id"], "--yes")[0] == 0
        assert refused("drop", "--all", "--yes")[0] == 0
    assert broker.llen("pipeline.dead_letters") == 0


def test_a_refused_publish_keeps_its_trace_until_it_is_published(
    shop: Installation, theirs: Celery, broker: redis.Redis
) -> None:
    caller = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "tracestate": "shop=1"}
    given = {"workflow": "annex", "events": [{**EVENT, "message_id": "traced"}]}
    theirs.send_task("pipeline.publish", kwargs=given, queue="pipeline.schedule", serializer="json", headers=caller)
    wait_for(lambda: broker.llen("pipeline.dead_letters") == 1, within=60)
    (entry,) = dead_letters(broker)
    assert {name: entry["headers"][name] for name in caller} == caller
    with shop.db.transaction() as tx:
        registration.register(
            tx, WorkflowSpec(name="annex", topics=(TopicSpec(name="orders"),), handlers=(), version=1)
        )
    with dead_letter_scenario.shell(shop) as refused:
        assert refused("send-back", "--all", "--yes")[0] == 0
    (event,) = wait_for(lambda: shop.ask("SELECT traceparent FROM pipeline.events WHERE message_id = 'traced'"))
    assert event.traceparent.split("-")[1] == "ab" * 16


def test_a_broker_that_takes_no_copy_keeps_the_message_itself(
    shop: Installation, theirs: Celery, broker: redis.Redis
) -> None:
    log = shop.nodes[0].log
    said = len(log.read_text())
    broker.set("pipeline.dead_letters", "no queue")
    theirs.send_task("pipeline.publsh", kwargs=GIVEN, queue="pipeline.schedule", serializer="json")
    wait_for(lambda: log.read_text()[said:].count("goes back") > 1, within=60, why="it came again")
    broker.delete("pipeline.dead_letters")
    wait_for(lambda: broker.llen("pipeline.dead_letters") == 1, within=60, why="it is kept once there is a queue")


def test_after_all_that_the_worker_still_works(shop: Installation, theirs: Celery) -> None:
    theirs.send_task("pipeline.publish", kwargs=GIVEN, queue="pipeline.schedule", serializer="json")
    shop.published.append("kept")
    shop.all_done_once()
    assert shop.nodes[0].process.poll() is None
