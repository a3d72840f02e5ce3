"""Three clocks: of an attempt, of an item, of the loop. Each is bounded in real time, and none adds to another."""

import itertools
import threading
import time
from typing import Any

import pytest

from pipeline.consumer_engine.attempts import Attempt, current_attempt
from pipeline.consumer_engine.errors import (
    ConsumerLoopTimeoutException,
    ExceptionType,
    FetchTimeoutException,
    TransactionException,
)
from pipeline.consumer_engine.lifecycle import ItemOutcome, ItemStatus, Step
from pipeline.consumer_engine.policies import ConsumerPolicy, RetryPolicy
from tests.consumer_engine.scripted_tasks import (
    FAIR,
    Batches,
    Cut,
    Does,
    Run,
    Script,
    ScriptRun,
    check,
    item,
    items,
    policy,
    run_script,
    with_time,
)
from tests.support.rule import rule
from tests.support.wait import wait_for

#: What a bound of less than a second may take on a busy machine, beside a body that the test does not wait for.
SOON, BODY = 40, 60


@rule("E-20", "E-12")
@pytest.mark.parametrize("step", [Step.PROCESS, Step.SUCCESS, Step.EXCEPTION])
@check("E13")
def test_an_attempt_ends_at_its_timeout_and_is_retried(variant: Run, step: Step) -> None:
    script = Script().will(step, "t-0", Does(takes=BODY), Does())
    if step is Step.EXCEPTION:
        script.will_process("t-0", Does(raises=TransactionException("no", ExceptionType.BUSINESS)))
    retry = RetryPolicy(max_attempts=2, timeout=FAIR)
    budget: dict[str, Any] = {step.value: retry}
    run = run_script(variant, script, Cut(items(1)), policy(**budget))
    assert run.seconds < SOON
    assert script.count(step) == 2
    assert run.outcomes[0].attempts[step] == 2
    assert run.report.processed == 1


@rule("E-6", "E-20")
@check("E13")
def test_an_item_whose_attempts_all_timed_out_fails_as_a_timeout(variant: Run) -> None:
    script = Script().will_process("t-0", Does(takes=BODY))
    run = run_script(variant, script, Cut(items(1)), policy(process=RetryPolicy(max_attempts=2, timeout=0.1)))
    assert run.seconds < SOON
    ((_, error),) = script.errors
    assert (error.category, error.transaction_id) == (ExceptionType.TIMEOUT, "t-0")
    assert "process did not return within 0.1 s (" in str(error)
    assert run.statuses == [ItemStatus.EXCEPTION]  # the transaction itself had no limit


@rule("E-16", "E-20")
@check("E13", "E19")
def test_a_fetch_that_hangs_ends_in_time_and_as_a_timeout(variant: Run) -> None:
    source = Batches(Does(takes=BODY), Does(takes=BODY))
    run = run_script(variant, Script(), source, policy(fetch=RetryPolicy(max_attempts=2, timeout=0.1)))
    assert run.seconds < SOON
    assert isinstance(run.error, FetchTimeoutException)
    assert len(source.asked) == 2


@rule("E-16")
@check("E19")
def test_a_timeout_error_that_a_source_raises_is_a_fetch_timeout(variant: Run) -> None:
    source = Batches(Does(raises=TimeoutError("no reply")), Does(raises=TimeoutError("no reply")))
    run = run_script(variant, Script(), source, policy(fetch=RetryPolicy(max_attempts=2)))
    assert isinstance(run.error, FetchTimeoutException)
    assert len(source.asked) == 2


@rule("E-8", "E-20", "E-27")
@check("E14")
def test_an_item_past_its_transaction_timeout_goes_to_the_exception_handler_and_never_succeeds(
    variant: Run,
) -> None:
    still, run = with_time(lambda bound: stubborn(variant, policy(transaction_timeout=bound)), has_begun)
    script = run.script
    assert still == [1]
    assert run.statuses == [ItemStatus.TIMEOUT]
    wait_for(lambda: not any(script.running.values()))  # the abandoned call has ended
    assert (script.count(Step.SUCCESS), script.count(Step.EXCEPTION)) == (0, 1)
    assert script.errors[0][1].category is ExceptionType.TIMEOUT
    assert (run.report.timed_out, run.report.processed) == (1, 1)


@rule("E-8")
@check("E14")
def test_the_transaction_timeout_starts_when_a_worker_starts_on_the_item(variant: Run) -> None:
    clocks: list[tuple[float, float]] = []

    def observe() -> None:
        ends_at = current_attempt().ends_at
        assert ends_at is not None
        clocks.append((ends_at, time.monotonic()))

    script = Script(always={Step.PROCESS: Does(takes=0.05, act=observe)})
    run = run_script(variant, script, Cut(items(4)), policy(concurrency=1, transaction_timeout=BODY))
    assert run.statuses == [ItemStatus.SUCCESS] * 4
    for (_, ended), (ends_at, _) in itertools.pairwise(clocks):
        assert ends_at > ended + BODY  # while the one before was worked on, its own time did not run


@check("E14")
def test_the_transaction_timeout_also_ends_pauses(variant: Run) -> None:
    retry = RetryPolicy(max_attempts=9, backoff=BODY)

    def failing(bound: float) -> ScriptRun:
        script = Script().will_process("t-0", Does(raises=ValueError("no")))
        return run_script(variant, script, Cut(items(1)), policy(process=retry, transaction_timeout=bound))

    run = with_time(failing, lambda run: run.script.count(Step.PROCESS) == 1)
    script = run.script
    assert run.seconds < SOON
    assert (script.count(Step.PROCESS), script.count(Step.EXCEPTION)) == (1, 1)
    assert run.statuses == [ItemStatus.TIMEOUT]
    assert isinstance(script.errors[0][1].__cause__, TransactionException)


@rule("E-20", "E-24")
@pytest.mark.parametrize("streaming", [False, True])
@check("E15")
def test_the_loop_timeout_ends_both_modes_and_leaves_nothing_running(variant: Run, streaming: bool) -> None:
    def held(bound: float) -> ScriptRun:
        script = Script()
        script.always[Step.PROCESS] = Does(takes=BODY, until=script.over)
        return run_script(variant, script, Cut(items(4)), policy(concurrency=2, timeout=bound, streaming=streaming))

    run = with_time(held, lambda run: run.script.count(Step.PROCESS) == 2)
    script = run.script
    assert run.seconds < SOON
    assert isinstance(run.error, ConsumerLoopTimeoutException)
    assert run.error.report is not None
    assert (run.error.report.processed, run.error.report.unfinished) == (0, 4)
    assert "left unacknowledged: 4" in str(run.error)
    assert run.statuses == [ItemStatus.UNFINISHED] * 4
    assert getattr(variant, "orphans", []) == []
    wait_for(lambda: not any(script.running.values()))
    assert script.count(Step.PROCESS) == 2  # what had no place yet was not started afterwards
    assert (script.count(Step.SUCCESS), script.count(Step.EXCEPTION)) == (0, 0)
    wait_for(lambda: len(run.task._state.in_flight) == 0)


@rule("E-20", "E-24")
@check("E15")
def test_the_loop_timeout_also_ends_pauses_and_fetches(variant: Run) -> None:
    resting = run_script(variant, Script(), Cut([]), policy(timeout=0.2, streaming=True))
    fetching = run_script(variant, Script(), Batches(Does(takes=BODY)), policy(timeout=0.2))
    pausing = Batches(Does(raises=OSError("busy")))
    waiting = run_script(
        variant, Script(), pausing, policy(timeout=0.2, fetch=RetryPolicy(max_attempts=5, backoff=BODY))
    )
    for run in (resting, fetching, waiting):
        assert isinstance(run.error, ConsumerLoopTimeoutException)
        assert run.seconds < SOON


@check("E15")
def test_items_that_were_settled_before_the_loop_timeout_are_counted(variant: Run) -> None:
    def held(bound: float) -> ScriptRun:
        return run_script(variant, Script().will_process("t-2", Does(takes=BODY)), Cut(items(3)), policy(timeout=bound))

    run = with_time(held, lambda run: run.script.count(Step.PROCESS) == 3)
    assert isinstance(run.error, ConsumerLoopTimeoutException)
    assert run.error.report is not None
    assert (run.error.report.succeeded, run.error.report.unfinished) == (2, 1)


@rule("E-20")
@check("E16")
def test_the_timeouts_of_attempts_do_not_add_up_and_do_not_cut_each_other(variant: Run) -> None:
    def tried(bound: float) -> tuple[float, ScriptRun]:
        script = Script().will_process("t-0", Does(takes=BODY), Does(takes=BODY), Does(takes=bound / 4))
        retry = RetryPolicy(max_attempts=3, timeout=bound)
        return bound, run_script(
            variant, script, Cut(items(1)), policy(process=retry, transaction_timeout=60, timeout=90)
        )

    bound, run = with_time(tried, lambda made: made[1].statuses == [ItemStatus.SUCCESS])
    assert run.statuses == [ItemStatus.SUCCESS]
    assert run.script.count(Step.PROCESS) == 3
    assert 2.2 * bound < run.seconds < BODY


@check("E13")
def test_an_abandoned_call_can_read_that_its_attempt_is_over(variant: Run) -> None:
    def run_abandoned(bound: float) -> tuple[ScriptRun, list[tuple[Attempt, bool]]]:
        seen: list[tuple[Attempt, bool]] = []
        left, observed = threading.Event(), threading.Event()

        def observe() -> None:
            seen.append((current_attempt(), current_attempt().is_over))
            observed.set()

        script = Script().will_process("t-0", Does(takes=BODY, until=left, act=observe, is_stubborn=True))
        script.will(Step.EXCEPTION, "t-0", Does(act=left.set))
        script.will(
            Step.SUCCESS, "t-1", Does(takes=BODY, until=observed)
        )  # so that the loop still runs when it observes
        return run_script(
            variant, script, Cut(items(2)), policy(concurrency=2, process=RetryPolicy(timeout=bound))
        ), seen

    run, seen = with_time(run_abandoned, lambda made: made[0].report.succeeded == 1)
    assert run.report.succeeded == 1
    assert [(attempt.remaining, was_over) for attempt, was_over in seen] == [(0, True)]


@check("E13", "E15")
def test_code_that_ignores_its_cancellation_delays_no_other_item(variant: Run) -> None:
    still, run = with_time(lambda bound: stubborn(variant, policy(process=RetryPolicy(timeout=bound))), has_begun)
    assert (run.report.processed, still) == (1, [1])


def stubborn(variant: Run, chosen: ConsumerPolicy) -> tuple[list[int], ScriptRun]:
    """Return how much code still ran at the outcome of an item whose code runs until then."""
    reported, still = threading.Event(), list[int]()
    script = Script().will_process("t-0", Does(takes=BODY, until=reported, is_stubborn=True))

    def record(_: ItemOutcome) -> None:
        still.append(sum(script.running.values()))
        reported.set()

    script.on_outcome = record
    return still, run_script(variant, script, Cut(items(1)), chosen)


def has_begun(made: tuple[list[int], ScriptRun]) -> bool:
    return made[1].script.count(Step.PROCESS) == 1


@check("E14")
def test_an_error_that_comes_too_late_is_dropped(variant: Run) -> None:
    def hurried(bound: float) -> ScriptRun:
        handled = threading.Event()
        late = Does(takes=BODY, until=handled, raises=ValueError("late"), is_stubborn=True)
        script = Script().will_process("t-0", late).will(Step.EXCEPTION, "t-0", Does(act=handled.set))
        return run_script(variant, script, Cut([item("t-0")]), policy(transaction_timeout=bound))

    run = with_time(hurried, lambda run: run.script.count(Step.PROCESS) == 1)
    script = run.script
    wait_for(lambda: not any(script.running.values()))
    assert run.statuses == [ItemStatus.TIMEOUT]
    assert script.errors[0][1].category is ExceptionType.TIMEOUT
