"""Every pool that Celery offers for handlers like ours runs a workflow to its commit."""

import pytest

from tests.support.installation import Installation

#: The processes of prefork live for a few tasks: long lives are what every other test here has.
POOLS = {
    "prefork": ("--pool=prefork", "--concurrency=2", "--max-tasks-per-child=5"),
    "threads": ("--pool=threads", "--concurrency=4"),
    "solo": ("--pool=solo",),
}


@pytest.fixture
def shop(installation: Installation, request: pytest.FixtureRequest) -> Installation:
    """A beat, and no worker."""
    installation.stand(lambda shop: shop.beat(), failed=request.session.testsfailed)
    return installation


@pytest.mark.parametrize("options", POOLS.values(), ids=POOLS)
def test_a_worker_of_this_pool_does_every_order_once(shop: Installation, options: tuple[str, ...]) -> None:
    worker = shop.worker(*options)
    shop.publish(40)
    shop.all_done_once()
    assert worker.stop() == 0
    assert shop.nodes.pop() is worker
