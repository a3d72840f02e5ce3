"""Ten thousand generated items with every kind of failure and timeout end the same way in every variant and mode."""

import gc
import random  # noqa: TID251 - a seeded generator makes the same workload each time
from collections import Counter
from typing import Any

import pytest

from pipeline.consumer_engine.errors import ExceptionType, TransactionException
from pipeline.consumer_engine.lifecycle import ItemOutcome, ItemStatus, Step
from pipeline.consumer_engine.policies import RetryPolicy
from tests.consumer_engine.scripted_tasks import VARIANTS, Cut, Does, Run, Script, items, policy, run_script
from tests.support.rule import rule

COUNT, HANGING = 10_000, 30
#: What one call does. "hangs" lasts beyond the timeout of its attempt.
KINDS = ("business", "system", "timeout", "TimeoutError", "ValueError", "SystemExit", "hangs")
#: The timeout of an attempt; a machine that stands still makes any call late, but not with ever more time.
TIMEOUTS = (0.5, 2.0, 8.0)
Ends = dict[str, tuple[Any, ...]]
Plan = dict[tuple[Step, str], list[str]]


def workload() -> tuple[Plan, set[str]]:
    """Return what the calls of some items do, and the items whose process lasts beyond the transaction timeout."""
    chance, plan = random.Random(19), Plan()
    for number in range(COUNT):
        for step in (Step.PROCESS, Step.SUCCESS, Step.EXCEPTION):
            if chance.random() < 0.2:
                kinds = [chance.choice((*KINDS[:-1], "returns")) for _ in range(chance.randint(1, 3))]
                plan[step, f"t-{number}"] = kinds
    for number, step in enumerate([Step.PROCESS, Step.SUCCESS, Step.EXCEPTION] * (HANGING // 3)):
        transaction_id = f"t-{number * 20}"
        plan[step, transaction_id] = ["hangs", "system", "returns"]
        if step is Step.EXCEPTION:
            plan[Step.PROCESS, transaction_id] = ["business"]
    return plan, {f"t-{number * 20 + 7}" for number in range(HANGING)}


def does(kind: str, script: Script) -> Does:
    match kind:
        case "returns":
            return Does(returns="fine")
        case "hangs":
            return Does(takes=120, until=script.over)
        case "TimeoutError":
            return Does(raises=TimeoutError("a client's own"))
        case "ValueError":
            return Does(raises=ValueError("plain"))
        case "SystemExit":
            return Does(raises=SystemExit(3))
        case _:
            return Does(raises=TransactionException(kind, ExceptionType(kind)))


class Counted(Script):
    """A script that counts the calls of each item instead of keeping a list of all calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[Step, str]] = Counter()

    def enter(self, step: Step, transaction_id: str) -> Does:
        with self.lock:
            made = self.calls[step, transaction_id]
            self.calls[step, transaction_id] += 1
            planned = self.steps.get((step, transaction_id)) or [Does()]
            return planned[min(made, len(planned) - 1)]

    def leave(self, step: Step, transaction_id: str, *, is_done: bool) -> None:
        """Keep nothing."""


def ends_of(variant: Run, timeout: float, *, continuous: bool) -> tuple[Ends, dict[str, Any]]:
    script, (plan, cut) = Counted(), workload()
    for (step, transaction_id), kinds in plan.items():
        script.will(step, transaction_id, *[does(kind, script) for kind in kinds])
    for transaction_id in cut:  # every attempt hangs: the transaction's time ends the second one
        script.will_process(transaction_id, Does(takes=120, until=script.over))
        for step in (Step.SUCCESS, Step.EXCEPTION):
            script.will(step, transaction_id, Does())
    ends: Ends = {}

    def keep(outcome: ItemOutcome) -> None:
        transaction_id = outcome.transaction.transaction_id
        assert transaction_id not in ends
        errors = [error and (error.category, error.transaction_id) for error in (outcome.error, outcome.handler_error)]
        calls = tuple(script.calls[step, transaction_id] for step in list(Step)[1:])
        ends[transaction_id] = (outcome.status, outcome.value, dict(outcome.attempts), calls, *errors, outcome.cut)

    script.on_outcome = keep
    chosen = policy(
        size=1000,  # all that hang are in the first batch: without a continuous fetch each batch waits for its slowest
        concurrency=32,
        continuous=continuous,
        transaction_timeout=1.5 * timeout,
        process=RetryPolicy(max_attempts=3, timeout=timeout),
        success=RetryPolicy(max_attempts=2, timeout=timeout),
        exception=RetryPolicy(max_attempts=2, timeout=timeout),
    )
    run = run_script(variant, script, Cut(items(COUNT)), chosen)
    assert run.error is None
    report = run.report.as_dict()
    return ends, {name: value for name, value in report.items() if name != "cut"} | {"cut": dict(run.report.cut)}


@pytest.mark.timeout(400)
@rule("E-4", "E-28", "E-12", "E-27")
def test_e5_ten_thousand_items_end_alike_with_threads_and_asyncio_and_with_and_without_a_continuous_fetch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("CRITICAL", logger="pipeline.consumer_engine")
    for timeout in TIMEOUTS:
        made = []
        for variant in VARIANTS:
            for continuous in (False, True):
                made.append(ends_of(variant, timeout, continuous=continuous))
                gc.collect()
        if all(each == made[0] for each in made):
            break
    ends, report = made[0]
    for other_ends, other_report in made[1:]:
        assert {key: (ends[key], other_ends[key]) for key in ends if ends[key] != other_ends[key]} == {}
        assert other_report == report
    assert len(ends) == report["processed"] == COUNT
    assert {status for status, *_ in ends.values()} == {ItemStatus.SUCCESS, ItemStatus.EXCEPTION, ItemStatus.TIMEOUT}
    assert report["cut"] == {Step.PROCESS: HANGING}
    assert report["handler_failures"] > 100
    for calls in (end[3] for end in ends.values()):
        assert calls[2] <= 2  # never more calls of the exception handler than its attempts
