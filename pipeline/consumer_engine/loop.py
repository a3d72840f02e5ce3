"""The loop that fetches items and has them processed. A generator: a driver brings threads or asyncio.

A batch is processed whole before the next fetch. With ``loop.continuous``, the next batch is fetched as soon as a
worker is free. Items start in the order of the source, each as soon as a worker is free. No fetched item is lost.
It is settled, or counted as unfinished when

- a stop request says now,
- the time of the loop is up, or
- an abandoned call holds its id for too long.
"""

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, cast

from pipeline.consumer_engine.attempts import (
    EngineContext,
    Invoke,
    Request,
    StepGenerator,
    StepResult,
    StepTarget,
    run_attempts,
)
from pipeline.consumer_engine.errors import (
    AbandonedCallsException,
    ConsumerLoopTimeoutException,
    ExceptionType,
    FetchException,
    FetchTimeoutException,
    TransactionException,
    error_message,
    printable_id,
)
from pipeline.consumer_engine.items import Batch, ConsumerSetup, WorkItem
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
    """Process these items in order, each when a worker is free, and report them."""

    items: list[WorkItem]


class StartFetch(NamedTuple):
    """Run the attempts of a fetch beside the loop, and report a FetchDone."""

    attempts: StepGenerator


class FetchDone(NamedTuple):
    """A fetch beside the loop has ended."""

    ended: StepResult


class ItemDone(NamedTuple):
    """An item that was started has ended."""

    item: WorkItem
    outcome: ItemOutcome


class Wait(NamedTuple):
    """Send back what has arrived, in order; an empty list when nothing came in time.

    Arrivals are ItemDone, FetchDone, LoopSignal, or errors of the engine itself.
    """

    seconds: float | None


class Abandon(NamedTuple):
    """Stop the items in progress as far as possible, and wait for none."""


class LoopSignal(Enum):
    """Signals to a loop besides outcomes."""

    ID_FREED = "the id of a deferred item may be free"
    STOP_REQUESTED = "the task received a stop request"


LoopGenerator = Generator[Request, Any, Any]


@dataclass(slots=True, kw_only=True)
class Loop:
    """One run of a consumer's loop."""

    setup: ConsumerSetup
    ends_at: float | None  #: on the clock of the context
    post: Callable[[LoopSignal], None]  #: wakes the loop, from any thread
    on_outcome: Callable[[ItemOutcome], None] = lambda _: None
    report: LoopReport = field(default_factory=LoopReport)
    in_progress: dict[int, WorkItem] = field(default_factory=dict)
    deferred: list[WorkItem] = field(default_factory=list)
    has_warned: bool = False  #: about abandoned calls
    fetched: StepResult | None = None  #: a fetch beside the loop that has ended
    fetching_since: float | None = None  #: on the clock of the context
    settled: list[list[Transaction]] = field(default_factory=list)  #: of batches that have ended, to be acknowledged
    problem: FetchException | None = None  #: of the source; raised when the open items have ended

    @property
    def context(self) -> EngineContext:
        """The context of the attempts of this loop."""
        return self.setup.context

    def post_id_freed(self) -> None:
        """Signal that the id of a deferred item may be free."""
        self.post(LoopSignal.ID_FREED)

    def stalled(self, seconds: float) -> str | None:
        """Return what runs for longer than so many seconds: the fetch or an item. Any thread may call it."""
        now, began = self.context.clock(), self.fetching_since
        if began is not None and now - began > seconds:
            return f"its fetch runs for {now - began:.0f} s"
        for item in [*self.in_progress.values()]:
            if item.begun_at is not None and now - item.begun_at > seconds:
                name = printable_id(item.transaction.transaction_id)
                return f"transaction {name} is in progress for {now - item.begun_at:.0f} s"
        return None

    def time_left(self) -> float | None:
        """Return the seconds until the loop's time is up; None without a limit."""
        return None if self.ends_at is None else max(0.0, self.ends_at - self.context.clock())


class _LoopTimedOut(Exception):  # noqa: N818 - control flow, not an error
    """The time of the loop is up."""


class _StopNow(Exception):  # noqa: N818 - control flow, not an error
    """A stop request with ``now``."""


class _TooManyAbandoned(Exception):  # noqa: N818 - control flow, not an error
    """Too many calls are abandoned and still run."""


def run_loop(loop: Loop) -> Generator[Request, Any, LoopReport]:
    """Fetch and process until there is a reason to end, or raise why that failed."""
    with loop.context.observer.loop() as span:
        try:
            loop.report.ending = yield from _run_until_end(loop)
        except Exception as error:
            loop.context.observer.mark_failed(span, error)
            raise
        finally:
            loop.context.is_over = True  # on every way out: no attempt, and so no handler, begins any more
    return loop.report


def _run_until_end(loop: Loop) -> Generator[Request, Any, Ending]:
    try:
        run = _run_continuously if loop.setup.policy.loop.continuous else _run_batches
        return (yield from run(loop))
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
    policy, empty_fetches, stuck = loop.setup.policy.loop, 0, 0
    while not loop.context.stop.is_requested:
        wanted = fetch_size(policy, loop.report.fetched)
        if wanted == 0:
            return Ending.LIMIT
        _raise_if_over(loop)
        batch = yield from _fetch(loop, wanted)
        if batch:
            empty_fetches, before = 0, loop.report.processed
            yield from _begin_batch(loop, batch)
            yield from _finish_open(loop)
            if loop.problem is not None:
                raise loop.problem
            del batch  # free the settled items before the next fetch
            stuck = 0 if loop.report.processed > before else stuck + 1
            yield from _pause(loop, pause_when_stuck(policy, stuck) if stuck else 0.0)
            continue
        empty_fetches += 1
        pause = pause_when_empty(policy, empty_fetches)
        if pause is None and not loop.context.stop.is_requested:
            return Ending.NOTHING_LEFT
        yield from _pause(loop, pause or 0.0)
    return Ending.STOPPED


def _fetch(loop: Loop, wanted: int) -> Generator[Request, Any, Sequence[Transaction]]:
    """Return the next batch as the source gave it; empty after a stop request."""
    loop.fetching_since = loop.context.clock()
    ended = yield from _fetch_attempts(loop, wanted)
    return _fetched_batch(loop, wanted, ended)


def _fetch_attempts(loop: Loop, wanted: int) -> StepGenerator:
    target = StepTarget(ends_at=loop.ends_at)
    return run_attempts(loop.context, loop.setup.steps[Step.FETCH], (wanted,), target)


def _fetched_batch(loop: Loop, wanted: int, ended: StepResult) -> Sequence[Transaction]:
    """Return the batch of a fetch that has ended, or raise why there is none."""
    loop.fetching_since = None
    if ended.is_stopped:
        if ended.attempts:
            reason = "it did not return" if ended.failure is None else error_message(ended.failure)
            log.warning("%s: gave up its fetch after a stop request: %s", loop.context.observer.task, reason)
        return ()
    if ended.is_past_deadline:
        raise _LoopTimedOut
    if ended.failure is not None:
        raise _fetch_error(loop, ended) from (ended.error or ended.failure)
    return _check_batch(loop, wanted, ended.value)


def _fetch_error(loop: Loop, ended: StepResult) -> FetchException:
    assert ended.failure is not None
    kind = FetchTimeoutException if ended.failure.category is ExceptionType.TIMEOUT else FetchException
    message = (
        f"{loop.context.observer.task} cannot fetch: {error_message(ended.failure)} (attempt {ended.attempts}, the "
        f"last). Settled before: {quantity(loop.report.processed, 'item')}. Check the source, then start it again."
    )
    return kind(message, loop.report)


def _check_batch(loop: Loop, wanted: int, given: Any) -> Sequence[Transaction]:
    """Return the batch if it is made of items. A batch that is too large is counted, logged and processed."""
    batch: Any = () if given is None else given
    found = None if isinstance(batch, Sequence) else f"something of type {type(batch).__name__}"
    for item in batch if found is None else ():
        if not isinstance(item, Transaction):
            found = f"something of type {type(item).__name__} among its items"
    if found is not None:
        message = f"The source of {loop.context.observer.task} gave {found}; expected a list of Transaction."
        raise FetchException(f"{message} Nothing of it was processed.", loop.report)
    loop.context.observer.count("pipeline.consumer_engine.batch.size", len(batch))
    loop.report.fetched += len(batch)
    loop.report.batches += bool(batch)
    if len(batch) > wanted:
        loop.context.observer.count("pipeline.consumer_engine.oversize_batches")
        message = "%s: the source gave %s instead of at most %d; all are processed, it may not give them out again"
        log.warning(message, loop.context.observer.task, quantity(len(batch), "item"), wanted)
    return cast("Sequence[Transaction]", batch)


@dataclass(slots=True)
class _Feed:
    """The state of a continuous fetch."""

    loop: Loop
    wanted: int = 0
    is_fetching: bool = False
    began_idle: bool = False  #: whether no item was open when the fetch began
    not_before: float = 0.0  #: no fetch begins earlier, on the clock of the context
    only_when_idle: bool = False  #: no fetch begins while items are open: the last one was empty
    empties: int = 0  #: empty fetches in a row
    stuck: int = 0  #: waits in a row for ids of abandoned calls after which no item had ended
    ending: Ending | None = None

    @property
    def is_over(self) -> bool:
        """Whether no other fetch begins."""
        return self.ending is not None or self.loop.problem is not None

    @property
    def has_room(self) -> bool:
        """Whether a worker is free and no fetched item waits for it."""
        places = 1 if self.only_when_idle else self.loop.setup.policy.loop.concurrency.value
        return len(self.loop.in_progress) < places and not self.loop.deferred

    def choose_ending(self) -> None:
        """End the fetches on a stop request, or at the limit."""
        if self.is_over:
            return
        if self.loop.context.stop.is_requested:
            self.ending = Ending.STOPPED
        elif not self.is_fetching and fetch_size(self.loop.setup.policy.loop, self.loop.report.fetched) == 0:
            self.ending = Ending.LIMIT

    def can_fetch(self) -> bool:
        """Return whether the next fetch may begin."""
        may_fetch = self.has_room and not (self.is_fetching or self.is_over)
        return may_fetch and self.loop.context.clock() >= self.not_before

    def begin(self) -> StartFetch:
        """Return the request for the next fetch."""
        loop = self.loop
        self.wanted, self.is_fetching = fetch_size(loop.setup.policy.loop, loop.report.fetched), True
        self.began_idle, loop.fetching_since = not loop.in_progress, loop.context.clock()
        return StartFetch(_fetch_attempts(loop, self.wanted))

    def seconds_to_wait(self) -> float | None:
        """Return how long the loop may wait for an arrival."""
        left = self.loop.time_left()
        if self.is_fetching or self.is_over or not self.has_room:
            return left
        pause = max(0.0, self.not_before - self.loop.context.clock())
        return pause if left is None else min(left, pause)

    def pause(self, seconds: float) -> None:
        """Begin no fetch for so many seconds."""
        self.not_before = self.loop.context.clock() + seconds if seconds > 0 else 0.0
        if seconds > 0:
            self.loop.context.observer.count("pipeline.consumer_engine.backoff", seconds, step="empty")

    def accept(self, ended: StepResult) -> Sequence[Transaction]:
        """Return the batch of a fetch that has ended. After an empty one decide when the next begins."""
        self.is_fetching, self.not_before, self.only_when_idle = False, 0.0, False
        try:
            batch = _fetched_batch(self.loop, self.wanted, ended)
        except FetchException as error:
            self.loop.problem = error
            return ()
        self.empties = 0 if batch else self.empties + 1
        if batch or ended.is_stopped:
            return batch
        pause = pause_when_empty(self.loop.setup.policy.loop, self.empties)
        if pause is not None:
            self.pause(pause)
        elif self.began_idle:
            self.ending = Ending.NOTHING_LEFT
        else:
            self.only_when_idle = True  # an item that was open may have gone back to the source
        return batch


def _run_continuously(loop: Loop) -> Generator[Request, Any, Ending]:
    """Fetch the next batch as soon as a worker is free, while other items are in progress.

    Every batch is started whole and in its order. No fetch begins while an item waits for its id.
    """
    feed = _Feed(loop)
    while True:
        _raise_if_over(loop)
        feed.choose_ending()
        if feed.can_fetch():
            yield feed.begin()
        if not (feed.is_fetching or loop.in_progress):
            if loop.deferred:
                before = loop.report.processed
                yield from _finish_open(loop)
                feed.stuck = 0 if loop.report.processed > before else feed.stuck + 1
                feed.pause(pause_when_stuck(loop.setup.policy.loop, feed.stuck) if feed.stuck else 0.0)
                continue
            if loop.problem is not None:
                raise loop.problem
            if feed.ending is not None:
                return feed.ending
        yield from _receive(loop, feed.seconds_to_wait())
        if loop.fetched is not None:
            ended, loop.fetched = loop.fetched, None
            yield from _begin_batch(loop, feed.accept(ended))


def _begin_batch(loop: Loop, batch: Sequence[Transaction]) -> LoopGenerator:
    """Have every item of a batch processed whose id is free. The others are deferred."""
    if not batch:
        return
    in_flight, whole = loop.setup.in_flight, Batch(len(batch))
    loop.deferred += [WorkItem(transaction, in_flight, whole) for transaction in batch]
    _raise_if_over(loop)
    yield _start(loop, loop.deferred)
    if loop.deferred:
        loop.context.observer.count("pipeline.consumer_engine.deferred", len(loop.deferred))


def _finish_open(loop: Loop) -> LoopGenerator:
    """Wait for all open items."""
    while loop.in_progress:
        yield from _receive(loop, loop.time_left())
    if loop.deferred:
        yield from _wait_for_deferred(loop)


def _start(loop: Loop, items: Sequence[WorkItem]) -> Start:
    """Return a request to start the items whose id is free. The others are deferred."""
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
    """Handle the arrivals that come in time."""
    arrivals = yield Wait(seconds)
    for arrival in arrivals:
        if type(arrival) is ItemDone:
            _count_outcome(loop, arrival)
        elif type(arrival) is FetchDone:
            loop.fetched = arrival.ended
        elif isinstance(arrival, BaseException):
            raise arrival
    if loop.settled:
        yield from _acknowledge(loop)
    if loop.deferred and LoopSignal.ID_FREED in arrivals:
        yield _start(loop, loop.deferred)
    _raise_if_over(loop)


def _raise_if_over(loop: Loop) -> None:
    """Leave the loop if there is a reason to."""
    if loop.context.stop.is_immediate:
        raise _StopNow
    if loop.ends_at is not None and loop.context.clock() >= loop.ends_at:
        raise _LoopTimedOut
    abandoned, policy = loop.context.abandoned.count, loop.setup.policy.loop
    if abandoned > policy.concurrency.value and not loop.has_warned:
        loop.has_warned = True
        message = "%s: %s abandoned after a timeout and still running, more than the concurrency"
        log.warning(message, loop.context.observer.task, quantity(abandoned, "call"))
    if abandoned > max_abandoned_calls(policy):
        raise _TooManyAbandoned


def _count_outcome(loop: Loop, done: ItemDone) -> None:
    outcome = done.outcome
    loop.in_progress.pop(id(done.item), None)
    loop.report.add(outcome)
    if outcome.status is ItemStatus.UNFINISHED:
        loop.context.observer.count("pipeline.consumer_engine.transactions", status=ItemStatus.UNFINISHED.value)
    loop.on_outcome(outcome)
    batch = done.item.batch
    if batch is None or loop.setup.acknowledge is None:
        return
    batch.open -= 1
    if outcome.status is ItemStatus.SUCCESS:
        batch.succeeded.append(outcome.transaction)
    if not batch.open and batch.succeeded:
        loop.settled.append(batch.succeeded)


def _acknowledge(loop: Loop) -> LoopGenerator:
    """Acknowledge the succeeded items of batches that have ended, one call for each batch."""
    assert loop.setup.acknowledge is not None
    while loop.settled:
        items = loop.settled.pop(0)
        target = StepTarget(ends_at=loop.ends_at)
        ended = yield from run_attempts(loop.context, loop.setup.acknowledge, (items,), target)
        if ended.failure is not None and loop.problem is None:
            loop.problem = _acknowledge_error(loop, items, ended.failure)
            loop.problem.__cause__ = ended.error or ended.failure


def _acknowledge_error(loop: Loop, items: Sequence[Transaction], failure: TransactionException) -> FetchException:
    message = (
        f"{loop.context.observer.task} cannot acknowledge {quantity(len(items), 'item')} of a batch that succeeded: "
        f"{error_message(failure)}. The source may give them out again. Check the source, then start it again."
    )
    return FetchException(message, loop.report)


def _wait_for_deferred(loop: Loop) -> LoopGenerator:
    """Wait for abandoned calls on the ids of deferred items, then start those items.

    The wait is bounded and ends on a stop request. An id whose wait failed before is not waited for again.
    """
    while loop.deferred:
        yield _start(loop, loop.deferred)  # an id may be free before its signal arrives
        if not loop.in_progress:
            yield from _wait_for_free_id(loop)
        if not loop.in_progress:
            _give_up_stuck(loop)
        while loop.in_progress:
            yield from _receive(loop, loop.time_left())


def _give_up_stuck(loop: Loop) -> None:
    for item in loop.deferred:
        loop.setup.in_flight.mark_stuck(item.transaction.transaction_id)
        message = "%s: transaction %s is left unfinished: an abandoned call still works on the same id"
        log.warning(message, loop.context.observer.task, printable_id(item.transaction.transaction_id))
        _count_unfinished(loop, item)
    loop.deferred = []


def _wait_for_free_id(loop: Loop) -> LoopGenerator:
    """Wait until a deferred item can start, or the wait for abandoned calls is over.

    A worker of another loop of the same task is waited for without a limit: its own policy limits it.
    """
    in_flight, seconds = loop.setup.in_flight, max_id_wait(loop.setup.policy.loop)
    until, is_logged = loop.context.clock() + seconds, False
    while loop.deferred and not loop.in_progress and not loop.context.stop.is_requested:
        now, ids = loop.context.clock(), [item.transaction.transaction_id for item in loop.deferred]
        if any(in_flight.has_worker(each) for each in ids):
            until = now + seconds
        elif now >= until or all(in_flight.is_stuck(each) for each in ids):
            return
        elif not is_logged and until - now < seconds:
            message = "%s: %s waiting for an abandoned call on the same id, for %g s at most"
            log.warning(message, loop.context.observer.task, quantity(len(ids), "item"), seconds)
            is_logged = True
        rest, left = until - now if is_logged else GRACE, loop.time_left()
        yield from _receive(loop, rest if left is None else min(rest, left))


def _pause(loop: Loop, pause: float) -> LoopGenerator:
    """Wait after an empty fetch, until a stop request."""
    if pause > 0:
        loop.context.observer.count("pipeline.consumer_engine.backoff", pause, step="empty")
    until = loop.context.clock() + pause
    while not loop.context.stop.is_requested and (rest := until - loop.context.clock()) > 0:
        left = loop.time_left()
        yield from _receive(loop, rest if left is None else min(rest, left))


def _abandon_open(loop: Loop) -> LoopGenerator:
    """Give up the open items: from now on no handler begins for them.

    Items that have ended still count. Items whose handler has begun get a moment to be settled.
    """
    loop.context.is_over = True
    yield from _drain_outcomes(loop, 0.0)
    _leave_fetched(loop)
    for item in (*(item for item in [*loop.in_progress.values()] if item.claim()), *loop.deferred):
        _count_unfinished(loop, item)
    until = loop.context.clock() + GRACE
    while loop.in_progress and (rest := until - loop.context.clock()) > 0:
        yield from _drain_outcomes(loop, rest)
    loop.report.in_doubt += len(loop.in_progress)
    for item in [*loop.in_progress.values()]:
        _count_unfinished(loop, item)
    _leave_fetched(loop)
    loop.in_progress, loop.deferred = {}, []
    for items in loop.settled:
        yield from _acknowledge_at_end(loop, items)
    yield Abandon()


def _leave_fetched(loop: Loop) -> None:
    """Count the items of a fetch that ended together with the loop: they are not begun."""
    ended, loop.fetched = loop.fetched, None
    batch = () if ended is None or not isinstance(ended.value, Sequence) else ended.value
    for transaction in batch:
        loop.report.fetched += 1
        _count_unfinished(loop, WorkItem(transaction, loop.setup.in_flight))


def _acknowledge_at_end(loop: Loop, items: list[Transaction]) -> LoopGenerator:
    """Acknowledge items that succeeded before their batch was given up, once and within a moment."""
    assert loop.setup.acknowledge is not None
    ended = yield Invoke(loop.setup.acknowledge.function, (items,), GRACE, lambda: lambda: None)
    if ended.is_timed_out or ended.error is not None:
        reason = "it did not return" if ended.error is None else error_message(ended.error)
        message = "%s: %s that succeeded may be given out again, they could not be acknowledged: %s"
        log.warning(message, loop.context.observer.task, quantity(len(items), "item"), reason)


def _drain_outcomes(loop: Loop, seconds: float) -> LoopGenerator:
    """Count the outcomes that come in time, of items that are still open."""
    for arrival in (yield Wait(seconds)):
        if type(arrival) is ItemDone and id(arrival.item) in loop.in_progress:
            _count_outcome(loop, arrival)
        elif type(arrival) is FetchDone:
            loop.fetched = arrival.ended


def _count_unfinished(loop: Loop, item: WorkItem) -> None:
    _count_outcome(loop, ItemDone(item, ItemOutcome(item.transaction, ItemStatus.UNFINISHED, item.attempts)))


def _loop_timeout_error(loop: Loop) -> ConsumerLoopTimeoutException:
    loop.context.observer.count("pipeline.consumer_engine.timeouts", scope="loop", step="loop")
    timeout, report = loop.setup.policy.loop.timeout, loop.report
    message = f"{loop.context.observer.task} was not done within {timeout:g} s, the timeout of its loop"
    return ConsumerLoopTimeoutException(
        f"{message}; {_counts_text(report)}. Raise `timeout` of its loop policy, or lower `limit`.", report
    )


def _abandoned_calls_error(loop: Loop) -> AbandonedCallsException:
    most, task = max_abandoned_calls(loop.setup.policy.loop), loop.context.observer.task
    message = f"{task} has more than {most} abandoned calls that ran past their limits and still run"
    advice = "Give the code its own limits below those of the policy, or let it check current_attempt().is_over"
    return AbandonedCallsException(f"{message}; {_counts_text(loop.report)}. {advice}; then restart it.", loop.report)


def _counts_text(report: LoopReport) -> str:
    doubt = f", in doubt because a handler had begun to settle them: {report.in_doubt}" if report.in_doubt else ""
    return f"settled: {quantity(report.processed, 'item')}, left unacknowledged: {report.unfinished}{doubt}"
