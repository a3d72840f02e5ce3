"""Every pool that Celery offers for handlers like ours runs a workflow to its commit."""

import pytest

from tests.support.cluster import Installation

POOLS = {
    "prefork": ("--pool=prefork", "--concurrency=2"),
    "prefork with short lives": ("--pool=prefork", "--concurrency=2", "--max-tasks-per-child=2"),
    "threads": ("--pool=threads", "--concurrency=4"),
    "solo": ("--pool=solo",),
}


@pytest.mark.parametrize("options", POOLS.values(), ids=POOLS)
def test_a_worker_of_this_pool_does_every_order_once(nodes: Installation, options: tuple[str, ...]) -> None:
    worker = nodes.worker(*options)
    nodes.beat()
    nodes.publish(40)
    nodes.all_done_once()
    assert worker.stop() == 0
