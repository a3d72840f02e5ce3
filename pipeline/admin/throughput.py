"""Show how workflows do: a snapshot for the live view, and samples over time for charts.

The sweep ``samples`` takes the samples.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from pipeline.admin import attention, lookup, workflows
from pipeline.admin.attention import AttentionItem, Incident, open_incidents
from pipeline.admin.resolutions import Resolutions
from pipeline.admin.workflows import WorkflowSummary
from pipeline.domain.errors import InvalidInputError
from pipeline.store.database import Database, Transaction, interval
from pipeline.store.reads import gauges, traces, work
from pipeline.store.rows import BucketRow

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
    incidents = open_incidents(resolutions)
    waiting = attention.items(resolutions, limit=MAX_ITEMS, recent=None, incidents=incidents)
    return Snapshot(
        at=now,
        workflows=tuple(workflows.list_workflows(resolutions.db)),
        throughput=rates,
        attention=tuple(waiting),
        incidents=tuple(incidents),
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


MAX_SPAN = timedelta(days=14)
_MIN_SPAN = timedelta(minutes=1)
_MAX_POINTS = 120
_STEPS = tuple(timedelta(minutes=minutes) for minutes in (1, 2, 5, 10, 15, 30, 60, 120, 180, 360))


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPoint:
    """A workflow in one span of time. Rates are per second."""

    at: datetime  #: begin of the span
    published: float  #: events
    committed: float  #: runs
    stopped: float  #: runs that ended without a commit
    backlog: int  #: events that no run held, at most
    oldest_age: float  #: seconds that the oldest of them had waited, at most
    uncertain_share: float | None  #: of the runs with a mutation, those that left its outcome unknown; None: no run
    unresolved: int  #: mutations whose outcome was unknown, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """A workflow over time, oldest point first. No point is missing."""

    workflow: str
    since: datetime
    until: datetime
    step: timedelta
    points: tuple[HistoryPoint, ...]


def workflow_history(db: Database, workflow: str, span: timedelta = timedelta(hours=1)) -> History:
    """Return the history of one workflow up to now."""
    with db.transaction() as tx:
        lookup.require_workflow(tx, workflow)
        (found,) = _histories(tx, [workflow], span)
    return found


def all_histories(db: Database, span: timedelta = timedelta(hours=1)) -> list[History]:
    """Return the histories of all workflows up to now, by name."""
    with db.transaction() as tx:
        return _histories(tx, work.workflow_names(tx), span)


def _histories(tx: Transaction, workflows: Sequence[str], span: timedelta) -> list[History]:
    if not _MIN_SPAN <= span <= MAX_SPAN:
        raise InvalidInputError(f"A history of {span} was asked for; expected 1 minute to {MAX_SPAN.days} days.")
    now = tx.clock()
    step = next(each for each in _STEPS if span / each <= _MAX_POINTS)
    number = -(-span // step)
    since = now - number * step
    found: dict[str, dict[datetime, BucketRow]] = {}
    for row in gauges.buckets(tx, workflows, since=since, until=now, step=step):
        found.setdefault(row.workflow, {})[row.at] = row
    return [
        History(
            workflow=name,
            since=since,
            until=now,
            step=step,
            points=tuple(
                _point(at, found.get(name, {}).get(at), step) for at in (since + each * step for each in range(number))
            ),
        )
        for name in workflows
    ]


def _point(at: datetime, row: BucketRow | None, step: timedelta) -> HistoryPoint:
    if row is None:
        return HistoryPoint(
            at=at,
            published=0.0,
            committed=0.0,
            stopped=0.0,
            backlog=0,
            oldest_age=0.0,
            uncertain_share=None,
            unresolved=0,
        )
    seconds = max(step, row.span).total_seconds()  # a sample after an outage covers more than one span
    return HistoryPoint(
        at=at,
        published=row.published / seconds,
        committed=row.committed / seconds,
        stopped=row.stopped / seconds,
        backlog=row.backlog,
        oldest_age=row.oldest_age.total_seconds() if row.oldest_age is not None else 0.0,
        uncertain_share=row.uncertain / row.mutated if row.mutated else None,
        unresolved=row.unresolved,
    )
