"""The soak: it goes on where it was killed, and adds up its segments."""

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.chaos.provider import EFFECTS, records_of
from pipeline.chaos.records import RunTimes
from pipeline.chaos.soak import (
    SoakFigures,
    SoakOptions,
    SoakState,
    percentile,
    recovery_times,
    saved_options,
    total,
)
from pipeline.domain.errors import InvalidInputError
from tests.support.environ import clean_environ
from tests.support.wait import wait_for

PIPELINE = Path(sys.executable).parent / "pipeline"
ORDERS, SEGMENT = 10, 5


def start(state: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [str(PIPELINE), "chaos", "--soak", str(ORDERS), "--state", str(state), "--json", *arguments]
    return subprocess.Popen(command, env=clean_environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.timeout(560)
def test_a_soak_that_is_killed_in_a_segment_goes_on_there_and_gives_the_whole_table(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with start(state, "--seed", "11", "--segment", str(SEGMENT), "--workers", "1", "--faults", "12") as killed:
        try:
            effects = state / "segment-00000" / EFFECTS
            wait_for(lambda: records_of(effects), within=120.0, why="the first effect")
        finally:
            killed.send_signal(signal.SIGKILL)
    before = records_of(effects)
    assert before, "it was killed in its first segment"
    with start(state) as resumed:
        output, log = resumed.communicate(timeout=420)
    assert resumed.returncode == 0, f"{output}\n{log}"
    found: dict[str, Any] = json.loads(output)
    counts = found["total"]
    assert (found["seed"], found["workers"], found["segments"], found["problems"]) == (11, 1, ORDERS // SEGMENT, [])
    assert (counts["orders"], counts["effects"], counts["interruptions"]) == (ORDERS, ORDERS, 1)
    assert (counts["doubled"], counts["lost"], counts["wrong_verdicts"]) == (0, 0, 0)
    assert counts["faults"], "something was killed meanwhile"
    assert sum(counts["requests"].values()) >= ORDERS
    assert found["unknown"] == sum(counts["settled_by"].values())
    assert found["reconcilable_share_without_a_person"] in (None, 1.0), "a person is asked about text only"


FIRST = SoakFigures(
    orders=2, seconds=1.5, faults={"a": 1, "b": 2}, certainty={"0.5": 1}, recoveries={"a": {"1.0": 1}}, database_mb=9.0
)
SECOND = SoakFigures(
    orders=3,
    seconds=1.0,
    faults={"b": 1},
    certainty={"0.5": 2, "2.0": 1},
    recoveries={"b": {"3.0": 1}},
    database_mb=8.0,
)


def test_segments_are_added_and_the_database_is_the_largest() -> None:
    found = total([FIRST, SECOND])
    assert (found.orders, found.seconds, found.database_mb) == (5, 2.5, 9.0)
    assert (found.faults, found.certainty) == ({"a": 1, "b": 3}, {"0.5": 3, "2.0": 1})
    assert found.recoveries == {"a": {"1.0": 1}, "b": {"3.0": 1}}
    assert total([]) == SoakFigures()


def test_percentiles_are_those_of_all_segments_together() -> None:
    assert [percentile({"0.5": 3, "10.0": 1}, percent) for percent in (50, 75, 76, 100)] == [0.5, 0.5, 10.0, 10.0]
    assert percentile({}, 50) is None


def test_the_share_without_a_person_counts_what_an_operator_settled() -> None:
    found = SoakFigures(settled_by={"reconcile": 6, "call": 1, "operator": 2, "operator_skip": 1})
    assert (found.unknown, found.share_without_a_person) == (10, 0.7)
    assert found.reconcilable_share_without_a_person is None


def test_a_killed_worker_is_repaired_when_its_last_run_is_stopped_and_a_server_when_the_next_run_starts() -> None:
    run = RunTimes(started_at=1.0, finished_at=5.0, worker="host:w:7", is_lost=True)
    times = [
        run,
        replace(run, finished_at=9.0),
        replace(run, worker="host:w:8", finished_at=50.0),
        replace(run, started_at=30.0, is_lost=False),
    ]
    faults = [
        {"at": 2.0, "fault": "killed", "pids": [7]},
        {"at": 2.0, "fault": "idle", "pids": [99]},
        {"at": 20.0, "fault": "server", "pids": []},
        {"at": 40.0, "fault": "too late", "pids": []},
    ]
    assert recovery_times(faults, times) == {"killed": [7.0], "server": [10.0]}


def test_the_state_is_read_again_and_another_seed_is_refused(tmp_path: Path) -> None:
    options = SoakOptions(orders=5, state=tmp_path, seed=3)
    SoakState.open(options).add(FIRST)
    assert SoakState.open(options).total == FIRST
    assert saved_options(tmp_path)["seed"] == 3
    with pytest.raises(InvalidInputError, match="has seed 3, and 4 was given"):
        SoakState.open(replace(options, seed=4))
