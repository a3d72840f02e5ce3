"""Show how workflows stood over time: throughput, backlog, age and unknown outcomes, for charts.

The sweep ``samples`` takes one sample a minute and keeps it for two weeks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from pipeline.admin import lookup
from pipeline.domain.errors import InvalidInputError
from pipeline.store.database import Database, Transaction
from pipeline.store.reads import installation, work
from pipeline.store.rows import BucketRow

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
    for row in installation.buckets(tx, workflows, since=since, until=now, step=step):
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
