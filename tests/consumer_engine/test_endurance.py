"""Ten thousand items, and nothing left over: no thread, no task, no memory."""

import gc
import logging
import threading
import tracemalloc

import pytest

from pipeline.consumer_engine.policies import RetryPolicy
from pipeline.consumer_engine.transactions import Transaction
from tests.consumer_engine.scripted_tasks import AsyncRun, Batches, Does, Run, Script, check, item, policy
from tests.support.rule import rule
from tests.support.wait import wait_for

MANY = 10_000


class Forgetful(Script):
    """A script that remembers nothing, so that all that grows is the engine's."""

    def enter(self, step: object, transaction_id: str) -> Does:
        number = int(transaction_id)
        if step == "process" and number % 100 == 7:
            raise ValueError("one in a hundred")
        return Does()

    def leave(self, *_: object, **__: object) -> None: ...


class Endless(Batches):
    """Makes its items when it is asked for them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.made, self.count, self.sizes = 0, count, list[int]()

    def _next(self, batch_size: int, _extra: dict[str, object]) -> list[Transaction]:
        if self.made in (self.count // 5, self.count * 4 // 5):
            gc.collect()
            self.sizes.append(tracemalloc.get_traced_memory()[0])
        size = min(batch_size, self.count - self.made)
        self.made += size
        return [item(str(self.made - n)) for n in range(size)]


@rule("E-8", "E-32")
@check("E15", "E20")
def test_ten_thousand_items_leave_no_thread_no_task_and_no_memory_behind(
    variant: Run, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="pipeline.consumer_engine")  # what is captured is kept
    before = threading.active_count()
    task, source = variant.task(Forgetful()), Endless(MANY)
    task.script.errors = task.script.results = _Nowhere()
    tracemalloc.start()
    try:
        report = variant.consume(task, source=source, policy=policy(concurrency=8, size=100))
    finally:
        tracemalloc.stop()
    assert (report.processed, report.failed, report.batches) == (MANY, MANY // 100, MANY // 100)
    early, late = source.sizes
    assert late - early < 100_000  # bytes, over six thousand items
    wait_for(lambda: threading.active_count() <= before)
    if isinstance(variant, AsyncRun):
        assert variant.orphans == []
    assert len(task._state.in_flight) == 0


@check("E13")
def test_a_thousand_calls_with_limits_share_their_threads(variant: Run) -> None:
    before, seen = threading.active_count(), [0]
    script = Script()
    task = variant.task(script)

    def observe(_: object) -> None:
        seen[0] = max(seen[0], threading.active_count())

    limited = policy(concurrency=4, size=50, process=RetryPolicy(timeout=30), transaction_timeout=60)
    source = Endless(1000)
    tracemalloc.start()
    try:
        variant.consume(task, source=source, policy=limited, on_outcome=observe)
    finally:
        tracemalloc.stop()
    assert seen[0] - before <= 2 * 4  # a worker and the thread beside it
    wait_for(lambda: threading.active_count() <= before)


class _Nowhere(dict):  # type: ignore[type-arg]
    """Takes what it is given and keeps nothing."""

    def __setitem__(self, *_: object) -> None: ...

    def append(self, _: object) -> None: ...
