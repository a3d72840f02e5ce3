"""Workers that are resized, recycled, revoked from or stopped with a call in flight: nothing is lost or doubled."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from tests.support.installation import PROJECT, Installation, Node
from tests.support.wait import wait_for


@pytest.fixture
def shop(nodes: Installation) -> Installation:
    """A beat, and no worker."""
    nodes.beat()
    return nodes


def hold_a_call(shop: Installation, count: int = 4) -> None:
    """Let the effects of new orders happen, and their answers wait."""
    shop.recorder.shut("after")
    shop.publish(count)
    shop.recorder.wait_at("after")


def asked(shop: Installation, command: str, **arguments: Any) -> Any:
    """Send a control command to the newest worker, and wait for its reply only."""
    with Celery(broker=shop.broker_url) as app:
        one = [f"{shop.nodes[-1].name}@here"]
        return app.control.broadcast(command, arguments=arguments, reply=True, timeout=30, destination=one)


def revoked(shop: Installation, by: str) -> int:
    """Revoke every task that the newest worker executes; return how many."""
    with Celery(broker=shop.broker_url) as app:
        active = app.control.inspect([f"{shop.nodes[-1].name}@here"], timeout=30).active() or {}
        ids = [task["id"] for tasks in active.values() for task in tasks]
        app.control.revoke(ids, terminate=True, signal=by)
    return len(ids)


def is_revoked_in_a_call(shop: Installation, by: str) -> bool:
    """Revoke the task of a call in flight. On a busy machine the call may have outlived its task: then nothing is."""
    hold_a_call(shop)
    count = revoked(shop, by)
    shop.recorder.open("after")
    shop.all_done_once()
    return count > 0


def ended(shop: Installation, worker: Node) -> int:
    code: int = worker.process.wait(timeout=60)
    shop.nodes.remove(worker)
    return code


def test_control_commands_cost_time_and_nothing_else(shop: Installation) -> None:
    worker = shop.worker("--autoscale=3,1")
    shop.publish(10)
    shop.all_done_once()
    for by in ("SIGTERM", "SIGKILL"):
        wait_for(partial(is_revoked_in_a_call, shop, by), within=90, why="a task with a call is revoked")
    hold_a_call(shop)
    (refused,) = asked(shop, "pool_restart")
    assert "not enabled" in str(refused)
    asked(shop, "pool_grow", n=1)
    asked(shop, "cancel_consumer", queue="pipeline.prepare")
    asked(shop, "add_consumer", queue="pipeline.prepare")
    shop.recorder.open("after")
    shop.all_done_once()
    hold_a_call(shop)
    with Celery(broker=shop.broker_url) as app:
        app.control.shutdown()
    shop.recorder.open("after")
    assert ended(shop, worker) == 0
    shop.worker("--pool=threads", "--concurrency=4")
    shop.all_done_once()


@pytest.mark.parametrize(
    ("signals", "environ"),
    [
        ([signal.SIGINT, signal.SIGINT], {}),
        ([signal.SIGQUIT], {}),
        ([signal.SIGTERM], {"REMAP_SIGTERM": "SIGQUIT"}),
    ],
    ids=["interrupted twice", "cold", "remapped"],
)
def test_a_worker_that_stops_with_a_call_in_flight_leaves_it_to_the_next(
    shop: Installation, signals: list[signal.Signals], environ: dict[str, str]
) -> None:
    worker = shop.worker("--pool=threads", "--concurrency=4", **environ)
    hold_a_call(shop)
    for each in signals:
        worker.process.send_signal(each)
    shop.recorder.open("after")
    assert ended(shop, worker) in (0, -signals[-1])
    shop.worker("--pool=threads", "--concurrency=4")
    shop.all_done_once()


def multi(shop: Installation, command: str, home: Path) -> "subprocess.Popen[bytes]":
    """Do something to the worker ``many`` that ``celery multi`` manages."""
    options = ["--pool=threads", "--concurrency=4", "--without-mingle", "-E", "--loglevel=INFO"]
    places = [f"--pidfile={home}/%n.pid", f"--logfile={home}/%n.log"]
    line = [sys.executable, "-m", "celery", "multi", command, "many", "-A", "pipeline", *options, *places]
    environ = {**shop.environ, "C_FORCE_ROOT": "1", "PYTHONUNBUFFERED": "1"}
    with (home / command).open("wb") as output:
        return subprocess.Popen(line, env=environ, cwd=PROJECT, stdout=output, stderr=output)


def test_celery_multi_starts_restarts_and_stops_a_worker(shop: Installation, tmp_path: Path) -> None:
    """It restarts with a call in flight: the first worker ends it, or leaves it to the second."""
    pid, log = tmp_path / "many.pid", tmp_path / "many.log"

    def has(file: Path, words: str) -> bool:
        return file.exists() and words in file.read_text()

    try:
        assert multi(shop, "start", tmp_path).wait(60) == 0
        wait_for(lambda: has(log, " ready."), within=90, why="a worker ready")
        hold_a_call(shop)
        first = pid.read_text()
        restart = multi(shop, "restart", tmp_path)
        wait_for(lambda: has(tmp_path / "restart", "TERM"), within=60, why="the worker is told to stop")
        shop.recorder.open("after")
        assert restart.wait(120) == 0
        shop.publish(4)
        shop.all_done_once()
        assert pid.read_text() != first, "another worker"
        assert multi(shop, "stopwait", tmp_path).wait(120) == 0
        assert not pid.exists()
    finally:
        if pid.exists():
            os.kill(int(pid.read_text()), signal.SIGKILL)
