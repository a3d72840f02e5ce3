"""Whole workers die, freeze past their leases, or are asked to stop in the middle of a phase."""

import pytest

from tests.support.effect_recorder import GATES
from tests.support.installation import Installation, Node
from tests.support.wait import wait_for


def begin(shop: Installation) -> None:
    """A worker and a beat. Who succeeds the worker that a test ends is the worker of the next test."""
    shop.worker()
    shop.beat()


def succeeded(shop: Installation, worker: Node) -> None:
    """Another worker takes the place of one that is gone."""
    assert worker.process.poll() is not None
    shop.nodes[0] = shop.nodes.pop()


@pytest.mark.parametrize("gate", GATES)
def test_a_worker_killed_in_the_middle_of_a_phase_loses_and_repeats_nothing(shop: Installation, gate: str) -> None:
    worker = shop.nodes[0]
    shop.recorder.shut(gate)
    shop.publish(5)
    shop.recorder.wait_at(gate)
    worker.kill()
    shop.recorder.open(gate)
    shop.worker()
    succeeded(shop, worker)
    shop.all_done_once()


def frozen(shop: Installation, worker: Node, gate: str) -> list[str]:
    """Freeze a worker in the middle of a phase. Returns the runs that it holds: there are some.

    A call that waits at a gate is given up after a while. If all were before the worker stood still, others follow.
    """
    shop.recorder.shut(gate)

    def held() -> list[str]:
        shop.publish(5)
        shop.recorder.wait_at(gate)
        worker.freeze()
        found = [str(run.id) for run in shop.runs() if run.status == "active" and run.worker]
        if not found:
            worker.thaw()
        return found

    return wait_for(held, within=120, why="the frozen worker holds runs")


@pytest.mark.parametrize("gate", ["before", "after", "next"])
def test_a_worker_that_comes_back_after_its_lease_finds_its_writes_refused(shop: Installation, gate: str) -> None:
    zombie = shop.nodes[0]
    held = frozen(shop, zombie, gate)
    shop.worker()
    still = "SELECT FROM pipeline.runs WHERE status = 'active' AND id = ANY(CAST(:held AS uuid[]))"
    wait_for(lambda: not shop.ask(still, held=held), within=60, why="the frozen worker's runs taken from it")
    zombie.thaw()
    if gate == "next":
        shop.recorder.open(gate)
    assert zombie.stop() == 0
    shop.recorder.open(gate)  # a call whose time is over has hung up: its request can no longer get through
    succeeded(shop, zombie)
    shop.all_done_once()


@pytest.mark.parametrize("gate", GATES)
def test_a_worker_stopped_in_the_middle_of_a_phase_finishes_it_and_leaves_the_others(
    shop: Installation, gate: str
) -> None:
    worker = shop.nodes[0]
    shop.recorder.shut(gate)
    shop.publish(5)
    shop.recorder.wait_at(gate)
    worker.ask_to_stop()
    shop.recorder.open(gate)
    assert worker.stop() == 0
    assert not shop.ask("SELECT FROM pipeline.runs WHERE lease_expires_at IS NOT NULL"), "a lease outlived its worker"
    shop.worker()
    succeeded(shop, worker)
    shop.all_done_once()
