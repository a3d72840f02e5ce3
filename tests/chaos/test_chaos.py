"""The promise under faults, as ``pipeline chaos`` proves it from the provider's own records."""

import json
import secrets
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from pipeline.chaos import celery_chain
from pipeline.chaos.compare import OURS, PEER, Claim, claims, tally
from pipeline.chaos.faults import (
    KEYED,
    OPERATIONS,
    PROVIDER_VARIABLE,
    RECONCILE_SHARES,
    SEARCH_LAGS,
    SETTLE,
    SHARES,
    TIMEOUT,
    ReconcileFault,
    RequestFault,
    operation_of,
    reconcile_fault,
    request_fault,
    scaled_shares,
)
from pipeline.chaos.judge import ChaosRecords, LedgerEntry, OrderDelivery, ProviderEffect, figures, judge
from pipeline.chaos.nodes import Disruption, Outage, plan_disruptions, plan_outages
from pipeline.chaos.provider import EFFECTS, REQUESTS, EffectLog, records_of
from pipeline.chaos.run import provider_process
from pipeline.cli.chaos import Peer, chaos
from pipeline.domain.errors import InvalidInputError
from pipeline.store.database import Database
from tests.support.environ import clean_environ

PIPELINE = Path(sys.executable).parent / "pipeline"
#: A fixed seed and a random one, each with its number of mutations.
RUNS = {"fixed": (4711, 90), "drawn": (secrets.randbelow(10**6), 40)}
#: Further options of a run. The second has a plain Celery chain beside it.
OPTIONS = {"fixed": (), "drawn": ("--faults", "12", "--compare", "celery")}


def start(*arguments: str) -> subprocess.Popen[str]:
    """Start ``pipeline chaos`` without our own settings."""
    command = [str(PIPELINE), "chaos", *arguments]
    return subprocess.Popen(command, env=clean_environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@dataclass(frozen=True)
class ChaosProcesses:
    """Both runs. Each is awaited once, by the test that comes first."""

    started: dict[str, subprocess.Popen[str]]
    plot: Path
    found: dict[str, dict[str, Any]]

    def result(self, name: str) -> dict[str, Any]:
        """Return the JSON of a run."""
        if name not in self.found:
            output, log = self.started[name].communicate(timeout=400)
            assert self.started[name].returncode == 0, f"seed {RUNS[name][0]}:\n{output}\n{log}"
            self.found[name] = json.loads(output)
        return self.found[name]


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosProcesses]:
    """Start both runs at once: each mostly waits for its provider."""
    plot = tmp_path_factory.mktemp("compared") / "plot.svg"
    more = {"fixed": (), "drawn": ("--plot", str(plot))}
    started = {
        name: start("--mutations", str(mutations), "--seed", str(seed), "--json", *OPTIONS[name], *more[name])
        for name, (seed, mutations) in RUNS.items()
    }
    yield ChaosProcesses(started, plot, {})
    for process in started.values():
        with process:
            process.terminate()


@pytest.mark.timeout(420)
@pytest.mark.parametrize("name", RUNS)
def test_every_effect_happens_once_or_is_unresolved_while_calls_fail_and_workers_die(
    processes: ChaosProcesses, name: str
) -> None:
    seed, mutations = RUNS[name]
    result = processes.result(name)
    found = result["ours"] if name == "drawn" else result
    assert found["seed"] == seed
    assert found["consumed"] + len(found["unresolved"]) == mutations
    assert {entry["operation"] for entry in found["unresolved"]} <= {"text"}, "only text cannot be reconciled"
    assert found["effects"] == found["consumed"] + sum(entry["effects"] for entry in found["unresolved"])
    assert {act for act in (*Disruption, *Outage) if found["disruptions"].get(act)} == {*Disruption, *Outage}
    assert {row["operation"]: row["doubled"] for row in found["operations"]} == dict.fromkeys(OPERATIONS, 0)
    lagging = [row for row in found["operations"] if row["is_lagging"]]
    assert [(row["operation"], row["is_keyed"]) for row in lagging] == [("refund", True)]
    if name == "fixed":
        assert lagging[0]["wrong_absences"] > 0, "the search was asked while it lagged"
    requests = sum(row["requests"] for row in found["comparison"])
    assert requests >= found["consumed"], "an unresolved mutation may never have been sent"


@pytest.mark.timeout(420)
def test_the_same_orders_run_as_a_plain_celery_chain_and_the_provider_judges_both(processes: ChaosProcesses) -> None:
    found = processes.result("drawn")
    mutations = RUNS["drawn"][1]
    ours, peer = found["sides"]
    promises = ("doubled", "lost", "stuck", "wrong_verdicts")
    assert (ours["side"], {name: ours[name] for name in promises}) == (OURS, dict.fromkeys(promises, 0))
    assert (peer["side"], peer["orders"], peer["unfinished"]) == (PEER, mutations, 0)
    assert peer["done"] <= peer["effects"]
    assert peer["done"] + peer["for_a_person"] + peer["lost"] + peer["stuck"] == mutations
    assert set(peer["doubled_by_operation"]) == set(OPERATIONS)
    met = {act for act in (*Disruption, *Outage) if peer["faults"].get(act)}  # a chain that ends early misses the last
    assert met <= {*Disruption, *Outage} - {Outage.BEAT}
    assert met & {*Disruption}
    texts = [element.text for element in ElementTree.parse(processes.plot).iter() if element.tag.endswith("text")]
    assert {OURS, PEER, "orders with more than one effect"} <= set(texts)


def test_wrong_usage_is_refused_before_anything_is_started() -> None:
    with start("--mutations", "0") as process:
        output, problem = process.communicate(timeout=60)
    assert (process.returncode, output) == (2, "")
    assert "Traceback" not in problem


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"plot": Path("plot.svg")}, "--plot was given without --compare"),
        ({"soak": 10}, "--state FOLDER"),
        ({"state": Path("state")}, "--soak ORDERS"),
        ({"segment": 5}, "--segment is for a soak only"),
        ({"soak": 10, "state": Path("state"), "compare": Peer.CELERY}, "one of --soak and --compare"),
    ],
    ids=lambda given: "-".join(given) if isinstance(given, dict) else "",
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidInputError, match=problem):
        chaos(**options)


def test_the_chain_sends_an_order_once_and_records_what_became_of_it(db: Database, tmp_path: Path) -> None:
    dsn = db.engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    celery_chain.app.conf.update(chaos_database=dsn)
    celery_chain.execute(celery_chain.TABLE.replace("TABLE", "TEMPORARY TABLE", 1))
    with provider_process(tmp_path, seed=1, faults=0) as provider, pytest.MonkeyPatch.context() as patch:
        patch.setenv(PROVIDER_VARIABLE, provider)
        celery_chain.execute("INSERT INTO orders (id, operation) VALUES ('order 1', 'ship'), ('order 2', 'ship')")
        for _ in range(2):
            assert celery_chain.send.apply(args=("order 1", "ship")).successful()
        assert celery_chain.finish.apply(args=("order 1",)).successful()
    assert [line["key"] for line in records_of(tmp_path / EFFECTS)] == ["order 1"], "a message that came twice"
    assert celery_chain.send.apply(args=("order 2", "ship"), retries=celery_chain.MAX_RETRIES).failed()
    assert celery_chain.statuses() == {"order 1": "done", "order 2": "failed"}


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


REFUND = replace(ENTRY, operation="refund", resolved_at=30.0)
REFUNDED = replace(EFFECT, operation="refund", at=10.0)
ABSENT = replace(REFUND, status="failed", resolved_by="reconcile", resolved_at=20.0)


def test_a_wrong_not_found_that_was_repeated_under_an_honoured_key_is_counted_and_no_problem() -> None:
    late = replace(ABSENT, is_found_late=True)
    found = replace(GOOD, ledger=[ABSENT, late, REFUND], effects=[REFUNDED])
    assert judge(found) == []
    assert found.unresolved == [], "the late effect is that of the repeat"
    (row,) = [each for each in figures(found) if each.operation == "refund"]
    assert (row.is_keyed, row.is_lagging, row.orders, row.effects, row.doubled) == (True, True, 1, 1, 0)
    assert row.wrong_absences == 2


def test_a_not_found_that_was_right_when_it_was_given_is_not_counted() -> None:
    found = replace(GOOD, ledger=[ABSENT, REFUND], effects=[replace(REFUNDED, at=25.0)])
    assert found.wrong_absences == []


def test_a_doubled_effect_of_a_keyed_operation_is_a_problem_of_its_own() -> None:
    found = replace(GOOD, ledger=[ABSENT, REFUND], effects=[REFUNDED, REFUNDED])
    assert "an order had its effect more than once, although its key is honoured" in [
        problem.description for problem in judge(found)
    ]
    assert [row.doubled for row in figures(found) if row.operation == "refund"] == [1]


def test_the_search_of_the_lagging_operation_does_not_find_an_effect_that_the_provider_has(tmp_path: Path) -> None:
    log = EffectLog(tmp_path, seed=1)
    for operation in ("charge", "ship", "refund"):
        for _ in range(2):
            log.apply(operation, "order 1", f"key of {operation}")
    assert log.finds("charge", "key of charge")
    assert not log.finds("refund", "key of refund")
    effects = Counter(json.loads(line)["operation"] for line in (tmp_path / "effects.jsonl").read_text().splitlines())
    assert effects == {"charge": 1, "refund": 1, "ship": 2}, "an honoured key counts once, found or not"


def test_a_provider_that_is_started_again_knows_keys_and_requests_of_before(tmp_path: Path) -> None:
    before = EffectLog(tmp_path, seed=1)
    before.nth_request("charge", "order 1", "key 1")
    before.apply("charge", "order 1", "key 1")
    before.append(REQUESTS, operation="charge", order="order 1", key="key 1", fault="done and answered", done=True)
    again = EffectLog(tmp_path, seed=1)
    again.apply("charge", "order 1", "key 1")
    assert len(records_of(tmp_path / EFFECTS)) == 1
    assert again.finds("charge", "key 1")
    assert again.nth_request("charge", "order 1", "key 1") == 2


def test_one_search_keeps_to_the_settle_window_and_one_does_not() -> None:
    assert SEARCH_LAGS["ship"] < SETTLE
    assert SEARCH_LAGS["refund"] > TIMEOUT + SETTLE
    assert "refund" in KEYED
    assert "ship" not in KEYED


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


@pytest.mark.parametrize("percent", [0, 12, 90])
def test_the_provider_misbehaves_in_the_given_share_of_its_calls(percent: int) -> None:
    assert scaled_shares(SHARES, None) is SHARES
    calls = Counter(request_fault(1, "charge", f"order {n}", 1, percent) for n in range(4000))
    assert abs((4000 - calls[RequestFault.NONE]) / 40 - percent) < 3
    asked = Counter(reconcile_fault(1, f"key {n}", 1, percent) for n in range(4000))
    assert abs((4000 - asked[ReconcileFault.NONE]) / 40 - percent) < 3
    assert set(calls) == (set(SHARES) if percent else {RequestFault.NONE})
    assert set(asked) == (set(RECONCILE_SHARES) if percent else {ReconcileFault.NONE})


@pytest.mark.parametrize("waves", [1, 4, 12])
def test_every_kind_of_outage_comes_before_any_is_repeated(waves: int) -> None:
    planned = plan_outages(3, waves=waves, gap=2.0)
    assert len(planned) == max(waves, len(Outage))
    assert {each.outage for each in planned[: len(Outage)]} == set(Outage)
    assert planned == plan_outages(3, waves=waves, gap=2.0)


def test_every_kind_of_disruption_comes_before_any_is_repeated() -> None:
    for start in (0, 4):
        assert {
            planned.disruption for planned in plan_disruptions(3, waves=8, gap=2.0, workers=2)[start : start + 4]
        } == set(Disruption)


ORDERS = [f"order {n}" for n in range(6)]


def test_a_side_is_judged_by_the_effects_and_by_what_it_says() -> None:
    said = dict(zip(ORDERS, (Claim.DONE, Claim.DONE, Claim.FAILED, Claim.OPEN, Claim.NONE, Claim.NONE), strict=True))
    effects = {"order 0": 2, "order 2": 1, "order 5": 1}
    found = tally("peer", ORDERS, effects, said, seed=1, seconds=1.0, faults={})
    assert (found.orders, found.done, found.effects, found.doubled) == (6, 2, 4, 1)
    assert (found.lost, found.stuck, found.for_a_person) == (1, 1, 2)
    assert found.wrong_verdicts == 2, "order 1 is done without an effect, order 2 failed with one"
    assert found.doubled_by_operation[operation_of(1, "order 0")] == 1


def test_an_order_of_ours_is_done_or_open_or_nobody_is_told() -> None:
    indeterminate = replace(ENTRY, key="key 2", order="order 2", status="indeterminate", resolved_by=None)
    deliveries = [DONE, replace(HELD, order="order 2", key="key 2"), replace(HELD, order="order 3", key="key 3")]
    found = replace(GOOD, ledger=[ENTRY, indeterminate], deliveries=deliveries)
    assert claims(found) == {"order 1": Claim.DONE, "order 2": Claim.OPEN, "order 3": Claim.NONE}
