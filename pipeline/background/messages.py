"""What one pass of a sweep did."""

from dataclasses import dataclass, field

from pipeline.domain.states import PhaseTask


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchMessage:
    """A doorbell to ring: which task, for which runs. Losing it costs time, never work."""

    task: PhaseTask
    run_ids: tuple[str, ...]
    description: str = ""  #: whose runs they are, for people who watch messages: ``workflow.handler``


@dataclass(slots=True)
class SweepReport:
    """Counts by name, for the log and the table of sweeps."""

    counts: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, count: int = 1) -> None:
        if count:
            self.counts[name] = self.counts.get(name, 0) + count
