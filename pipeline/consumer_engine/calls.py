"""Several calls at once, each bounded by its own deadline, and their results as they come.

A call that outlives its deadline is reported as overdue and its late result is dropped: threads
cannot be killed, so they are daemons and are left behind.
"""

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from pipeline.consumer_engine.steps import TimedOutError, call_and_await

_GATHER_PAUSE, _GATHER_LIMIT = 0.001, 0.01  #: seconds: the pause that ends a gathering, and its longest


@dataclass(frozen=True, slots=True)
class FinishedCall:
    """How one call ended: with a value or with an error."""

    key: Hashable
    value: Any = None
    error: BaseException | None = None


_JobQueue = SimpleQueue[tuple[Any, ...] | None]


class _CallThreads:
    """What the threads share with their owner. They do not hold on to the owner itself, so that it can go."""

    def __init__(self) -> None:
        self.finished: SimpleQueue[tuple[Hashable, int, FinishedCall]] = SimpleQueue()
        self.idle: list[_JobQueue] = []
        self.is_closed = False

    def serve(self, jobs: _JobQueue) -> None:
        """Threads are kept for the next call: as many as were ever in the air at once, and no more."""
        while (job := jobs.get()) is not None:
            key, ticket, function, args = job
            try:
                finished = FinishedCall(key, value=call_and_await(function, args))
            except BaseException as error:  # noqa: BLE001 - whatever the connector raises is its answer
                finished = FinishedCall(key, error=error)
            self.idle.append(jobs)
            self.finished.put((key, ticket, finished))
            del job, function, args, finished  # an idle thread must not keep the last call alive
            if self.is_closed:
                self.close()

    def close(self) -> None:
        self.is_closed = True
        while self.idle:
            self.idle.pop().put(None)


class ConcurrentCalls:
    """The calls that are in the air."""

    def __init__(self) -> None:
        self._ends_at: dict[Hashable, float] = {}
        self._tickets: dict[Hashable, int] = {}
        self._threads = _CallThreads()
        self._count = 0

    def __len__(self) -> int:
        return len(self._ends_at)

    def start(self, key: Hashable, function: Callable[..., Any], *args: Any, ends_at: float) -> None:
        """Start a call that must end by ``ends_at`` on the monotonic clock."""
        self._count += 1
        self._tickets[key], self._ends_at[key] = self._count, ends_at
        jobs = self._threads.idle.pop() if self._threads.idle else self._new_thread()
        jobs.put((key, self._count, function, args))

    def close(self) -> None:
        """Let the threads end, those still in a call after it. What is in the air is nobody's any more."""
        self._threads.close()

    __del__ = close  # whoever forgets to close leaves no threads behind

    def wait(self, timeout: float) -> list[FinishedCall]:
        """What has ended, waiting at most so many seconds for the first; what arrives together comes together.

        After the first result the others get a moment each to catch up, so that one commit records them all.
        """
        patience = min(timeout, max(0.0, min(self._ends_at.values(), default=0.0) - time.monotonic()))
        found: list[FinishedCall] = []
        try:
            self._accept(self._threads.finished.get(timeout=max(patience, 0.0005)), found)
            closes_at = time.monotonic() + _GATHER_LIMIT
            while self._ends_at and time.monotonic() < closes_at:
                self._accept(self._threads.finished.get(timeout=_GATHER_PAUSE), found)
        except Empty:
            pass
        return found + self._pop_overdue()

    def _accept(self, arrived: tuple[Hashable, int, FinishedCall], found: list[FinishedCall]) -> None:
        key, ticket, finished = arrived
        if self._tickets.get(key) == ticket:
            del self._tickets[key], self._ends_at[key]
            found.append(finished)

    def _pop_overdue(self) -> list[FinishedCall]:
        now = time.monotonic()
        late = [key for key, ends_at in self._ends_at.items() if ends_at <= now]
        for key in late:
            del self._tickets[key], self._ends_at[key]
        return [FinishedCall(key, error=TimedOutError("the call did not return by its deadline")) for key in late]

    def _new_thread(self) -> _JobQueue:
        jobs: _JobQueue = SimpleQueue()
        Thread(target=self._threads.serve, args=(jobs,), name="pipeline-call", daemon=True).start()
        return jobs
