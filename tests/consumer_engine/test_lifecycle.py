"""The life of an item, the same with threads and with asyncio."""

import asyncio
from typing import Any

import pytest

from pipeline.consumer_engine.attempts import current_attempt
from pipeline.consumer_engine.bounded import CallResult
from pipeline.consumer_engine.errors import ExceptionType, TransactionException
from pipeline.consumer_engine.items import run_item
from pipeline.consumer_engine.lifecycle import (
    ItemStatus,
    Step,
    fetch_size,
    final_status,
    next_step,
    pause_before_next,
    pause_when_empty,
)
from pipeline.consumer_engine.policies import ConsumerLoopPolicy, EmptyQueuePolicy, RetryPolicy
from pipeline.domain.errors import InvalidInputError
from tests.consumer_engine.scripted_tasks import (
    AsyncRun,
    Batches,
    Cut,
    Does,
    Run,
    Script,
    ScriptRun,
    Threaded,
    answer_to,
    check,
    item,
    items,
    policy,
    run_script,
    with_time,
)
from tests.support.rule import rule
from tests.support.wait import wait_for

BUSINESS = TransactionException("out of stock", ExceptionType.BUSINESS)
SYSTEM = TransactionException("down", ExceptionType.SYSTEM)
TIMEOUT = TransactionException("slow", ExceptionType.TIMEOUT)


def counts(script: Script, transaction_id: str = "t-0") -> tuple[int, int, int]:
    process, success, exception = (
        script.count(step, transaction_id) for step in (Step.PROCESS, Step.SUCCESS, Step.EXCEPTION)
    )
    return process, success, exception


@rule("E-1", "E-4", "E-10")
@check("E5", "E6")
def test_a_returned_value_goes_to_the_success_handler_once_and_nowhere_else(variant: Run) -> None:
    script = Script().will_process("t-0", Does(returns=42))
    run = run_script(variant, script, Cut(items(1)), policy())
    assert counts(script) == (1, 1, 0)
    assert script.results == {"t-0": 42}
    (outcome,) = run.outcomes
    assert (outcome.status, outcome.value, outcome.error, outcome.handler_error) == (ItemStatus.SUCCESS, 42, None, None)
    assert outcome.attempts == {Step.PROCESS: 1, Step.SUCCESS: 1}


@rule("E-4", "E-11", "E-26", "E-27")
@check("E7")
def test_a_business_failure_is_not_retried_and_goes_straight_to_the_exception_handler(variant: Run) -> None:
    script = Script().will_process("t-0", Does(raises=BUSINESS))
    run = run_script(variant, script, Cut(items(1)), policy(process=RetryPolicy(max_attempts=5)))
    assert counts(script) == (1, 0, 1)
    ((transaction_id, error),) = script.errors
    assert (transaction_id, error.category, error.transaction_id) == ("t-0", ExceptionType.BUSINESS, "t-0")
    assert run.statuses == [ItemStatus.EXCEPTION]
    assert run.outcomes[0].error is error


@rule("E-12", "E-13")
@pytest.mark.parametrize(
    ("raised", "category"),
    [
        (SYSTEM, ExceptionType.SYSTEM),
        (TIMEOUT, ExceptionType.TIMEOUT),
        (ValueError("plain"), ExceptionType.SYSTEM),
        (TimeoutError("a task's own"), ExceptionType.TIMEOUT),
        (SystemExit(3), ExceptionType.SYSTEM),
        (asyncio.CancelledError("a task's own"), ExceptionType.SYSTEM),
        (StopIteration("odd"), ExceptionType.SYSTEM),
    ],
    ids=repr,
)
@check("E8")
def test_other_failures_are_retried_until_attempts_are_spent_and_then_handled_once(
    variant: Run, raised: BaseException, category: ExceptionType
) -> None:
    script = Script().will_process("t-0", Does(raises=raised))
    run = run_script(variant, script, Cut(items(1)), policy(process=RetryPolicy(max_attempts=4)))
    assert counts(script) == (4, 0, 1)
    ((_, error),) = script.errors
    assert (error.category, error.transaction_id) == (category, "t-0")
    if isinstance(raised, ValueError):
        assert error.__cause__ is raised
    assert run.outcomes[0].attempts == {Step.PROCESS: 4, Step.EXCEPTION: 1}


@rule("E-12")
@check("E8")
def test_a_successful_attempt_is_the_last(variant: Run) -> None:
    script = Script().will_process("t-0", Does(raises=SYSTEM), Does(raises=SYSTEM), Does(returns="at last"))
    run = run_script(variant, script, Cut(items(1)), policy(process=RetryPolicy(max_attempts=9)))
    assert counts(script) == (3, 1, 0)
    assert (run.statuses, run.outcomes[0].value) == ([ItemStatus.SUCCESS], "at last")


@rule("E-14", "E-27", "E-30")
@check("E9")
def test_a_failing_success_handler_has_its_own_attempts_and_processing_is_not_repeated(variant: Run) -> None:
    script = Script().will(Step.SUCCESS, "t-0", Does(raises=OSError("no disk")))
    budgets = policy(process=RetryPolicy(max_attempts=7), success=RetryPolicy(max_attempts=3))
    run = run_script(variant, script, Cut(items(1)), budgets)
    assert counts(script) == (1, 3, 1)
    assert isinstance(script.errors[0][1].__cause__, OSError)
    assert run.statuses == [ItemStatus.EXCEPTION]


@rule("E-14", "E-11")
@check("E9")
def test_a_business_failure_of_the_success_handler_is_not_retried(variant: Run) -> None:
    script = Script().will(Step.SUCCESS, "t-0", Does(raises=BUSINESS))
    run_script(variant, script, Cut(items(1)), policy(success=RetryPolicy(max_attempts=5)))
    assert counts(script) == (1, 1, 1)


@rule("E-15", "E-29")
@check("E10")
def test_a_failing_exception_handler_is_retried_by_its_policy_and_its_last_error_is_reported(variant: Run) -> None:
    script = Script().will_process("t-0", Does(raises=BUSINESS))
    script.will(Step.EXCEPTION, "t-0", Does(raises=OSError("first")), Does(raises=OSError("last")))
    run = run_script(variant, script, Cut(items(3)), policy(exception=RetryPolicy(max_attempts=2)))
    assert counts(script) == (1, 0, 2)
    first = run.outcomes[0]
    assert first.handler_error is not None
    assert str(first.handler_error) == "last"
    assert isinstance(first.handler_error.__cause__, OSError)
    assert first.error is not None
    assert first.error.category is ExceptionType.BUSINESS
    assert run.statuses == [ItemStatus.EXCEPTION, ItemStatus.SUCCESS, ItemStatus.SUCCESS]  # the loop goes on
    assert (run.report.failed, run.report.handler_failures, run.report.processed) == (1, 1, 3)


@rule("E-15", "E-29")
@check("E10")
def test_the_failure_of_an_exception_handler_is_logged(variant: Run, caplog: pytest.LogCaptureFixture) -> None:
    script = Script().will_process("t-0", Does(raises=BUSINESS)).will(Step.EXCEPTION, "t-0", Does(raises=BUSINESS))
    run_script(variant, script, Cut(items(1)), policy(exception=RetryPolicy(max_attempts=5)))
    assert counts(script) == (1, 0, 1)
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
    assert "the exception handler failed for transaction t-0" in caplog.text


@rule("E-2", "E-30")
@check("E11")
def test_every_step_has_its_own_attempts(variant: Run) -> None:
    script = Script().will_process("t-0", Does(raises=SYSTEM), Does(raises=SYSTEM), Does())
    script.will(Step.SUCCESS, "t-0", Does(raises=SYSTEM)).will(Step.EXCEPTION, "t-0", Does(raises=SYSTEM))
    failing = Does(raises=OSError("busy"))
    source = Batches(failing, failing, failing, failing, items(1))
    budgets = policy(
        fetch=RetryPolicy(max_attempts=5),
        process=RetryPolicy(max_attempts=3),
        success=RetryPolicy(max_attempts=4),
        exception=RetryPolicy(max_attempts=2),
    )
    run = run_script(variant, script, source, budgets)
    assert run.error is None
    assert counts(script) == (3, 4, 2)
    assert run.outcomes[0].attempts == {Step.PROCESS: 3, Step.SUCCESS: 4, Step.EXCEPTION: 2}


@rule("E-1", "E-20", "E-27")
@pytest.mark.parametrize("cut", [Step.SUCCESS, Step.EXCEPTION])
@check("E12", "E14")
def test_the_transaction_timeout_cuts_a_handler_that_hangs_and_no_other_handler_follows(
    variant: Run, cut: Step, caplog: pytest.LogCaptureFixture
) -> None:
    def hanging(bound: float) -> ScriptRun:
        script = Script()
        script.will(cut, "t-0", Does(takes=60, until=script.over))
        if cut is Step.EXCEPTION:
            script.will_process("t-0", Does(raises=BUSINESS))
        return run_script(variant, script, Cut(items(3)), policy(transaction_timeout=bound))

    def had_time(run: ScriptRun) -> bool:
        return run.report.succeeded == 2 and run.script.count(cut, "t-0") == 1

    run = with_time(hanging, had_time)
    assert counts(run.script) == ((1, 1, 0) if cut is Step.SUCCESS else (1, 0, 1))
    first, *others = run.outcomes
    assert (first.status, first.cut, first.is_in_doubt) == (ItemStatus.TIMEOUT, cut, True)
    assert [outcome.status for outcome in others] == [ItemStatus.SUCCESS] * 2  # the place was free again
    told = first.error if cut is Step.SUCCESS else first.handler_error
    assert told is not None
    assert told.category is ExceptionType.TIMEOUT
    assert f"its {cut} handler was cut and may have settled it" in caplog.text
    report = run.report.as_dict()
    assert (report["timed_out"], report["in_doubt"], report["cut"]) == (1, 1, {cut: 1})
    wait_for(lambda: not any(run.script.running.values()))


@rule("E-20", "E-27")
@check("E14")
def test_an_exception_handler_that_the_timeout_calls_for_has_the_same_time_again_and_no_more(variant: Run) -> None:
    def hanging(bound: float) -> ScriptRun:
        script = Script()
        for step in (Step.PROCESS, Step.EXCEPTION):
            script.will(step, "t-0", Does(takes=60, until=script.over))
        limits: list[float | None] = []
        script.will(Step.EXCEPTION, "t-1", Does(act=lambda: limits.append(current_attempt().remaining)))
        script.will_process("t-1", Does(takes=60, until=script.over))
        run = run_script(variant, script, Cut(items(2)), policy(transaction_timeout=bound))
        (left,) = limits
        assert left is not None
        assert 0 <= left <= bound
        return run

    run = with_time(hanging, lambda run: run.report.handler_failures == 1)
    assert run.statuses == [ItemStatus.TIMEOUT] * 2
    assert [outcome.cut for outcome in run.outcomes] == [Step.EXCEPTION, Step.PROCESS]
    assert counts(run.script) == counts(run.script, "t-1") == (1, 0, 1)
    assert run.outcomes[0].error is not None
    assert run.outcomes[0].handler_error is not None
    assert (run.report.in_doubt, run.report.handler_failures) == (1, 1)


@rule("E-27")
def test_an_exception_handler_begins_even_if_the_time_runs_out_before_it() -> None:
    """Driven by hand with a clock that jumps: a process may be frozen between two lines."""
    times = iter([0.0, 0.0, 0.0, 0.9])
    task = Threaded(Script())
    task.policy = policy(transaction_timeout=1)
    setup = task._item_setup()
    setup.context.clock = lambda: next(times, 5.0)
    living = run_item(setup, task._single_item(item("t-0"), setup))
    next(living)
    call = living.send(CallResult(error=BUSINESS))
    assert call.function == task.handle_transaction_exception
    assert call.limit == 0


@rule("E-27")
@check("E12")
def test_a_success_handler_that_failed_is_not_retried_after_the_timeout(variant: Run) -> None:
    def slowly(bound: float) -> ScriptRun:
        script = Script().will(Step.SUCCESS, "t-0", Does(raises=SYSTEM))
        chosen = policy(transaction_timeout=bound, success=RetryPolicy(max_attempts=9, backoff=60))
        return run_script(variant, script, Cut(items(1)), chosen)

    run = with_time(slowly, lambda run: run.script.count(Step.SUCCESS) == 1)
    script = run.script
    assert counts(script) == (1, 1, 1)  # it had failed, so it settled nothing: the exception handler does
    assert (run.statuses, run.outcomes[0].cut) == ([ItemStatus.TIMEOUT], None)
    assert script.errors[0][1].category is ExceptionType.TIMEOUT
    assert script.errors[0][1].__cause__ is not None


@check("E5")
def test_one_item_can_be_processed_without_a_loop(variant: Run) -> None:
    script = (
        Script().will_process("t-0", Does(raises=SYSTEM), Does(returns=1)).will_process("t-1", Does(raises=BUSINESS))
    )
    task = variant.task(script)
    task.policy = policy(process=RetryPolicy(max_attempts=2, timeout=60))
    assert variant.process(task, item("t-0")).status is ItemStatus.SUCCESS
    assert variant.process(task, item("t-1")).status is ItemStatus.EXCEPTION
    task._state.in_flight.take("t-2", lambda: None)
    with pytest.raises(InvalidInputError, match="'t-2' is being worked on"):
        variant.process(task, item("t-2"))


@check("E13")
def test_code_can_read_its_attempt_and_the_time_left(variant: Run) -> None:
    seen: list[tuple[Any, ...]] = []

    def observe() -> None:
        attempt = current_attempt()
        assert attempt.remaining is not None
        seen.append(
            (attempt.step, attempt.number, attempt.transaction_id, 0 < attempt.remaining <= 60, attempt.is_over)
        )

    script = Script().will_process("t-0", Does(act=observe, raises=SYSTEM), Does(act=observe))
    run_script(variant, script, Cut(items(1)), policy(process=RetryPolicy(max_attempts=2, timeout=60)))
    assert seen == [(Step.PROCESS, 1, "t-0", True, False), (Step.PROCESS, 2, "t-0", True, False)]
    with pytest.raises(LookupError):
        current_attempt()


def test_a_task_for_asyncio_with_a_plain_function_is_refused_before_anything_is_fetched() -> None:
    variant, source = AsyncRun(), Cut(items(1))
    task = variant.task(Script())
    task.process_transaction = lambda transaction: None
    run = run_script(variant, task.script, source, policy(), task=task)
    assert isinstance(run.error, InvalidInputError)
    assert "is not async; expected `async def`" in str(run.error)
    assert source.asked == []


@rule("E-1", "E-28")
def test_every_decision_is_a_pure_function() -> None:
    assert [(step, failed, next_step(step, failed=failed)) for step in list(Step)[1:] for failed in (False, True)] == [
        (Step.PROCESS, False, Step.SUCCESS),
        (Step.PROCESS, True, Step.EXCEPTION),
        (Step.SUCCESS, False, None),
        (Step.SUCCESS, True, Step.EXCEPTION),
        (Step.EXCEPTION, False, None),
        (Step.EXCEPTION, True, None),
    ]
    cut = [next_step(step, failed=True, is_cut=True) for step in list(Step)[1:]]
    assert cut == [Step.EXCEPTION, None, None]  # a handler that was cut may have settled the item
    assert final_status(Step.SUCCESS, failed=False, is_time_up=False) is ItemStatus.SUCCESS
    assert final_status(Step.EXCEPTION, failed=True, is_time_up=False) is ItemStatus.EXCEPTION
    assert final_status(Step.EXCEPTION, failed=True, is_time_up=True) is ItemStatus.TIMEOUT


@rule("E-11", "E-12", "E-22")
def test_a_pause_is_decided_by_the_number_of_the_attempt_and_the_kind_of_its_failure() -> None:
    retry = RetryPolicy(max_attempts=4, backoff=1, backoff_multiplier=2, backoff_cap=3)
    assert [pause_before_next(retry, number, ExceptionType.SYSTEM) for number in (1, 2, 3, 4)] == [1, 2, 3, None]
    assert pause_before_next(retry, 1, ExceptionType.TIMEOUT) == 1
    assert pause_before_next(retry, 1, ExceptionType.BUSINESS) is None


@rule("E-8", "E-18")
def test_fetch_sizes_and_pauses_follow_from_counts() -> None:
    loop = ConsumerLoopPolicy(limit=7, batch={"size": 3})
    assert [fetch_size(loop, taken) for taken in (0, 3, 6, 7, 9)] == [3, 3, 1, 0, 0]
    assert fetch_size(ConsumerLoopPolicy(), 10**9) == 1
    assert pause_when_empty(loop, 1) is None
    streaming = ConsumerLoopPolicy(streaming=True, empty_queue=EmptyQueuePolicy(backoff=1, backoff_cap=3))
    assert [pause_when_empty(streaming, empties) for empties in (1, 2, 3, 4)] == [1, 2, 3, 3]


@rule("E-27")
@check("E12")
def test_an_item_that_the_loop_gave_up_gets_no_handler(variant: Run) -> None:
    """Driven by hand, so that the loop gives up exactly between the end of processing and the handler."""
    for answer in (CallResult("value"), CallResult(error=BUSINESS)):
        task = variant.task(Script())
        hooks = task._item_setup()
        waiting = task._single_item(item("t-0"), hooks)
        living = run_item(hooks, waiting)
        request = next(living)
        assert request[0] == task.process_transaction
        assert waiting.claim()
        with pytest.raises(StopIteration) as end:
            living.send(answer_to(request, answer))
        assert end.value.value.status is ItemStatus.UNFINISHED
        assert len(hooks.in_flight) == 0


@rule("E-22")
@check("E23")
def test_a_single_item_is_settled_without_pauses_after_a_stop_request(variant: Run) -> None:
    script = Script().will_process("t-0", Does(raises=SYSTEM), Does(raises=SYSTEM), Does())
    task = variant.task(script)
    task.policy = policy(process=RetryPolicy(max_attempts=3, backoff=60))
    task.stop()
    assert variant.process(task, item("t-0")).status is ItemStatus.SUCCESS
