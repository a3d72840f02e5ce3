"""Values that the duties hand out: messages to send, and reports of what a pass did."""

from dataclasses import dataclass, field
from datetime import datetime

from pipeline.domain.states import PhaseTask


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchMessage:
    """A wake-up message: which task, for which runs. Losing it costs time, never work."""

    task: PhaseTask
    run_ids: tuple[str, ...]
    description: str = ""  #: ``workflow.handler`` of the runs, for operators who read messages


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileMessage:
    """A reconcile attempt for a worker that knows the workflow. Losing it costs the pause of its deferral."""

    mutation_id: str
    workflow: str
    version: int  #: of the workflow, as registered
    deferred_until: datetime  #: a worker may make the attempt before, as long as this time is not changed


@dataclass(slots=True)
class SweepReport:
    """Counts by name, for the log and the table of sweeps."""

    counts: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, count: int = 1) -> None:
        if count:
            self.counts[name] = self.counts.get(name, 0) + count
