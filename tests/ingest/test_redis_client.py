"""What a queue may be made of: settings that make sense, and a client that hides nothing."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from pipeline.domain.errors import InvalidInputError
from pipeline.ingest.consumer import QueueConsumer
from pipeline.ingest.errors import QueueError
from pipeline.ingest.queue import QueueConfig, RedisStreamsQueue
from pipeline.ingest.redis_client import connect_redis
from tests.ingest.redis_streams import Place
from tests.support.rule import rule

HONEST: dict[str, Any] = {
    "retry": Retry(NoBackoff(), 0),
    "socket_timeout": 10,
    "protocol": 2,
    "single_connection_client": True,
}


def test_q1_the_defaults_wait_five_seconds_for_one_entry_that_is_stale_after_a_minute() -> None:
    config = QueueConfig(stream="s", group="g", consumer="c")
    assert (config.block_ms, config.max_read_count, config.claim_idle_ms) == (5_000, 1, 60_000)


@pytest.mark.parametrize(
    "wrong",
    [
        {"stream": ""},
        {"group": "  "},
        {"consumer": ""},
        {"block_ms": 0},
        {"block_ms": -1},
        {"block_ms": 1.5},
        {"block_ms": True},
        {"claim_idle_ms": 0},
        {"claim_idle_ms": -5},
        {"max_read_count": 0},
        {"group": "caf\udce9"},
        {"stream": "\ud800"},
    ],
    ids=str,
)
def test_q1_a_setting_that_cannot_work_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is .*; expected"):
        QueueConfig(**{"stream": "s", "group": "g", "consumer": "c", **wrong})


@rule("Q-11")
def test_q1_a_consumer_refuses_a_queue_that_reads_more_than_one(place: Place) -> None:
    with pytest.raises(ValueError, match="max_read_count is 2; expected 1"):
        QueueConsumer(place.queue(max_read_count=2))


def test_q2_a_message_is_frozen_and_says_how_often_it_was_delivered(place: Place) -> None:
    (entry,) = place.add({"n": 1})
    queue = place.queue()
    (message,) = queue.read()
    assert (message.stream, message.group, message.id, message.payload, message.times_delivered) == (
        place.stream,
        "workers",
        entry,
        {"n": 1},
        1,
    )
    with pytest.raises(FrozenInstanceError):
        message.id = "other"  # type: ignore[misc]
    place.make_stale()
    (again,) = queue.claim_stale()
    assert (again.id, again.times_delivered) == (entry, 2)


@rule("Q-18")
def test_q4_a_closed_port_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []
    really = socket.socket.connect

    def connected(self: socket.socket, address: Any) -> None:
        tried.append(address)
        really(self, address)

    monkeypatch.setattr(socket.socket, "connect", connected)
    with pytest.raises(QueueError, match="cannot be reached") as caught:
        connect_redis("redis://:s3cret@127.0.0.1:1/0")
    assert tried == [("127.0.0.1", 1)], "it is tried once, and nothing is waited for"
    assert isinstance(caught.value.__cause__, redis.ConnectionError)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://:s3cret@127.0.0.1:port/0", "cannot be used"),
        ("redis://:s3cret/x@127.0.0.1:6379/0", "cannot be used"),
        ("amqp://:s3cret@127.0.0.1/", "cannot be used"),
        ("redis://:s3cret@127.0.0.1:6379/0?foo=1", "the option 'foo' that the client does not know"),
        ("redis://:s3cret@127.0.0.1:6379/0?max_connections=no", "cannot be used"),
        ("redis://:s3cret@127.0.0.1:6379/0?max_connections=-1", "an option that cannot be used"),
    ],
)
def test_q4_a_url_that_cannot_be_used_is_refused_without_its_password(url: str, expected: str) -> None:
    with pytest.raises(InvalidInputError, match=expected) as caught:
        connect_redis(url)
    assert "s3cret" not in str(caught.value)
    assert caught.value.__suppress_context__


@rule("Q-18")
def test_q4_options_of_the_url_for_the_broker_do_not_change_how_a_stream_is_read(place: Place) -> None:
    options = "socket_timeout=1&decode_responses=true&retry_on_timeout=true&health_check_interval=5&protocol=3"
    client = connect_redis(f"{place.url}?{options}&client_name=shop", longest_block_ms=200)
    config = QueueConfig(stream=place.stream, group="g", consumer="c", block_ms=200)
    assert RedisStreamsQueue(client, config).read() == []
    assert client.get_connection_kwargs()["client_name"] == "shop"
    client.close()


def test_q4_tcp_keepalive_detects_a_half_open_connection(place: Place) -> None:
    client = connect_redis(place.url)
    connection: Any = client.connection
    assert connection._sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert client.get_connection_kwargs()["socket_keepalive"] is True, (
        "set explicitly, whatever the default of the library"
    )
    client.close()


@contextmanager
def behind_a_file(place: Place, path: Path) -> Iterator[str]:
    """A URL by which the Redis of a place is found through a socket in a folder, for one connection."""
    parts = urlsplit(place.url)

    def pump(source: socket.socket, sink: socket.socket) -> None:
        while data := source.recv(65_536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)

    def serve() -> None:
        near, far = door.accept()[0], socket.create_connection((parts.hostname or "", parts.port or 0))
        with near, far:
            back = threading.Thread(target=pump, args=(far, near))
            back.start()
            pump(near, far)
            back.join()

    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(path))
        door.listen()
        relay = threading.Thread(target=serve, daemon=True)
        relay.start()
        yield f"unix://:{parts.password}@{path}?db={parts.path.removeprefix('/')}"
        relay.join()


def test_q4_a_redis_on_a_unix_socket_works(place: Place, tmp_path: Path) -> None:
    config = QueueConfig(stream=place.stream, group="g", consumer="c", block_ms=200)
    with behind_a_file(place, tmp_path / "r") as url, connect_redis(url, longest_block_ms=30_000) as client:
        queue = RedisStreamsQueue(client, config)
        place.add({"n": 1})
        assert [message.payload for message in queue.read()] == [{"n": 1}]


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("redis+cluster://a:7000,b:7000", "a Redis Cluster"),
        ("rediss+cluster://a:7000", "a Redis Cluster"),
        ("sentinel://:word@a:26379/0;sentinel://b:26379/0", "Redis Sentinel"),
        ("redis+sentinel://a:26379", "Redis Sentinel"),
    ],
)
def test_a_cluster_or_sentinel_url_is_refused_in_a_sentence_without_its_secrets(url: str, kind: str) -> None:
    with pytest.raises(InvalidInputError, match=f"names {kind}") as caught:
        connect_redis(url)
    assert "word" not in str(caught.value)


@pytest.mark.parametrize("path", ["", "/nowhere/redis.sock"])
def test_q4_a_missing_unix_socket_is_an_unreachable_redis(path: str) -> None:
    with pytest.raises(QueueError, match="cannot be reached"):
        connect_redis(f"unix://{path}")


def test_q4_celerys_names_for_certificate_checks_are_accepted() -> None:
    with pytest.raises(QueueError, match="refused"):
        connect_redis("rediss://127.0.0.1:1/0?ssl_cert_reqs=CERT_REQUIRED")


@pytest.mark.parametrize("block_ms", [100, 5_200])  # by its own default, redis-py would give up after 5 s
def test_q4_an_idle_read_takes_as_long_as_its_block(quiet: Place, block_ms: int) -> None:
    consumer = quiet.consumer(block_ms=block_ms)
    before, began = quiet.calls("xreadgroup")["xreadgroup"], time.monotonic()
    assert consumer.next() is None
    assert time.monotonic() - began >= block_ms / 1000 - 0.05
    assert quiet.calls("xreadgroup")["xreadgroup"] == before + 1, "one read, which was not given up and begun again"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"retry": Retry(NoBackoff(), 3)}, "it may retry by itself"),
        ({"retry": Retry(NoBackoff(), -1)}, "it may retry by itself"),
        ({"retry": None, "retry_on_error": [redis.TimeoutError]}, "it may retry by itself"),
        ({"single_connection_client": False}, "from a pool"),
        ({"decode_responses": True}, "decodes responses"),
        ({"protocol": 3}, "protocol 2"),
        ({"socket_timeout": 5}, "needs a socket timeout of at least 6 s"),
    ],
    ids=["retries", "retries for ever", "retries on error", "pool", "decodes", "protocol 3", "short timeout"],
)
def test_q4_a_client_that_hides_failures_or_cuts_reads_short_is_refused(
    place: Place, given: dict[str, Any], problem: str
) -> None:
    config = QueueConfig(stream=place.stream, group="g", consumer="c")
    with redis.Redis.from_url(place.url, **{**HONEST, **given}) as client, pytest.raises(ValueError, match=problem):
        RedisStreamsQueue(client, config)


@pytest.mark.parametrize("unsaid", HONEST)
def test_q4_an_option_left_to_the_library_default_is_refused(place: Place, unsaid: str) -> None:
    given = {name: value for name, value in HONEST.items() if name != unsaid}
    config = QueueConfig(stream=place.stream, group="g", consumer="c", block_ms=100)
    with (
        redis.Redis.from_url(place.url, **given) as careless,
        pytest.raises(ValueError, match=r"Make it with pipeline\.ingest\.connect_redis"),
    ):
        RedisStreamsQueue(careless, config)


@pytest.mark.parametrize("timeout", [10, None])
def test_q4_a_suitable_client_of_the_caller_is_accepted(place: Place, timeout: int | None) -> None:
    config = QueueConfig(stream=place.stream, group="g", consumer="c")
    with redis.Redis.from_url(place.url, **{**HONEST, "socket_timeout": timeout}) as careful:
        assert RedisStreamsQueue(careful, config).read(block_ms=20) == []


def test_q4_a_read_may_not_block_longer_than_the_socket_timeout(place: Place) -> None:
    with pytest.raises(ValueError, match="larger longest_block_ms"):
        place.consumer(block_ms=200).next(block_ms=60_000)
