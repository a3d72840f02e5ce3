"""Whole workers die, freeze past their leases, or are asked to stop in the middle of a phase."""

import pytest

from tests.support.cluster import Installation
from tests.support.wait import wait_for

GATES = ["prepare", "before", "after", "next"]


@pytest.mark.parametrize("gate", GATES)
def test_a_worker_killed_in_the_middle_of_a_phase_loses_and_repeats_nothing(nodes: Installation, gate: str) -> None:
    worker = nodes.worker()
    nodes.beat()
    nodes.recorder.shut(gate)
    nodes.publish(5)
    nodes.recorder.wait_at(gate)
    worker.kill()
    nodes.recorder.open(gate)
    nodes.worker()
    nodes.all_done_once()


@pytest.mark.parametrize("gate", ["before", "after", "next"])
def test_a_worker_that_comes_back_after_its_lease_finds_its_writes_refused(nodes: Installation, gate: str) -> None:
    zombie = nodes.worker()
    nodes.beat()
    nodes.recorder.shut(gate)
    nodes.publish(5)
    nodes.recorder.wait_at(gate)
    zombie.freeze()
    nodes.worker()
    held = "SELECT FROM pipeline.runs WHERE status = 'active' AND worker IS NOT NULL"
    wait_for(lambda: not nodes.ask(held), within=20, why="the frozen worker's runs taken from it")
    zombie.thaw()
    nodes.recorder.open(gate)
    assert zombie.stop() == 0
    nodes.all_done_once()


@pytest.mark.parametrize("gate", GATES)
def test_a_worker_asked_to_stop_in_the_middle_of_a_phase_finishes_it_and_leaves_the_rest(
    nodes: Installation, gate: str
) -> None:
    worker = nodes.worker()
    nodes.beat()
    nodes.recorder.shut(gate)
    nodes.publish(5)
    nodes.recorder.wait_at(gate)
    worker.ask_to_stop()
    nodes.recorder.open(gate)
    assert worker.stop() == 0
    assert not nodes.ask("SELECT FROM pipeline.runs WHERE lease_expires_at IS NOT NULL"), "a lease outlived its worker"
    nodes.worker()
    nodes.all_done_once()
