"""Whole workers die, freeze past their leases, or are asked to stop in the middle of a phase."""

from collections.abc import Iterator

import pytest

from tests.support.cluster import Installation
from tests.support.wait import wait_for

GATES = ["prepare", "before", "after", "next"]


@pytest.fixture(scope="module")
def beating(installation: Installation) -> Iterator[Installation]:
    """A beat that stays for the whole module."""
    installation.beat()
    yield installation
    installation.end_nodes()


@pytest.fixture
def nodes(beating: Installation) -> Iterator[Installation]:
    """The installation with its beat; workers are gone after the test."""
    yield beating
    for node in beating.nodes[1:]:
        node.end()
    del beating.nodes[1:]


@pytest.mark.parametrize("gate", GATES)
def test_a_worker_killed_in_the_middle_of_a_phase_loses_and_repeats_nothing(nodes: Installation, gate: str) -> None:
    worker = nodes.worker()
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
    nodes.recorder.shut(gate)
    nodes.publish(5)
    nodes.recorder.wait_at(gate)
    zombie.freeze()
    held = [str(run.id) for run in nodes.runs() if run.status == "active" and run.worker]
    stuck = zombie.unfinished()
    nodes.worker()
    still = "SELECT FROM pipeline.runs WHERE status = 'active' AND id = ANY(CAST(:held AS uuid[]))"
    wait_for(lambda: not nodes.ask(still, held=held), within=60, why="the frozen worker's runs taken from it")
    zombie.thaw()
    if gate != "next":  # a call whose time is over must have hung up before its request can get through
        wait_for(lambda: not stuck & zombie.unfinished(), within=60, why="the woken worker gives its calls up")
    nodes.recorder.open(gate)
    assert zombie.stop() == 0
    nodes.all_done_once()


@pytest.mark.parametrize("gate", GATES)
def test_a_worker_asked_to_stop_in_the_middle_of_a_phase_finishes_it_and_leaves_the_rest(
    nodes: Installation, gate: str
) -> None:
    worker = nodes.worker()
    nodes.recorder.shut(gate)
    nodes.publish(5)
    nodes.recorder.wait_at(gate)
    worker.ask_to_stop()
    nodes.recorder.open(gate)
    assert worker.stop() == 0
    assert not nodes.ask("SELECT FROM pipeline.runs WHERE lease_expires_at IS NOT NULL"), "a lease outlived its worker"
    nodes.worker()
    nodes.all_done_once()
