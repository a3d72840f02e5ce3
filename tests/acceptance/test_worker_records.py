"""Operators see which workers run, from the start of a worker to its end."""

import socket

from pipeline.admin import system
from tests.support.installation import Installation
from tests.support.wait import wait_for


def test_a_worker_is_listed_while_it_runs_and_not_after_it_stopped(nodes: Installation) -> None:
    node = nodes.worker("--pool=solo", "-Q", "pipeline.mutate")
    wait_for(lambda: bool(system.list_workers(nodes.db)), why="the worker is recorded")
    (found,) = system.list_workers(nodes.db)
    assert (found.name, found.pid) == (f"{node.name}@here:{node.process.pid}", node.process.pid)
    assert (found.host, found.pool, found.is_gone) == (socket.gethostname(), "solo", False)
    assert (found.queues, found.workflows) == (("pipeline.mutate",), {"shop": 1})
    assert found.concurrency >= 1
    assert node.stop() == 0
    assert system.list_workers(nodes.db) == ()
