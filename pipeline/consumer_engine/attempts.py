"""The attempts at one step, written once for threads and asyncio.

Limits, pauses, spans and kinds of failure are decided here, in a generator. It yields requests for
everything that takes time, a call or a pause. A driver does them and sends the results back. The
generator holds no thread and no event loop.
"""

import functools
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar, Token
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
    """Call this and send back how it ended, after at most ``limit`` seconds."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    limit: float | None
    on_abandon: OnAbandon  #: called when the call is abandoned; its result is called when the call has ended
    is_stoppable: bool = False  #: a stop request ends the wait for it


#: A call without a limit: the function and its arguments. Its answer is a pair too: a value and an error.
PlainCall = tuple[Callable[..., Any], tuple[Any, ...]]


class Pause(NamedTuple):
    """Wait so many seconds, or until a stop request."""

    seconds: float


Request = Any  #: an Invoke, a PlainCall or a Pause; of the loop also the requests of `pipeline.consumer_engine.loop`
StepGenerator = Generator[Request, Any, "StepResult"]


class StopToken:
    """The stop request of a task. It stays once it is made.

    After a plain request the loop fetches nothing more and settles its items, without pauses between
    attempts. After one with ``now`` it leaves its items.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self.is_immediate = False
        self._listeners: tuple[Callable[[], None], ...] = ()
        self._listeners_lock = threading.Lock()  # for changes of the listeners; request() only reads them

    def request(self, *, now: bool = False) -> None:
        """Request the end. Takes no lock: a signal may interrupt a thread that holds one."""
        self.is_immediate = self.is_immediate or now
        self.is_requested = True
        for listener in self._listeners:
            listener()

    @contextmanager
    def subscribe(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call ``listener`` at every request. It must take no lock either."""
        with self._listeners_lock:
            self._listeners = (*self._listeners, listener)
        try:
            yield
        finally:
            with self._listeners_lock:
                self._listeners = tuple(each for each in self._listeners if each is not listener)


@dataclass(slots=True, kw_only=True)
class EngineContext:
    """The surroundings of the attempts of one loop."""

    observer: Observer
    stop: StopToken = field(default_factory=StopToken)
    clock: Callable[[], float] = time.monotonic
    source: Any = None  #: the source of the items
    acknowledge: Callable[[Any], Any] | None = None  #: of the source, for the default success handler; found once
    abandoned: AbandonedCalls = field(default_factory=AbandonedCalls)
    is_over: bool = False  #: the loop has ended: no attempt begins any more


@dataclass(slots=True, kw_only=True)
class StepSpec:
    """A step, the same for every item."""

    step: str  #: a Step, or another short name from a small set: it is a label
    function: Callable[..., Any]
    retry: RetryPolicy
    always_begins: bool = False  #: the first attempt begins even after the deadline
    is_stoppable: bool = False  #: no attempt begins after a stop request, and none counts as failed then


class StepTarget:
    """The subject of a step: an item, or the loop itself."""

    __slots__ = ("ends_at", "transaction_id")

    def __init__(self, transaction_id: str | None = None, ends_at: float | None = None) -> None:
        self.transaction_id, self.ends_at = transaction_id, ends_at

    def hold_until_ended(self) -> Callable[[], None]:
        """Hold the subject for an abandoned call; the returned function releases it."""
        return lambda: None


class Attempt:
    """The running attempt, as the code in it can read it.

    A thread that has run out of time cannot be stopped from outside. Long work checks ``is_over`` now
    and then, and ends when its result is no longer used.
    """

    __slots__ = ("_context", "_is_over", "ends_at", "number", "step", "transaction_id")

    def __init__(
        self, context: EngineContext, step: str, number: int, transaction_id: str | None, ends_at: float | None
    ) -> None:
        self._context = context
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
        """Whether the engine has stopped waiting: further work has no effect on the item."""
        return self._is_over or self._context.is_over

    @property
    def source(self) -> Any:
        """The source of the item; for an item passed in, the task's source."""
        return self._context.source

    @property
    def acknowledge(self) -> Callable[[Any], Any] | None:
        """How the default success handler acknowledges the item; None if it does not."""
        return self._context.acknowledge

    def end(self) -> None:
        """Mark the attempt as over."""
        self._is_over = True


_CURRENT: ContextVar[Attempt] = ContextVar("pipeline_consumer_engine_attempt")


def current_attempt() -> Attempt:
    """Return the attempt that the calling code runs in. Raises ``LookupError`` outside of one."""
    return _CURRENT.get()


class StepResult(NamedTuple):
    """How a step ended."""

    value: Any = None
    error: BaseException | None = None  #: the exception of the last attempt; None when it timed out
    failure: TransactionException | None = None  #: the failure as one of the three kinds
    attempts: int = 0
    is_past_deadline: bool = False  #: it ended because the deadline passed
    is_cut: bool = False  #: an attempt was still running then; it is abandoned
    is_stopped: bool = False  #: it ended because the loop ended, or on a stop request


def run_attempts(context: EngineContext, spec: StepSpec, args: tuple[Any, ...], subject: StepTarget) -> StepGenerator:
    """Attempt a step until it returns, fails for good, or its time is up."""
    attempts = _attempt_until_done(context, spec, args, subject, _NOT_ATTEMPTED)
    if not context.observer.is_traced:
        return attempts
    return _in_span(context.observer, context.observer.step(spec.step, spec.retry, subject.transaction_id), attempts)


def attempt_again(
    context: EngineContext, spec: StepSpec, args: tuple[Any, ...], subject: StepTarget, first: CallResult
) -> StepGenerator:
    """Go on with a step whose first attempt has failed."""
    failure = _failure(spec, subject, first, None)
    last = StepResult(error=first.error, failure=failure, attempts=1)
    pause = pause_before_next(spec.retry, 1, failure.category)
    if pause is None:
        return last
    yield from _pause_before_retry(context, spec, subject, pause)
    return (yield from _attempt_until_done(context, spec, args, subject, last))


def _attempt_until_done(
    context: EngineContext, spec: StepSpec, args: tuple[Any, ...], subject: StepTarget, last: StepResult
) -> StepGenerator:
    number = last.attempts
    while True:
        if context.is_over or (spec.is_stoppable and context.stop.is_requested):
            return last._replace(is_stopped=True)
        is_late = subject.ends_at is not None and context.clock() >= subject.ends_at
        if is_late and (number or not spec.always_begins):
            return last._replace(is_past_deadline=True)
        number += 1
        attempting = _attempt_once(context, spec, args, subject, number)
        if context.observer.is_traced:
            span = context.observer.attempt(spec.step, spec.retry, subject.transaction_id, number)
            attempting = _in_span(context.observer, span, attempting)
        last = yield from attempting
        if last.failure is None:
            return last
        if spec.is_stoppable and context.stop.is_requested:
            return last._replace(is_stopped=True)
        pause = pause_before_next(spec.retry, number, last.failure.category)
        if pause is None or last.is_past_deadline:
            return last
        yield from _pause_before_retry(context, spec, subject, pause)


_NOT_ATTEMPTED = StepResult()


def _in_span(observer: Observer, span: AbstractContextManager[Span], attempts: StepGenerator) -> StepGenerator:
    """Run the generator in a span, which is the current one for the called code."""
    with span as current:
        ended = yield from attempts
        if ended.failure is not None:
            observer.mark_failed(current, ended.failure)
    return ended


def _attempt_once(
    context: EngineContext, spec: StepSpec, args: tuple[Any, ...], subject: StepTarget, number: int
) -> StepGenerator:
    begun = context.clock()
    limit, is_cut = _limit(spec, subject, begun)
    ends_at = None if limit is None else begun + limit
    attempt, token = begin_attempt(context, spec.step, number, subject.transaction_id, ends_at)
    can_be_abandoned = limit is not None or spec.is_stoppable
    on_abandon = functools.partial(_abandon, context, subject) if can_be_abandoned else _refuse_abandon
    try:
        ended: CallResult = yield Invoke(spec.function, args, limit, on_abandon, spec.is_stoppable)
    finally:
        end_attempt(attempt, token)
    if ended.is_stopped:
        return StepResult(attempts=number, is_stopped=True)
    failure = _failure(spec, subject, ended, limit) if ended.is_timed_out or ended.error is not None else None
    if context.observer.is_metered:
        _count(context, spec, number, context.clock() - begun, failure)
        if ended.is_timed_out and not is_cut:
            context.observer.count("pipeline.consumer_engine.timeouts", scope="step", step=str(spec.step))
    was_cut = ended.is_timed_out and is_cut
    return StepResult(ended.value, ended.error, failure, number, is_past_deadline=was_cut, is_cut=was_cut)


def begin_attempt(
    context: EngineContext, step: str, number: int, transaction_id: str | None, ends_at: float | None
) -> tuple[Attempt, Token[Attempt]]:
    """Begin an attempt: the code that runs now can read it. `end_attempt` ends it."""
    attempt = Attempt(context, step, number, transaction_id, ends_at)
    return attempt, _CURRENT.set(attempt)


def end_attempt(attempt: Attempt, token: Token[Attempt]) -> None:
    """End an attempt that `begin_attempt` began."""
    attempt.end()
    _CURRENT.reset(token)


def _abandon(context: EngineContext, subject: StepTarget) -> Callable[[], None]:
    """Count an abandoned call until it has ended. A driver may report the end twice."""
    release, first_report = subject.hold_until_ended(), threading.Lock()
    context.abandoned.change(1)
    context.observer.count("pipeline.consumer_engine.abandoned_calls", 1)

    def ended() -> None:
        if first_report.acquire(blocking=False):
            context.abandoned.change(-1)
            context.observer.count("pipeline.consumer_engine.abandoned_calls", -1)
            release()

    return ended


def _refuse_abandon() -> Callable[[], None]:
    raise AssertionError("a call without a limit is not abandoned")


def _limit(spec: StepSpec, subject: StepTarget, now: float) -> tuple[float | None, bool]:
    """Return the seconds for an attempt that begins now, and whether the deadline cuts it."""
    own = spec.retry.timeout
    if subject.ends_at is None:
        return own, False
    left = max(0.0, subject.ends_at - now)
    return (own, False) if own is not None and own < left else (left, True)


def _failure(spec: StepSpec, subject: StepTarget, ended: CallResult, limit: float | None) -> TransactionException:
    if ended.error is not None:
        return as_transaction_exception(ended.error, subject.transaction_id)
    option = (
        f"timeout of the retry of {spec.step}" if limit == spec.retry.timeout else "transaction_timeout of the loop"
    )
    message = f"{spec.step} did not return within {limit:.3g} s ({option}); it was abandoned"
    return TransactionException(message, ExceptionType.TIMEOUT, subject.transaction_id)


def _count(
    context: EngineContext, spec: StepSpec, number: int, seconds: float, failure: TransactionException | None
) -> None:
    result = failure.category.value if failure else "returned"
    context.observer.count("pipeline.consumer_engine.step.duration", seconds, step=str(spec.step))
    context.observer.count("pipeline.consumer_engine.attempts", step=str(spec.step), result=result)
    if number > 1:
        context.observer.count("pipeline.consumer_engine.retries", step=str(spec.step))


def _pause_before_retry(
    context: EngineContext, spec: StepSpec, subject: StepTarget, pause: float
) -> Generator[Request, Any, None]:
    """Wait before the next attempt, at most until the deadline or a stop request."""
    if pause <= 0 or context.stop.is_requested or context.is_over:
        return
    if subject.ends_at is not None:
        pause = min(pause, max(0.0, subject.ends_at - context.clock()))
    context.observer.count("pipeline.consumer_engine.backoff", pause, step=str(spec.step))
    yield Pause(pause)
