"""The same promise with RabbitMQ as the broker: quorum queues, killed workers, and a broker that dies with -9."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from kombu import pools
from kombu.connection import Connection

from pipeline.domain.values import NewEvent
from pipeline.embedded import servers
from pipeline.transitions import events
from tests.support import databases, dead_letter_scenario, rabbitmq
from tests.support.effect_recorder import GATES
from tests.support.installation import PROJECT, Installation, installed
from tests.support.rabbitmq import Rabbit
from tests.support.wait import wait_for

QUEUES = [f"pipeline.{name}" for name in ("prepare", "mutate", "next", "schedule")]
pytestmark = pytest.mark.skipif(not rabbitmq.is_installed(), reason=rabbitmq.MISSING)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rabbit]:
    with rabbitmq.running(tmp_path_factory.mktemp("rabbit")) as found:
        yield found


@pytest.fixture(scope="module")
def empty(
    broker: Rabbit, embedded: servers.Servers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installation]:
    """An installation on this broker, without nodes."""
    home = tmp_path_factory.mktemp("nodes")
    with (
        databases.clone_database(embedded.database_url, f"rabbit_{os.getpid()}") as database_url,
        installed(home, database_url, broker.url) as found,
    ):
        yield found


@pytest.fixture
def shop(empty: Installation, request: pytest.FixtureRequest) -> Installation:
    """A worker and a beat that stay from test to test."""
    empty.stand(begin, failed=request.session.testsfailed)
    return empty


def begin(shop: Installation) -> None:
    shop.worker(PIPELINE_MAX_COHORT_SIZE="10")
    shop.beat()


def test_a_cohort_passes_its_three_tasks(shop: Installation) -> None:
    shop.publish(50)
    shop.all_done_once()


def test_the_queues_are_of_the_replicated_kind(shop: Installation, broker: Rabbit) -> None:
    kinds = dict(line.split("\t") for line in broker.tell("list_queues", "name", "type").splitlines())
    assert {kinds[name] for name in QUEUES} == {"quorum"}


def test_in_an_app_of_its_own_queues_our_queues_are_of_their_kind_and_kills_repeat_nothing(
    empty: Installation, broker: Rabbit, tmp_path: Path
) -> None:
    """The existing tasks of the example, on a broker without quorum queues."""
    empty.begin_anew()
    empty.app = "examples.celery_shop"
    environ = {"SHOP_CHARGES": str(tmp_path), "SHOP_RESULTS": "cache+memory://", "PIPELINE_QUEUE_PREFIX": "hosted"}
    try:
        worker = empty.worker("--concurrency=2", PIPELINE_WORKFLOWS="", **environ)
        payloads: list[dict[str, Any]] = [{"order": str(number), "cents": 990} for number in range(40)]
        new = [NewEvent(topic="charge_card", message_id=each["order"], payload=each) for each in payloads]
        with empty.db.transaction() as tx:
            events.publish(tx, "shop", new)
        empty.published += [each.message_id for each in new]
        wait_for(lambda: list(tmp_path.glob("*.charge")), within=60, why="a card is charged")
        assert worker.kill_children()
        wait_for(empty.is_consumed, within=90, every=0.1, why="every card is charged")
        charged = Counter(file.read_text() for file in tmp_path.glob("*.charge"))
        assert charged == {f"{each['order']} 990": 1 for each in payloads}
        kinds = dict(line.split("\t") for line in broker.tell("list_queues", "name", "type").splitlines())
        ours = {"hosted.prepare", "hosted.mutate", "hosted.next", "hosted.schedule", "hosted.publish", "celery"}
        assert {kinds[name] for name in ours} == {"classic"}
    finally:
        empty.begin_anew()
        empty.app = "pipeline"


@pytest.mark.parametrize("is_first", [False, True], ids=["after the worker", "before the worker"])
def test_a_plain_app_publishes_by_the_documented_snippet(shop: Installation, is_first: bool) -> None:
    if is_first:
        shop.end_nodes()
        with Celery(broker=shop.broker_url) as ours, ours.connection_for_write() as connection:
            connection.default_channel.queue_delete("pipeline.publish")
        # kombu remembers for this broker which queues this process has declared
        pools.reset()  # type: ignore[no-untyped-call]
    with Celery("theirs", broker=shop.broker_url) as theirs:
        event = {"topic": "orders", "message_id": f"plain {is_first}", "payload": {}}
        theirs.send_task(
            "pipeline.publish",
            kwargs={"workflow": "shop", "events": [event]},
            queue="pipeline.publish",
            serializer="json",
        )
        theirs.send_task("pipeline.schedule", args=["shop"], queue="pipeline.publish")
    if is_first:
        begin(shop)
    shop.published.append(f"plain {is_first}")
    shop.all_done_once()


def test_dead_letters_are_listed_sent_back_and_dropped(shop: Installation, broker: Rabbit) -> None:
    dead_letter_scenario.play(shop)
    kinds = dict(line.split("\t") for line in broker.tell("list_queues", "name", "type").splitlines())
    assert kinds["pipeline.dead_letters"] == "quorum"


def test_unreadable_messages_and_unknown_tasks_are_kept_too(shop: Installation) -> None:
    with Celery("theirs", broker=shop.broker_url) as theirs, dead_letter_scenario.shell(shop) as refused:
        theirs.conf.task_create_missing_queue_type = "quorum"
        theirs.send_task("pipeline.publish", args=["shop", []], queue="pipeline.schedule", serializer="yaml")
        theirs.send_task("pipeline.publsh", args=["shop", []], queue="pipeline.schedule", compression="gzip")
        wait_for(lambda: len(refused.listed()) == 2, within=60, every=0.2)
        assert sorted(each["kind"] for each in refused.listed()) == ["unknown task", "unreadable"]
        assert refused("send-back", "--all", "--yes")[0] == 0
        wait_for(lambda: len(refused.listed()) == 2, within=60, every=0.2, why="refused again")
        assert refused("drop", "--all", "--yes")[0] == 0


@pytest.mark.parametrize("gate", GATES)
def test_children_killed_in_the_middle_of_a_phase_lose_and_repeat_nothing(shop: Installation, gate: str) -> None:
    shop.recorder.shut(gate)
    shop.publish(5)
    shop.recorder.wait_at(gate)
    assert shop.nodes[0].kill_children(), "there was nobody to kill"
    shop.recorder.open(gate)
    shop.all_done_once()


def test_a_worker_killed_with_9_loses_and_repeats_nothing(shop: Installation) -> None:
    shop.recorder.shut("after")
    shop.publish(20)
    shop.recorder.wait_at("after")
    shop.nodes[0].kill()
    shop.recorder.open("after")
    shop.worker(PIPELINE_MAX_COHORT_SIZE="10")
    shop.nodes[0] = shop.nodes.pop()
    shop.all_done_once()


def test_a_broker_killed_with_9_costs_time_and_nothing_else(shop: Installation, broker: Rabbit) -> None:
    shop.recorder.shut("before")
    shop.publish(40)
    shop.recorder.wait_at("before")
    broker.kill()
    shop.recorder.open("before")
    broker.start()
    shop.all_done_once()


def test_a_broker_that_is_frozen_holds_no_sender_for_long(
    shop: Installation, broker: Rabbit, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in shop.environ.items():
        monkeypatch.setenv(name, value)
    wake = "print(messages.wake_workflow('shop'))"
    program = f"from pipeline.tasks import messages; {wake}; input(); {wake}"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=PROJECT
    ) as service:
        assert service.stdin is not None
        assert service.stdout is not None
        assert service.stdout.readline() == "True\n"
        broker.freeze()
        try:
            service.stdin.write("\n")
            service.stdin.flush()
            assert service.stdout.readline() == "False\n"
        finally:
            broker.thaw()
    shop.publish(10)
    shop.all_done_once()


def test_messages_purged_out_of_the_queues_cost_time_and_nothing_else(shop: Installation) -> None:
    shop.recorder.shut("prepare")
    shop.publish(60)
    shop.recorder.wait_at("prepare")
    with Connection(shop.broker_url) as connection:  # type: ignore[no-untyped-call]
        for name in QUEUES:
            connection.default_channel.queue_purge(name)
    shop.recorder.open("prepare")
    shop.all_done_once()
