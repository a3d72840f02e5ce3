"""A task and a source that follow a script, in both variants of the engine, and record everything."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol, TypeVar

import pytest

from pipeline.consumer_engine.bounded import CallResult
from pipeline.consumer_engine.consumer import AsyncConsumerMixin, ConsumerMixin
from pipeline.consumer_engine.errors import TransactionException
from pipeline.consumer_engine.lifecycle import ItemOutcome, ItemStatus, LoopReport, Step
from pipeline.consumer_engine.policies import (
    BatchPolicy,
    ConcurrencyPolicy,
    ConsumerLoopPolicy,
    ConsumerPolicy,
    ConsumerSteps,
    EmptyQueuePolicy,
    ExceptionPolicy,
    FetchPolicy,
    ProcessPolicy,
    RetryPolicy,
    SuccessPolicy,
)
from pipeline.consumer_engine.telemetry import PROCESS_WIDE, Telemetry
from pipeline.consumer_engine.transactions import Transaction
from tests.support.wait import wait_for

T = TypeVar("T")

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
#: Seconds that are waited out, and that other calls have to meet; and more, for a machine that stood still.
FAIR, LONGER = 0.5, (2.0, 4.0)


def item(transaction_id: str, payload: Any = None, **fields: Any) -> Transaction:
    return Transaction(transaction_id=transaction_id, payload=payload, created_at=NOON, **fields)


def items(count: int, start: int = 0) -> list[Transaction]:
    return [item(f"t-{number}") for number in range(start, start + count)]


@dataclass(frozen=True)
class Does:
    """What one call does: takes its time, then raises or returns. ``act`` is called in the middle of it."""

    takes: float = 0.0
    until: threading.Event | None = None  #: ends what it takes before its time
    raises: BaseException | None = None
    returns: Any = None
    act: Callable[[], Any] | None = None
    is_stubborn: bool = False  #: goes on when it is cancelled


FINE = Does()


@dataclass
class Script:
    """What each step does for each item: its calls in order, the last one again and again."""

    steps: dict[tuple[Step, str], Sequence[Does]] = field(default_factory=dict)
    always: dict[Step, Does] = field(default_factory=dict)
    begun: list[tuple[Step, str]] = field(default_factory=list)
    finished: list[tuple[Step, str]] = field(default_factory=list)
    errors: list[tuple[str, TransactionException]] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)
    running: Counter[str] = field(default_factory=Counter)
    peak: int = 0
    overlaps: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    on_outcome: Callable[[ItemOutcome], Any] = lambda _: None  #: called with every outcome
    over: threading.Event = field(default_factory=threading.Event)  #: set when the loop has ended

    def will(self, step: Step, transaction_id: str, *does: Does) -> "Script":
        self.steps[step, transaction_id] = does
        return self

    def will_process(self, transaction_id: str, *does: Does) -> "Script":
        return self.will(Step.PROCESS, transaction_id, *does)

    def count(self, step: Step, transaction_id: str | None = None) -> int:
        return sum(s is step and transaction_id in (None, t) for s, t in self.begun)

    def enter(self, step: Step, transaction_id: str) -> Does:
        with self.lock:
            calls = self.count(step, transaction_id)
            self.begun.append((step, transaction_id))
            self.overlaps += self.running[transaction_id] > 0
            self.running[transaction_id] += 1
            self.peak = max(self.peak, sum(self.running.values()))
            planned = self.steps.get((step, transaction_id)) or [self.always.get(step, FINE)]
            return planned[min(calls, len(planned) - 1)]

    def leave(self, step: Step, transaction_id: str, *, is_done: bool) -> None:
        with self.lock:
            self.running[transaction_id] -= 1
            if is_done:
                self.finished.append((step, transaction_id))

    def settle(self, does: Does) -> Any:
        if does.act is not None:
            does.act()
        if does.raises is not None:
            raise does.raises
        return does.returns


class Begun(threading.Event):
    """Set as soon as so many items have begun."""

    def __init__(self, script: Script, count: int) -> None:
        super().__init__()
        self.script, self.wanted = script, count

    def is_set(self) -> bool:
        return self.script.count(Step.PROCESS) >= self.wanted

    def wait(self, timeout: float | None = None) -> bool:
        return wait_for(self.is_set, within=timeout or 30)


class Threaded(ConsumerMixin):
    """Follows a script, with threads."""

    def __init__(self, script: Script) -> None:
        self.script = script

    def _call(self, step: Step, transaction: Transaction) -> Any:
        does = self.script.enter(step, transaction.transaction_id)
        is_done = False
        try:
            if does.takes:
                (does.until or threading.Event()).wait(does.takes)
            is_done = True
            return self.script.settle(does)
        finally:
            self.script.leave(step, transaction.transaction_id, is_done=is_done)

    def process_transaction(self, transaction: Transaction) -> Any:
        return self._call(Step.PROCESS, transaction)

    def handle_transaction_success(self, transaction: Transaction, result: Any) -> Any:
        self.script.results[transaction.transaction_id] = result
        return self._call(Step.SUCCESS, transaction)

    def handle_transaction_exception(self, transaction: Transaction, error: TransactionException) -> Any:
        self.script.errors.append((transaction.transaction_id, error))
        return self._call(Step.EXCEPTION, transaction)


class Awaited(AsyncConsumerMixin):
    """Follows a script, with asyncio."""

    def __init__(self, script: Script) -> None:
        self.script = script

    async def _call(self, step: Step, transaction: Transaction) -> Any:
        does = self.script.enter(step, transaction.transaction_id)
        is_done = False
        try:
            if does.takes:
                await sleep_as_scripted(does)
            is_done = True
            return self.script.settle(does)
        finally:
            self.script.leave(step, transaction.transaction_id, is_done=is_done)

    async def process_transaction(self, transaction: Transaction) -> Any:
        return await self._call(Step.PROCESS, transaction)

    async def handle_transaction_success(self, transaction: Transaction, result: Any) -> Any:
        self.script.results[transaction.transaction_id] = result
        return await self._call(Step.SUCCESS, transaction)

    async def handle_transaction_exception(self, transaction: Transaction, error: TransactionException) -> Any:
        self.script.errors.append((transaction.transaction_id, error))
        return await self._call(Step.EXCEPTION, transaction)


async def sleep_as_scripted(does: Does) -> None:
    ends_at = time.monotonic() + does.takes
    while (rest := ends_at - time.monotonic()) > 0 and not (does.until and does.until.is_set()):
        try:
            await asyncio.sleep(min(rest, 0.01) if does.until else rest)
        except asyncio.CancelledError:
            if not does.is_stubborn:
                raise


Given = Sequence[Transaction] | Does


class Batches:
    """A source that gives out its batches, one per fetch, and then nothing; it cuts none of them to size."""

    def __init__(self, *given: Given) -> None:
        self.given = list(given)
        self.asked: list[int] = []
        self.extra: list[dict[str, Any]] = []

    def _next(self, batch_size: int, extra: dict[str, Any]) -> Given:
        self.asked.append(batch_size)
        self.extra.append(extra)
        return self.given.pop(0) if self.given else ()

    def fetch_transactions(self, batch_size: int, /, **extra: Any) -> Any:
        given = self._next(batch_size, extra)
        if not isinstance(given, Does):
            return given
        (given.until or threading.Event()).wait(given.takes)
        return self._settle(given)

    async def fetch_transactions_async(self, batch_size: int, /, **extra: Any) -> Any:
        given = self._next(batch_size, extra)
        if not isinstance(given, Does):
            return given
        await sleep_as_scripted(given)
        return self._settle(given)

    def _settle(self, given: Does) -> Any:
        if given.act is not None:
            given.act()
        if given.raises is not None:
            raise given.raises
        return given.returns or ()


class Cut(Batches):
    """A source with a long line of items, which gives out as many as it is asked for."""

    def __init__(self, line: Iterable[Transaction]) -> None:
        super().__init__()
        self.line = list(line)

    def _next(self, batch_size: int, extra: dict[str, Any]) -> Given:
        super()._next(batch_size, extra)
        batch, self.line = self.line[:batch_size], self.line[batch_size:]
        return batch


class Run(Protocol):
    """How a variant is run in a test."""

    name: str

    def task(self, script: Script, telemetry: Telemetry = PROCESS_WIDE) -> Any: ...

    def consume(self, task: Any, **arguments: Any) -> LoopReport: ...

    def process(self, task: Any, transaction: Transaction) -> ItemOutcome: ...


class ThreadsRun:
    name = "threads"

    def task(self, script: Script, telemetry: Telemetry = PROCESS_WIDE) -> Any:
        return _with_telemetry(Threaded(script), telemetry)

    def consume(self, task: Any, **arguments: Any) -> LoopReport:
        try:
            report: LoopReport = task.consume_transactions(**arguments)
        finally:
            _mark_over(task)
        return report

    def process(self, task: Any, transaction: Transaction) -> ItemOutcome:
        outcome: ItemOutcome = task.start_processing(transaction)
        return outcome


class AsyncRun:
    name = "asyncio"

    def task(self, script: Script, telemetry: Telemetry = PROCESS_WIDE) -> Any:
        return _with_telemetry(Awaited(script), telemetry)

    def consume(self, task: Any, **arguments: Any) -> LoopReport:
        async def run() -> LoopReport:
            try:
                report: LoopReport = await task.consume_transactions(**arguments)
            finally:
                self.orphans = [one for one in asyncio.all_tasks() if one is not asyncio.current_task()]
                _mark_over(task)
            return report

        return asyncio.run(run())

    def process(self, task: Any, transaction: Transaction) -> ItemOutcome:
        outcome: ItemOutcome = asyncio.run(task.start_processing(transaction))
        return outcome


def _mark_over(task: Any) -> None:
    if isinstance(task, Threaded | Awaited):
        task.script.over.set()


def _with_telemetry(task: Any, telemetry: Telemetry) -> Any:
    task.telemetry = telemetry
    return task


VARIANTS: list[Run] = [ThreadsRun(), AsyncRun()]


def check(*ids: str) -> pytest.MarkDecorator:
    """The test is run with both variants, under the numbers of the checks it makes."""
    return pytest.mark.parametrize(
        "variant", [pytest.param(variant, id=f"{'+'.join(ids)}-{variant.name}") for variant in VARIANTS]
    )


def policy(
    *,
    fetch: RetryPolicy | None = None,
    process: RetryPolicy | None = None,
    success: RetryPolicy | None = None,
    exception: RetryPolicy | None = None,
    extra: dict[str, Any] | None = None,
    concurrency: int = 1,
    size: int = 100,
    empty: EmptyQueuePolicy | None = None,
    **loop: Any,
) -> ConsumerPolicy:
    """A policy with what a test cares about."""
    none = RetryPolicy()
    return ConsumerPolicy(
        loop=ConsumerLoopPolicy(
            batch=BatchPolicy(size=size),
            concurrency=ConcurrencyPolicy(value=concurrency),
            empty_queue=empty or EmptyQueuePolicy(),
            **loop,
        ),
        steps=ConsumerSteps(
            fetch=FetchPolicy(retry=fetch or none, extra=extra or {}),
            process=ProcessPolicy(retry=process or none),
            success=SuccessPolicy(retry=success or none),
            exception=ExceptionPolicy(retry=exception or none),
        ),
    )


@dataclass
class ScriptRun:
    """A whole run: what the script remembers, the outcomes, and the time it took."""

    script: Script
    source: Batches
    outcomes: list[ItemOutcome] = field(default_factory=list)
    report: LoopReport = field(default_factory=LoopReport)
    seconds: float = 0.0
    error: BaseException | None = None
    task: Any = None

    @property
    def statuses(self) -> list[ItemStatus]:
        return [outcome.status for outcome in self.outcomes]


def run_script(
    variant: Run,
    script: Script,
    source: Batches,
    policy: ConsumerPolicy,
    telemetry: Telemetry = PROCESS_WIDE,
    task: Any = None,
) -> ScriptRun:
    """Run a script to its end; an error of the loop is kept, not raised."""
    run = ScriptRun(script, source, task=task or variant.task(script, telemetry))
    begun = time.monotonic()

    def record(outcome: ItemOutcome) -> None:
        run.outcomes.append(outcome)
        script.on_outcome(outcome)

    try:
        run.report = variant.consume(run.task, source=source, policy=policy, on_outcome=record)
    except Exception as error:  # noqa: BLE001 - the test checks it
        run.error = error
    run.seconds = time.monotonic() - begun
    return run


def with_time(run: Callable[[float], T], had_time: Callable[[T], bool]) -> T:
    """Run with a bound that is long enough for the events within it."""
    made = run(FAIR)
    for bound in LONGER:
        if had_time(made):
            break
        made = run(bound)
    return made


def answer_to(request: Any, ended: CallResult) -> Any:
    """Return what a driver sends back to an item that asked for a call."""
    return (ended.value, ended.error) if type(request) is tuple else ended
