"""What is counted of a phase: how many runs a message claimed, and how long the phase took each of them."""

import time
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from typing import Any
from uuid import UUID

from pipeline.telemetry import metrics


class Cohort:
    """Runs that were claimed together, each until what it did is recorded."""

    def __init__(self, phase: str, runs: Sequence[Any]) -> None:
        self.phase, self.begun = phase, time.monotonic()
        self.open: dict[UUID, str] = {run.id: run.workflow for run in runs}
        self._token = _COHORT.set(self)

    def over(self, run_ids: Iterable[UUID], result: str) -> None:
        """The phase is over for these runs. One that was given back, or is another's by now, is not counted."""
        seconds = time.monotonic() - self.begun
        for run_id in run_ids:
            workflow = self.open.pop(run_id, None)
            if workflow is not None:
                labels = {"workflow": workflow, "phase": self.phase, "result": result}
                metrics.note("pipeline.phase.duration", labels, seconds)

    def close(self) -> None:
        """The phase is over for all of them."""
        _COHORT.reset(self._token)


class _Nobody:
    """In the place of a cohort when nobody counts."""

    def close(self) -> None:
        return


_NOBODY = _Nobody()
_COHORT: ContextVar[Cohort | None] = ContextVar("pipeline_counted_cohort", default=None)


def watch(phase: str, claimed: Sequence[Any], *, ignored: int) -> Cohort | _Nobody:
    """Count what a message claimed, and begin to time the phase. To be closed when it is over."""
    if not metrics.is_on():
        return _NOBODY
    if ignored:
        metrics.note("pipeline.deliveries.ignored", {"task": f"pipeline.{phase}"}, ignored)
    if not claimed:
        return _NOBODY
    metrics.note("pipeline.cohort.size", {"phase": phase}, len(claimed))
    return Cohort(phase, claimed)


def done(run_ids: Iterable[UUID]) -> None:
    """What the phase did for these runs is recorded."""
    cohort = _COHORT.get()
    if cohort is not None:
        cohort.over(run_ids, "done")


def failed(run_ids: Iterable[UUID]) -> None:
    """These runs were stopped in the phase."""
    cohort = _COHORT.get()
    if cohort is not None:
        cohort.over(run_ids, "failed")


def is_counted() -> bool:
    """Whether the phase that runs here is timed."""
    return _COHORT.get() is not None
