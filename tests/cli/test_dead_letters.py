"""Messages that workers refused, in the list of what waits for a person: the broker is asked, and not waited for."""

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
    """Let the broker at this address be asked."""
    return lambda url: monkeypatch.setattr(dead_letter, "app", Celery(broker=url))


@pytest.fixture
def two(embedded: servers.Servers, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A broker with two refused messages. It answers: whoever asks has time to hear it."""
    monkeypatch.setattr(dead_letter, "dead_letter_depth", functools.partial(dead_letter.dead_letter_depth, 60.0))
    url = embedded.broker_url.rpartition("/")[0] + "/9"
    with redis.Redis.from_url(url) as broker:
        broker.lpush("pipeline.dead_letters", "{}", "{}")
        yield url
        broker.delete("pipeline.dead_letters")


def test_refused_messages_wait_for_a_person_with_the_command_to_type(pipeline: Pipeline, ask: Ask, two: str) -> None:
    ask(two)
    (item,) = pipeline("attention", "--json").json
    assert (item["kind"], item["subject"], item["commands"][0]) == (
        "dead_letter",
        "queue pipeline.dead_letters",
        "pipeline dead-letters list",
    )
    assert item["reason"].startswith("2 messages")
    said = pipeline("attention", "--check")
    assert (said.code, "\n    pipeline dead-letters list\n" in said.out) == (4, True)


def test_a_queue_that_nobody_wrote_to_is_nothing_to_tell(pipeline: Pipeline, ask: Ask, two: str) -> None:
    ask(two.rpartition("/")[0] + "/8")
    said = pipeline("attention")
    assert (said.code, said.out, said.err) == (0, "Nothing waits for an operator.\n", "")


def test_a_broker_that_cannot_be_asked_is_said_and_the_rest_is_shown(pipeline: Pipeline, ask: Ask) -> None:
    ask("redis://127.0.0.1:1/0")
    said = pipeline("attention")
    assert (said.code, said.out) == (0, "Nothing waits for an operator.\n")
    assert "The broker did not answer, so refused messages are unknown" in said.err


def test_a_broker_that_never_answers_is_not_waited_for(pipeline: Pipeline, ask: Ask) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        ask(f"redis://127.0.0.1:{mute.getsockname()[1]}/0")
        began = time.monotonic()
        said = pipeline("attention")
        took = time.monotonic() - began
    assert "The broker did not answer" in said.err
    assert took < 40
