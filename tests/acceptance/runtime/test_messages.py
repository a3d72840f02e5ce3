"""Messages are doorbells: dropped, doubled, delayed or overtaken, they change nothing but the time it takes."""

import signal
from datetime import timedelta

import pytest
from celery import Celery

from pipeline.config import EXIT_AGAIN
from pipeline.runtime.registry import Registry
from pipeline.runtime.sync import sync
from pipeline.schedules.sweeps import PERIODS
from tests.support.cluster import Installation
from tests.support.wait import wait_for


def test_three_of_ten_messages_dropped_doubled_delayed_and_overtaken_lose_and_repeat_nothing(
    nodes: Installation,
) -> None:
    nodes.worker(line="chaos", PIPELINE_COHORT="4")
    nodes.beat(line="chaos")
    nodes.publish(40)
    nodes.all_done_once()


def test_every_message_delivered_twice_leaves_the_database_as_once(nodes: Installation) -> None:
    nodes.worker(line="twice", PIPELINE_COHORT="4")
    nodes.worker(line="twice", PIPELINE_COHORT="4")
    nodes.beat(line="twice")
    before = len(nodes.runs())
    nodes.publish(40)
    nodes.all_done_once()
    assert len(nodes.runs()) - before == 40, "a message that came twice made a second run"
    assert {run.status for run in nodes.runs()[before:]} == {"committed"}


def test_two_beats_at_once_are_as_good_as_one(nodes: Installation) -> None:
    nodes.worker()
    nodes.beat()
    nodes.beat()
    before = len(nodes.runs())
    nodes.publish(40)
    nodes.all_done_once()
    assert len(nodes.runs()) - before == 40


def test_without_any_beat_a_worker_stands_in_for_every_sweep(nodes: Installation) -> None:
    nodes.worker()
    nodes.publish(10)
    nodes.all_done_once()
    swept = "SELECT name FROM pipeline.sweeps WHERE last_run_at > pipeline.clock() - interval '5 minutes'"
    wait_for(lambda: {row.name for row in nodes.ask(swept)} >= {*PERIODS}, within=150, why="every sweep ran")


def test_a_worker_that_does_not_know_a_workflow_leaves_its_runs_to_one_that_does(nodes: Installation) -> None:
    sync(nodes.db, Registry.load(["tests.support.shop"]))
    stranger = nodes.worker("--pool=solo", PIPELINE_WORKFLOWS="tests.support.mill", PIPELINE_SILENCE="500ms")
    nodes.beat()
    nodes.publish(10)
    wait_for(lambda: "pipeline.sweep" in stranger.log.read_text(), within=60, why="the stranger at work")
    knows = nodes.worker("--pool=solo", PIPELINE_SILENCE="500ms")
    nodes.all_done_once(within=60)
    holders = {run.worker.rpartition(":")[2] for run in nodes.runs()[-10:]}
    assert holders == {str(knows.process.pid)}


@pytest.mark.parametrize("pool", ["prefork", "solo"])
def test_a_worker_that_hears_no_messages_any_more_ends_itself_and_loses_nothing(nodes: Installation, pool: str) -> None:
    deaf = nodes.worker(f"--pool={pool}", "--concurrency=1", line="deaf", PIPELINE_STALL="3s")
    nodes.publish(5)
    nodes.all_done_once()
    deaf.process.send_signal(signal.SIGUSR2)
    nodes.publish(5)
    assert deaf.process.wait(timeout=60) == EXIT_AGAIN
    assert "taken no message for 3 s although some wait" in deaf.log.read_text()
    nodes.worker()
    nodes.all_done_once()


def test_a_worker_that_only_has_nothing_to_do_goes_on(nodes: Installation) -> None:
    idle = nodes.worker("--pool=solo", "--queues=pipeline.mutate", PIPELINE_STALL="1s")
    other = nodes.worker("--queues=pipeline.prepare,pipeline.next,pipeline.schedule")
    nodes.beat()
    wait_for(lambda: other.log.read_text().count("pipeline.sweep") > 100, within=60, why="three looks of a guardian")
    assert idle.process.poll() is None
    nodes.publish(5)
    nodes.all_done_once()


def test_from_publish_to_prepare_a_poke_is_enough_however_rare_the_tick(nodes: Installation) -> None:
    tick = timedelta(hours=1)
    nodes.worker(PIPELINE_TICK="1h")
    swept = "SELECT name FROM pipeline.sweeps WHERE name = 'tick' AND last_run_at > pipeline.clock() - interval '5 min'"
    wait_for(lambda: nodes.ask(swept), within=60, why="the one tick of this hour is over")
    with Celery(broker=nodes.broker_url).connection_for_write() as broker:
        for _ in range(5):
            nodes.publish(1)
            Celery(broker=nodes.broker_url).send_task(
                "pipeline.schedule", args=("shop",), queue="pipeline.schedule", connection=broker
            )
            nodes.all_done_once(within=60)
    waited = nodes.ask(
        "SELECT r.started_at - e.created_at AS span FROM pipeline.runs r JOIN pipeline.deliveries d ON d.run_id = r.id"
        " JOIN pipeline.events e ON e.id = d.event_id WHERE e.topic = 'orders' ORDER BY e.id DESC LIMIT 5"
    )
    assert len(waited) == 5
    assert max(row.span for row in waited) < tick / 100
