"""Messages that a worker refused, and what a person does about them, on Redis; RabbitMQ has its own module."""

import redis

from tests.support import refusals
from tests.support.cluster import Installation


def test_what_was_refused_is_listed_sent_back_and_dropped(nodes: Installation) -> None:
    nodes.worker(PIPELINE_TICK="1h")
    refusals.play(nodes)
    with redis.Redis.from_url(nodes.broker_url) as client:
        assert client.hlen("unacked") == 0, "nothing is left in anybody's hands"


def test_a_broker_that_is_away_is_said_in_a_sentence(nodes: Installation) -> None:
    away = nodes.broker_url.rpartition("@")[0] + "@127.0.0.1:1/0"
    nodes.broker_url, kept = away, nodes.broker_url
    with refusals.shell(nodes) as refused:
        code, said = refused("list")
    nodes.broker_url = kept
    assert (code, "The broker failed" in said, "Traceback" in said) == (75, True, False), said
