"""Workers that are resized, recycled, revoked from or stopped with a call in flight: nothing is lost or doubled."""

import signal
from functools import partial
from typing import Any

import pytest
from celery import Celery

from tests.support.installation import Installation, Node
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
