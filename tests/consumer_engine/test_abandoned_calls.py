"""Code that does not end when it should: how long an item waits for it, and what is logged."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.consumer_engine.attempts import EngineContext, Invoke, StepSpec, StepTarget, run_attempts
from pipeline.consumer_engine.bounded import CallResult, StepRunner
from pipeline.consumer_engine.errors import AbandonedCallsException, ConsumerLoopTimeoutException
from pipeline.consumer_engine.lifecycle import (
    GRACE,
    MIN_ID_WAIT,
    Ending,
    ItemStatus,
    Step,
    max_abandoned_calls,
    max_id_wait,
    wait_ends_at,
)
from pipeline.consumer_engine.loop import Abandon, ItemDone, Loop, Start, Wait, run_loop
from pipeline.consumer_engine.policies import ConsumerLoopPolicy, RetryPolicy
from pipeline.consumer_engine.telemetry import Telemetry
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
from tests.consumer_engine.test_loop import _outcome_of
from tests.support.rule import rule
from tests.support.wait import wait_for

#: What a bound of less than a second may take on a busy machine, beside a body and a patience that are longer.
SOON, BODY = 40, 60


def waits(task: Any, given: list[Any], chosen: Any, then: Callable[[int], Any] = lambda _: None) -> tuple[Any, Any]:
    """Drive a loop by hand with a clock that moves only when it waits; its longest waits, and how it ended."""
    now, long, answers, arrived = 0.0, list[float](), list(given), list[Any]()
    hooks = task._setup(chosen, lambda _: None)
    hooks.context.clock = lambda: now
    loop = Loop(setup=hooks, ends_at=None, post=lambda notice: arrived.append(notice))
    looping = run_loop(loop)
    answer: Any = None
    try:
        while True:
            match looping.send(answer):
                case Invoke():
                    answer = CallResult(answers.pop(0) if answers else ())
                case Start(started):
                    arrived += [ItemDone(each, _outcome_of(hooks, each)) for each in started]
                    answer = None
                case Wait(seconds):
                    if not arrived:
                        now += seconds or 0.0
                        long.append(seconds or 0.0)
                        then(len(long))
                    answer, arrived[:] = list(arrived), []
                case _:
                    answer = None
    except StopIteration:
        return long, loop.report


@rule("E-5", "E-29")
@check("E21")
def test_an_item_whose_id_is_held_by_an_abandoned_call_is_left_unfinished_after_a_wait(
    variant: Run, caplog: pytest.LogCaptureFixture
) -> None:
    task = variant.task(Script())
    ended = abandoned_call(task, "t-0")
    batches = [items(2), [item("t-0"), item("t-2")], [item("t-0")], items(1, start=3)]
    long, report = waits(task, batches, policy())
    # Once, with a warning after a moment; later a rest after a batch of which nothing could be worked on.
    assert long == [GRACE, MIN_ID_WAIT - GRACE, 1.0]
    assert (report.succeeded, report.unfinished, report.ending) == (3, 3, Ending.NOTHING_LEFT)
    assert "1 item waiting for an abandoned call on the same id, for 10 s at most" in caplog.text
    assert caplog.text.count("transaction t-0 is left") == 3
    ended()
    assert waits(task, [items(1)], policy())[1].succeeded == 1
    abandoned_call(task, "t-0")  # other code: it is waited for like the first
    assert waits(task, [items(1)], policy())[0][:2] == [GRACE, MIN_ID_WAIT - GRACE]


def abandoned_call(task: Any, transaction_id: str) -> Callable[[], None]:
    """Abandon a call on an id; the returned function ends it."""
    task._state.in_flight.take(transaction_id, lambda: None)
    ended: Callable[[], None] = task._state.in_flight.hold_abandoned(transaction_id)
    task._state.in_flight.release(transaction_id)
    return ended


@rule("E-5")
@check("E21")
def test_an_item_waits_without_limit_for_a_worker_of_another_loop(variant: Run) -> None:
    task = variant.task(Script())
    task._state.in_flight.take("t-0", lambda: None)

    def free(turn: int) -> None:
        if turn == 50:
            task._state.in_flight.release("t-0")

    long, report = waits(task, [items(1)], policy(), free)
    assert (sum(long) > 2 * MIN_ID_WAIT, report.succeeded, report.unfinished) == (True, 1, 0)


@rule("E-5")
@check("E21")
def test_a_deferred_item_starts_when_its_id_is_free_however_short_its_timeout(
    variant: Run,
) -> None:
    def short(bound: float) -> ScriptRun:
        script = Script().will_process("same", Does(takes=2.2 * bound, is_stubborn=True), Does())
        return run_script(variant, script, Batches([item("same") for _ in range(3)]), policy(transaction_timeout=bound))

    run = with_time(short, lambda run: run.report.succeeded == 2)
    assert (run.report.timed_out, run.report.succeeded, run.report.unfinished) == (1, 2, 0)
    task = variant.task(Script())
    ended = abandoned_call(task, "t-0")
    assert waits(task, [items(1)], policy(), lambda _: ended())[1].succeeded == 1


@check("E21", "E23")
def test_after_a_stop_request_no_item_waits_for_its_id(variant: Run) -> None:
    task = variant.task(Script())
    abandoned_call(task, "t-0")
    timer = threading.Timer(0.2, task.stop)
    timer.start()
    run = run_script(
        variant, task.script, Cut(items(1)), policy(transaction_timeout=BODY), task=task
    )  # its patience too
    assert (run.report.unfinished, run.report.ending, run.seconds < SOON) == (1, Ending.STOPPED, True)


@rule("E-8", "E-19")
@check("E20")
def test_too_many_abandoned_calls_end_the_loop_with_advice(variant: Run, caplog: pytest.LogCaptureFixture) -> None:
    task = variant.task(Script())
    for _ in range(max_abandoned_calls(ConsumerLoopPolicy())):
        task._state.abandoned.change(1)
    script = task.script
    script.will_process("t-0", Does(takes=BODY, until=script.over, is_stubborn=True))
    chosen = policy(size=1, process=RetryPolicy(timeout=FAIR))
    run = run_script(variant, script, Cut(items(3)), chosen, task=task)
    assert isinstance(run.error, AbandonedCallsException)
    assert run.error.report is not None
    assert (run.error.report.processed, run.error.report.fetched, len(run.source.asked)) == (1, 1, 1)
    assert "has more than 100 abandoned calls" in str(run.error)
    assert "current_attempt()" in str(run.error)
    assert "abandoned after a timeout and still running" in caplog.text
    wait_for(lambda: task._state.abandoned.count == max_abandoned_calls(ConsumerLoopPolicy()))
    again = run_script(variant, script, Cut(items(1, start=5)), policy(process=RetryPolicy(timeout=BODY)), task=task)
    assert (again.error, again.report.succeeded) == (None, 1)  # as many as may be are not too many


def test_the_policy_decides_the_wait_for_ids_and_the_limit_of_abandoned_calls() -> None:
    assert max_id_wait(ConsumerLoopPolicy()) == MIN_ID_WAIT
    assert max_id_wait(ConsumerLoopPolicy(transaction_timeout=60)) == 60
    assert max_abandoned_calls(ConsumerLoopPolicy(concurrency={"value": 50})) == 500
    assert wait_ends_at(30, 5, is_bounded=True, is_immediate=False) == 6
    assert wait_ends_at(5.5, 5, is_bounded=True, is_immediate=False) == 5.5
    assert wait_ends_at(30, 5, is_bounded=False, is_immediate=False) == 30
    assert wait_ends_at(30, 5, is_bounded=False, is_immediate=True) == 5


@check("E15", "E21")
def test_items_that_no_worker_had_begun_at_the_loop_timeout_can_be_processed_again(variant: Run) -> None:
    script = Script().will_process("t-0", Does(takes=BODY))
    task = variant.task(script)
    first = run_script(variant, script, Cut(items(3)), policy(timeout=0.2), task=task)
    assert isinstance(first.error, ConsumerLoopTimeoutException)
    second = run_script(variant, script, Cut(items(2, start=1)), policy(timeout=30), task=task)
    assert (second.error, second.report.succeeded) == (None, 2)


@rule("E-27")
@check("E12", "E15")
def test_a_handler_that_has_begun_gets_a_moment_to_settle_its_item_at_the_loop_timeout(
    variant: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.consumer_engine.loop.GRACE", float(BODY))

    def held(bound: float) -> ScriptRun:
        left = threading.Event()  # set by the first outcome after the timeout; the handler runs until then
        script = Script(on_outcome=lambda _: left.set())
        script.will(Step.SUCCESS, "t-0", Does(takes=BODY, until=left)).will_process("t-1", Does(takes=BODY))
        return run_script(variant, script, Cut(items(2)), policy(timeout=bound, concurrency=2))

    begun = {(Step.SUCCESS, "t-0"), (Step.PROCESS, "t-1")}
    run = with_time(held, lambda run: begun <= {*run.script.begun})
    assert isinstance(run.error, ConsumerLoopTimeoutException)
    assert run.error.report is not None
    assert (run.error.report.succeeded, run.error.report.unfinished, run.error.report.in_doubt) == (1, 1, 0)
    assert run.statuses == [ItemStatus.UNFINISHED, ItemStatus.SUCCESS]


@check("E12", "E15")
def test_an_unfinished_item_is_not_counted_twice_when_its_code_ends_in_that_moment(variant: Run) -> None:
    """Driven by hand, so that both end exactly while the loop waits for the handler of one of them."""
    now = 0.0
    hooks: Any = variant.task(Script())._setup(policy(timeout=5), lambda _: None)
    hooks.context.clock = lambda: now
    loop = Loop(setup=hooks, ends_at=5.0, post=lambda _: None)
    looping = run_loop(loop)
    next(looping)
    handled, worked_on = looping.send(CallResult(items(2))).items
    looping.send(None)
    now = 5.0
    assert handled.claim()  # its handler has begun
    assert looping.send([]) == Wait(0.0)
    assert looping.send([]) == Wait(GRACE)
    ended = [ItemDone(each, _outcome_of(hooks, each)) for each in (worked_on, handled)]
    assert type(looping.send(ended)) is Abandon
    assert (loop.report.unfinished, loop.report.in_doubt, len(loop.in_progress)) == (
        1 + 1,
        0,
        0,
    )  # both have ended


@check("E12", "E15")
def test_an_item_whose_handler_does_not_end_in_that_moment_counts_as_in_doubt(variant: Run) -> None:
    def held(bound: float) -> ScriptRun:
        return run_script(
            variant, Script().will(Step.SUCCESS, "t-0", Does(takes=BODY)), Cut(items(1)), policy(timeout=bound)
        )

    run = with_time(held, lambda run: run.script.count(Step.SUCCESS) == 1)
    assert "left unacknowledged: 1, in doubt because a handler had begun to settle them: 1" in str(run.error)
    assert run.seconds < BODY
    assert run.statuses == [ItemStatus.UNFINISHED]


@rule("E-20")
@pytest.mark.parametrize("own", [BODY + 10.0, None])
@check("E14", "E16")
def test_the_transaction_timeout_cuts_an_attempt_with_a_longer_timeout(variant: Run, own: float | None) -> None:
    script = Script().will_process("t-0", Does(takes=BODY))
    run = run_script(variant, script, Cut(items(1)), policy(transaction_timeout=0.1, process=RetryPolicy(timeout=own)))
    assert (run.statuses, run.seconds < SOON) == ([ItemStatus.TIMEOUT], True)
    fetching = run_script(
        variant,
        Script(),
        Batches(Does(takes=BODY)),
        policy(timeout=0.1, fetch=RetryPolicy(max_attempts=3, timeout=own)),
    )
    assert isinstance(fetching.error, ConsumerLoopTimeoutException)
    assert fetching.seconds < SOON


def test_an_attempt_that_the_deadline_cut_is_the_last_even_if_the_clock_shows_time_left() -> None:
    host = EngineContext(observer=Telemetry().observer("Task"), clock=lambda: 0.0)
    work = StepSpec(step="process", function=lambda: None, retry=RetryPolicy(max_attempts=3, backoff=1))
    trying = run_attempts(host, work, (), StepTarget(ends_at=0.5))
    assert type(next(trying)) is Invoke
    with pytest.raises(StopIteration) as end:
        trying.send(CallResult(is_timed_out=True))
    assert (end.value.value.is_past_deadline, end.value.value.attempts) == (True, 1)


def test_a_call_that_ends_while_it_is_abandoned_is_reported_as_ended_once() -> None:
    host, backs = EngineContext(observer=Telemetry().observer("Task")), list[int]()

    class HeldTarget(StepTarget):
        def hold_until_ended(self) -> Callable[[], None]:
            return lambda: backs.append(1)

    trying = run_attempts(
        host, StepSpec(step="process", function=lambda: None, retry=RetryPolicy(timeout=1)), (), HeldTarget()
    )
    call, steps = next(trying), StepRunner()
    job = steps.begin(call.function, call.args)
    wait_for(lambda: job.is_done)
    steps.abandon(job, call.on_abandon)  # it ended just now: the end is reported at once, and the id is free
    assert (backs, host.abandoned.count) == ([1], 0)
    ended = call.on_abandon()
    assert host.abandoned.count == 1
    ended()
    ended()
    assert (backs, host.abandoned.count) == ([1, 1], 0)


@rule("E-29")
@check("E5")
def test_a_fault_of_the_engine_itself_in_a_worker_ends_the_loop(variant: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The faults are made by hand: nothing a task does makes them."""

    def faulty(*_: object) -> Any:
        raise RuntimeError("a fault of the engine")

    monkeypatch.setattr("pipeline.consumer_engine.threads.run_item", faulty)
    monkeypatch.setattr("pipeline.consumer_engine.asyncio_driver.run_item", faulty)
    run = run_script(variant, Script(), Cut(items(2)), policy(concurrency=2, timeout=30))
    assert str(run.error) == "a fault of the engine"
