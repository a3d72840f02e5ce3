"""Random transitions, random crashes, several workers and an operator, against a model."""

from collections.abc import Callable
from random import Random  # noqa: TID251 - a seeded walk repeats itself exactly

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from pipeline.domain.failures import FailureKind
from pipeline.domain.renames import NameKind
from pipeline.store.database import Database
from tests.lifecycle.operator_steps import Acts
from tests.lifecycle.state_machine import CLAIM
from tests.support import databases

pytestmark = pytest.mark.timeout(600)  # thousands of small transactions: minutes on a busy machine


def test_random_transitions_crashes_and_operators_agree_with_the_model(db: Database) -> None:
    machine = type("BoundMachine", (Acts,), {"db": db})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=25,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
    databases.delete_all_rows(
        db
    )  # each step was checked; that work of the last example waits where it ended says nothing


@pytest.mark.parametrize("seed", range(6))
def test_a_long_walk_of_weighted_transitions_agrees_with_the_model(db: Database, seed: int) -> None:
    """Hypothesis shrinks well but stays shallow; a long seeded walk reaches runs that were retried many times."""
    chance = Random(seed)
    machine: Acts = type("BoundMachine", (Acts,), {"db": db})()
    honours_keys = seed % 3 == 0
    concurrency, batch = chance.choice([1, 3, 6]), chance.randint(1, 3)
    machine.begin(
        concurrency,
        1 if honours_keys else batch,
        ordered=chance.random() < 0.5,
        contain=chance.random() < 0.5,
        sets_aside=seed % 2 == 1,
        honours_keys=honours_keys,
    )
    for _ in range(300):
        _random_step(machine, chance)
        machine.the_invariants_hold()
        machine.the_tables_are_what_the_model_says()
        machine.no_effect_happens_twice()
        machine.a_key_is_held_by_one_run_at_a_time()
    assert machine.releases >= 2, "the walk must rename something"
    assert sum(run.phase == "committed" for run in machine.model.runs.values()) >= 5, "the walk must get somewhere"
    machine.settle()
    machine.the_invariants_hold()
    machine.the_tables_are_what_the_model_says()
    machine.no_effect_happens_twice()
    assert machine.repeats >= (1 if honours_keys else 0), "a wrong answer must be followed by a repeat"


def _random_step(machine: Acts, chance: Random) -> None:
    pick = chance.randint(0, 10_000)
    says = chance.choice(["wrong", "wrong", "skip"] if machine.honours_keys else ["truth", "truth", "skip"])
    answer = chance.choice(["applied", "applied", "refused", "silence", "late"])
    kind = chance.choice(list(FailureKind)[:3])
    tokens = bool(machine.tokens)
    steps: list[tuple[int, Callable[[], object]]] = [
        (24, lambda: machine.forward(pick, chance.randint(1, 6), answer)),
        (6, lambda: machine.start(chance.randint(1, 4), alone=chance.random() < 0.2)),
        (2, lambda: machine.publish(chance.randint(1, 3), chance.choice([None, "a", "b"]))),
        (8, lambda: machine.clean_up(pick, says, recover=chance.random() < 0.5)),
        (1, lambda: machine.claim(chance.choice(sorted(CLAIM)), pick)),
        (5, lambda: machine.decide_approval(pick, yes=chance.random() < 0.7)),
        (1, lambda: machine.replace(pick)),
        (2, lambda: machine.rename(chance.choice(list(NameKind)))),
        (1, lambda: machine.act_on_event(pick, chance.choice(["skip", "quarantine", "release", "release"]))),
        (1, machine.raise_watermarks),
        (1, lambda: machine.claim_all(chance.choice(["prepare", "next"]))),
        (tokens * 1, machine.commit_all),
        (tokens * 1, lambda: machine.stop_some(kind, chance.randint(2, 4))),
        (tokens * 2, lambda: machine.late_verdict(pick, applied=chance.random() < 0.5)),
        (tokens * 2, lambda: machine.commit(pick)),
        (tokens * 1, lambda: machine.stop(pick, kind)),
        (tokens * 1, lambda: machine.begin_mutation(pick)),
        (tokens * 1, lambda: machine.finish_prepare(pick, 2)),
        (tokens * 1, lambda: machine.no_mutation(pick)),
        (tokens * 1, lambda: machine.release(pick)),
    ]
    (step,) = chance.choices([act for _, act in steps], weights=[weight for weight, _ in steps])
    step()
