"""Take a snapshot for the live view: workflows, their rates, and what waits for an operator."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from pipeline.admin import attention, workflows
from pipeline.admin.attention import AttentionItem
from pipeline.admin.incidents import Incident, open_incidents
from pipeline.admin.resolutions import Resolutions
from pipeline.admin.workflows import WorkflowSummary
from pipeline.store.database import interval
from pipeline.store.reads import traces, work

RATE_WINDOW = timedelta(minutes=1)
MAX_ITEMS = 100  #: of each kind that waits for an operator
_MAX_ROWS = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Rates of a workflow, per second over the last minute."""

    published: float
    committed: float
    stopped: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of all workflows at one instant."""

    at: datetime
    workflows: tuple[WorkflowSummary, ...]
    throughput: dict[str, Throughput]  #: by workflow; an idle one is missing
    attention: tuple[AttentionItem, ...]
    incidents: tuple[Incident, ...]
    to_decide: dict[str, int]  #: items that wait for an operator, by workflow; at most 100 of each kind are counted
    late_sweeps: tuple[str, ...]  #: sweeps that have not run for three of their periods


def snapshot(resolutions: Resolutions, sweep_periods: Mapping[str, timedelta]) -> Snapshot:
    """Take a snapshot. Of broken invariants it shows those that the doctor found last."""
    span = interval(RATE_WINDOW)
    with resolutions.db.transaction() as tx:
        now = tx.clock()
        ended = {row.workflow: row for row in traces.run_throughput(tx, span, recent=_MAX_ROWS)}
        came = {row.workflow: row for row in traces.event_throughput(tx, span, recent=_MAX_ROWS)}
        late = work.overdue_sweeps(tx, sweep_periods)
    rates = {
        name: Throughput(
            published=_rate(came.get(name), "published"),
            committed=_rate(ended.get(name), "committed"),
            stopped=_rate(ended.get(name), "stopped"),
        )
        for name in sorted({*ended, *came})
    }
    waiting = attention.items(resolutions, limit=MAX_ITEMS, recent=None)
    return Snapshot(
        at=now,
        workflows=tuple(workflows.list_workflows(resolutions.db)),
        throughput=rates,
        attention=tuple(waiting),
        incidents=tuple(open_incidents(resolutions)),
        to_decide=dict(Counter(item.workflow for item in waiting if item.workflow)),
        late_sweeps=tuple(late),
    )


def _rate(row: Any, name: str) -> float:
    """Return the rate per second, over a minute or over the shorter span that the rows cover."""
    if row is None:
        return 0.0
    count = int(getattr(row, name))
    whole = row.rows_read >= _MAX_ROWS
    span = max(float(row.oldest_age), 1.0) if whole else RATE_WINDOW.total_seconds()
    return round(count / span, 2)
