"""The promise under faults, as ``pipeline chaos`` proves it from the provider's own records."""

import json
import secrets
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.chaos.faults import KEYED, OPERATIONS, SHARES, RequestFault, operation_of, request_fault
from pipeline.chaos.judge import ChaosRecords, LedgerEntry, OrderDelivery, ProviderEffect, judge
from pipeline.chaos.nodes import Disruption, plan_disruptions
from tests.support.environ import clean_environ

PIPELINE = Path(sys.executable).parent / "pipeline"
#: A fixed seed and a random one, each with its number of mutations.
RUNS = {"fixed": (4711, 90), "drawn": (secrets.randbelow(10**6), 50)}


def start(*arguments: str) -> subprocess.Popen[str]:
    """Start ``pipeline chaos`` without our own settings."""
    command = [str(PIPELINE), "chaos", *arguments]
    return subprocess.Popen(command, env=clean_environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Start both runs at once: each mostly waits for its provider."""
    started = {
        name: start("--mutations", str(mutations), "--seed", str(seed), "--json")
        for name, (seed, mutations) in RUNS.items()
    }
    yield started
    for process in started.values():
        with process:
            process.terminate()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", RUNS)
def test_every_effect_happens_once_or_is_unresolved_while_calls_fail_and_workers_die(
    processes: dict[str, subprocess.Popen[str]], name: str
) -> None:
    seed, mutations = RUNS[name]
    output, log = processes[name].communicate(timeout=280)
    assert processes[name].returncode == 0, f"seed {seed}:\n{output}\n{log}"
    found: dict[str, Any] = json.loads(output)
    assert found["seed"] == seed
    assert found["consumed"] + len(found["unresolved"]) == mutations
    assert {entry["operation"] for entry in found["unresolved"]} <= {"text"}, "only text cannot be reconciled"
    assert found["effects"] == found["consumed"] + sum(entry["effects"] for entry in found["unresolved"])
    assert {act for act in Disruption if found["disruptions"].get(act)} == set(Disruption)
    requests = sum(row["requests"] for row in found["comparison"])
    assert requests >= found["consumed"], "an unresolved mutation may never have been sent"


def test_wrong_usage_is_refused_before_anything_is_started() -> None:
    with start("--mutations", "0") as process:
        output, problem = process.communicate(timeout=60)
    assert (process.returncode, output) == (2, "")
    assert "Traceback" not in problem


ENTRY = LedgerEntry(key="key 1", order="order 1", operation="ship", status="applied", resolved_by="call")
EFFECT = ProviderEffect(key="key 1", order="order 1", operation="ship")
DONE = OrderDelivery(order="order 1", status="consumed", key="key 1")
GOOD = ChaosRecords(
    orders=["order 1"], ledger=[ENTRY], effects=[EFFECT], deliveries=[DONE], completed_orders=["order 1"]
)
HELD = replace(DONE, status="reserved")
AGAIN = replace(EFFECT, key="key 2")


def test_a_ledger_that_agrees_with_the_provider_has_no_problems() -> None:
    assert judge(GOOD) == []
    assert GOOD.unresolved == []


@pytest.mark.parametrize("effects", [[], [EFFECT]], ids=["did not happen", "happened"])
def test_an_unresolved_mutation_is_no_problem_whether_or_not_it_happened(effects: list[ProviderEffect]) -> None:
    unresolved = replace(ENTRY, status="indeterminate", resolved_by=None)
    found = replace(GOOD, ledger=[unresolved], effects=effects, deliveries=[HELD], completed_orders=[])
    assert judge(found) == []
    assert found.unresolved == [unresolved]


def test_a_late_effect_without_a_replacement_effect_is_unresolved() -> None:
    late = replace(ENTRY, status="failed", is_found_late=True)
    unresolved = replace(ENTRY, key="key 2", status="indeterminate", resolved_by=None)
    found = replace(GOOD, ledger=[late, unresolved], deliveries=[replace(HELD, key="key 2")], completed_orders=[])
    assert judge(found) == []
    assert found.unresolved == [late, unresolved]


def test_a_late_effect_with_a_replacement_effect_is_two_effects() -> None:
    late = replace(ENTRY, key="key 2", status="failed", is_found_late=True)
    problems = judge(replace(GOOD, ledger=[ENTRY, late], effects=[EFFECT, AGAIN]))
    assert [problem.description for problem in problems] == ["an order had its effect more than once"]
    assert "key 2: ship failed by call, found late" in problems[0].ledger


BROKEN: dict[str, dict[str, Any]] = {
    "it happened more than once": {"effects": [EFFECT, EFFECT]},
    "the ledger says that it happened": {"effects": []},
    "the ledger says that it did not happen": {"ledger": [replace(ENTRY, status="failed")]},
    "the ledger says that it was found late": {
        "ledger": [ENTRY, replace(ENTRY, key="key 2", status="failed", is_found_late=True)]
    },
    "the ledger row is not finished": {"ledger": [replace(ENTRY, status="in_flight")]},
    "an effect does not belong to exactly one row": {
        "effects": [EFFECT, replace(EFFECT, key="unknown", order="order 2")]
    },
    "an order had its effect more than once": {
        "ledger": [ENTRY, replace(ENTRY, key="key 2")],
        "effects": [EFFECT, AGAIN],
    },
    "an order was published once and delivered 0 times": {"deliveries": [], "completed_orders": []},
    "an order was consumed without an effect": {"ledger": [], "effects": []},
    "an order is neither done nor unresolved": {"deliveries": [HELD], "completed_orders": []},
    "an order that is consumed was reported as done 2 times": {"completed_orders": ["order 1", "order 1"]},
    "the doctor found: something is broken": {"findings": ["something is broken"]},
}


@pytest.mark.parametrize("what", BROKEN)
def test_the_judge_finds_every_kind_of_disagreement(what: str) -> None:
    assert what in [problem.description for problem in judge(replace(GOOD, **BROKEN[what]))]


def test_a_disagreement_names_the_order_the_key_and_both_sides() -> None:
    problems = judge(replace(GOOD, ledger=[replace(ENTRY, status="failed", resolved_by="reconcile")]))
    assert str(problems[0]) == (
        "the ledger says that it did not happen "
        "(order: order 1; key: key 1; ledger: ship failed by reconcile; provider: 1 effects of this key)"
    )


def test_an_effect_under_the_key_of_another_order_is_noticed() -> None:
    found = replace(GOOD, effects=[replace(EFFECT, order="order 2")])
    assert "an effect does not belong to exactly one row" in [problem.description for problem in judge(found)]


def test_a_seed_repeats_faults_and_disruptions_and_another_one_does_not() -> None:
    def drawn(seed: int) -> object:
        faults = [request_fault(seed, operation_of(seed, f"order {n}"), f"order {n}", 1) for n in range(50)]
        return faults, plan_disruptions(seed, waves=8, gap=2.0, workers=2)

    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)


def test_faults_come_as_often_as_the_table_says_and_duplicates_only_where_the_key_is_honoured() -> None:
    assert sum(SHARES.values()) == sum(OPERATIONS.values()) == 100
    for operation in OPERATIONS:
        counts = Counter(request_fault(1, operation, f"order {n}", 1) for n in range(4000))
        assert (counts[RequestFault.TWICE] > 0) == (operation in KEYED)
        for kind, share in SHARES.items():
            if kind not in (RequestFault.NONE, RequestFault.TWICE):
                assert abs(counts[kind] / 40 - share) < 3, kind


def test_every_kind_of_disruption_comes_before_any_is_repeated() -> None:
    for start in (0, 4):
        assert {
            planned.disruption for planned in plan_disruptions(3, waves=8, gap=2.0, workers=2)[start : start + 4]
        } == set(Disruption)
