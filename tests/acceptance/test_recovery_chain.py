"""Work goes on soon after a death: the rescue dispatches the reconcile attempt, and the verdict starts what follows."""

from datetime import datetime, timedelta
from typing import Any

import pytest
from celery import Celery

from tests.support.installation import Installation, Node
from tests.support.wait import wait_for

#: A call does not end by itself while a test stands still, and its timeout is longer than the lease.
SLOW = {"SHOP_TIMEOUT": "20"}
#: No sweep comes: each step follows from the one before, or the test fails.
UNSWEPT = SLOW | {"PIPELINE_TICK": "1h"}
#: Sweeps that make up for a step which does not follow come late.
SELDOM = SLOW | {"PIPELINE_TICK": "10s"}
LEASE = timedelta(seconds=3)


def publish_one(nodes: Installation) -> Any:
    """Publish an order whose effect has happened, and whose answer is still to come. Return its run."""
    nodes.recorder.shut("after")
    nodes.publish(1)
    nodes.ring()
    nodes.recorder.wait_at("after")
    (run,) = nodes.runs()
    return run


def killed_holder(nodes: Installation, run: Any) -> datetime:
    """Kill the worker that holds a run, and return when."""
    holder = next(node for node in nodes.nodes if int(run.worker.rpartition(":")[2]) in node.children())
    nodes.nodes.remove(holder)
    holder.kill()
    return now(nodes)


def now(nodes: Installation) -> datetime:
    (row,) = nodes.ask("SELECT clock_timestamp() AS now")
    at: datetime = row.now
    return at


def retried(nodes: Installation) -> Any:
    """Wait for the run that continues the stopped one."""
    return wait_for(
        lambda: next((run for run in nodes.runs() if run.retry_of), None), within=60, why="the run is continued"
    )


def rescue(nodes: Installation) -> bool:
    """Dispatch a rescue, as beat does. Return whether no run is held any more."""
    nodes.ask("DELETE FROM pipeline.sweeps WHERE name = 'rescue' RETURNING name")
    with Celery(broker=nodes.broker_url) as beat:
        beat.send_task("pipeline.sweep.rescue", queue="pipeline.schedule")
    return not any(run.lease_expires_at for run in nodes.runs())


def test_after_a_child_is_killed_in_a_call_everything_follows_without_a_sweep(nodes: Installation) -> None:
    nodes.sweep_nothing()
    worker = nodes.worker(**UNSWEPT)
    publish_one(nodes)
    assert worker.kill_children()
    nodes.recorder.open("after")
    nodes.all_done_once()


def test_after_a_worker_is_killed_in_a_call_everything_follows_from_one_rescue(nodes: Installation) -> None:
    nodes.sweep_nothing()
    for _ in range(2):
        nodes.worker(**UNSWEPT)
    killed_holder(nodes, publish_one(nodes))
    nodes.recorder.open("after")
    wait_for(lambda: rescue(nodes), within=60, every=0.5, why="the lease has lapsed, and the run is rescued")
    nodes.all_done_once()


def test_the_work_of_a_killed_worker_goes_on_within_three_leases(nodes: Installation) -> None:
    """The sweep of reconcile attempts comes every 20 s, and the tick every 10 s: neither may be waited for."""
    for _ in range(2):
        nodes.worker(**SELDOM)
    nodes.beat(**SELDOM)
    at = killed_holder(nodes, publish_one(nodes))
    nodes.recorder.open("after")
    rescues = timedelta(seconds=4)  # every 4 s at this tick
    assert retried(nodes).created_at - at < 3 * LEASE + rescues
    nodes.all_done_once()


@pytest.mark.parametrize("options", [(), ("--pool=prefork", "--concurrency=1")], ids=["two", "one"])
def test_the_work_of_a_killed_child_goes_on_before_its_lease_has_lapsed(
    nodes: Installation, options: tuple[str, ...]
) -> None:
    slow = SLOW | {"PIPELINE_LEASE": "20s", "PIPELINE_TICK": "1h"}
    nodes.sweep_nothing()
    worker: Node = nodes.worker(*options, **slow)
    publish_one(nodes)
    at, _ = now(nodes), worker.kill_children()
    nodes.recorder.open("after")
    assert retried(nodes).created_at - at < timedelta(seconds=20)
    nodes.all_done_once()
