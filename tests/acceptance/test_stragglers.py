"""Calls outlive their tasks in real processes, which are then killed, frozen, recycled and stopped."""

import os
import signal
from datetime import timedelta

import pytest

from tests.support.installation import UNHURRIED, Installation, Node
from tests.support.wait import wait_for

_LEASES = "SELECT FROM pipeline.runs WHERE lease_expires_at IS NOT NULL"
POOLS = {
    "prefork": ("--pool=prefork", "--concurrency=2"),
    "threads": ("--pool=threads", "--concurrency=2"),
    "solo": ("--pool=solo",),
}


def with_stragglers(nodes: Installation, *options: str, gate: str = "after", **environ: str) -> Node:
    """A worker whose tasks are all done, and whose calls all wait at a gate."""
    worker = nodes.worker(*options, **environ)
    nodes.beat()
    nodes.recorder.shut(gate)
    nodes.publish(5)
    wait_for(lambda: nodes.recorder.waiting(gate) == 5, within=60, why="five calls at the gate")
    wait_for(lambda: not worker.unfinished(), within=60, why="the tasks done before their calls")
    assert nodes.recorder.waiting(gate) == 5, "the tasks waited for their calls"
    return worker


def resolvers(nodes: Installation) -> set[str]:
    """What told the outcome of each mutation: its own call, or a later question."""
    return {row.resolved_by for row in nodes.ledger()}


@pytest.mark.parametrize("gate", ["before", "after"])
def test_children_killed_while_calls_outlive_their_task_lose_and_repeat_nothing(nodes: Installation, gate: str) -> None:
    worker = with_stragglers(nodes, gate=gate, SHOP_TIMEOUT="20", PIPELINE_LEASE="30s")
    assert worker.kill_children(), "no child was killed"
    nodes.recorder.open(gate)
    nodes.all_done_once()


@pytest.mark.parametrize("options", POOLS.values(), ids=POOLS)
def test_a_worker_that_is_stopped_records_the_calls_that_outlived_their_task(
    nodes: Installation, options: tuple[str, ...]
) -> None:
    worker = with_stragglers(nodes, *options, **UNHURRIED)
    worker.ask_to_stop()
    wait_for(lambda: "Warm shutdown" in worker.log.read_text(), why="the worker stopping")
    nodes.recorder.open("after")
    assert worker.stop() == 0
    assert resolvers(nodes) == {"call"}, "an outcome was not recorded before the worker ended"
    assert not nodes.ask(_LEASES), "a lease outlived its worker"
    nodes.worker()
    nodes.all_done_once()


@pytest.mark.parametrize("options", [POOLS["prefork"], POOLS["solo"]], ids=["prefork", "solo"])
def test_a_worker_that_is_told_again_to_end_leaves_its_calls_to_be_reconciled(
    nodes: Installation, options: tuple[str, ...]
) -> None:
    worker = with_stragglers(nodes, *options, SHOP_TIMEOUT="20", PIPELINE_LEASE="25s")

    def is_ended() -> bool:
        if worker.process.poll() is None:
            worker.process.send_signal(signal.SIGQUIT)
        return worker.process.poll() is not None

    wait_for(is_ended, within=15, every=0.5, why="a worker that does not wait for its calls")
    # The pool's child ends a moment after the worker that killed it.
    wait_for(lambda: nodes.recorder.waiting("after") == 0, within=15, why="the calls hanging up with their process")
    assert {row.status for row in nodes.ledger()} == {"in_flight"}
    nodes.recorder.open("after")
    nodes.let_time_pass(timedelta(seconds=25))
    nodes.worker()
    nodes.all_done_once()
    assert resolvers(nodes) == {"reconcile"}


@pytest.mark.parametrize("limit", ["--max-tasks-per-child=1", "--max-memory-per-child=1"])
def test_a_recycled_child_records_its_calls_before_it_ends(nodes: Installation, limit: str) -> None:
    with_stragglers(nodes, "--pool=prefork", "--concurrency=2", limit, **UNHURRIED)
    nodes.recorder.open("after")
    nodes.all_done_once()
    assert resolvers(nodes) == {"call"}


def test_a_worker_frozen_past_its_lease_with_stragglers_neither_writes_nor_repeats(nodes: Installation) -> None:
    zombie = with_stragglers(nodes, gate="before", SHOP_TIMEOUT="2")
    nodes.freeze_between_transactions(zombie)
    nodes.worker()
    wait_for(lambda: not nodes.ask("SELECT FROM pipeline.mutations WHERE status = 'in_flight'"), within=60)
    zombie.thaw()
    assert zombie.stop() == 0, "its calls have hung up when it has ended"
    nodes.recorder.open("before")
    nodes.all_done_once()


def test_a_child_with_stragglers_does_other_work_meanwhile(nodes: Installation) -> None:
    with_stragglers(nodes, "--pool=prefork", "--concurrency=1", **UNHURRIED)
    nodes.publish(5)
    wait_for(lambda: nodes.recorder.waiting("after") == 10, within=60, why="the calls of the next cohort")
    nodes.recorder.open("after")
    nodes.all_done_once()
    assert resolvers(nodes) == {"call"}


def test_a_child_that_is_terminated_with_stragglers_loses_and_repeats_nothing(nodes: Installation) -> None:
    worker = with_stragglers(nodes, SHOP_TIMEOUT="20", PIPELINE_LEASE="30s")
    for pid in worker.children():
        os.kill(pid, signal.SIGTERM)  # as --autoscale ends a child that has no task
    nodes.recorder.open("after")
    nodes.all_done_once()
