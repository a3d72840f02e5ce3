"""What the endpoint of a real worker says equals what the database says, however its processes come and go."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.cluster import Installation
from tests.support.scrapes import Scraped, answering, free_port, scrape
from tests.support.wait import wait_for

pytestmark = pytest.mark.timeout(120)


def done(installation: Installation) -> bool:
    (row,) = installation.ask("SELECT count(*) AS done FROM pipeline.events WHERE topic = 'done'")
    return bool(row.done == len(installation.published))


def told(installation: Installation) -> dict[str, int]:
    """What the database knows of what workers count."""
    (row,) = installation.ask("""
        SELECT count(*) FILTER (WHERE status = 'committed') AS committed,
               count(*) FILTER (WHERE status = 'committed' AND event_ids <> '{}') AS with_inputs,
               count(*) FILTER (WHERE status NOT IN ('committed', 'active')) AS stopped,
               count(*) FILTER (WHERE status = 'crashed') AS crashed, sum(fence) AS claimed, count(*) AS started,
               (SELECT count(*) FROM pipeline.mutations WHERE status = 'applied') AS applied,
               (SELECT count(*) FROM pipeline.mutations WHERE status = 'applied' AND resolved_by = 'call') AS by_call
        FROM pipeline.runs""")
    return {name: int(value or 0) for name, value in row._mapping.items()}


def counted(seen: Scraped) -> dict[str, int]:
    """The same, as an endpoint tells it."""

    def transition(name: str) -> float:
        return seen.sum("pipeline_transitions_total", transition=name, workflow="shop")

    found = {
        "committed": transition("run.committed"),
        "with_inputs": seen.sum("pipeline_run_latency_seconds_count", workflow="shop", handler="Fulfil"),
        "stopped": seen.sum("pipeline_runs_stopped_total", workflow="shop", handler="Fulfil"),
        "crashed": seen.sum("pipeline_rescues_total", workflow="shop"),
        "claimed": transition("run.claimed"),
        "started": transition("run.started") + transition("run.retried"),
        "applied": transition("mutation.applied"),
        "by_call": seen.sum("pipeline_mutation_duration_seconds_count", connector="world", outcome="applied"),
    }
    return {name: int(value) for name, value in found.items()}


@contextmanager
def watched(port: int) -> Iterator[list[str]]:
    """Scrape all the while, and remember whatever went back."""
    ending, fell, best = threading.Event(), list[str](), dict[object, float]()

    def look() -> None:
        while not ending.wait(0.1):
            for series, value in scrape(port).growing():
                if value < best.get(series, 0.0):
                    fell.append(f"{series}: {best[series]} then {value}")
                best[series] = value

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield fell
    finally:
        ending.set()
        thread.join()


def test_the_sums_of_recycled_and_killed_children_equal_what_the_database_says(installation: Installation) -> None:
    port = free_port()
    options = ("--pool=prefork", "--concurrency=2", "--max-tasks-per-child=3")
    node = installation.worker(*options, PIPELINE_METRICS_PORT=str(port))
    answering(port)
    with watched(port) as fell:
        first = set(node.children())
        installation.publish(12)
        wait_for(lambda: done(installation), within=60, every=0.1, why="all orders done")
        agree(installation, port)
        assert set(node.children()) - first, "no child was recycled"
        installation.recorder.shut("next")
        installation.publish(1)
        installation.recorder.wait_at("next")
        wait_for(lambda: counted(scrape(port))["claimed"] == told(installation)["claimed"], within=10)
        (holder,) = {int(run.worker.rpartition(":")[2]) for run in installation.runs() if run.lease_expires_at}
        os.kill(holder, signal.SIGKILL)
        wait_for(lambda: told(installation)["crashed"] == 1, within=20)
        installation.recorder.open("next")
        installation.publish(7)
        wait_for(lambda: done(installation), within=60, every=0.1, why="all orders done")
        agree(installation, port)
    assert fell == []
    assert told(installation)["crashed"] == 1
    seen = scrape(port)
    assert (
        seen.sum("pipeline_phase_duration_seconds_count", phase="next", result="done")
        == told(installation)["committed"]
    )
    assert (
        seen.sum("pipeline_phase_duration_seconds_count", phase="mutate", result="done")
        == told(installation)["by_call"]
    )
    assert seen.sum("pipeline_database_up") == 1
    assert node.stop() == 0


def agree(installation: Installation, port: int) -> None:
    """Wait for the last second of every child, and compare."""

    def same() -> bool:
        seen, known = counted(scrape(port)), told(installation)
        assert seen == known
        return True

    wait_for(same, within=10, every=0.2, why="endpoint and database agree")
