"""The loop: when it fetches, how wide it works, what it never does, and when it ends."""

import threading
from typing import Any

import pytest

from pipeline.consumer_engine.attempts import Invoke, Pause
from pipeline.consumer_engine.bounded import CallResult
from pipeline.consumer_engine.errors import ConsumerLoopTimeoutException, FetchException, FetchTimeoutException
from pipeline.consumer_engine.items import run_item
from pipeline.consumer_engine.lifecycle import Ending, ItemOutcome, ItemStatus, Step
from pipeline.consumer_engine.loop import Abandon, ItemDone, Loop, Start, Wait, run_loop
from pipeline.consumer_engine.policies import EmptyQueuePolicy, RetryPolicy
from pipeline.consumer_engine.transactions import Transaction
from tests.consumer_engine.scripted_tasks import (
    Batches,
    Begun,
    Cut,
    Does,
    Run,
    Script,
    ScriptRun,
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

FAILING = Does(raises=OSError("busy"))


@rule("E-18", "E-24")
@check("E17")
def test_an_empty_fetch_ends_a_loop_that_does_not_stream(variant: Run) -> None:
    source = Cut(items(5))
    run = run_script(variant, Script(), source, policy(size=2))
    assert (run.report.processed, run.report.ending, run.report.batches) == (5, Ending.NOTHING_LEFT, 3)
    assert source.asked == [2, 2, 2, 2]


@rule("E-7", "E-18", "E-22")
@check("E17")
def test_a_streaming_loop_pauses_by_the_formula_and_starts_over_after_an_item(variant: Run) -> None:
    """Both variants ask the same generator; here time is an argument, so that the pauses can be compared exactly."""
    nothing: list[Transaction] = []
    given: list[Any] = [nothing, nothing, nothing, nothing, items(1), nothing, nothing, FAILING, FAILING, nothing]
    empty = EmptyQueuePolicy(backoff=1, backoff_multiplier=2, backoff_cap=5)
    retry = RetryPolicy(max_attempts=3, backoff=10, backoff_multiplier=3, backoff_cap=20)
    task = variant.task(Script())
    waits = pretended(task, given, policy(streaming=True, empty=empty, fetch=retry))
    assert waits == [1, 2, 4, 5, 1, 2, 10, 20, 4]


def pretended(task: Any, given: list[Any], chosen: Any) -> list[float]:
    """Drive a loop by hand, with a clock that moves only when the loop waits; it is asked to end when all is given."""
    now, waits, answers = 0.0, [], list(given)
    hooks = task._setup(chosen, lambda _: None)
    hooks.context.clock = lambda: now
    looping = run_loop(Loop(setup=hooks, ends_at=None, post=lambda _: None))
    arrived: list[Any] = []
    request = next(looping)
    while True:
        answer: Any = None
        match request:
            case Invoke():
                answer = answers.pop(0)
                answer = CallResult(error=answer.raises) if isinstance(answer, Does) else CallResult(answer)
            case Start(started):
                arrived = [ItemDone(each, _outcome_of(hooks, each)) for each in started]
            case Pause(seconds) | Wait(seconds):
                answer, arrived = arrived, []
                if not answer:
                    waits.append(seconds or 0.0)
                    now += seconds or 0.0
                if not answers:
                    hooks.context.stop.request()
        try:
            request = looping.send(answer)
        except StopIteration:
            return waits


def _outcome_of(hooks: Any, each: Any) -> Any:
    living = run_item(hooks, each)
    try:
        request = next(living)
        while True:
            request = living.send(answer_to(request, CallResult()))
    except StopIteration as end:
        return end.value


@rule("E-18")
@check("E17")
def test_a_streaming_loop_pauses_in_real_time_too(variant: Run) -> None:
    nothing: list[Transaction] = []
    source = Batches(nothing, nothing, items(1))
    empty = EmptyQueuePolicy(backoff=0.1, backoff_multiplier=2)
    run = run_script(variant, Script(), source, policy(streaming=True, empty=empty, limit=1))
    assert (run.report.processed, run.report.ending) == (1, Ending.LIMIT)
    assert 0.3 <= run.seconds < 30  # 0.1 and 0.2


@rule("E-18")
@check("E17")
def test_a_streaming_loop_pauses_by_default(variant: Run) -> None:
    source = Cut([])
    run = run_script(variant, Script(), source, policy(streaming=True, timeout=0.5))
    assert isinstance(run.error, ConsumerLoopTimeoutException)
    assert len(source.asked) == 1


@rule("E-8", "E-24")
@check("E18")
def test_a_limit_is_exact_across_batches_and_nothing_is_fetched_beyond_it(variant: Run) -> None:
    source = Cut(items(100))
    run = run_script(variant, Script(), source, policy(limit=7, size=3, concurrency=4))
    assert (run.report.processed, run.report.ending) == (7, Ending.LIMIT)
    assert (source.asked, len(source.line)) == ([3, 3, 1], 93)


@rule("E-8")
@check("E18")
def test_a_limit_below_the_batch_size_bounds_the_fetch(variant: Run) -> None:
    source = Cut(items(20))
    run = run_script(variant, Script(), source, policy(limit=5, size=10))
    assert (run.report.processed, source.asked, len(source.line)) == (5, [5], 15)


@rule("E-8")
@pytest.mark.parametrize("streaming", [False, True])
@check("E18")
def test_a_limit_of_0_fetches_nothing(variant: Run, streaming: bool) -> None:
    source = Cut(items(3))
    run = run_script(variant, Script(), source, policy(limit=0, streaming=streaming))
    assert (run.report.processed, run.report.ending, source.asked) == (0, Ending.LIMIT, [])


@rule("E-8")
@check("E18")
def test_failed_items_count_towards_the_limit(variant: Run) -> None:
    run = run_script(variant, Script(always={Step.PROCESS: FAILING}), Cut(items(9)), policy(limit=4, size=3))
    assert (run.report.failed, run.report.succeeded, run.report.processed) == (4, 0, 4)


@rule("E-16", "E-17", "E-24", "E-29")
@check("E19")
def test_a_fetch_is_attempted_by_its_policy_and_then_ends_the_loop_with_its_cause(variant: Run) -> None:
    cause = OSError("connection refused")
    source = Batches(items(2), *[Does(raises=cause)] * 3)
    run = run_script(variant, Script(), source, policy(fetch=RetryPolicy(max_attempts=3), size=2))
    assert isinstance(run.error, FetchException)
    assert not isinstance(run.error, FetchTimeoutException)
    assert run.error.__cause__ is cause
    assert "connection refused (attempt 3, the last)" in str(run.error)
    assert len(source.asked) == 4
    assert run.error.report is not None
    assert run.error.report.processed == len(run.outcomes) == 2  # what was fetched before was settled first


@rule("E-16")
@check("E19")
def test_a_fetch_that_succeeds_on_retry_does_not_end_the_loop(variant: Run) -> None:
    source = Batches(FAILING, items(1), FAILING, items(1, start=1), FAILING)
    run = run_script(variant, Script(), source, policy(fetch=RetryPolicy(max_attempts=2), size=1))
    assert (run.error, run.report.processed) == (None, 2)


@rule("E-17", "E-29")
@pytest.mark.parametrize("given", [7, [object()], iter([1]), {"a": 1}], ids=["number", "object", "iterator", "dict"])
@check("E19")
def test_a_fetch_result_that_is_not_a_list_of_items_is_refused_by_type(variant: Run, given: Any) -> None:
    run = run_script(variant, Script(), Batches(Does(returns=given)), policy())
    assert isinstance(run.error, FetchException)
    assert "expected a list of Transaction" in str(run.error)


@check("E19")
def test_the_source_gets_the_extra_arguments_of_the_policy_under_any_name(variant: Run) -> None:
    source = Cut(items(1))
    run = run_script(variant, Script(), source, policy(extra={"name": "q", "message": "m", "block": 5}))
    assert run.error is None
    assert source.extra[0] == {"name": "q", "message": "m", "block": 5}


@rule("E-8", "E-19")
@check("E20")
def test_exactly_as_many_items_as_the_concurrency_are_processed_at_once(variant: Run) -> None:
    script = Script()
    for number in range(24):  # four by four: none of them ends before all four have begun
        script.will_process(f"t-{number}", Does(takes=30, until=Begun(script, number // 4 * 4 + 4)))
    run = run_script(variant, script, Cut(items(24)), policy(concurrency=4, size=24))
    assert script.peak == 4
    assert run.report.succeeded == 24
    assert run.seconds < 30


@rule("E-19")
@check("E20")
def test_a_slow_item_does_not_keep_the_other_workers_of_its_batch_idle(variant: Run) -> None:
    outcomes, others = list[ItemOutcome](), threading.Event()

    def tell(outcome: ItemOutcome) -> None:
        outcomes.append(outcome)
        if len(outcomes) == 11:
            others.set()

    script = Script(on_outcome=tell).will_process("t-0", Does(takes=30, until=others))
    run = run_script(variant, script, Cut(items(12)), policy(concurrency=2, size=12))
    assert run.outcomes[-1].transaction.transaction_id == "t-0"
    assert run.report.succeeded == 12
    assert run.seconds < 30


@rule("E-5")
@check("E21")
def test_two_items_of_one_id_never_overlap_and_both_are_settled(variant: Run) -> None:
    script = Script(always={Step.PROCESS: Does(takes=0.05)})
    same = item("same")
    batch = [same, item("same"), item("other"), same]
    run = run_script(variant, script, Batches(batch), policy(concurrency=4))
    assert script.overlaps == 0
    assert script.count(Step.PROCESS, "same") == 3
    assert run.report.succeeded == 4


@rule("E-5")
@check("E21")
def test_a_batch_of_one_id_is_processed_serially_in_a_reasonable_time(variant: Run) -> None:
    script = Script()
    run = run_script(variant, script, Batches([item("same") for _ in range(300)]), policy(concurrency=8, size=300))
    assert (run.report.succeeded, script.overlaps) == (300, 0)
    assert run.seconds < 30


@rule("E-5")
@check("E21")
def test_an_id_stays_taken_until_an_abandoned_call_has_ended_also_in_the_next_batch(variant: Run) -> None:
    def held(bound: float) -> ScriptRun:
        other = threading.Event()

        def tell(outcome: ItemOutcome) -> None:
            if outcome.transaction.transaction_id == "t-1":
                other.set()

        script = Script(on_outcome=tell)
        script.will_process("t-0", Does(takes=60, until=other, is_stubborn=True), Does())
        source = Batches([item("t-0")], [item("t-0"), item("t-1")])
        return run_script(variant, script, source, policy(concurrency=4, size=2, process=RetryPolicy(timeout=bound)))

    run = with_time(held, lambda run: run.report.succeeded == 2)
    script = run.script
    assert script.overlaps == 1  # the exception handler of the first, whose own code did not end in time
    assert [(outcome.transaction.transaction_id, outcome.status) for outcome in run.outcomes] == [
        ("t-0", ItemStatus.EXCEPTION),
        ("t-1", ItemStatus.SUCCESS),
        ("t-0", ItemStatus.SUCCESS),
    ]
    second = script.begun.index((Step.PROCESS, "t-0"), 1)
    assert (Step.PROCESS, "t-0") in script.finished
    assert script.begun[second:].count((Step.PROCESS, "t-0")) == 1


@rule("E-25", "E-29")
@check("E22")
def test_an_oversized_batch_is_logged_and_processed_whole(variant: Run, caplog: pytest.LogCaptureFixture) -> None:
    run = run_script(variant, Script(), Batches(items(7)), policy(size=2))
    assert (run.report.succeeded, run.report.fetched) == (7, 7)
    assert "the source gave 7 items instead of at most 2" in caplog.text


@rule("E-25")
@check("E22")
def test_a_batch_is_processed_whole_and_in_order_before_the_next_fetch(variant: Run) -> None:
    script = Script()
    seen: list[int] = []
    source = Cut(items(6))
    original = source._next

    def noted(batch_size: int, extra: dict[str, Any]) -> Any:
        seen.append(len(script.finished) // 2)
        return original(batch_size, extra)

    source._next = noted  # type: ignore[method-assign]
    run_script(variant, script, source, policy(size=2, concurrency=1))
    assert seen == [0, 2, 4, 6]
    assert [each for step, each in script.begun if step is Step.PROCESS] == [f"t-{n}" for n in range(6)]


@rule("E-29")
@check("E5")
def test_an_error_of_on_outcome_ends_the_loop_and_is_raised(variant: Run) -> None:
    def refuse(_: Any) -> None:
        raise RuntimeError("no more")

    task = variant.task(Script(always={Step.PROCESS: Does(takes=0.05)}))
    with pytest.raises(RuntimeError, match="no more"):
        variant.consume(task, source=Cut(items(3)), policy=policy(), on_outcome=refuse)
    before = threading.active_count()
    wait_for(lambda: threading.active_count() <= before)
    wait_for(lambda: len(task._state.in_flight) == 0)


@rule("E-24")
@check("E15")
def test_an_outcome_that_arrives_at_the_loop_timeout_still_counts(variant: Run) -> None:
    """Driven by hand, so that one item ends exactly when the loop gives up and the other does not."""
    now, outcomes = 0.0, list[Any]()
    hooks: Any = variant.task(Script())._setup(policy(timeout=5), lambda _: None)
    hooks.context.clock = lambda: now
    loop = Loop(setup=hooks, ends_at=5.0, post=lambda _: None, on_outcome=outcomes.append)
    looping = run_loop(loop)
    assert type(next(looping)) is Invoke
    first, second = looping.send(CallResult(items(2))).items
    assert looping.send(None) == Wait(5.0)
    ended = ItemDone(first, _outcome_of(hooks, first))
    now = 5.0
    assert looping.send([]) == Wait(0.0)
    assert loop.context.is_over  # from here on nothing is attempted again
    assert type(looping.send([ended])) is Abandon
    with pytest.raises(ConsumerLoopTimeoutException, match="settled: 1 item, left unacknowledged: 1"):
        looping.send(None)
    assert [(outcome.transaction, outcome.status) for outcome in outcomes] == [
        (first.transaction, ItemStatus.SUCCESS),
        (second.transaction, ItemStatus.UNFINISHED),
    ]
