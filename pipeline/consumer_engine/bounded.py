"""Calls of user code that are bounded in time: one by one, or several at once.

Each call runs in a daemon thread. Its limit therefore holds in every worker pool, and code that hangs
delays only its own caller. A thread cannot be killed: a call that runs past its limit is abandoned,
its late result is dropped, and the next call gets a new thread. While an abandoned call may still
touch an item, no worker starts on that item.
"""

import asyncio
import contextlib
import contextvars
import functools
import inspect
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from pipeline.domain.errors import TransientError


class TimedOutError(TransientError):
    """A step ran past its limit."""


class CallResult(NamedTuple):
    """How one attempt ended: with a value, with an error, or not in time."""

    value: Any = None
    error: BaseException | None = None
    is_timed_out: bool = False  #: it was still running when its time was up
    is_stopped: bool = False  #: it was still running when the task was asked to end


class Job:
    """A call on its way through the thread."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.function, self.args = function, args
        self.context = contextvars.copy_context()
        self.running = threading.Lock()  # a bare lock is the cheapest event: it is released once
        self.running.acquire()
        self.value: Any = None
        self.error: BaseException | None = None
        self.is_done = self._is_abandoned = False
        self._on_end: Callable[[], None] | None = None
        self._cancel: Callable[[], None] | None = None

    def run(self) -> None:
        """Make the call."""
        try:
            self.value = self.context.run(call_and_await, self.function, self.args, self._set_cancel)
        except BaseException as error:  # noqa: BLE001 - the thread survives every error of a handler
            self.error = error
        self._finish()

    def _finish(self) -> None:
        self.is_done = True
        self.running.release()
        if self._on_end is not None:
            self._on_end()

    def then(self, on_end: Callable[[], None]) -> None:
        """Call ``on_end`` when the call has ended. It may be called twice if the call ends just now."""
        self._on_end = on_end
        if self.is_done:
            on_end()

    def abandon(self, on_end: Callable[[], None]) -> None:
        """Abandon the call. Async code is cancelled; other code cannot be."""
        self.then(on_end)
        self._is_abandoned = True
        if self._cancel is not None:
            self._cancel()

    def _set_cancel(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        if self._is_abandoned:
            cancel()


@dataclass(slots=True)
class StepCall:
    """One of several calls that a thread makes one after the other, in the context in which it was made."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    limit: float  #: seconds
    what: str
    on_end: Callable[[], None]  #: called once, when the call has ended or is abandoned
    option: str = ""  #: what sets the limit, for the message
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    value: Any = None
    error: BaseException | None = None
    seconds: float = 0.0

    def end(self, value: Any, error: BaseException | None, seconds: float) -> None:
        """Keep how the call ended."""
        self.value, self.error, self.seconds = value, error, seconds
        self.on_end()


class StepSeries(Job):
    """Calls on their way through the thread. It is handed over once, not once for each call."""

    def __init__(self, calls: Sequence[StepCall], ends_at: float) -> None:
        super().__init__(_no_op, ())
        self.calls, self.ends_at = calls, ends_at
        self.count = 0  #: of calls that have ended
        self._began_at = time.monotonic()
        self._shortest = min(call.limit for call in calls)
        self._moving = threading.Lock()  # a call ends in time, or it is abandoned, and never both

    def wait(self) -> bool:
        """Wait until all is done, or until the current call may be overdue. Return whether all is done."""
        return self.running.acquire(timeout=min(self._shortest, self._seconds_left))

    @property
    def _seconds_left(self) -> float:
        """How long the current call may still take."""
        return max(0.0, self._began_at + self.calls[min(self.count, len(self.calls) - 1)].limit - time.monotonic())

    def give_up_overdue(self) -> StepCall | None:
        """Abandon the current call if its time is up. Its late result is dropped, and no other call begins."""
        with self._moving:
            if self.is_done or self.count == len(self.calls) or self._seconds_left:
                return None
            self._is_abandoned = True
            call = self.calls[self.count]
            call.end(None, timeout_error(call.what, call.limit, call.option), call.limit)
            return call

    def stop(self) -> None:
        """Begin no other call."""
        with self._moving:
            self._is_abandoned = True

    def run(self) -> None:
        """Make the calls, until all have ended, the time is up, or one is abandoned."""
        for call in self.calls:
            if not self._begin() or not self._end(call, *self._result(call)):
                break
        self._finish()

    def _result(self, call: StepCall) -> tuple[Any, BaseException | None]:
        try:
            return call.context.run(call_and_await, call.function, call.args, self._set_cancel), None
        except BaseException as error:  # noqa: BLE001 - the thread survives every error of a handler
            return None, error

    def _begin(self) -> bool:
        with self._moving:
            self._began_at = time.monotonic()
            return not self._is_abandoned and (not self.count or self._began_at <= self.ends_at)

    def _end(self, call: StepCall, value: Any, error: BaseException | None) -> bool:
        with self._moving:
            if self._is_abandoned:
                return False
            call.end(value, error, time.monotonic() - self._began_at)
            self.count += 1
            return True


class _StepThread(threading.Thread):
    """A daemon thread: an abandoned step cannot keep the process from ending."""

    def __init__(self) -> None:
        super().__init__(name="pipeline-step", daemon=True)
        self.jobs: SimpleQueue[Job | None] = SimpleQueue()

    def run(self) -> None:
        while (job := self.jobs.get()) is not None:
            job.run()
            del job  # an idle thread must not keep the last item alive


class StepRunner:
    """Runs steps one after the other, each within its limit."""

    def __init__(self) -> None:
        self._thread: _StepThread | None = None

    def run(self, function: Callable[..., Any], *args: Any, limit: timedelta, what: str, option: str = "") -> Any:
        """Return the awaited value of the function, or raise its error or a timeout."""
        value, error = self.attempt(function, *args, limit=limit, what=what, option=option)
        if error is not None:
            raise error
        return value

    def attempt(
        self, function: Callable[..., Any], *args: Any, limit: timedelta, what: str, option: str = ""
    ) -> tuple[Any, BaseException | None]:
        """Return the value of the function, or the error that it ended with.

        An exception that this method raises itself interrupts the waiting thread. It does not come from
        ``function``.
        """
        ended = self.run_bounded(function, args, limit=limit.total_seconds())
        if ended.is_timed_out:
            return ended.value, timeout_error(what, limit.total_seconds(), option)
        return ended.value, ended.error

    def run_bounded(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        limit: float,
        on_abandon: Callable[[], Callable[[], None]] | None = None,
    ) -> CallResult:
        """Return how the call ended within ``limit`` seconds.

        ``on_abandon`` is called when the call is abandoned. The function that it returns is called when
        the code has ended after all.
        """
        job = self.begin(function, args)
        if not job.running.acquire(timeout=max(0.0, limit)):
            self.abandon(job, on_abandon)
            return CallResult(is_timed_out=True)
        return CallResult(job.value, job.error)

    def attempt_each(self, calls: Sequence[StepCall], *, ends_at: float) -> int:
        """Make calls one after the other until ``ends_at`` on the monotonic clock. Return how many were made.

        Each has its own limit. The first is made at any time. A call that hangs is abandoned, and the others go on.
        An exception that this method raises itself interrupts the waiting thread; then no other call begins.
        """
        count = 0
        while count < len(calls) and (not count or time.monotonic() <= ends_at):
            series = StepSeries(calls[count:], ends_at)
            self._start(series)
            hung = None
            try:
                while hung is None and not series.wait():
                    hung = series.give_up_overdue()
            except BaseException:
                series.stop()
                self.abandon(series)
                raise
            count += series.count
            if hung is None:
                break
            self.abandon(series)
            count += 1
        return count

    def begin(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Job:
        """Start a call that the caller then waits for or abandons."""
        job = Job(function, args)
        self._start(job)
        return job

    def _start(self, job: Job) -> None:
        if self._thread is None or not self._thread.is_alive():  # a child of a fork has the object, not the thread
            self._thread = _StepThread()
            self._thread.start()
        self._thread.jobs.put(job)

    def abandon(self, job: Job, on_abandon: Callable[[], Callable[[], None]] | None = None) -> None:
        """Abandon a call together with its thread."""
        self.close()
        job.abandon(on_abandon() if on_abandon is not None else _no_op)

    def close(self) -> None:
        """Let the thread end. A step that still runs is not waited for."""
        if self._thread is not None:
            self._thread.jobs.put(None)
            self._thread = None

    __del__ = close  # without close(), no thread leaks


def timeout_error(what: str, limit: float, option: str = "") -> TimedOutError:
    """Return the error of a step that was abandoned. The option is what sets its limit."""
    return TimedOutError(f"{what} did not return within {limit:g} s{option and f' ({option})'}; it was abandoned")


def call_and_await(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    on_cancellable: Callable[[Callable[[], None]], None] | None = None,
) -> Any:
    """Return the value of the function, awaited in its own event loop if needed.

    ``on_cancellable`` then gets a function that cancels the await.
    """
    value = function(*args)
    if value is None or not inspect.isawaitable(value):
        return value
    return asyncio.run(_await_value(value, on_cancellable))


async def _await_value(value: Any, on_cancellable: Callable[[Callable[[], None]], None] | None) -> Any:
    task = asyncio.current_task()
    if on_cancellable is not None and task is not None:
        on_cancellable(functools.partial(_cancel, asyncio.get_running_loop(), task))
    return await value


def _cancel(loop: asyncio.AbstractEventLoop, task: "asyncio.Task[Any]") -> None:
    with contextlib.suppress(RuntimeError):  # the loop may have ended meanwhile
        loop.call_soon_threadsafe(task.cancel)


def _no_op() -> None: ...


_GATHER_PAUSE, _GATHER_LIMIT = 0.001, 0.01  #: seconds: the pause that ends a gathering, and its maximum


@dataclass(frozen=True, slots=True)
class FinishedCall:
    """How one call ended: with a value or with an error."""

    key: Hashable
    value: Any = None
    error: BaseException | None = None


class ConcurrentCalls:
    """Several calls at once, each with its own deadline; results arrive as calls end.

    Calls that share ``idle`` share the threads that wait in it.
    """

    def __init__(self, idle: list[StepRunner] | None = None) -> None:
        self._running: dict[Hashable, tuple[StepRunner, Job, float]] = {}  # the float is the deadline
        self._finished: SimpleQueue[Hashable] = SimpleQueue()
        self._idle: list[StepRunner] = [] if idle is None else idle

    def __len__(self) -> int:
        return len(self._running)

    def start(self, key: Hashable, function: Callable[..., Any], *args: Any, ends_at: float) -> None:
        """Start a call that must end by ``ends_at`` on the monotonic clock."""
        try:
            runner = self._idle.pop()
        except IndexError:
            runner = StepRunner()
        job = runner.begin(function, args)
        self._running[key] = runner, job, ends_at
        job.then(functools.partial(self._finished.put, key))

    def close(self) -> None:
        """Let the threads end, busy ones after their call. Results of running calls are dropped."""
        for runner, _, _ in self._running.values():
            runner.close()
        while self._idle:  # one by one: another thread may take some meanwhile
            self._idle.pop().close()

    def wake(self) -> None:
        """End the wait of the thread that waits for results, or its next wait."""
        self._finished.put(None)

    def wait(self, timeout: float) -> list[FinishedCall]:
        """Return the ended calls; wait at most ``timeout`` seconds for the first.

        After the first result, others get a short time to arrive, so that one commit records them all.
        Calls past their deadline are returned as timed out, and their late results are dropped.
        """
        first_end = min((ends_at for _, _, ends_at in self._running.values()), default=float("inf"))
        patience = min(timeout, max(0.0, first_end - time.monotonic()))
        found: list[FinishedCall] = []
        try:
            self._accept(self._finished.get(timeout=max(patience, 0.0005)), found)
            closes_at = time.monotonic() + _GATHER_LIMIT
            while self._running and time.monotonic() < closes_at:
                self._accept(self._finished.get(timeout=_GATHER_PAUSE), found)
        except Empty:
            pass
        return found + self._pop_overdue()

    def _accept(self, key: Hashable, found: list[FinishedCall]) -> None:
        """Add the result of a call. A key may arrive twice, or for an overdue call that was reported before."""
        if key in self._running and self._running[key][1].is_done:
            runner, job, _ = self._running.pop(key)
            self._idle.append(runner)
            found.append(FinishedCall(key, job.value, job.error))

    def _pop_overdue(self) -> list[FinishedCall]:
        now = time.monotonic()
        late = [key for key, (_, _, ends_at) in self._running.items() if ends_at <= now]
        for key in late:
            runner, job, _ = self._running.pop(key)
            runner.abandon(job)
        return [FinishedCall(key, error=TimedOutError("the call did not return by its deadline")) for key in late]


class InFlight:
    """The ids that are being worked on in this task.

    An id is free when the last call on it has ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: dict[str, int] = {}
        self._abandoned: Counter[str] = Counter()  # of the holders, those that were abandoned
        self._waiting: dict[str, set[Callable[[], None]]] = {}
        self._stuck: set[str] = set()

    def __len__(self) -> int:
        return len(self._holders)

    def take(self, transaction_id: str, wake: Callable[[], None]) -> bool:
        """Take the id if it is free; else call ``wake`` once when it may be free.

        The same ``wake`` may be passed several times.
        """
        with self._lock:
            if transaction_id in self._holders:
                self._waiting.setdefault(transaction_id, set()).add(wake)
                return False
            self._holders[transaction_id] = 1
            return True

    def hold_abandoned(self, transaction_id: str) -> Callable[[], None]:
        """Hold a taken id for an abandoned call; the returned function releases it, once."""
        with self._lock:
            self._holders[transaction_id] += 1
            self._abandoned[transaction_id] += 1
        return functools.partial(self.release, transaction_id, is_abandoned=True)

    def release(self, transaction_id: str, *, is_abandoned: bool = False) -> None:
        """Release the id."""
        with self._lock:
            if not (self._abandoned or self._waiting or self._stuck):
                del self._holders[transaction_id]  # no call was abandoned, so its worker alone holds it
                return
            self._holders[transaction_id] -= 1
            self._abandoned[transaction_id] -= is_abandoned
            if self._holders[transaction_id]:
                return
            del self._holders[transaction_id], self._abandoned[transaction_id]
            self._stuck.discard(transaction_id)
            waiting = self._waiting.pop(transaction_id, set())
        for wake in waiting:
            wake()

    def has_worker(self, transaction_id: str) -> bool:
        """Return whether a worker holds the id, not only an abandoned call."""
        with self._lock:
            return self._holders.get(transaction_id, 0) > self._abandoned.get(transaction_id, 0)

    def mark_stuck(self, transaction_id: str) -> None:
        """Note that the wait for the id failed: while it is held, no loop waits for it again."""
        with self._lock:
            if transaction_id in self._holders:
                self._stuck.add(transaction_id)

    def is_stuck(self, transaction_id: str) -> bool:
        """Return whether a wait for the id failed."""
        return transaction_id in self._stuck


class AbandonedCalls:
    """The number of abandoned calls of a task that still run.

    Each keeps a thread, or an asyncio task, and its memory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0

    def change(self, by: int) -> None:
        """Add to the count."""
        with self._lock:
            self.count += by
