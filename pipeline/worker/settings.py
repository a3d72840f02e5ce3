"""Hold the limits and sizes of a worker, and the usual duration of its handlers."""

import threading
from datetime import timedelta

from pydantic import Field

from pipeline.domain.policies import Policy
from pipeline.domain.values import DEFAULT_LIMITS, Limits


class WorkerPolicy(Policy):
    """Bounds of one worker process."""

    lease: timedelta = timedelta(seconds=60)
    step_limit: timedelta = timedelta(seconds=30)  #: one call of one handler
    cohort_budget: timedelta = timedelta(seconds=30)  #: after this a cohort gives the rest of its runs back
    mutation_budget: timedelta = timedelta(seconds=60)  #: after this a cohort sends nothing more
    record_limit: timedelta = timedelta(seconds=60)  #: how long outcomes wait for a database that does not take them
    mutation_concurrency: int = Field(default=100, ge=1, le=1000)
    #: how long a task waits for the slow calls of its cohort, at most, and finished runs for the others
    straggler_wait: timedelta = timedelta(milliseconds=200)
    limits: Limits = DEFAULT_LIMITS


_WEIGHT = 0.3  #: of what was seen last; the rest is what was seen before


class HandlerDurations:
    """Moving averages by handler and phase, shared by the threads of a process."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, str], float] = {}
        self._lock = threading.Lock()

    def record(self, handler_id: int, phase: str, seconds: float) -> None:
        """Take note of one run."""
        with self._lock:
            before = self._seconds.get((handler_id, phase), seconds)
            self._seconds[handler_id, phase] = before + _WEIGHT * (seconds - before)

    def per_run(self, handler_id: int) -> timedelta:
        """What a run takes in its slowest phase; nothing when none was seen: the cohort's budget bounds the first."""
        with self._lock:
            found = [seconds for (handler, _), seconds in self._seconds.items() if handler == handler_id]
        return timedelta(seconds=max(found, default=0.0))
