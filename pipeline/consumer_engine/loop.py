"""The loop that fetches items and has them worked on. A generator: whoever drives it brings threads or asyncio.

A batch is worked on whole before the next is fetched, and a free place within it is taken at once by
the next item. Nothing that was fetched is dropped: it is settled, or counted as left when the loop is
told to end now, its time is up, or code that was left behind holds its id for too long.
"""

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, cast

from pipeline.consumer_engine.attempts import EngineContext, Request, StepResult, StepTarget, run_attempts
from pipeline.consumer_engine.errors import (
    AbandonedCallsException,
    ConsumerLoopTimeoutException,
    ExceptionType,
    FetchException,
    FetchTimeoutException,
    error_message,
    printable_id,
)
from pipeline.consumer_engine.items import ConsumerSetup, WorkItem
from pipeline.consumer_engine.lifecycle import (
    GRACE,
    Ending,
    ItemOutcome,
    ItemStatus,
    LoopReport,
    Step,
    fetch_size,
    max_abandoned_calls,
    max_id_wait,
    pause_when_empty,
    pause_when_stuck,
)
from pipeline.consumer_engine.transactions import Transaction
from pipeline.domain.errors import quantity

log = logging.getLogger("pipeline.consumer_engine")


class Start(NamedTuple):
    """Have these items worked on, in this order, each as soon as a place is free, and tell their outcomes."""

    items: list[WorkItem]


class ItemDone(NamedTuple):
    """An item that was started has ended."""

    item: WorkItem
    outcome: ItemOutcome


class Wait(NamedTuple):
    """Send back what there is to hear, in its order: Settled, Notice, or errors of the engine itself. Nothing when
    nothing came in time."""

    seconds: float | None


class Abandon(NamedTuple):
    """Stop what is being worked on, as far as it can be stopped, and wait for none of it."""


class LoopSignal(Enum):
    """What a loop may be told besides outcomes."""

    ID_FREED = "an id that was waited for may be free"
    STOP_REQUESTED = "the task was asked to end"


LoopGenerator = Generator[Request, Any, Any]


@dataclass(slots=True, kw_only=True)
class Loop:
    """One go of a consumer."""

    setup: ConsumerSetup
    ends_at: float | None  #: on the clock of the host
    post: Callable[[LoopSignal], None]  #: how to wake the loop; from any thread
    on_outcome: Callable[[ItemOutcome], None] = lambda _: None
    report: LoopReport = field(default_factory=LoopReport)
    in_progress: dict[int, WorkItem] = field(default_factory=dict)
    deferred: list[WorkItem] = field(default_factory=list)
    has_warned: bool = False  #: of code that was left behind

    @property
    def context(self) -> EngineContext:
        """What surrounds the attempts of this loop."""
        return self.setup.context

    def post_id_freed(self) -> None:
        """An id that a deferred item waits for may be free."""
        self.post(LoopSignal.ID_FREED)

    def time_left(self) -> float | None:
        """Seconds until the loop's time is up; None when it has no limit."""
        return None if self.ends_at is None else max(0.0, self.ends_at - self.context.clock())


class _LoopTimedOut(Exception):  # noqa: N818 - a turn of the loop, not an error
    """The time of the loop is up."""


class _StopNow(Exception):  # noqa: N818 - a turn of the loop, not an error
    """The task was asked to end now."""


class _TooManyAbandoned(Exception):  # noqa: N818 - a turn of the loop, not an error
    """Too many calls were left behind."""


def run_loop(loop: Loop) -> Generator[Request, Any, LoopReport]:
    """Fetch and settle until there is a reason to end, or raise why that is not possible."""
    with loop.context.observer.loop() as span:
        try:
            loop.report.ending = yield from _run_until_end(loop)
        except Exception as error:
            loop.context.observer.mark_failed(span, error)
            raise
        finally:
            loop.context.is_over = True  # whatever was raised: no attempt, and so no handler, begins any more
    return loop.report


def _run_until_end(loop: Loop) -> Generator[Request, Any, Ending]:
    try:
        return (yield from _run_batches(loop))
    except _LoopTimedOut:
        yield from _abandon_open(loop)
        raise _loop_timeout_error(loop) from None
    except _TooManyAbandoned:
        yield from _abandon_open(loop)
        raise _abandoned_calls_error(loop) from None
    except _StopNow:
        yield from _abandon_open(loop)
        return Ending.STOPPED


def _run_batches(loop: Loop) -> Generator[Request, Any, Ending]:
    policy, empties, stuck = loop.setup.policy.loop, 0, 0
    while not loop.context.stop.is_requested:
        wanted = fetch_size(policy, loop.report.fetched)
        if wanted == 0:
            return Ending.LIMIT
        _raise_if_over(loop)
        batch = yield from _fetch(loop, wanted)
        if batch:
            empties, before = 0, loop.report.processed
            yield from _process_batch(loop, batch)
            del batch  # what was settled need not live until the next fetch has returned
            stuck = 0 if loop.report.processed > before else stuck + 1
            yield from _pause(loop, pause_when_stuck(policy, stuck) if stuck else 0.0)
            continue
        empties += 1
        pause = pause_when_empty(policy, empties)
        if pause is None and not loop.context.stop.is_requested:
            return Ending.NOTHING_LEFT
        yield from _pause(loop, pause or 0.0)
    return Ending.STOPPED


def _fetch(loop: Loop, wanted: int) -> Generator[Request, Any, Sequence[Transaction]]:
    """The next batch exactly as the source gave it; empty also when the task is asked to end before one came."""
    subject = StepTarget(ends_at=loop.ends_at)
    ended = yield from run_attempts(loop.context, loop.setup.steps[Step.FETCH], (wanted,), subject)
    if ended.is_stopped:
        if ended.attempts:
            why = "it did not return" if ended.failure is None else error_message(ended.failure)
            log.warning("%s: asked to end, it gave up its fetch: %s", loop.context.observer.task, why)
        return ()
    if ended.is_past_deadline:
        raise _LoopTimedOut
    if ended.failure is not None:
        raise _fetch_error(loop, ended) from (ended.error or ended.failure)
    return _check_batch(loop, wanted, ended.value)


def _fetch_error(loop: Loop, ended: StepResult) -> FetchException:
    assert ended.failure is not None
    kind = FetchTimeoutException if ended.failure.category is ExceptionType.TIMEOUT else FetchException
    words = (
        f"{loop.context.observer.task} cannot fetch: {error_message(ended.failure)} (attempt "
        f"{ended.attempts}, the last)."
    )
    settled = quantity(loop.report.processed, "item")
    return kind(f"{words} Settled before: {settled}. Look at the source, then start it again.", loop.report)


def _check_batch(loop: Loop, wanted: int, given: Any) -> Sequence[Transaction]:
    """What the source gave, if it is made of items. More than was asked for is noticed, and worked on."""
    batch: Any = () if given is None else given
    found = None if isinstance(batch, Sequence) else f"something of type {type(batch).__name__}"
    for item in batch if found is None else ():
        if not isinstance(item, Transaction):
            found = f"something of type {type(item).__name__} among its items"
    if found is not None:
        words = f"The source of {loop.context.observer.task} gave {found}; expected a list of Transaction."
        raise FetchException(f"{words} Nothing of it was worked on.", loop.report)
    loop.context.observer.count("pipeline.consumer_engine.batch.size", len(batch))
    loop.report.fetched += len(batch)
    loop.report.batches += bool(batch)
    if len(batch) > wanted:
        loop.context.observer.count("pipeline.consumer_engine.oversize_batches")
        words = "%s: the source gave %s when %d were asked for; all are worked on, for it may not give them again"
        log.warning(words, loop.context.observer.task, quantity(len(batch), "item"), wanted)
    return cast("Sequence[Transaction]", batch)


def _process_batch(loop: Loop, batch: Sequence[Transaction]) -> LoopGenerator:
    """Have every item of a batch worked on, and wait for all of them."""
    in_flight = loop.setup.in_flight
    loop.deferred = [WorkItem(transaction, in_flight) for transaction in batch]
    _raise_if_over(loop)
    yield _start(loop, loop.deferred)
    if loop.deferred:
        loop.context.observer.count("pipeline.consumer_engine.deferred", len(loop.deferred))
    while loop.in_progress:
        yield from _receive(loop, loop.time_left())
    if loop.deferred:
        yield from _wait_for_deferred(loop)


def _start(loop: Loop, items: Sequence[WorkItem]) -> Start:
    """What can be started of these items. The others wait while somebody works on one of the same id."""
    in_flight, free = loop.setup.in_flight, []
    loop.deferred = []
    for item in items:
        if in_flight.take(item.transaction.transaction_id, loop.post_id_freed):
            loop.in_progress[id(item)] = item
            free.append(item)
        else:
            loop.deferred.append(item)
    return Start(free)


def _receive(loop: Loop, seconds: float | None) -> LoopGenerator:
    """Take the notices that come in time."""
    notices = yield Wait(seconds)
    for notice in notices:
        if type(notice) is ItemDone:
            _count_outcome(loop, notice)
        elif isinstance(notice, BaseException):
            raise notice
    if loop.deferred and LoopSignal.ID_FREED in notices:
        yield _start(loop, loop.deferred)
    _raise_if_over(loop)


def _raise_if_over(loop: Loop) -> None:
    """Turn to the end of the loop if there is a reason to."""
    if loop.context.stop.is_immediate:
        raise _StopNow
    if loop.ends_at is not None and loop.context.clock() >= loop.ends_at:
        raise _LoopTimedOut
    behind, policy = loop.context.abandoned.count, loop.setup.policy.loop
    if behind > policy.concurrency.value and not loop.has_warned:
        loop.has_warned = True
        words = "%s: %s left behind after their time was up and still running, more than items are worked on at once"
        log.warning(words, loop.context.observer.task, quantity(behind, "call"))
    if behind > max_abandoned_calls(policy):
        raise _TooManyAbandoned


def _count_outcome(loop: Loop, settled: ItemDone) -> None:
    outcome = settled.outcome
    loop.in_progress.pop(id(settled.item), None)
    loop.report.add(outcome)
    if outcome.status is ItemStatus.UNFINISHED:
        loop.context.observer.count("pipeline.consumer_engine.transactions", status=ItemStatus.UNFINISHED.value)
    loop.on_outcome(outcome)


def _wait_for_deferred(loop: Loop) -> LoopGenerator:
    """Wait for code that was left behind on the ids of deferred items, with patience but not for ever, and no
    longer than the task is wanted. Where somebody waited in vain before nobody waits again."""
    while loop.deferred:
        yield _start(loop, loop.deferred)  # one may be free by now, though nobody has said so yet
        if not loop.in_progress:
            yield from _wait_for_free_id(loop)
        if not loop.in_progress:
            _give_up_stuck(loop)
        while loop.in_progress:
            yield from _receive(loop, loop.time_left())


def _give_up_stuck(loop: Loop) -> None:
    for item in loop.deferred:
        loop.setup.in_flight.mark_stuck(item.transaction.transaction_id)
        words = "%s: transaction %s is left: code that was left behind still works on one of the same id"
        log.warning(words, loop.context.observer.task, printable_id(item.transaction.transaction_id))
        _count_unfinished(loop, item)
    loop.deferred = []


def _wait_for_free_id(loop: Loop) -> LoopGenerator:
    """Wait until one of the deferred items could be started, or patience with code that was left behind ends.

    A worker of another loop of the same task is waited for as long as it takes: its own policy limits it.
    """
    in_flight, seconds = loop.setup.in_flight, max_id_wait(loop.setup.policy.loop)
    until, is_told = loop.context.clock() + seconds, False
    while loop.deferred and not loop.in_progress and not loop.context.stop.is_requested:
        now, ids = loop.context.clock(), [item.transaction.transaction_id for item in loop.deferred]
        if any(in_flight.has_worker(each) for each in ids):
            until = now + seconds
        elif now >= until or all(in_flight.is_stuck(each) for each in ids):
            return
        elif not is_told and until - now < seconds:
            words = "%s: %s waiting for code that was left behind on the same id, for %g s at most"
            log.warning(words, loop.context.observer.task, quantity(len(ids), "item"), seconds)
            is_told = True
        rest, left = until - now if is_told else GRACE, loop.time_left()
        yield from _receive(loop, rest if left is None else min(rest, left))


def _pause(loop: Loop, pause: float) -> LoopGenerator:
    """Rest after an empty fetch, until the task is asked to end."""
    if pause > 0:
        loop.context.observer.count("pipeline.consumer_engine.backoff", pause, step="empty")
    until = loop.context.clock() + pause
    while not loop.context.stop.is_requested and (rest := until - loop.context.clock()) > 0:
        left = loop.time_left()
        yield from _receive(loop, rest if left is None else min(rest, left))


def _abandon_open(loop: Loop) -> LoopGenerator:
    """Give up what is open: from here on no handler begins for it. What has ended already still counts, and what a
    handler has begun to settle gets a moment to be settled."""
    loop.context.is_over = True
    yield from _drain_outcomes(loop, 0.0)
    for item in (*(item for item in [*loop.in_progress.values()] if item.claim()), *loop.deferred):
        _count_unfinished(loop, item)
    until = loop.context.clock() + GRACE
    while loop.in_progress and (rest := until - loop.context.clock()) > 0:
        yield from _drain_outcomes(loop, rest)
    loop.report.in_doubt = len(loop.in_progress)
    for item in [*loop.in_progress.values()]:
        _count_unfinished(loop, item)
    loop.in_progress, loop.deferred = {}, []
    yield Abandon()


def _drain_outcomes(loop: Loop, seconds: float) -> LoopGenerator:
    """Count the outcomes that come in time, of those that are still waited for."""
    for notice in (yield Wait(seconds)):
        if type(notice) is ItemDone and id(notice.item) in loop.in_progress:
            _count_outcome(loop, notice)


def _count_unfinished(loop: Loop, item: WorkItem) -> None:
    _count_outcome(loop, ItemDone(item, ItemOutcome(item.transaction, ItemStatus.UNFINISHED, item.attempts)))


def _loop_timeout_error(loop: Loop) -> ConsumerLoopTimeoutException:
    loop.context.observer.count("pipeline.consumer_engine.timeouts", scope="loop")
    timeout, report = loop.setup.policy.loop.timeout, loop.report
    words = f"{loop.context.observer.task} was not done within {timeout:g} s, the time of its loop"
    return ConsumerLoopTimeoutException(f"{words}; {_counts_text(report)}. Give it more time, or fewer items.", report)


def _abandoned_calls_error(loop: Loop) -> AbandonedCallsException:
    most, task = max_abandoned_calls(loop.setup.policy.loop), loop.context.observer.task
    words = f"{task} has left more than {most} calls behind that outlived their limits and still run"
    todo = "Give the code limits of its own that are below those of the policy, or let it look at current_attempt()"
    return AbandonedCallsException(f"{words}; {_counts_text(loop.report)}. {todo}; then start it again.", loop.report)


def _counts_text(report: LoopReport) -> str:
    doubt = f", {report.in_doubt} of them in doubt: a handler had begun to settle them" if report.in_doubt else ""
    return f"settled: {quantity(report.processed, 'item')}, left unacknowledged: {report.unfinished}{doubt}"
