"""An unknown outcome is settled by a worker that knows the workflow, whichever worker gets the message first."""

import time

import pytest

from pipeline import Backoff, ReconcilePolicy
from pipeline.domain.policies import BreakerPolicy
from pipeline.store.database import Statement
from pipeline.testing import Does, Inline, scripted
from tests.support import order_workflow
from tests.support.installation import Installation
from tests.support.wait import wait_for

DOUBTS = 8
_NOW = Statement[object](
    "UPDATE pipeline.mutations SET next_reconcile_at = pipeline.clock() WHERE status = 'needs_reconcile' RETURNING id"
)
_IN_DOUBT = "SELECT 1 FROM pipeline.mutations WHERE status = 'needs_reconcile'"
OFTEN = {"PIPELINE_TICK": "200ms"}
OTHERS = {
    "another workflow": {"PIPELINE_WORKFLOWS": "tests.support.unanswered_mail_workflow"},
    "an older version": {"SHOP_VERSION": "1"},
}


def leave_doubts(nodes: Installation) -> None:
    """Orders whose effect did not happen, which only a reconcile attempt can find out."""
    world = scripted(
        "world",
        mutations=("apply",),
        reads={"gate": lambda name: {}},
        policy=ReconcilePolicy(max_attempts=100, backoff=Backoff(base=order_workflow.TIMEOUT)),
        breaker=BreakerPolicy(min_unknown=1000),
    )
    world.will(*[Does.TIMES_OUT_BEFORE] * DOUBTS)
    world.cannot_tell(DOUBTS)
    run = Inline(nodes.db, [order_workflow.shop], [world])
    nodes.publish(DOUBTS)
    run.run()
    run.close()
    assert len(nodes.ask(_IN_DOUBT)) == DOUBTS


def seconds_to_settle(nodes: Installation) -> float:
    """Let the doubts be due, and measure until none is left."""
    with nodes.db.transaction() as tx:
        tx.all(_NOW)
    begun = time.monotonic()
    wait_for(lambda: not nodes.ask(_IN_DOUBT), within=100, why="every doubt settled")
    return time.monotonic() - begun


@pytest.mark.parametrize("other", OTHERS)
def test_workers_that_do_not_know_a_workflow_do_not_delay_its_doubts(nodes: Installation, other: str) -> None:
    leave_doubts(nodes)
    nodes.worker("--pool=prefork", "--concurrency=1", SHOP_VERSION="2", **OFTEN)
    beat = nodes.beat(**OFTEN)
    alone = seconds_to_settle(nodes)
    nodes.all_done_once()
    beat.stop()
    nodes.end_nodes()
    leave_doubts(nodes)
    nodes.worker("--pool=prefork", "--concurrency=1", SHOP_VERSION="2", **OFTEN)
    nodes.worker("--pool=prefork", "--concurrency=4", **OTHERS[other], **OFTEN)
    nodes.beat(**OFTEN)
    beside = seconds_to_settle(nodes)
    assert beside < 4 * max(alone, 2.0), f"{alone:.1f} s alone, {beside:.1f} s beside {other}"
    nodes.all_done_once()
