"""What a run asks of Postgres does not grow: statements, commits and plans are counted, and nothing is timed.

Beat stands still while runs are counted: sweeps come by the clock, so a busy machine has more of them in a run.
``pipeline bench`` prints the same figures with its sweeps.
"""

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.bench import gate, installation, loads
from pipeline.bench.installation import Fleet, FleetOptions
from pipeline.bench.workflow import DONE

#: Per run, at 20 orders a second: nearly every run is a cohort of its own.
LIGHT_LIMITS = {"statements": 15.0, "commits": 10.5, "plans": 2.0}
#: Per run of a backlog: runs travel in cohorts of 200.
BACKLOG_LIMITS = {"statements": 0.2, "commits": 0.18, "plans": 0.2}


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """A worker with two processes and beat, on servers of their own: the log of Postgres is what counts."""
    with installation.embedded() as site, site.fleet(FleetOptions()) as running:
        loads.warm_up(running, "many")
        yield running
        running.stop()
        assert gate.check(running) == []


@contextmanager
def without_sweeps(fleet: Fleet) -> Iterator[None]:
    """Let beat stand still."""
    os.kill(fleet.beat.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(fleet.beat.process.pid, signal.SIGCONT)


def test_a_run_under_light_load_asks_no_more_of_postgres(fleet: Fleet) -> None:
    with without_sweeps(fleet):
        counted = loads.count_paced(fleet, "many", 40)
    assert beyond(counted, LIGHT_LIMITS) == {}


def test_a_run_of_a_backlog_asks_no_more_of_postgres(fleet: Fleet) -> None:
    with without_sweeps(fleet):
        counted = loads.count_drained(fleet, "many", 3000)
    assert beyond(counted, BACKLOG_LIMITS) == {}


def test_latency_begins_before_the_publish_and_ends_after_the_commit(fleet: Fleet) -> None:
    sent = fleet.pace("many", 5, 20.0)
    fleet.wait_until_done()
    done = fleet.committed_at(sent)
    rows = fleet.site.query(
        "SELECT d.message_id, extract(epoch FROM o.created_at)::float, extract(epoch FROM d.created_at)::float "
        "FROM pipeline.events d JOIN pipeline.events o ON o.message_id = d.message_id AND o.topic <> d.topic "
        "WHERE d.topic = %s AND d.message_id >= %s",
        DONE,
        min(sent),
    )
    before = time.monotonic()
    ((now,),) = fleet.site.query("SELECT extract(epoch FROM clock_timestamp())::float")
    least, most = now - time.monotonic(), now - before  # what Postgres's clock is ahead of this machine's
    assert {order for order, _, _ in rows} == set(sent)
    assert [order for order, published, _ in rows if sent[order] + least > published] == []
    # a row has the instant at which its transaction began
    assert [order for order, _, committing in rows if done[order] + most <= committing] == []


def test_a_worker_that_starts_later_has_the_settings_of_its_options(fleet: Fleet) -> None:
    fleet.configure(FleetOptions(concurrency=1, settings={"PIPELINE_MAX_COHORT_SIZE": "7"}))
    node = fleet.start_worker(9)
    environ = Path(f"/proc/{node.process.pid}/environ").read_bytes().split(b"\0")
    node.end()
    fleet.configure(FleetOptions())
    assert b"PIPELINE_MAX_COHORT_SIZE=7" in environ


def beyond(counted: Mapping[str, float], limits: Mapping[str, float]) -> dict[str, str]:
    """Return each count that is above its limit, or suspiciously zero."""
    return {
        name: f"{counted[name]:.2f} per run; expected at most {limit:g}"
        for name, limit in limits.items()
        if counted[name] > limit or (not counted[name] and name != "plans")  # what is planned already may stay at none
    }


def test_a_count_beyond_its_limit_is_found() -> None:
    limits = {"statements": 10.0, "commits": 2.0, "plans": 1.0}
    found = beyond({"statements": 0.0, "commits": 2.1, "plans": 0.0}, limits)
    assert found == {
        "statements": "0.00 per run; expected at most 10",
        "commits": "2.10 per run; expected at most 2",
    }
