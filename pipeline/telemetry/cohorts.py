"""What is counted of a phase: how many runs a message claimed, and how long the phase took each of them."""

import time
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from typing import Any
from uuid import UUID

from pipeline.telemetry import metrics


class PhaseTimer:
    """Runs that were claimed together, each until what it did is recorded."""

    def __init__(self, phase: str, runs: Sequence[Any]) -> None:
        self.phase, self.started_at = phase, time.monotonic()
        self.running: dict[UUID, str] = {run.id: run.workflow for run in runs}
        self._token = _TIMER.set(self)

    def finish(self, run_ids: Iterable[UUID], result: str) -> None:
        """The phase is over for these runs. One that was given back, or is another's by now, is not counted."""
        seconds = time.monotonic() - self.started_at
        for run_id in run_ids:
            workflow = self.running.pop(run_id, None)
            if workflow is not None:
                labels = {"workflow": workflow, "phase": self.phase, "result": result}
                metrics.record("pipeline.phase.duration", labels, seconds)

    def close(self) -> None:
        """The phase is over for all of them."""
        _TIMER.reset(self._token)


class _NoTimer:
    """In the place of a cohort when nobody counts."""

    def close(self) -> None:
        return


_NO_TIMER = _NoTimer()
_TIMER: ContextVar[PhaseTimer | None] = ContextVar("pipeline_counted_cohort", default=None)


def start_phase(phase: str, claimed: Sequence[Any], *, ignored: int) -> PhaseTimer | _NoTimer:
    """Count what a message claimed, and begin to time the phase. To be closed when it is over."""
    if not metrics.is_on():
        return _NO_TIMER
    if ignored:
        metrics.record("pipeline.deliveries.ignored", {"task": f"pipeline.{phase}"}, ignored)
    if not claimed:
        return _NO_TIMER
    metrics.record("pipeline.cohort.size", {"phase": phase}, len(claimed))
    return PhaseTimer(phase, claimed)


def record_done(run_ids: Iterable[UUID]) -> None:
    """What the phase did for these runs is recorded."""
    cohort = _TIMER.get()
    if cohort is not None:
        cohort.finish(run_ids, "done")


def record_failed(run_ids: Iterable[UUID]) -> None:
    """These runs were stopped in the phase."""
    cohort = _TIMER.get()
    if cohort is not None:
        cohort.finish(run_ids, "failed")


def is_timed() -> bool:
    """Whether the phase that runs here is timed."""
    return _TIMER.get() is not None
