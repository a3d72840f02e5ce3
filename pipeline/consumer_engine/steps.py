"""One step of user code, bounded in time whatever it does.

The step runs in a thread of its own, so that its limit holds in every worker pool and a hanging
handler holds up nobody but itself. A thread cannot be killed: one that outlives its limit is left
behind, its result is dropped, and the next step gets a new thread.
"""

import asyncio
import contextlib
import contextvars
import functools
import inspect
import threading
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
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
        self.running = threading.Lock()  # a bare lock: it is taken and given once per step, and steps are many
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
        except BaseException as error:  # noqa: BLE001 - the thread outlives whatever the handler raises
            self.error = error
        self.is_done = True
        self.running.release()
        if self._on_end is not None:
            self._on_end()

    def then(self, on_end: Callable[[], None]) -> None:
        """Have ``on_end`` called when the code has ended, which may be now; then it may be called twice."""
        self._on_end = on_end
        if self.is_done:
            on_end()

    def abandon(self, on_end: Callable[[], None]) -> None:
        """Nobody waits any more. Async code is cancelled; other code cannot be."""
        self.then(on_end)
        self._is_abandoned = True
        if self._cancel is not None:
            self._cancel()

    def _set_cancel(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        if self._is_abandoned:
            cancel()


class _StepThread(threading.Thread):
    """A daemon, so that a step nobody waits for cannot keep the process from ending."""

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

    def run(self, function: Callable[..., Any], *args: Any, limit: timedelta, what: str) -> Any:
        """The value the function returns, awaited if need be; raises what it raises, or that it took too long."""
        value, error = self.attempt(function, *args, limit=limit, what=what)
        if error is not None:
            raise error
        return value

    def attempt(
        self, function: Callable[..., Any], *args: Any, limit: timedelta, what: str
    ) -> tuple[Any, BaseException | None]:
        """What the function returned, or the error it ended with. What this raises itself is not the function's:
        somebody wants the waiting thread to stop."""
        ended = self.run_bounded(function, args, limit=limit.total_seconds())
        return ended.value, timeout_error(what, limit.total_seconds()) if ended.is_timed_out else ended.error

    def run_bounded(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        limit: float,
        on_abandon: Callable[[], Callable[[], None]] | None = None,
    ) -> CallResult:
        """How the call ended within ``limit`` seconds.

        When it is left behind ``on_left`` is called, and what that returns once the code has ended after all.
        """
        job = self.begin(function, args)
        if not job.running.acquire(timeout=max(0.0, limit)):
            self.abandon(job, on_abandon)
            return CallResult(is_timed_out=True)
        return CallResult(job.value, job.error)

    def begin(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Job:
        """Start a call that the caller waits for, or leaves."""
        job = Job(function, args)
        if self._thread is None or not self._thread.is_alive():  # a child of a fork has the object, not the thread
            self._thread = _StepThread()
            self._thread.start()
        self._thread.jobs.put(job)
        return job

    def abandon(self, job: Job, on_abandon: Callable[[], Callable[[], None]] | None = None) -> None:
        """Leave a call behind, with its thread."""
        self.close()
        job.abandon(on_abandon() if on_abandon is not None else _no_op)

    def close(self) -> None:
        """Let the thread end. A step that still runs is not waited for."""
        if self._thread is not None:
            self._thread.jobs.put(None)
            self._thread = None

    __del__ = close  # whoever forgets to close leaves no thread behind


def timeout_error(what: str, limit: float) -> TimedOutError:
    """The error of a step that was left behind."""
    return TimedOutError(f"{what} did not return within {limit:g} s; it was left behind")


def call_and_await(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    on_cancellable: Callable[[Callable[[], None]], None] | None = None,
) -> Any:
    """What the function returns, awaited in a loop of its own if need be; ``told`` is then given how to cancel it."""
    value = function(*args)
    return asyncio.run(_await_value(value, on_cancellable)) if inspect.isawaitable(value) else value


async def _await_value(value: Any, told: Callable[[Callable[[], None]], None] | None) -> Any:
    task = asyncio.current_task()
    if told is not None and task is not None:
        told(functools.partial(_cancel, asyncio.get_running_loop(), task))
    return await value


def _cancel(loop: asyncio.AbstractEventLoop, task: "asyncio.Task[Any]") -> None:
    with contextlib.suppress(RuntimeError):  # the loop may have ended meanwhile
        loop.call_soon_threadsafe(task.cancel)


def _no_op() -> None: ...
