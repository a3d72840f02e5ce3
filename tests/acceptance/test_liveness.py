"""The liveness file is fresh as long as the process works."""

import shlex
import subprocess
from pathlib import Path
from threading import Event

import pytest
import redis

from tests.support.installation import Installation
from tests.support.wait import wait_for

#: The probe of every file in deploy/, which a test there compares with this one.
PROBE = "test -n \"$(find {file} -newermt '-{seconds} seconds')\""


def is_alive(file: Path, seconds: float = 60) -> bool:
    """The result of the probe."""
    return subprocess.run(PROBE.format(file=shlex.quote(str(file)), seconds=seconds), shell=True).returncode == 0


def wait_until_touched(*files: Path) -> None:
    """Each of them is touched once more from now on."""
    before = {file: file.stat().st_mtime_ns for file in files}
    wait_for(lambda: all(file.stat().st_mtime_ns > before[file] for file in files), within=60, why=str(files))


@pytest.fixture
def files(nodes: Installation) -> tuple[Path, Path]:
    """The signs of a worker and a beat."""
    worker, beat = nodes.home / "alive-worker", nodes.home / "alive-beat"
    nodes.worker("--pool=solo", PIPELINE_LIVENESS_FILE=str(worker))
    nodes.beat(PIPELINE_LIVENESS_FILE=str(beat))
    wait_for(lambda: worker.exists() and beat.exists(), within=60)
    return worker, beat


def test_a_worker_and_a_beat_that_wait_for_their_broker_give_signs_of_life_and_frozen_ones_do_not(
    nodes: Installation, files: tuple[Path, Path]
) -> None:
    wait_until_touched(*files)
    with redis.Redis.from_url(nodes.broker_url) as client:
        client.config_set("maxclients", 1)
        try:
            client.client_kill_filter(skipme=True)
            wait_until_touched(*files)
        finally:
            client.config_set("maxclients", 1000)
    for node in nodes.nodes:
        node.freeze()
    Event().wait(2)
    assert not any(is_alive(file, seconds=1) for file in files)
    for node in nodes.nodes:
        node.thaw()
    wait_until_touched(*files)
    assert all(is_alive(file) for file in files)


def test_a_process_without_a_liveness_file_is_not_alive(tmp_path: Path) -> None:
    assert not is_alive(tmp_path / "nothing")
