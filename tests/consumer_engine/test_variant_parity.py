"""Threads and asyncio agree on every script, and the same script always ends the same way."""

import re
import threading
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.consumer_engine.errors import ExceptionType, TransactionException
from pipeline.consumer_engine.lifecycle import Step
from pipeline.consumer_engine.policies import RetryPolicy
from tests.consumer_engine.scripted_tasks import (
    VARIANTS,
    Batches,
    Does,
    Run,
    Script,
    ScriptRun,
    check,
    items,
    policy,
    run_script,
    with_time,
)
from tests.support.rule import rule

#: What a call may do. A late one ends with its loop; of a step that has none, every call has time enough.
LATE, ENOUGH = 60.0, 60.0
#: For the steps that have a late one: a machine that stands still can make any call late, but not with ever more time.
TIMEOUTS = (0.05, 0.5, 4.0)
KINDS = ["returns", "returns", "business", "system", "timeout", "plain", "late"]

Calls = dict[tuple[int, Step], list[str]]


def does(kind: str, over: threading.Event) -> Does:
    match kind:
        case "returns":
            return Does(returns="fine")
        case "late":
            return Does(takes=LATE, until=over)
        case "plain":
            return Does(raises=ValueError("plain"))
        case _:
            return Does(raises=TransactionException(kind, ExceptionType(kind)))


calls = st.dictionaries(
    st.tuples(st.integers(0, 4), st.sampled_from([Step.PROCESS, Step.SUCCESS, Step.EXCEPTION])),
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    max_size=6,
)
budgets = st.fixed_dictionaries({step.value: st.integers(1, 3) for step in Step})
fetches = st.lists(st.sampled_from(["batch", "batch", "plain", "system", "business", "late"]), max_size=4)


def trace_of(run: ScriptRun) -> Any:
    """Everything that is not time: what was called in which order, how every item ended, how the loop ended."""
    ends = [
        (
            outcome.transaction.transaction_id,
            outcome.status,
            outcome.value,
            dict(outcome.attempts),
            outcome.error and (outcome.error.category, outcome.error.transaction_id),
            outcome.handler_error and outcome.handler_error.category,
        )
        for outcome in run.outcomes
    ]
    return run.script.begun, ends, type(run.error), run.report.as_dict(), run.source.asked


def follow(
    variant: Run,
    script: Calls,
    budget: dict[str, int],
    plan: list[str],
    limit: int | None = None,
    *,
    timeout: float,
) -> ScriptRun:
    followed = Script()
    for (number, step), kinds in script.items():
        followed.will(step, f"t-{number}", *[does(kind, followed.over) for kind in kinds])
    given_out: list[Any] = []
    for kind in [*plan, "batch"]:
        start = 2 * sum(isinstance(batch, list) for batch in given_out)
        given_out.append(items(2, start=start) if kind == "batch" else does(kind, followed.over))
    late = {str(step) for (_, step), kinds in script.items() if "late" in kinds}
    late |= {"fetch"} if "late" in plan else set()
    retries: dict[str, Any] = {
        name: RetryPolicy(max_attempts=most, timeout=timeout if name in late else ENOUGH)
        for name, most in budget.items()
    }
    return run_script(variant, followed, Batches(*given_out), policy(size=2, limit=limit, **retries))


@rule("E-4", "E-28")
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(script=calls, budget=budgets, plan=fetches, limit=st.sampled_from([None, None, 0, 3, 4]))
def test_e28_both_variants_do_the_same_on_any_script(
    script: Calls, budget: dict[str, int], plan: list[str], limit: int | None
) -> None:
    for timeout in TIMEOUTS:
        threads, coroutines = (
            trace_of(follow(each, script, budget, plan, limit, timeout=timeout)) for each in VARIANTS
        )
        if threads == coroutines:
            break
    assert threads == coroutines


@rule("E-28", "E-33")
@check("E28")
def test_a_policy_is_the_same_after_a_run_and_a_run_is_the_same_the_second_time(variant: Run) -> None:
    script: Calls = {(0, Step.PROCESS): ["system", "late", "returns"], (1, Step.PROCESS): ["business"]}
    budget = {"fetch": 2, "process": 3, "success": 1, "exception": 1}
    first, second = with_time(
        lambda bound: [trace_of(follow(variant, script, budget, ["system", "batch"], timeout=bound)) for _ in range(2)],
        lambda both: bool(both[0] == both[1]),
    )
    assert first == second
    chosen = policy(extra={"a": {"b": [1]}}, process=RetryPolicy(max_attempts=2))
    before = chosen.model_dump_json()
    run_script(variant, Script(), Batches(items(3)), chosen)
    assert chosen.model_dump_json() == before


def test_every_numbered_check_has_a_test(project: Path) -> None:
    found: set[str] = set()
    for path in (project / "tests/consumer_engine").glob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        for ids in re.findall(r"@check\(([^)]*)\)", text):
            found |= set(re.findall(r"E\d+", ids))
        found |= {f"E{number}" for number in re.findall(r"def test_e(\d+)_", text)}
        found |= {f"E{number}" for number in re.findall(r'f"E(\d+)-', text)}
    assert {f"E{number}" for number in range(1, 29)} - found == set()
