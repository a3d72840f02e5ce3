"""The engine's way of attempting a step, for whoever has a step but no loop: the phases of the runtime.

Attempts, limit, pauses, spans and kinds of failure are those of the consumers; the code is the same.
"""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from pipeline.consumer_engine.attempts import EngineContext, StepResult, StepSpec, StepTarget, run_attempts
from pipeline.consumer_engine.policies import RetryPolicy
from pipeline.consumer_engine.steps import StepRunner, timeout_error
from pipeline.consumer_engine.stops import StopToken
from pipeline.consumer_engine.telemetry import PROCESS_WIDE, Telemetry
from pipeline.consumer_engine.threads import drive


class StepExecutor(StepRunner):
    """Attempts steps one after the other. Takes the place of ``Steps``; one for each thread.

    When nobody listens and a step is attempted once, it costs what ``Steps`` costs. ``clean`` takes
    credentials out of the words of an error before they are shown on a span.
    """

    def __init__(
        self,
        telemetry: Telemetry = PROCESS_WIDE,
        stop: StopToken | None = None,
        redact: Callable[[str], str] | None = None,
    ) -> None:
        super().__init__()
        self._telemetry, self._stop, self._clean = telemetry, stop or StopToken(), redact
        self._never = threading.Event()

    def attempt(
        self, function: Callable[..., Any], *args: Any, limit: timedelta, what: str
    ) -> tuple[Any, BaseException | None]:
        """What the function returned, or the error it ended with. ``what`` is ``Class.step``; both are labels."""
        if not self._telemetry.is_enabled():
            return super().attempt(function, *args, limit=limit, what=what)
        retry = RetryPolicy.model_construct(timeout=max(0.0, limit.total_seconds()))  # no time at all is a limit too
        ended = self.run_attempts(function, *args, retry=retry, what=what)
        return ended.value, self._error(ended, what, limit.total_seconds())

    def run_attempts(self, function: Callable[..., Any], *args: Any, retry: RetryPolicy, what: str) -> StepResult:
        """How the step ended after its attempts; its ``error`` is exactly what the function raised."""
        task, _, step = what.rpartition(".")
        host = EngineContext(observer=self._telemetry.observer(task or step, self._clean), stop=self._stop)
        work = StepSpec(step=step, function=function, retry=retry)
        return drive(run_attempts(host, work, args, StepTarget()), self, self._never.wait)

    def _error(self, ended: StepResult, what: str, limit: float) -> BaseException | None:
        return timeout_error(what, limit) if ended.failure is not None and ended.error is None else ended.error
