"""The attempts at one step: limits, pauses, spans and kinds of failure, written once for threads and asyncio.

This is a generator. It asks for what takes time, a call or a pause, and whoever drives it does that in
its own way and sends back what came of it. It holds no thread and no event loop itself.
"""

import functools
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from opentelemetry.trace import Span

from pipeline.consumer_engine.bounded import AbandonedCalls, CallResult
from pipeline.consumer_engine.errors import ExceptionType, TransactionException, as_transaction_exception
from pipeline.consumer_engine.lifecycle import pause_before_next
from pipeline.consumer_engine.policies import RetryPolicy
from pipeline.consumer_engine.telemetry import Observer

OnAbandon = Callable[[], Callable[[], None]]


class Invoke(NamedTuple):
    """Call this and send back how it ended, after at most ``limit`` seconds if there is a limit."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    limit: float | None
    on_abandon: OnAbandon  #: told when the call is left behind; what it returns is told when the call has ended
    is_stoppable: bool = False  #: the wait for it ends when the task is asked to end


class Pause(NamedTuple):
    """Wait so many seconds, or until the task is asked to end."""

    seconds: float


Request = Any  #: a Call or a Pause; of the loop also what it asks in `pipeline.consumer_engine.loop`
StepGenerator = Generator[Request, Any, "StepResult"]


class StopToken:
    """Whether a task was asked to end. Once asked, it stays so.

    Asked politely, a loop fetches nothing more and settles what it has, without the pauses between
    attempts. Asked again, with ``now``, it leaves what it has.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self.is_immediate = False
        self._listeners: tuple[Callable[[], None], ...] = ()
        self._listeners_lock = threading.Lock()  # of the listeners; whoever asks only reads them

    def request(self, *, now: bool = False) -> None:
        """End. Takes no lock: a signal may interrupt a thread that holds one."""
        self.is_immediate = self.is_immediate or now
        self.is_requested = True
        for listener in self._listeners:
            listener()

    @contextmanager
    def subscribe(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call ``listener``, which must take no lock either, whenever the task is asked."""
        with self._listeners_lock:
            self._listeners = (*self._listeners, listener)
        try:
            yield
        finally:
            with self._listeners_lock:
                self._listeners = tuple(each for each in self._listeners if each is not listener)


@dataclass(slots=True, kw_only=True)
class EngineContext:
    """What surrounds the attempts of one loop."""

    observer: Observer
    stop: StopToken = field(default_factory=StopToken)
    clock: Callable[[], float] = time.monotonic
    source: Any = None  #: who gives out the items
    abandoned: AbandonedCalls = field(default_factory=AbandonedCalls)
    is_over: bool = False  #: the loop has ended: nothing is attempted any more


@dataclass(slots=True, kw_only=True)
class StepSpec:
    """A step, the same for every item."""

    step: str  #: a Step, or another short name from a small set: it is a label
    function: Callable[..., Any]
    retry: RetryPolicy
    is_timed: bool = True  #: no attempt begins after the subject's time is up
    is_cut_at_deadline: bool = True  #: and a running attempt ends then
    is_stoppable: bool = False  #: no attempt begins once the task is asked to end, and none is an error then


class StepTarget:
    """Whom a step is for: an item, or nobody in particular."""

    __slots__ = ("ends_at", "transaction_id")

    def __init__(self, transaction_id: str | None = None, ends_at: float | None = None) -> None:
        self.transaction_id, self.ends_at = transaction_id, ends_at

    def hold_until_ended(self) -> Callable[[], None]:
        """Code that works on it is left behind; what is returned is called when that code has ended."""
        return lambda: None


class Attempt:
    """The attempt that is running, as the code in it can see it.

    A thread that has run out of time cannot be stopped from outside. Long work looks here now and
    then, and ends when nobody waits for it any more.
    """

    __slots__ = ("_context", "_is_over", "ends_at", "number", "step", "transaction_id")

    def __init__(
        self, host: EngineContext, step: str, number: int, transaction_id: str | None, ends_at: float | None
    ) -> None:
        self._context = host
        self._is_over = False
        self.step = step
        self.number = number  #: from 1
        self.transaction_id = transaction_id
        self.ends_at = ends_at  #: on the monotonic clock; None when there is no limit

    @property
    def remaining(self) -> float | None:
        """Seconds left; None when there is no limit."""
        return None if self.ends_at is None else max(0.0, self.ends_at - self._context.clock())

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for this attempt any more: what it still does has no effect on the item."""
        return self._is_over or self._context.is_over

    @property
    def source(self) -> Any:
        """Who gave out the item; for one that was handed in, the source of the task. None where there is none."""
        return self._context.source

    def end(self) -> None:
        """Nobody waits any more."""
        self._is_over = True


_CURRENT: ContextVar[Attempt] = ContextVar("pipeline_consumer_engine_attempt")


def current_attempt() -> Attempt:
    """The attempt the calling code runs in. Raises ``LookupError`` outside of one."""
    return _CURRENT.get()


class StepResult(NamedTuple):
    """How a step ended, its attempts spent or not."""

    value: Any = None
    error: BaseException | None = None  #: exactly what the last attempt raised; None when it was too late
    failure: TransactionException | None = None  #: the same, as one of the three kinds
    attempts: int = 0
    is_past_deadline: bool = False  #: it ended because its subject's time was up
    is_stopped: bool = False  #: it ended because the loop did, or because the task was asked to end


def run_attempts(host: EngineContext, work: StepSpec, args: tuple[Any, ...], subject: StepTarget) -> StepGenerator:
    """Attempt a step until it returns, fails for good, or its time is up."""
    trying = _attempt_until_done(host, work, args, subject)
    if not host.observer.is_traced:
        return trying
    return _in_span(host.observer, host.observer.step(work.step, work.retry, subject.transaction_id), trying)


def _attempt_until_done(
    host: EngineContext, work: StepSpec, args: tuple[Any, ...], subject: StepTarget
) -> StepGenerator:
    last, number = _NOT_ATTEMPTED, 0
    while True:
        if host.is_over or (work.is_stoppable and host.stop.is_requested):
            return last._replace(is_stopped=True)
        if subject.ends_at is not None and work.is_timed and host.clock() >= subject.ends_at:
            return last._replace(is_past_deadline=True)
        number += 1
        attempting = _attempt_once(host, work, args, subject, number)
        if host.observer.is_traced:
            span = host.observer.attempt(work.step, work.retry, subject.transaction_id, number)
            attempting = _in_span(host.observer, span, attempting)
        last = yield from attempting
        if last.failure is None:
            return last
        if work.is_stoppable and host.stop.is_requested:
            return last._replace(is_stopped=True)
        pause = pause_before_next(work.retry, number, last.failure.category)
        if pause is None or last.is_past_deadline:
            return last
        yield from _pause_before_retry(host, work, subject, pause)


_NOT_ATTEMPTED = StepResult()


def _in_span(observer: Observer, span: AbstractContextManager[Span], trying: StepGenerator) -> StepGenerator:
    """The same, seen as a span, which the code that is called finds as its current one."""
    with span as shown:
        ended = yield from trying
        if ended.failure is not None:
            observer.mark_failed(shown, ended.failure)
    return ended


def _attempt_once(
    host: EngineContext, work: StepSpec, args: tuple[Any, ...], subject: StepTarget, number: int
) -> StepGenerator:
    begun = host.clock()
    limit, is_cut = _limit(work, subject, begun)
    attempt = Attempt(host, work.step, number, subject.transaction_id, None if limit is None else begun + limit)
    token = _CURRENT.set(attempt)
    can_be_left = limit is not None or work.is_stoppable
    on_left = functools.partial(_abandon, host, subject) if can_be_left else _refuse_abandon
    try:
        ended: CallResult = yield Invoke(work.function, args, limit, on_left, work.is_stoppable)
    finally:
        attempt.end()
        _CURRENT.reset(token)
    if ended.is_stopped:
        return StepResult(attempts=number, is_stopped=True)
    failure = _failure(work, subject, ended, limit) if ended.is_timed_out or ended.error is not None else None
    if host.observer.is_metered:
        _count(host, work, number, host.clock() - begun, failure)
        if ended.is_timed_out and not is_cut:
            host.observer.count("pipeline.consumer_engine.timeouts", scope="step")
    return StepResult(ended.value, ended.error, failure, number, ended.is_timed_out and is_cut)


def _abandon(host: EngineContext, subject: StepTarget) -> Callable[[], None]:
    """A call is left behind: it counts until it has ended. Whoever tells that may tell it twice."""
    give_back, told = subject.hold_until_ended(), threading.Lock()
    host.abandoned.change(1)
    host.observer.count("pipeline.consumer_engine.left_behind", 1)

    def ended() -> None:
        if told.acquire(blocking=False):
            host.abandoned.change(-1)
            host.observer.count("pipeline.consumer_engine.left_behind", -1)
            give_back()

    return ended


def _refuse_abandon() -> Callable[[], None]:
    raise AssertionError("a call without a limit is not left behind")


def _limit(work: StepSpec, subject: StepTarget, now: float) -> tuple[float | None, bool]:
    """Seconds for an attempt that begins now, and whether it is cut before its own timeout by the time above it."""
    own = work.retry.timeout
    if subject.ends_at is None or not work.is_cut_at_deadline:
        return own, False
    rest = max(0.0, subject.ends_at - now)
    return (own, False) if own is not None and own < rest else (rest, True)


def _failure(work: StepSpec, subject: StepTarget, ended: CallResult, limit: float | None) -> TransactionException:
    if ended.error is not None:
        return as_transaction_exception(ended.error, subject.transaction_id)
    words = f"{work.step} did not return within {limit:.3g} s; it was left behind"
    return TransactionException(words, ExceptionType.TIMEOUT, subject.transaction_id)


def _count(
    host: EngineContext, work: StepSpec, number: int, seconds: float, failure: TransactionException | None
) -> None:
    result = failure.category.value if failure else "returned"
    host.observer.count("pipeline.consumer_engine.step.duration", seconds, step=str(work.step))
    host.observer.count("pipeline.consumer_engine.attempts", step=str(work.step), result=result)
    if number > 1:
        host.observer.count("pipeline.consumer_engine.retries", step=str(work.step))


def _pause_before_retry(
    host: EngineContext, work: StepSpec, subject: StepTarget, pause: float
) -> Generator[Request, Any, None]:
    """Wait before the next attempt, no longer than there is time, and not at all once the task is to end."""
    if pause <= 0 or host.stop.is_requested or host.is_over:
        return
    if subject.ends_at is not None and work.is_timed:
        pause = min(pause, max(0.0, subject.ends_at - host.clock()))
    host.observer.count("pipeline.consumer_engine.backoff", pause, step=str(work.step))
    yield Pause(pause)
