"""One look at everything at once, for a live view: workflows, how fast they go, and what waits for a person."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from pipeline.admin import attention, workflows
from pipeline.admin.attention import Item
from pipeline.admin.resolutions import Desk
from pipeline.admin.workflows import Workflow
from pipeline.store.database import interval
from pipeline.store.reads import traces, work

SPAN = timedelta(minutes=1)
_RECENT = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast a workflow goes, per second over the last minute."""

    published: float
    committed: float
    stopped: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Everything at one instant."""

    at: datetime
    workflows: tuple[Workflow, ...]
    paces: dict[str, Pace]  #: by workflow; one in which nothing moved is missing
    attention: tuple[Item, ...]
    late_sweeps: tuple[str, ...]  #: sweeps that have not run for three of their periods

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def frame(desk: Desk, periods: Mapping[str, timedelta]) -> Frame:
    """What is true now. The doctor's long look back is left to the doctor."""
    span = interval(SPAN)
    with desk.db.transaction() as tx:
        now = tx.clock()
        ended = {row.workflow: row for row in traces.pace(tx, span, recent=_RECENT)}
        came = {row.workflow: row for row in traces.arrivals(tx, span, recent=_RECENT)}
        late = work.late_sweeps(tx, periods)
    paces = {
        name: Pace(
            published=_rate(came.get(name), "published"),
            committed=_rate(ended.get(name), "committed"),
            stopped=_rate(ended.get(name), "stopped"),
        )
        for name in sorted({*ended, *came})
    }
    return Frame(
        at=now,
        workflows=tuple(workflows.listed(desk.db)),
        paces=paces,
        attention=tuple(attention.items(desk, limit=20, recent=100)),
        late_sweeps=tuple(late),
    )


def _rate(row: Any, name: str) -> float:
    """Per second. When the look did not reach back a whole minute, over as long as it reached."""
    if row is None:
        return 0.0
    count = int(getattr(row, name))
    whole = row.looked >= _RECENT
    span = max(float(row.reach), 1.0) if whole else SPAN.total_seconds()
    return round(count / span, 2)
