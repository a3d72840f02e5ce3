"""Processes of the pool die with -9 wherever they are: the parent lives on, and every order is done once."""

from collections.abc import Iterator

import pytest

from pipeline.runtime.points import Point
from tests.support.cluster import Installation

#: Points that a consumer's run passes; at each of them the process that gets there dies.
POINTS = [point for point in Point if point not in (Point.PRODUCE_CLAIMED, Point.PRODUCED)]


@pytest.fixture(scope="module")
def shop(installation: Installation) -> Iterator[Installation]:
    """A worker and a beat that stay for the whole module."""
    installation.worker(SHOP_OBEYS="1")
    installation.beat()
    yield installation
    installation.end_nodes()


@pytest.mark.parametrize("gate", ["prepare", "before", "after", "next"])
def test_children_killed_while_their_handlers_or_calls_are_busy_lose_and_repeat_nothing(
    shop: Installation, gate: str
) -> None:
    shop.recorder.shut(gate)
    shop.publish(5)
    shop.recorder.wait_at(gate)
    shop.nodes[0].kill_children()
    shop.recorder.open(gate)
    shop.all_done_once()


@pytest.mark.parametrize("point", POINTS)
def test_a_process_that_dies_at_this_point_loses_and_repeats_nothing(shop: Installation, point: Point) -> None:
    shop.recorder.order(point, "die")
    shop.publish(5)
    shop.recorder.wait_until_obeyed(point)
    if shop.nodes[0].process.poll() is not None:  # a scheduler may run in the parent too
        shop.worker(SHOP_OBEYS="1")
    shop.all_done_once()
