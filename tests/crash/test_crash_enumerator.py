"""For every scenario, a crash at every commit boundary: nothing is lost, nothing happens twice, no orphan.

The walker that dies is replaced by another that is every sweep, the scheduler and a person at once.
Each boundary is tried twice: with the transaction's writes lost, and with them kept.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest

from pipeline.domain.failures import FailureKind
from pipeline.domain.policies import FailurePolicy
from pipeline.store import invariants
from pipeline.store.database import Database
from tests.factories import NO_PAUSE, OUT, a_workflow, event_status, some_events
from tests.support.crashes import Crash, CrashingDatabase
from tests.support.reads import rows
from tests.support.walker import Walker
from tests.support.world import Behaviour, World


@dataclass(frozen=True)
class Scenario:
    """A workflow's options, what the world does with the first event, and how ``next`` fails."""

    world: tuple[Behaviour, ...] = ()
    next_fails: tuple[FailureKind, ...] = ()
    workflow: dict[str, Any] = field(default_factory=dict)
    events: int = 2


SCENARIOS = {
    "applied": Scenario(),
    "refused-then-applied": Scenario(world=(Behaviour.REFUSES,)),
    "refused-then-the-same-plan-again": Scenario(
        world=(Behaviour.REFUSES,), workflow={"after_failed_mutation": "mutate"}
    ),
    "timeout-after-applying": Scenario(world=(Behaviour.TIMES_OUT_AFTER_APPLYING,)),
    "timeout-before-applying": Scenario(world=(Behaviour.TIMES_OUT_BEFORE_APPLYING,)),
    "timeout-contained": Scenario(
        world=(Behaviour.TIMES_OUT_AFTER_APPLYING,), workflow={"on_uncertain": "contain", "concurrency": 4}
    ),
    "next-fails-by-logic": Scenario(next_fails=(FailureKind.LOGIC,)),
    "next-fails-for-now": Scenario(next_fails=(FailureKind.TRANSIENT, FailureKind.TRANSIENT)),
    "next-lacks-permission": Scenario(next_fails=(FailureKind.AUTH,)),
    "in-slices": Scenario(workflow={"concurrency": 4, "batch": 2}, events=5, world=(Behaviour.REFUSES,)),
    "ordered": Scenario(workflow={"concurrency": 4, "ordered": True}, events=3),
    "nothing-to-do": Scenario(events=0),
}


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_a_crash_at_any_commit_boundary_loses_nothing_and_repeats_nothing(db: Database, name: str) -> None:
    boundaries = _play(db, SCENARIOS[name], CrashingDatabase(db))
    assert boundaries >= 4, "the scenario must have boundaries to crash at"
    for number in range(1, boundaries + 1):
        _play(db, SCENARIOS[name], CrashingDatabase(db, before_commit=number), f"before-{number}")
        _play(db, SCENARIOS[name], CrashingDatabase(db, after_commit=number), f"after-{number}")


def _play(db: Database, scenario: Scenario, crashing: CrashingDatabase, label: str = "dry") -> int:
    """Run the scenario in a workflow of its own until the crash, recover, check. Returns its boundaries."""
    workflow = f"billing-{label}"
    a_workflow(db, workflow, failure_policy=_patient(), **scenario.workflow)
    ids = some_events(db, *[f"m{n}" for n in range(scenario.events)], workflow=workflow)
    world = World()
    if ids:
        world.will(ids[0], *scenario.world)
    crashing.offset = db.offset
    dying = Walker(crashing, world, workflow, next_fails=list(scenario.next_fails), batch=2)
    try:
        dying.walk_new(count=8)
        crashed = False
    except Crash:
        crashed = True
    assert crashed == (label != "dry"), "every boundary up to the last must be reached"
    boundaries = crashing.transactions
    Walker(db, world, workflow, batch=2).settle()
    _check(db, workflow, ids, world)
    return boundaries


def _check(db: Database, workflow: str, ids: list[Any], world: World) -> None:
    assert [event_status(db, event, workflow=workflow) for event in ids] == ["consumed"] * len(ids)
    assert world.effects == dict.fromkeys(ids, 1), "each effect exactly once"
    out = rows(db, "SELECT message_id FROM pipeline.events WHERE workflow = :w AND topic = :t", w=workflow, t=OUT)
    assert sorted(row.message_id for row in out) == sorted(f"out:{event}" for event in ids)
    with db.transaction() as tx:
        assert invariants.findings(tx) == []
    left = rows(db, "SELECT * FROM pipeline.runs WHERE workflow = :w AND finished_at IS NULL", w=workflow)
    assert left == []
    sessions = rows(db, "SELECT * FROM pipeline.sessions WHERE workflow = :w AND finished_at IS NULL", w=workflow)
    assert sessions == []


def _patient() -> FailurePolicy:
    return NO_PAUSE.model_copy(update={"max_failures": 50})
