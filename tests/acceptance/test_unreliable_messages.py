"""Messages are doorbells: dropped, doubled, delayed or overtaken, they change nothing but the time it takes."""

import signal

from pipeline.background.sweeps import PERIODS
from pipeline.config import EXIT_RESTART
from pipeline.workflows.registration import register_workflows
from pipeline.workflows.registry import Registry
from tests.support.installation import UNHURRIED, Installation
from tests.support.wait import wait_for


def test_three_of_ten_messages_dropped_doubled_delayed_and_overtaken_lose_and_repeat_nothing(
    nodes: Installation,
) -> None:
    soon = {"PIPELINE_TICK": "200ms", "PIPELINE_REDISPATCH_AFTER": "800ms"}  # longer than a message is delayed
    nodes.worker(line="chaos", PIPELINE_MAX_COHORT_SIZE="4", **soon)
    nodes.beat(line="chaos", **soon)
    nodes.publish(40)
    nodes.all_done_once()


def test_every_message_delivered_twice_and_two_beats_at_once_leave_the_database_as_once(nodes: Installation) -> None:
    """Nothing runs out of time here: a run that came too late would be followed by a second one, rightly."""
    for _ in range(2):
        nodes.worker(line="twice", PIPELINE_MAX_COHORT_SIZE="4", **UNHURRIED)
        nodes.beat(line="twice")
    nodes.publish(40)
    nodes.all_done_once()
    assert len(nodes.runs()) == 40, "a message that came twice made a second run"
    assert {run.status for run in nodes.runs()} == {"committed"}


def test_without_any_beat_a_worker_stands_in_for_every_sweep(nodes: Installation) -> None:
    nodes.worker()
    nodes.publish(10)
    nodes.all_done_once()
    swept = "SELECT name FROM pipeline.sweeps WHERE last_run_at > pipeline.clock() - interval '5 minutes'"
    wait_for(lambda: {row.name for row in nodes.ask(swept)} >= {*PERIODS}, within=150, why="every sweep ran")


def test_a_worker_that_does_not_know_a_workflow_leaves_its_runs_to_one_that_does(nodes: Installation) -> None:
    register_workflows(nodes.db, Registry.load(["tests.support.order_workflow"]))
    stranger = nodes.worker(
        "--pool=solo", PIPELINE_WORKFLOWS="tests.support.load_workflow", PIPELINE_REDISPATCH_AFTER="500ms"
    )
    nodes.beat()
    nodes.publish(10)
    wait_for(lambda: "pipeline.sweep" in stranger.log.read_text(), within=60, why="the stranger at work")
    knows = nodes.worker("--pool=solo", PIPELINE_REDISPATCH_AFTER="500ms")
    nodes.all_done_once()
    holders = {run.worker.rpartition(":")[2] for run in nodes.runs() if run.status == "committed"}
    assert holders == {str(knows.process.pid)}


def test_a_worker_that_receives_no_messages_ends_itself_and_an_idle_one_continues(
    nodes: Installation,
) -> None:
    hard_of_hearing = [
        nodes.worker(f"--pool={pool}", "--concurrency=1", line="deaf", PIPELINE_STALL_TIMEOUT="3s")
        for pool in ("prefork", "solo")
    ]
    idle = nodes.worker("--pool=solo", "--queues=pipeline.mutate", PIPELINE_STALL_TIMEOUT="1s")
    nodes.publish(5)
    nodes.ring()
    nodes.all_done_once()
    for deaf in hard_of_hearing:
        deaf.process.send_signal(signal.SIGUSR2)
        deaf.wait_until_ready("hears nothing from now on")
    nodes.publish(5)
    for _ in range(5):  # each of the two may have asked for one message before it went deaf
        nodes.ring()
    for deaf in hard_of_hearing:
        assert deaf.process.wait(timeout=60) == EXIT_RESTART
        assert "taken no message for 3 s although some wait" in deaf.log.read_text()
    assert idle.process.poll() is None
    nodes.worker("--queues=pipeline.prepare,pipeline.next,pipeline.schedule")
    nodes.all_done_once()
    assert idle.process.poll() is None
