"""Medians, spread, ratios, counts of the log, the gate and the table of cases: the parts without a server."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.compare import __main__ as compare
from pipeline.bench import figures, gate
from pipeline.bench.cases import AA_PAIR, CASES, Case, selected_cases
from pipeline.bench.counters import count_log, cpu_seconds, postmaster_pid
from pipeline.bench.figures import Range, Sample
from pipeline.bench.gate import Evidence
from pipeline.bench.run import BenchResult, as_dict, measuring_order, write_plot
from pipeline.domain.errors import InvalidInputError

PEER = "light chain-ledger"


def sample(case: str, repeat: int, rate: float, *problems: str) -> Sample:
    return Sample(case=case, repeat=repeat, figures={"runs_per_second": rate}, problems=problems)


def result(*samples: Sample) -> BenchResult:
    names = {one.case for one in samples}
    return BenchResult(cases=[case for case in CASES.values() if case.name in names], samples=samples, machine="here")


def test_a_range_is_the_median_between_the_least_and_the_largest() -> None:
    found = figures.ranges([sample("backlog", n, rate) for n, rate in enumerate((300.0, 100.0, 200.0))])
    assert found == {"runs_per_second": Range(median=200.0, least=100.0, largest=300.0)}
    assert found["runs_per_second"].text(0) == "200 (100 to 300)"
    assert Range(median=1234.5, least=1234.5, largest=1234.5).text(1) == "1,234.5"


def test_a_case_with_a_closed_gate_has_no_figures() -> None:
    assert figures.ranges([sample("backlog", 0, 100.0), sample("backlog", 1, 100.0, "an order was lost")]) == {}


def test_a_closed_gate_does_not_reopen_in_json() -> None:
    closed = result(*(sample(name, 0, 100.0, "an order was lost") for name in AA_PAIR))
    assert [one["figures"] for one in as_dict(closed)["samples"]] == [{}, {}]
    assert closed.spread is None
    pair = {name: [sample(name, 0, 90.0), sample(name, 1, 100.0, "lost")] for name in (compare.OURS, compare.AGAIN)}
    pair[compare.AGAIN][0] = sample(compare.AGAIN, 0, 99.0)
    written = compare.as_dict(
        compare.Comparison(
            contenders=compare.contenders()[:2], samples=pair, machine="here", day="today", runs=1, repeats=2
        )
    )
    read = compare.from_dict(compare.contenders(), json.loads(json.dumps(written)))
    assert read.problems == ["ours: lost", "ours-again: lost"]
    assert read.ranges(compare.OURS) == {}
    assert read.spread == 1.1, "of the repeat whose gates were open"
    assert "100" not in compare.markdown(read)


def test_a_comparison_shows_the_ratios_of_p99_and_of_one_run_at_a_time() -> None:
    known = [one for one in compare.contenders() if one.name in {compare.ONE, compare.CHAIN, compare.LIGHT, PEER}]
    rates = {compare.ONE: 50.0, compare.CHAIN: 200.0}
    waits = {compare.LIGHT: (10.0, 60.0), PEER: (20.0, 30.0)}
    samples = {name: [sample(name, 0, rate)] for name, rate in rates.items()} | {
        name: [Sample(case=name, repeat=0, figures={"p50_ms": p50, "p99_ms": p99})]
        for name, (p50, p99) in waits.items()
    }
    found = compare.Comparison(contenders=known, samples=samples, machine="here", day="today", runs=1, repeats=1)
    assert [row[-1] for row in found.rows("runs_per_second")] == ["0.25, not resolved (of chain)", ""]
    assert [row[-2:] for row in found.rows("p50_ms")] == [("", ""), ("0.50, not resolved", "2.00, not resolved")]


def test_any_error_of_one_sample_is_its_problem() -> None:
    site: Any = None
    broken = Case(name="broken", title="", figures=lambda: _time_out(site, 0, 1).figures)
    assert broken.measure(site, 0, None).problems == ["TimeoutError('late')"]
    slow = compare.Contender(name="slow", title="", measure=_time_out, against="slow")
    assert slow.sample(site, 0, 1) == Sample(case="slow", repeat=0, problems=["TimeoutError('late')"])


def _time_out(site: Any, repeat: int, runs: int) -> Sample:
    raise TimeoutError("late")


def test_the_spread_is_the_largest_ratio_within_one_repeat() -> None:
    assert figures.spread([100.0, 100.0, 150.0], [100.0, 80.0, 150.0]) == 1.25
    assert figures.spread([80.0], [100.0]) == 1.25
    assert figures.spread([100.0], [0.0]) is None


@pytest.mark.parametrize(
    ("ratio", "noise", "resolved"),
    [(1.3, 1.2, True), (0.7, 1.2, True), (1.2, 1.2, False), (0.9, 1.2, False), (5.0, None, False), (0.0, 1.2, False)],
)
def test_a_ratio_within_the_spread_is_not_resolved(ratio: float, noise: float | None, resolved: bool) -> None:
    assert figures.is_resolved(ratio, noise) is resolved
    assert (figures.NOT_RESOLVED in figures.ratio_text(ratio, noise)) is not resolved


@pytest.mark.parametrize(("percent", "value"), [(50, 50.0), (99, 99.0), (100, 100.0), (0, 1.0)])
def test_a_percentile_is_a_value_that_was_measured(percent: float, value: float) -> None:
    assert figures.percentile([float(n) for n in range(100, 0, -1)], percent) == value


def test_the_log_counts_statements_commits_and_plans_of_the_workers() -> None:
    log = """\
bench|1|pipeline|LOG:  statement: BEGIN ISOLATION LEVEL READ COMMITTED
bench|1|pipeline|LOG:  PLANNER STATISTICS
bench|1|pipeline|DETAIL:  ! system usage stats:
bench|1|pipeline|LOG:  statement:
    SELECT 'a statement that begins on its second line'
bench|2|pipeline|LOG:  statement: UPDATE pipeline.runs SET phase = 'x'
bench|1|pipeline|LOG:  statement: COMMIT
bench|1|pipeline|LOG:  statement: BEGIN
bench|1|pipeline|LOG:  statement: COMMIT
bench|1|pipeline|LOG:  statement: BEGIN
bench|1|pipeline|LOG:  statement: DELETE FROM pipeline.runs
bench|1|pipeline|LOG:  statement: ROLLBACK
bench|3|pipeline|LOG:  execute s1: SELECT 1
bench|4|pipeline-bench|LOG:  statement: SELECT 1
LOG:  checkpoint starting: time
"""
    found = count_log(log.splitlines(keepends=True))
    assert (found.statements, found.plans) == (10, 1)
    assert found.commits == 3, "one transaction, and two statements outside of one; an empty transaction is none"


def test_a_begin_that_travels_with_a_statement_counts_both() -> None:
    log = """\
bench|1|pipeline|LOG:  statement: BEGIN ISOLATION LEVEL READ COMMITTED; EXECUTE p1 ('a;b')
bench|1|pipeline|LOG:  statement: COMMIT
bench|1|pipeline|LOG:  statement: EXECUTE p2 ('BEGIN; a')
"""
    found = count_log(log.splitlines(keepends=True))
    assert (found.statements, found.commits) == (4, 2)


def test_the_processor_time_of_a_process_includes_its_children() -> None:
    assert cpu_seconds(1) > 0
    assert cpu_seconds(2**30) == 0
    assert postmaster_pid(1) is None


CLEAN = Evidence(
    published=2,
    expected=2,
    counts={"consumed": 2, "orders": 2, "done": 2, "open_runs": 0, "open_mutations": 0},
    effects={"order-0": 1, "order-1": 1},
)


def test_the_gate_is_open_if_each_order_was_done_once() -> None:
    assert gate.problems(CLEAN) == []


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (replace(CLEAN, counts={**CLEAN.counts, "consumed": 1}), "consumed: 1; expected 2"),
        (replace(CLEAN, counts={**CLEAN.counts, "done": 3}), "done: 3; expected 2"),
        (replace(CLEAN, counts={**CLEAN.counts, "open_mutations": 1}), "open mutations: 1; expected 0"),
        (replace(CLEAN, effects={"order-0": 1}), "orders with an effect: 1; expected 2"),
        (replace(CLEAN, effects={"order-0": 2, "order-1": 1}), "more than one effect: 1, such as order-0"),
        (replace(CLEAN, findings=["run 1: is lost"]), "doctor: run 1: is lost"),
    ],
)
def test_the_gate_is_closed_by_a_lost_or_repeated_order(found: Evidence, problem: str) -> None:
    (said,) = gate.problems(found)
    assert problem in said


def test_the_pair_is_always_measured() -> None:
    assert {case.name for case in selected_cases(["light"])} == {"light", *AA_PAIR}
    assert set(AA_PAIR) <= {case.name for case in selected_cases([])}
    with pytest.raises(InvalidInputError, match="There is no case 'heavy'; expected some of light"):
        selected_cases(["light", "heavy"])


def test_each_case_is_compared_with_another_by_a_figure_that_exists() -> None:
    assert {case.against for case in CASES.values() if case.against} < set(CASES)
    assert {case.figure for case in CASES.values()} <= set(figures.FIGURES)


def test_each_repeat_has_another_order_and_the_pair_is_never_side_by_side() -> None:
    cases: list[Case] = [*CASES.values()][:6]
    orders = [[case.name for case in measuring_order(cases, AA_PAIR, repeat)] for repeat in range(6)]
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert len({tuple(order) for order in orders}) > 3
    assert min(abs(order.index(AA_PAIR[0]) - order.index(AA_PAIR[1])) for order in orders) > 1
    assert [case.name for case in measuring_order(cases[:1], AA_PAIR, 5)] == ["light"]


def test_a_result_compares_the_pair_and_names_its_problems() -> None:
    both = [sample(name, repeat, 100.0 + 20 * repeat) for name in AA_PAIR for repeat in range(2)]
    good = as_dict(result(*both))
    assert good["spread"] == 1.0
    assert [case["ratio"] for case in good["cases"]] == [None, 1.0]
    bad = result(*both, sample(AA_PAIR[1], 2, 50.0, "an order was lost"))
    assert bad.problems == ["backlog-again, repeat 3: an order was lost"]
    assert bad.ranges(AA_PAIR[1]) == {}


def test_a_collapse_in_one_repeat_shows() -> None:
    rates = {"backlog": (100.0, 100.0, 50.0), "batch-100": (900.0, 90.0, 800.0)}
    samples = [
        Sample(case=name, repeat=repeat, figures={"events_per_second": rate})
        for name, of in rates.items()
        for repeat, rate in enumerate(of)
    ]
    found = result(*samples)
    assert (found.ratio(CASES["batch-100"]), found.least_ratio(CASES["batch-100"])) == (8.0, 0.9)
    assert as_dict(found)["cases"][1]["least_ratio"] == 0.9
    assert found.least_ratio(CASES["backlog"]) is None


def test_a_plot_has_a_bar_for_each_case(tmp_path: Path) -> None:
    file = tmp_path / "plot.svg"
    write_plot(file, result(*(sample(name, 0, 100.0) for name in AA_PAIR)))
    texts = [element.text for element in ElementTree.parse(file).iter() if element.tag.endswith("text")]
    assert {CASES[name].title for name in AA_PAIR} <= set(texts)
