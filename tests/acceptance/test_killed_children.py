"""Processes of the pool die with -9 wherever they are: the parent lives on, and every order is done once."""

import pytest

from pipeline.testing import CrashPoint
from tests.support.effect_recorder import GATES
from tests.support.installation import Installation, lives
from tests.support.wait import wait_for

#: Points that a consumer's run passes; at each of them the process that gets there dies.
POINTS = [point for point in CrashPoint if point not in (CrashPoint.PRODUCE_CLAIMED, CrashPoint.PRODUCED)]


def begin(shop: Installation) -> None:
    """A worker and a beat that stay from test to test."""
    shop.worker(SHOP_OBEYS="1")
    shop.beat()


@pytest.mark.parametrize("gate", GATES)
def test_children_killed_while_their_handlers_or_calls_are_busy_lose_and_repeat_nothing(
    shop: Installation, gate: str
) -> None:
    shop.recorder.shut(gate)
    shop.publish(5)
    shop.recorder.wait_at(gate)
    assert shop.nodes[0].kill_children(), "there was nobody to kill"
    shop.recorder.open(gate)
    shop.all_done_once()


@pytest.mark.parametrize("point", POINTS)
def test_a_process_that_dies_at_this_point_loses_and_repeats_nothing(shop: Installation, point: CrashPoint) -> None:
    worker = shop.nodes[0]
    shop.recorder.order(point, "die")
    shop.publish(5)
    dead = shop.recorder.wait_until_obeyed(point)
    if dead == worker.process.pid:  # a scheduler may run in the parent too
        worker.process.wait(timeout=60)
        shop.worker(SHOP_OBEYS="1")
        shop.nodes[0] = shop.nodes.pop()
    wait_for(lambda: not lives(dead), why="the process is dead")
    shop.all_done_once()
