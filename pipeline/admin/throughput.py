"""One look at everything at once, for a live view: workflows, how fast they go, and what waits for a person."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from pipeline.admin import attention, workflows
from pipeline.admin.attention import AttentionItem
from pipeline.admin.resolutions import Resolutions
from pipeline.admin.workflows import WorkflowSummary
from pipeline.store.database import interval
from pipeline.store.reads import traces, work

RATE_WINDOW = timedelta(minutes=1)
_MAX_ROWS = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """How fast a workflow goes, per second over the last minute."""

    published: float
    committed: float
    stopped: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything at one instant."""

    at: datetime
    workflows: tuple[WorkflowSummary, ...]
    throughput: dict[str, Throughput]  #: by workflow; one in which nothing moved is missing
    attention: tuple[AttentionItem, ...]
    late_sweeps: tuple[str, ...]  #: sweeps that have not run for three of their periods


def snapshot(resolutions: Resolutions, sweep_periods: Mapping[str, timedelta]) -> Snapshot:
    """What is true now. The doctor's long look back is left to the doctor."""
    span = interval(RATE_WINDOW)
    with resolutions.db.transaction() as tx:
        now = tx.clock()
        ended = {row.workflow: row for row in traces.run_throughput(tx, span, recent=_MAX_ROWS)}
        came = {row.workflow: row for row in traces.event_throughput(tx, span, recent=_MAX_ROWS)}
        late = work.overdue_sweeps(tx, sweep_periods)
    paces = {
        name: Throughput(
            published=_rate(came.get(name), "published"),
            committed=_rate(ended.get(name), "committed"),
            stopped=_rate(ended.get(name), "stopped"),
        )
        for name in sorted({*ended, *came})
    }
    return Snapshot(
        at=now,
        workflows=tuple(workflows.list_workflows(resolutions.db)),
        throughput=paces,
        attention=tuple(attention.items(resolutions, limit=20, recent=100)),
        late_sweeps=tuple(late),
    )


def _rate(row: Any, name: str) -> float:
    """Per second. When the look did not reach back a whole minute, over as long as it reached."""
    if row is None:
        return 0.0
    count = int(getattr(row, name))
    whole = row.rows_read >= _MAX_ROWS
    span = max(float(row.oldest_age), 1.0) if whole else RATE_WINDOW.total_seconds()
    return round(count / span, 2)
