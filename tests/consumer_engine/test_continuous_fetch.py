"""With a continuous fetch a batch is no barrier, and everything else stays as it is."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from pipeline.consumer_engine.errors import ConsumerLoopTimeoutException, FetchException, TransactionException
from pipeline.consumer_engine.lifecycle import Ending, ItemOutcome, ItemStatus, Step
from pipeline.consumer_engine.policies import BatchPolicy, ConsumerPolicy, EmptyQueuePolicy, RetryPolicy
from pipeline.consumer_engine.transactions import Transaction
from pipeline.domain.errors import InvalidInputError
from tests.consumer_engine.scripted_tasks import (
    Batches,
    Begun,
    Cut,
    Does,
    Run,
    Script,
    check,
    item,
    items,
    policy,
    run_script,
)
from tests.support.rule import rule

#: More than any wait here takes.
LONG = 60


@rule("E-19", "E-25", "E-37")
@check("E20")
def test_a_slow_item_holds_one_place_and_not_its_whole_batch(variant: Run) -> None:
    """Of 160 items, one in every 16 is slow: it ends when nothing more can begin beside it."""

    def begun_beside_the_first_slow_item(continuous: bool, expected: int) -> int:
        script, begun = Script(), list[int]()
        for number in range(0, 160, 16):
            act = (lambda: begun.append(script.count(Step.PROCESS))) if number == 0 else None
            until = Begun(script, expected) if continuous else None
            script.will_process(f"t-{number}", Does(takes=LONG if continuous else 0.2, until=until, act=act))
        chosen = policy(size=16, concurrency=16, continuous=continuous)
        run = run_script(variant, script, Cut(items(160)), chosen)
        assert (run.report.succeeded, run.report.batches, run.error) == (160, 10, None)
        assert set(run.source.asked) == {16}
        assert script.peak <= 16
        return begun[0]

    barrier = begun_beside_the_first_slow_item(False, 16)
    assert barrier == 16
    assert begun_beside_the_first_slow_item(True, 160) == 10 * barrier


@rule("E-25")
@check("E20", "E22")
def test_a_continuous_fetch_keeps_batches_whole_and_in_order_and_holds_no_more_than_it_can_start(variant: Run) -> None:
    held: list[int] = []
    script = Script(on_outcome=lambda _: held.append(source.given_out - len(script.finished) // 2))

    class Counted(Batches):
        given_out = 0

        def _next(self, batch_size: int, extra: dict[str, Any]) -> Any:
            given = super()._next(batch_size, extra)
            self.given_out += len(given) if isinstance(given, list) else 0
            return given

    batches = [items(5), items(1, start=5), items(9, start=6), items(3, start=15)]
    source = Counted(*batches)
    run = run_script(variant, script, source, policy(size=5, concurrency=2, continuous=True))
    assert [transaction_id for step, transaction_id in script.begun if step is Step.PROCESS] == [
        f"t-{number}" for number in range(18)
    ]
    assert (run.report.batches, run.report.ending) == (4, Ending.NOTHING_LEFT)
    assert max(held) <= 9 + 2  # a batch, and the items of the one before that have no free place behind them


@rule("E-8", "E-18", "E-24")
@check("E17", "E18")
def test_a_continuous_loop_ends_for_the_same_reasons(variant: Run) -> None:
    limited = run_script(variant, Script(), Cut(items(9)), policy(size=2, concurrency=3, limit=5, continuous=True))
    assert (limited.report.succeeded, limited.report.ending, limited.source.asked) == (5, Ending.LIMIT, [2, 2, 1])
    empty = run_script(variant, Script(), Cut([]), policy(continuous=True))
    assert (empty.report.fetched, empty.report.ending) == (0, Ending.NOTHING_LEFT)
    none = run_script(variant, Script(), Cut(items(1)), policy(limit=0, continuous=True))
    assert (none.source.asked, none.report.ending) == ([], Ending.LIMIT)
    script = Script(always={Step.PROCESS: Does(takes=LONG)})
    timed = run_script(variant, script, Cut(items(4)), policy(size=2, concurrency=3, timeout=0.3, continuous=True))
    assert isinstance(timed.error, ConsumerLoopTimeoutException)
    assert timed.error.report is not None
    assert timed.error.report.fetched == timed.error.report.unfinished


@rule("E-16", "E-24")
@check("E19")
def test_items_in_progress_are_settled_before_a_failed_fetch_ends_a_continuous_loop(variant: Run) -> None:
    failed = threading.Event()
    script = Script().will_process("t-0", Does(takes=LONG, until=failed))
    source = Batches(items(2), Does(raises=OSError("gone"), act=failed.set))
    run = run_script(variant, script, source, policy(size=2, concurrency=2, continuous=True))
    assert isinstance(run.error, FetchException)
    assert "Settled before: " in str(run.error)
    assert run.error.report is not None
    assert (run.error.report.succeeded, run.error.report.unfinished) == (2, 0)


@check("E17")
def test_an_empty_fetch_beside_open_items_ends_no_loop_and_paces_one_that_streams(variant: Run) -> None:
    """The first item goes back to the source, as a rejected one does, after a fetch that found nothing."""
    asked_again, source = threading.Event(), Batches(items(2), Does(act=lambda: asked_again.set()), [item("t-9")])
    script = Script().will_process("t-0", Does(takes=LONG, until=asked_again))
    run = run_script(variant, script, source, policy(size=2, concurrency=2, continuous=True))
    assert (run.report.succeeded, run.report.ending) == (3, Ending.NOTHING_LEFT)
    stopping = Batches(items(1), [], [], items(1, start=1))
    script = Script()
    script.on_outcome = lambda outcome: outcome.transaction.transaction_id == "t-1" and run.task.stop()
    task = variant.task(script)
    run.task = task
    empty = EmptyQueuePolicy(backoff=0.05, backoff_multiplier=1)
    streaming = run_script(
        variant, script, stopping, policy(concurrency=2, streaming=True, empty=empty, continuous=True), task=task
    )
    assert (streaming.report.succeeded, streaming.report.ending) == (2, Ending.STOPPED)
    assert streaming.seconds >= 0.1  # both pauses


@rule("E-5")
@check("E21")
def test_an_item_that_waits_for_its_id_stops_a_continuous_fetch(variant: Run) -> None:
    script = Script()
    begun = Begun(script, 2)
    script.will_process("t-0", Does(takes=LONG, until=begun), Does())
    batches = [[item("t-0")], [item("t-0"), item("t-1")], items(2, start=2)]
    run = run_script(variant, script, Batches(*batches), policy(size=2, concurrency=4, continuous=True))
    assert (run.report.succeeded, script.overlaps) == (5, 0)


@rule("E-24")
@check("E23")
@pytest.mark.parametrize("timeout", [None, LONG])
def test_a_stop_request_ends_a_continuous_fetch_and_settles_what_it_has(variant: Run, timeout: float | None) -> None:
    script = Script()
    until = threading.Event()
    fetch = Does(takes=LONG, until=until, act=lambda: None)
    task = variant.task(script)

    def stop(_: ItemOutcome) -> None:
        task.stop()
        if timeout is None:
            until.set()  # a fetch without a limit is waited for

    script.on_outcome = stop
    chosen = policy(concurrency=2, fetch=RetryPolicy(timeout=timeout), continuous=True, streaming=True)
    run = run_script(variant, script, Batches(items(1), fetch), chosen, task=task)
    assert (run.report.ending, run.report.succeeded, run.error) == (Ending.STOPPED, 1, None)
    assert run.seconds < LONG
    assert getattr(variant, "orphans", []) == []


class Together(Cut):
    """A source that acknowledges several items in one call."""

    def __init__(self, line: Sequence[Transaction], fails: bool = False) -> None:
        super().__init__(line)
        self.acknowledged: list[list[str]] = []
        self.fails = fails

    def ack_transaction(self, _: Transaction, /) -> None:
        raise AssertionError("not one by one")

    def ack_transactions(self, transactions: Sequence[Transaction], /) -> None:
        if self.fails:
            raise OSError("gone")
        self.acknowledged.append([each.transaction_id for each in transactions])


def together(continuous: bool, **options: Any) -> ConsumerPolicy:
    chosen = policy(continuous=continuous, **options)
    batch = BatchPolicy(size=options.get("size", 4), acknowledge_together=True)
    return chosen.model_copy(update={"loop": chosen.loop.model_copy(update={"batch": batch})})


def default_handlers(variant: Run, script: Script) -> Any:
    """A task whose success handler is the engine's own."""
    task = variant.task(script)
    mixin: Any = type(task).__mro__[1]
    task.handle_transaction_success = mixin.handle_transaction_success.__get__(task)
    return task


@pytest.mark.parametrize("continuous", [False, True])
@check("E6")
def test_the_succeeded_items_of_a_batch_are_acknowledged_in_one_call(variant: Run, continuous: bool) -> None:
    script, source = Script(), Together(items(6))
    script.will_process("t-1", Does(raises=TransactionException("no")))
    run = run_script(variant, script, source, together(continuous, size=4), task=default_handlers(variant, script))
    assert source.acknowledged == [["t-0", "t-2", "t-3"], ["t-4", "t-5"]]
    assert (run.report.succeeded, run.report.failed) == (5, 1)


@pytest.mark.parametrize("continuous", [False, True])
@check("E19")
def test_a_batch_that_cannot_be_acknowledged_ends_the_loop_when_its_items_have_ended(
    variant: Run, continuous: bool
) -> None:
    script, source = Script(), Together(items(6), fails=True)
    run = run_script(variant, script, source, together(continuous, size=4), task=default_handlers(variant, script))
    assert isinstance(run.error, FetchException)
    assert "cannot acknowledge" in str(run.error)
    assert run.error.report is not None
    assert run.error.report.unfinished == 0
    refused = run_script(variant, Script(), Cut(items(1)), together(continuous))
    assert isinstance(refused.error, InvalidInputError)
    assert "ack_transactions" in str(refused.error)


@pytest.mark.parametrize("continuous", [False, True])
@check("E15")
def test_items_that_succeeded_are_acknowledged_when_their_batch_is_given_up(variant: Run, continuous: bool) -> None:
    script, source = Script(), Together(items(3))
    script.will_process("t-2", Does(takes=LONG, until=script.over))
    script.on_outcome = lambda outcome: outcome.transaction.transaction_id == "t-1" and task.stop(now=True)
    task = default_handlers(variant, script)
    run = run_script(variant, script, source, together(continuous), task=task)
    assert (run.report.ending, run.report.unfinished) == (Ending.STOPPED, 1)
    assert source.acknowledged == [["t-0", "t-1"]]
    assert ItemStatus.UNFINISHED in run.statuses
