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

from pipeline.consumer_engine.attempts import Host, Request, Subject, Tried, tried
from pipeline.consumer_engine.errors import (
    ConsumerLoopTimeoutException,
    ExceptionType,
    FetchException,
    FetchTimeoutException,
    LeftBehindException,
    said,
)
from pipeline.consumer_engine.items import Hooks, Item
from pipeline.consumer_engine.lifecycle import (
    GRACE,
    Ending,
    Status,
    Step,
    most_left_behind,
    patience,
    rest_when_empty,
    rest_when_stuck,
    to_ask_for,
)
from pipeline.consumer_engine.outcomes import Outcome, Report
from pipeline.consumer_engine.transactions import Transaction
from pipeline.consumer_engine.words import counted, named

log = logging.getLogger("pipeline.engine")


class Start(NamedTuple):
    """Have these items worked on, in this order, each as soon as a place is free, and tell their outcomes."""

    items: list[Item]


class Settled(NamedTuple):
    """An item that was started has ended."""

    item: Item
    outcome: Outcome


class Wait(NamedTuple):
    """Send back what there is to hear, in its order: Settled, Notice, or errors of the engine itself. Nothing when
    nothing came in time."""

    seconds: float | None


class Abandon(NamedTuple):
    """Stop what is being worked on, as far as it can be stopped, and wait for none of it."""


class Notice(Enum):
    """What a loop may be told besides outcomes."""

    FREED = "an id that was waited for may be free"
    ASKED = "the task was asked to end"


Looping = Generator[Request, Any, Any]


@dataclass(slots=True, kw_only=True)
class Loop:
    """One go of a consumer."""

    hooks: Hooks
    ends_at: float | None  #: on the clock of the host
    tell: Callable[[Notice], None]  #: how to wake the loop; from any thread
    on_outcome: Callable[[Outcome], None] = lambda _: None
    report: Report = field(default_factory=Report)
    open: dict[int, Item] = field(default_factory=dict)
    deferred: list[Item] = field(default_factory=list)
    is_warned: bool = False  #: of code that was left behind

    @property
    def host(self) -> Host:
        """What surrounds the attempts of this loop."""
        return self.hooks.host

    def freed(self) -> None:
        """An id that a deferred item waits for may be free."""
        self.tell(Notice.FREED)

    def rest(self) -> float | None:
        """Seconds until the loop's time is up; None when it has no limit."""
        return None if self.ends_at is None else max(0.0, self.ends_at - self.host.clock())


class _TimeUp(Exception):  # noqa: N818 - a turn of the loop, not an error
    """The time of the loop is up."""


class _GivenUp(Exception):  # noqa: N818 - a turn of the loop, not an error
    """The task was asked to end now."""


class _LeftBehind(Exception):  # noqa: N818 - a turn of the loop, not an error
    """Too many calls were left behind."""


def consumed(loop: Loop) -> Generator[Request, Any, Report]:
    """Fetch and settle until there is a reason to end, or raise why that is not possible."""
    with loop.host.observer.loop() as span:
        try:
            loop.report.ending = yield from _ended(loop)
        except Exception as error:
            loop.host.observer.mark_failed(span, error)
            raise
        finally:
            loop.host.is_over = True  # whatever was raised: no attempt, and so no handler, begins any more
    return loop.report


def _ended(loop: Loop) -> Generator[Request, Any, Ending]:
    try:
        return (yield from _batches(loop))
    except _TimeUp:
        yield from _abandoned(loop)
        raise _time_is_up(loop) from None
    except _LeftBehind:
        yield from _abandoned(loop)
        raise _too_many(loop) from None
    except _GivenUp:
        yield from _abandoned(loop)
        return Ending.STOPPED


def _batches(loop: Loop) -> Generator[Request, Any, Ending]:
    policy, empties, stuck = loop.hooks.policy.loop, 0, 0
    while not loop.host.stop.is_asked:
        wanted = to_ask_for(policy, loop.report.taken)
        if wanted == 0:
            return Ending.LIMIT
        _go_on(loop)
        batch = yield from _fetched(loop, wanted)
        if batch:
            empties, before = 0, loop.report.processed
            yield from _settled(loop, batch)
            del batch  # what was settled need not live until the next fetch has returned
            stuck = 0 if loop.report.processed > before else stuck + 1
            yield from _rested(loop, rest_when_stuck(policy, stuck) if stuck else 0.0)
            continue
        empties += 1
        pause = rest_when_empty(policy, empties)
        if pause is None and not loop.host.stop.is_asked:
            return Ending.NOTHING_LEFT
        yield from _rested(loop, pause or 0.0)
    return Ending.STOPPED


def _fetched(loop: Loop, wanted: int) -> Generator[Request, Any, Sequence[Transaction]]:
    """The next batch exactly as the source gave it; empty also when the task is asked to end before one came."""
    subject = Subject(ends_at=loop.ends_at)
    ended = yield from tried(loop.host, loop.hooks.works[Step.FETCH], (wanted,), subject)
    if ended.is_given_up:
        if ended.attempts:
            why = "it did not return" if ended.failure is None else said(ended.failure)
            log.warning("%s: asked to end, it gave up its fetch: %s", loop.host.observer.task, why)
        return ()
    if ended.is_time_up:
        raise _TimeUp
    if ended.failure is not None:
        raise _cannot_fetch(loop, ended) from (ended.error or ended.failure)
    return _checked(loop, wanted, ended.value)


def _cannot_fetch(loop: Loop, ended: Tried) -> FetchException:
    assert ended.failure is not None
    kind = FetchTimeoutException if ended.failure.category is ExceptionType.TIMEOUT else FetchException
    words = f"{loop.host.observer.task} cannot fetch: {said(ended.failure)} (attempt {ended.attempts}, the last)."
    settled = counted(loop.report.processed, "item")
    return kind(f"{words} Settled before: {settled}. Look at the source, then start it again.", loop.report)


def _checked(loop: Loop, wanted: int, given: Any) -> Sequence[Transaction]:
    """What the source gave, if it is made of items. More than was asked for is noticed, and worked on."""
    batch: Any = () if given is None else given
    found = None if isinstance(batch, Sequence) else f"something of type {type(batch).__name__}"
    for item in batch if found is None else ():
        if not isinstance(item, Transaction):
            found = f"something of type {type(item).__name__} among its items"
    if found is not None:
        words = f"The source of {loop.host.observer.task} gave {found}; expected a list of Transaction."
        raise FetchException(f"{words} Nothing of it was worked on.", loop.report)
    loop.host.observer.count("pipeline.engine.batch.size", len(batch))
    loop.report.taken += len(batch)
    loop.report.batches += bool(batch)
    if len(batch) > wanted:
        loop.host.observer.count("pipeline.engine.oversize_batches")
        words = "%s: the source gave %s when %d were asked for; all are worked on, for it may not give them again"
        log.warning(words, loop.host.observer.task, counted(len(batch), "item"), wanted)
    return cast("Sequence[Transaction]", batch)


def _settled(loop: Loop, batch: Sequence[Transaction]) -> Looping:
    """Have every item of a batch worked on, and wait for all of them."""
    in_flight = loop.hooks.in_flight
    loop.deferred = [Item(transaction, in_flight) for transaction in batch]
    _go_on(loop)
    yield _start(loop, loop.deferred)
    if loop.deferred:
        loop.host.observer.count("pipeline.engine.deferred", len(loop.deferred))
    while loop.open:
        yield from _heard(loop, loop.rest())
    if loop.deferred:
        yield from _waited_for(loop)


def _start(loop: Loop, items: Sequence[Item]) -> Start:
    """What can be started of these items. The others wait while somebody works on one of the same id."""
    in_flight, free = loop.hooks.in_flight, []
    loop.deferred = []
    for item in items:
        if in_flight.take(item.transaction.transaction_id, loop.freed):
            loop.open[id(item)] = item
            free.append(item)
        else:
            loop.deferred.append(item)
    return Start(free)


def _heard(loop: Loop, seconds: float | None) -> Looping:
    """Take the notices that come in time."""
    notices = yield Wait(seconds)
    for notice in notices:
        if type(notice) is Settled:
            _count(loop, notice)
        elif isinstance(notice, BaseException):
            raise notice
    if loop.deferred and Notice.FREED in notices:
        yield _start(loop, loop.deferred)
    _go_on(loop)


def _go_on(loop: Loop) -> None:
    """Turn to the end of the loop if there is a reason to."""
    if loop.host.stop.is_now:
        raise _GivenUp
    if loop.ends_at is not None and loop.host.clock() >= loop.ends_at:
        raise _TimeUp
    behind, policy = loop.host.behind.count, loop.hooks.policy.loop
    if behind > policy.concurrency.value and not loop.is_warned:
        loop.is_warned = True
        words = "%s: %s left behind after their time was up and still running, more than items are worked on at once"
        log.warning(words, loop.host.observer.task, counted(behind, "call"))
    if behind > most_left_behind(policy):
        raise _LeftBehind


def _count(loop: Loop, settled: Settled) -> None:
    outcome = settled.outcome
    loop.open.pop(id(settled.item), None)
    loop.report.add(outcome)
    if outcome.status is Status.LEFT:
        loop.host.observer.count("pipeline.consumer_engine.transactions", status=Status.LEFT.value)
    loop.on_outcome(outcome)


def _waited_for(loop: Loop) -> Looping:
    """Wait for code that was left behind on the ids of deferred items, with patience but not for ever, and no
    longer than the task is wanted. Where somebody waited in vain before nobody waits again."""
    while loop.deferred:
        yield _start(loop, loop.deferred)  # one may be free by now, though nobody has said so yet
        if not loop.open:
            yield from _patient(loop)
        if not loop.open:
            _leave_stuck(loop)
        while loop.open:
            yield from _heard(loop, loop.rest())


def _leave_stuck(loop: Loop) -> None:
    for item in loop.deferred:
        loop.hooks.in_flight.give_up(item.transaction.transaction_id)
        words = "%s: transaction %s is left: code that was left behind still works on one of the same id"
        log.warning(words, loop.host.observer.task, named(item.transaction.transaction_id))
        _leave(loop, item)
    loop.deferred = []


def _patient(loop: Loop) -> Looping:
    """Wait until one of the deferred items could be started, or patience with code that was left behind ends.

    A worker of another loop of the same task is waited for as long as it takes: its own policy limits it.
    """
    in_flight, seconds = loop.hooks.in_flight, patience(loop.hooks.policy.loop)
    until, is_told = loop.host.clock() + seconds, False
    while loop.deferred and not loop.open and not loop.host.stop.is_asked:
        now, ids = loop.host.clock(), [item.transaction.transaction_id for item in loop.deferred]
        if any(in_flight.is_lived(each) for each in ids):
            until = now + seconds
        elif now >= until or all(in_flight.is_stuck(each) for each in ids):
            return
        elif not is_told and until - now < seconds:
            words = "%s: %s waiting for code that was left behind on the same id, for %g s at most"
            log.warning(words, loop.host.observer.task, counted(len(ids), "item"), seconds)
            is_told = True
        rest, left = until - now if is_told else GRACE, loop.rest()
        yield from _heard(loop, rest if left is None else min(rest, left))


def _rested(loop: Loop, pause: float) -> Looping:
    """Rest after an empty fetch, until the task is asked to end."""
    if pause > 0:
        loop.host.observer.count("pipeline.engine.backoff", pause, step="empty")
    until = loop.host.clock() + pause
    while not loop.host.stop.is_asked and (rest := until - loop.host.clock()) > 0:
        left = loop.rest()
        yield from _heard(loop, rest if left is None else min(rest, left))


def _abandoned(loop: Loop) -> Looping:
    """Give up what is open: from here on no handler begins for it. What has ended already still counts, and what a
    handler has begun to settle gets a moment to be settled."""
    loop.host.is_over = True
    yield from _noted(loop, 0.0)
    for item in (*(item for item in [*loop.open.values()] if item.claim()), *loop.deferred):
        _leave(loop, item)
    until = loop.host.clock() + GRACE
    while loop.open and (rest := until - loop.host.clock()) > 0:
        yield from _noted(loop, rest)
    loop.report.in_doubt = len(loop.open)
    for item in [*loop.open.values()]:
        _leave(loop, item)
    loop.open, loop.deferred = {}, []
    yield Abandon()


def _noted(loop: Loop, seconds: float) -> Looping:
    """Count the outcomes that come in time, of those that are still waited for."""
    for notice in (yield Wait(seconds)):
        if type(notice) is Settled and id(notice.item) in loop.open:
            _count(loop, notice)


def _leave(loop: Loop, item: Item) -> None:
    _count(loop, Settled(item, Outcome(item.transaction, Status.LEFT, item.attempts)))


def _time_is_up(loop: Loop) -> ConsumerLoopTimeoutException:
    loop.host.observer.count("pipeline.engine.timeouts", scope="loop")
    timeout, report = loop.hooks.policy.loop.timeout, loop.report
    words = f"{loop.host.observer.task} was not done within {timeout:g} s, the time of its loop"
    return ConsumerLoopTimeoutException(f"{words}; {_counts(report)}. Give it more time, or fewer items.", report)


def _too_many(loop: Loop) -> LeftBehindException:
    most, task = most_left_behind(loop.hooks.policy.loop), loop.host.observer.task
    words = f"{task} has left more than {most} calls behind that outlived their limits and still run"
    todo = "Give the code limits of its own that are below those of the policy, or let it look at current_attempt()"
    return LeftBehindException(f"{words}; {_counts(loop.report)}. {todo}; then start it again.", loop.report)


def _counts(report: Report) -> str:
    doubt = f", {report.in_doubt} of them in doubt: a handler had begun to settle them" if report.in_doubt else ""
    return f"settled: {counted(report.processed, 'item')}, left unacknowledged: {report.left}{doubt}"
