"""The engine's way of attempting a step, for whoever has a step but no loop: the phases of the runtime.

Attempts, limit, pauses, spans and kinds of failure are those of the consumers; the code is the same.
"""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from pipeline.consumer_engine.attempts import Host, Subject, Tried, Work, tried
from pipeline.consumer_engine.policies import RetryPolicy
from pipeline.consumer_engine.steps import Steps, too_late
from pipeline.consumer_engine.stops import Stop
from pipeline.consumer_engine.telemetry import PROCESS_WIDE, Telemetry
from pipeline.consumer_engine.threads import drive


class StepExecutor(Steps):
    """Attempts steps one after the other. Takes the place of ``Steps``; one for each thread.

    When nobody listens and a step is attempted once, it costs what ``Steps`` costs. ``clean`` takes
    credentials out of the words of an error before they are shown on a span.
    """

    def __init__(
        self,
        telemetry: Telemetry = PROCESS_WIDE,
        stop: Stop | None = None,
        clean: Callable[[str], str] | None = None,
    ) -> None:
        super().__init__()
        self._telemetry, self._stop, self._clean = telemetry, stop or Stop(), clean
        self._never = threading.Event()

    def attempt(
        self, function: Callable[..., Any], *args: Any, limit: timedelta, what: str
    ) -> tuple[Any, BaseException | None]:
        """What the function returned, or the error it ended with. ``what`` is ``Class.step``; both are labels."""
        if not self._telemetry.is_heard():
            return super().attempt(function, *args, limit=limit, what=what)
        retry = RetryPolicy.model_construct(timeout=max(0.0, limit.total_seconds()))  # no time at all is a limit too
        ended = self.tried(function, *args, retry=retry, what=what)
        return ended.value, self._error(ended, what, limit.total_seconds())

    def tried(self, function: Callable[..., Any], *args: Any, retry: RetryPolicy, what: str) -> Tried:
        """How the step ended after its attempts; its ``error`` is exactly what the function raised."""
        task, _, step = what.rpartition(".")
        host = Host(observer=self._telemetry.of(task or step, self._clean), stop=self._stop)
        work = Work(step=step, function=function, retry=retry)
        return drive(tried(host, work, args, Subject()), self, self._never.wait)

    def _error(self, ended: Tried, what: str, limit: float) -> BaseException | None:
        return too_late(what, limit) if ended.failure is not None and ended.error is None else ended.error
