"""Dead letters in the list of attention items; a silent broker is not waited for."""

import functools
import socket
import time
from collections.abc import Callable, Iterator

import pytest
import redis
from celery import Celery

from pipeline.embedded import servers
from pipeline.tasks import dead_letter
from tests.cli.conftest import Pipeline

Ask = Callable[[str], None]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Use the broker at this address."""
    return lambda url: monkeypatch.setattr(dead_letter, "app", Celery(broker=url))


@pytest.fixture
def two(embedded: servers.Servers, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Start a broker with two dead letters; the time limit for its answer is long."""
    monkeypatch.setattr(dead_letter, "dead_letter_depth", functools.partial(dead_letter.dead_letter_depth, 60.0))
    url = embedded.broker_url.rpartition("/")[0] + "/9"
    with redis.Redis.from_url(url) as broker:
        broker.lpush("pipeline.dead_letters", "{}", "{}")
        yield url
        broker.delete("pipeline.dead_letters")


def test_dead_letters_wait_for_an_operator_with_the_commands_to_type(pipeline: Pipeline, ask: Ask, two: str) -> None:
    ask(two)
    (item,) = pipeline("attention", "--json").json
    assert (item["kind"], item["subject"], item["commands"][0]) == (
        "dead_letter",
        "queue pipeline.dead_letters",
        "pipeline dead-letters list",
    )
    assert item["reason"].startswith("2 messages")
    output = pipeline("attention", "--check")
    assert (output.code, "\n    pipeline dead-letters list\n" in output.out) == (4, True)


def test_a_queue_without_messages_is_not_listed(pipeline: Pipeline, ask: Ask, two: str) -> None:
    ask(two.rpartition("/")[0] + "/8")
    output = pipeline("attention")
    assert (output.code, output.out, output.err) == (0, "Nothing waits for an operator.\n", "")


def test_an_unreachable_broker_is_a_warning_and_the_other_items_are_listed(pipeline: Pipeline, ask: Ask) -> None:
    ask("redis://127.0.0.1:1/0")
    output = pipeline("attention")
    assert (output.code, output.out) == (0, "Nothing waits for an operator.\n")
    assert "The broker did not answer, so refused messages are unknown" in output.err


def test_a_broker_that_never_answers_is_not_waited_for(pipeline: Pipeline, ask: Ask) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        ask(f"redis://127.0.0.1:{mute.getsockname()[1]}/0")
        began = time.monotonic()
        output = pipeline("attention")
        took = time.monotonic() - began
    assert "The broker did not answer" in output.err
    assert took < 40
