"""A process that is frozen past its lease and comes back changes nothing and sends nothing, wherever it was."""

import pytest

from pipeline.testing import CrashPoint
from tests.support.installation import Installation, is_frozen
from tests.support.wait import wait_for

#: After each of these a process believes that it holds runs, and has something left to do for them.
POINTS = [
    CrashPoint.PREPARE_RAN,
    CrashPoint.MUTATE_CLAIMED,
    CrashPoint.IN_FLIGHT,
    CrashPoint.CALLED,
    CrashPoint.NEXT_RAN,
]


def begin(shop: Installation) -> None:
    """A worker with a process to freeze and others to go on, and a beat; they stay from test to test."""
    shop.worker("--pool=prefork", "--concurrency=3", SHOP_OBEYS="1")
    shop.beat()


@pytest.mark.parametrize("point", POINTS)
def test_a_process_frozen_past_its_lease_at_this_point_neither_writes_nor_sends_when_it_wakes(
    shop: Installation, point: CrashPoint
) -> None:
    shop.recorder.order(point, "stop")
    shop.publish(5)
    frozen = shop.recorder.wait_until_obeyed(point)
    wait_for(lambda: is_frozen(frozen), why="the process stops where it was told to")
    shop.all_done_once()
    worker = shop.nodes[0]
    assert is_frozen(frozen), "the frozen process has ended, so nothing was proved"
    worker.thaw()

    def has_finished() -> bool:
        end = worker.log.read_text().splitlines()[-20:]
        assert not worker.unfinished(), f"exit code {worker.process.poll()}, unfinished {worker.unfinished()}: {end}"
        return True

    wait_for(has_finished, within=60, why="the woken process finishing its task")
    shop.all_done_once()
