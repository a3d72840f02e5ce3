"""The attempts at one step: limits, pauses, spans and kinds of failure, written once for threads and asyncio.

This is a generator. It asks for what takes time, a call or a pause, and whoever drives it does that in
its own way and sends back what came of it. It holds no thread and no event loop itself.
"""

import functools
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from opentelemetry.trace import Span

from pipeline.consumer_engine.errors import ExceptionType, TransactionException, categorised
from pipeline.consumer_engine.guard import Behind
from pipeline.consumer_engine.lifecycle import pause_before_next
from pipeline.consumer_engine.policies import RetryPolicy
from pipeline.consumer_engine.steps import Ended
from pipeline.consumer_engine.stops import Stop
from pipeline.consumer_engine.telemetry import Observer

OnLeft = Callable[[], Callable[[], None]]


class Call(NamedTuple):
    """Call this and send back how it ended, after at most ``limit`` seconds if there is a limit."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    limit: float | None
    on_left: OnLeft  #: told when the call is left behind; what it returns is told when the call has ended
    is_stoppable: bool = False  #: the wait for it ends when the task is asked to end


class Pause(NamedTuple):
    """Wait so many seconds, or until the task is asked to end."""

    seconds: float


Request = Any  #: a Call or a Pause; of the loop also what it asks in `pipeline.consumer_engine.loop`
Asking = Generator[Request, Any, "Tried"]


@dataclass(slots=True, kw_only=True)
class Host:
    """What surrounds the attempts of one loop."""

    observer: Observer
    stop: Stop = field(default_factory=Stop)
    clock: Callable[[], float] = time.monotonic
    source: Any = None  #: who gives out the items
    behind: Behind = field(default_factory=Behind)
    is_over: bool = False  #: the loop has ended: nothing is attempted any more


@dataclass(slots=True, kw_only=True)
class Work:
    """A step, the same for every item."""

    step: str  #: a Step, or another short name from a small set: it is a label
    function: Callable[..., Any]
    retry: RetryPolicy
    is_timed: bool = True  #: no attempt begins after the subject's time is up
    is_cut: bool = True  #: and a running attempt ends then
    ends_when_asked: bool = False  #: no attempt begins once the task is asked to end, and none is an error then


class Subject:
    """Whom a step is for: an item, or nobody in particular."""

    __slots__ = ("ends_at", "transaction_id")

    def __init__(self, transaction_id: str | None = None, ends_at: float | None = None) -> None:
        self.transaction_id, self.ends_at = transaction_id, ends_at

    def left(self) -> Callable[[], None]:
        """Code that works on it is left behind; what is returned is called when that code has ended."""
        return lambda: None


class Attempt:
    """The attempt that is running, as the code in it can see it.

    A thread that has run out of time cannot be stopped from outside. Long work looks here now and
    then, and ends when nobody waits for it any more.
    """

    __slots__ = ("_host", "_is_over", "ends_at", "number", "step", "transaction_id")

    def __init__(self, host: Host, step: str, number: int, transaction_id: str | None, ends_at: float | None) -> None:
        self._host = host
        self._is_over = False
        self.step = step
        self.number = number  #: from 1
        self.transaction_id = transaction_id
        self.ends_at = ends_at  #: on the monotonic clock; None when there is no limit

    @property
    def remaining(self) -> float | None:
        """Seconds left; None when there is no limit."""
        return None if self.ends_at is None else max(0.0, self.ends_at - self._host.clock())

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for this attempt any more: what it still does has no effect on the item."""
        return self._is_over or self._host.is_over

    @property
    def source(self) -> Any:
        """Who gave out the item; for one that was handed in, the source of the task. None where there is none."""
        return self._host.source

    def end(self) -> None:
        """Nobody waits any more."""
        self._is_over = True


_CURRENT: ContextVar[Attempt] = ContextVar("pipeline_engine_attempt")


def current_attempt() -> Attempt:
    """The attempt the calling code runs in. Raises ``LookupError`` outside of one."""
    return _CURRENT.get()


class Tried(NamedTuple):
    """How a step ended, its attempts spent or not."""

    value: Any = None
    error: BaseException | None = None  #: exactly what the last attempt raised; None when it was too late
    failure: TransactionException | None = None  #: the same, as one of the three kinds
    attempts: int = 0
    is_time_up: bool = False  #: it ended because its subject's time was up
    is_given_up: bool = False  #: it ended because the loop did, or because the task was asked to end


def tried(host: Host, work: Work, args: tuple[Any, ...], subject: Subject) -> Asking:
    """Attempt a step until it returns, fails for good, or its time is up."""
    trying = _tried(host, work, args, subject)
    if not host.observer.is_traced:
        return trying
    return _within(host.observer, host.observer.step(work.step, work.retry, subject.transaction_id), trying)


def _tried(host: Host, work: Work, args: tuple[Any, ...], subject: Subject) -> Asking:
    last, number = _UNTRIED, 0
    while True:
        if host.is_over or (work.ends_when_asked and host.stop.is_asked):
            return last._replace(is_given_up=True)
        if subject.ends_at is not None and work.is_timed and host.clock() >= subject.ends_at:
            return last._replace(is_time_up=True)
        number += 1
        attempting = _attempted(host, work, args, subject, number)
        if host.observer.is_traced:
            span = host.observer.attempt(work.step, work.retry, subject.transaction_id, number)
            attempting = _within(host.observer, span, attempting)
        last = yield from attempting
        if last.failure is None:
            return last
        if work.ends_when_asked and host.stop.is_asked:
            return last._replace(is_given_up=True)
        pause = pause_before_next(work.retry, number, last.failure.category)
        if pause is None or last.is_time_up:
            return last
        yield from _rested(host, work, subject, pause)


_UNTRIED = Tried()


def _within(observer: Observer, span: AbstractContextManager[Span], trying: Asking) -> Asking:
    """The same, seen as a span, which the code that is called finds as its current one."""
    with span as shown:
        ended = yield from trying
        if ended.failure is not None:
            observer.mark_failed(shown, ended.failure)
    return ended


def _attempted(host: Host, work: Work, args: tuple[Any, ...], subject: Subject, number: int) -> Asking:
    begun = host.clock()
    limit, is_cut = _limit(work, subject, begun)
    attempt = Attempt(host, work.step, number, subject.transaction_id, None if limit is None else begun + limit)
    token = _CURRENT.set(attempt)
    can_be_left = limit is not None or work.ends_when_asked
    on_left = functools.partial(_left, host, subject) if can_be_left else _not_left
    try:
        ended: Ended = yield Call(work.function, args, limit, on_left, work.ends_when_asked)
    finally:
        attempt.end()
        _CURRENT.reset(token)
    if ended.is_given_up:
        return Tried(attempts=number, is_given_up=True)
    failure = _failure(work, subject, ended, limit) if ended.is_late or ended.error is not None else None
    if host.observer.is_metered:
        _count(host, work, number, host.clock() - begun, failure)
        if ended.is_late and not is_cut:
            host.observer.count("pipeline.engine.timeouts", scope="step")
    return Tried(ended.value, ended.error, failure, number, ended.is_late and is_cut)


def _left(host: Host, subject: Subject) -> Callable[[], None]:
    """A call is left behind: it counts until it has ended. Whoever tells that may tell it twice."""
    give_back, told = subject.left(), threading.Lock()
    host.behind.change(1)
    host.observer.count("pipeline.engine.left_behind", 1)

    def ended() -> None:
        if told.acquire(blocking=False):
            host.behind.change(-1)
            host.observer.count("pipeline.engine.left_behind", -1)
            give_back()

    return ended


def _not_left() -> Callable[[], None]:
    raise AssertionError("a call without a limit is not left behind")


def _limit(work: Work, subject: Subject, now: float) -> tuple[float | None, bool]:
    """Seconds for an attempt that begins now, and whether it is cut before its own timeout by the time above it."""
    own = work.retry.timeout
    if subject.ends_at is None or not work.is_cut:
        return own, False
    rest = max(0.0, subject.ends_at - now)
    return (own, False) if own is not None and own < rest else (rest, True)


def _failure(work: Work, subject: Subject, ended: Ended, limit: float | None) -> TransactionException:
    if ended.error is not None:
        return categorised(ended.error, subject.transaction_id)
    words = f"{work.step} did not return within {limit:.3g} s; it was left behind"
    return TransactionException(words, ExceptionType.TIMEOUT, subject.transaction_id)


def _count(host: Host, work: Work, number: int, seconds: float, failure: TransactionException | None) -> None:
    result = failure.category.value if failure else "returned"
    host.observer.count("pipeline.engine.step.duration", seconds, step=str(work.step))
    host.observer.count("pipeline.consumer_engine.attempts", step=str(work.step), result=result)
    if number > 1:
        host.observer.count("pipeline.engine.retries", step=str(work.step))


def _rested(host: Host, work: Work, subject: Subject, pause: float) -> Generator[Request, Any, None]:
    """Wait before the next attempt, no longer than there is time, and not at all once the task is to end."""
    if pause <= 0 or host.stop.is_asked or host.is_over:
        return
    if subject.ends_at is not None and work.is_timed:
        pause = min(pause, max(0.0, subject.ends_at - host.clock()))
    host.observer.count("pipeline.engine.backoff", pause, step=str(work.step))
    yield Pause(pause)
