"""The loop that fetches items and has them worked on. A generator: whoever drives it brings threads or asyncio.

A batch is worked on whole before the next is fetched, and a free place within it is taken at once by
the next item. Nothing that was fetched is dropped: it is settled, or counted as left when the loop is
told to end now or its time is up.
"""

import logging
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, cast

from pipeline.engine.attempts import Host, Request, Subject, Tried, tried
from pipeline.engine.errors import (
    ConsumerLoopTimeoutException,
    ExceptionType,
    FetchException,
    FetchTimeoutException,
    said,
)
from pipeline.engine.items import Hooks, Item
from pipeline.engine.lifecycle import Ending, Status, Step, rest_when_empty, to_ask_for
from pipeline.engine.outcomes import Outcome, Report
from pipeline.engine.transactions import Transaction

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


def consumed(loop: Loop) -> Generator[Request, Any, Report]:
    """Fetch and settle until there is a reason to end, or raise why that is not possible."""
    with loop.host.observer.loop():
        try:
            loop.report.ending = yield from _batches(loop)
        except _TimeUp:
            yield from _abandoned(loop)
            raise _time_is_up(loop) from None
        except _GivenUp:
            yield from _abandoned(loop)
            loop.report.ending = Ending.STOPPED
        finally:
            loop.host.is_over = True
            for item in loop.open.values():
                item.claim()
    return loop.report


def _batches(loop: Loop) -> Generator[Request, Any, Ending]:
    policy, empties = loop.hooks.policy.loop, 0
    while not loop.host.stop.is_asked:
        wanted = to_ask_for(policy, loop.report.taken)
        if wanted == 0:
            return Ending.LIMIT
        batch = yield from _fetched(loop, wanted)
        if batch:
            empties = 0
            yield from _settled(loop, batch)
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
    return kind(f"{words} {loop.report.processed} items were settled before; start it again.", loop.report)


def _checked(loop: Loop, wanted: int, given: Any) -> Sequence[Transaction]:
    """What the source gave, if it is made of items. More than was asked for is noticed, and worked on."""
    batch: Any = () if given is None else given
    found = None if isinstance(batch, Sequence) else f"a {type(batch).__name__}"
    for item in batch if found is None else ():
        if not isinstance(item, Transaction):
            found = f"a {type(item).__name__} among its items"
    if found is not None:
        words = f"The source of {loop.host.observer.task} gave {found}; expected a list of Transaction."
        raise FetchException(f"{words} Nothing of it was worked on.", loop.report)
    loop.host.observer.count("pipeline.engine.batch.size", len(batch))
    loop.report.taken += len(batch)
    loop.report.batches += bool(batch)
    if len(batch) > wanted:
        loop.host.observer.count("pipeline.engine.oversize_batches")
        words = "%s: the source gave %d items when %d were asked for; all are worked on, for it may not give them again"
        log.warning(words, loop.host.observer.task, len(batch), wanted)
    return cast("Sequence[Transaction]", batch)


def _settled(loop: Loop, batch: Sequence[Transaction]) -> Looping:
    """Have every item of a batch worked on, and wait for all of them."""
    in_flight = loop.hooks.in_flight
    yield _start(loop, [Item(transaction, in_flight) for transaction in batch])
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
    if loop.host.stop.is_now:
        raise _GivenUp
    if loop.ends_at is not None and loop.host.clock() >= loop.ends_at:
        raise _TimeUp


def _count(loop: Loop, settled: Settled) -> None:
    outcome = settled.outcome
    loop.open.pop(id(settled.item), None)
    loop.report.add(outcome)
    if outcome.status is Status.LEFT:
        loop.host.observer.count("pipeline.engine.transactions", status=Status.LEFT.value)
    loop.on_outcome(outcome)


def _waited_for(loop: Loop) -> Looping:
    """Wait for code that was left behind on the ids of deferred items: as long as one item may take, if that is
    limited, and no longer than the task is wanted."""
    timeout = loop.hooks.policy.loop.transaction_timeout
    ends_at = math.inf if timeout is None else loop.host.clock() + timeout
    while loop.open or loop.deferred:
        if not loop.open:
            yield _start(loop, loop.deferred)  # one may be free by now, though nobody has said so yet
        patience = math.inf if loop.open else ends_at - loop.host.clock()
        if not loop.open and (loop.host.stop.is_asked or patience <= 0):
            break
        rest = loop.rest()
        seconds = min(patience, math.inf if rest is None else rest)
        yield from _heard(loop, None if seconds == math.inf else seconds)
    for item in loop.deferred:
        words = "%s: transaction %s is left: code that was left behind still works on one of the same id"
        log.warning(words, loop.host.observer.task, item.transaction.transaction_id)
        _leave(loop, item)
    loop.deferred = []


def _rested(loop: Loop, pause: float) -> Looping:
    """Rest after an empty fetch, until the task is asked to end."""
    if pause > 0:
        loop.host.observer.count("pipeline.engine.backoff", pause, step="empty")
    until = loop.host.clock() + pause
    while not loop.host.stop.is_asked and (rest := until - loop.host.clock()) > 0:
        left = loop.rest()
        yield from _heard(loop, rest if left is None else min(rest, left))


def _abandoned(loop: Loop) -> Looping:
    """Give up what is open: from here on no handler begins for it. What has ended already still counts."""
    loop.host.is_over = True
    for notice in (yield Wait(0.0)):
        if type(notice) is Settled:
            _count(loop, notice)
    for item in (*loop.open.values(), *loop.deferred):
        item.claim()
        _leave(loop, item)
    loop.open, loop.deferred = {}, []
    yield Abandon()


def _leave(loop: Loop, item: Item) -> None:
    _count(loop, Settled(item, Outcome(item.transaction, Status.LEFT, item.attempts)))


def _time_is_up(loop: Loop) -> ConsumerLoopTimeoutException:
    loop.host.observer.count("pipeline.engine.timeouts", scope="loop")
    timeout, report = loop.hooks.policy.loop.timeout, loop.report
    words = f"{loop.host.observer.task} was not done within {timeout:g} s, the time of its loop"
    counts = f"{report.processed} items were settled, {report.left} are left unacknowledged"
    return ConsumerLoopTimeoutException(f"{words}; {counts}. Give it more time, or fewer items.", report)
