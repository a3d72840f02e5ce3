"""Messages are doorbells: dropped, doubled, delayed or overtaken, they change nothing but the time it takes."""

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
    swept = "SELECT name FROM pipeline.sweeps WHERE last_run_at > pipeline.clock() - interval '1 minute'"
    wait_for(lambda: {row.name for row in nodes.ask(swept)} >= {*PERIODS}, within=60, why="every sweep ran")


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
