"""Metrics of a worker: its children count, its main process adds up and answers.

The channel between them is made before the first child is. A child that is recycled hands over the rest when it ends;
one that is killed takes its last second along, and nothing else.
"""

import logging
from collections.abc import Iterable

from sqlalchemy.exc import SQLAlchemyError

from pipeline.admin.gauges import Gauges
from pipeline.config import Settings
from pipeline.store.database import Database
from pipeline.store.reads import gauges, work
from pipeline.tasks import dead_letter
from pipeline.telemetry import metrics
from pipeline.telemetry.metrics_export.meters import Meters, require

log = logging.getLogger(__name__)

#: Of these transitions alerts ask how fast they come.
RATED = ("mutation.applied", "mutation.failed", "mutation.escalated")

_meters: Meters | None = None


def open_(settings: Settings, pool: str) -> None:
    """When the worker starts, before its pool does. What is not installed is said now."""
    global _meters
    require(settings)
    _meters = Meters(settings, forks="prefork" in pool)
    _meters.open()


def begin(settings: Settings, workflows: Iterable[str]) -> None:
    """In the main process, once it is ready: add up, and answer whoever asks."""
    meters = _meters or Meters(settings)
    if meters.is_wanted:
        db = Database.connect(settings.database_url, pool_size=1)
        meters.begin(Gauges(db).register)
        count_none({*workflows, *_registered(db)})  # its sweeps rescue the runs of others, too


def begin_child(workflows: Iterable[str]) -> None:
    """In a process of the pool."""
    if _meters is not None and _meters.is_wanted:
        _meters.begin_child()
        count_none(workflows)


def count_none(workflows: Iterable[str]) -> None:
    """Begin at zero what alerts rate: of a series whose first value is 200, Prometheus sees no step at all."""
    dead_letter.count_none()
    for workflow in workflows:
        metrics.note("pipeline.rescues", {"workflow": workflow}, 0)
        for name in RATED:
            metrics.note("pipeline.transitions", {"transition": name, "workflow": workflow}, 0)


def _registered(db: Database) -> list[str]:
    """The workflows that the database knows; none while it does not answer."""
    try:
        with db.transaction() as tx:
            gauges.carefully(tx)
            return work.workflow_names(tx)
    except SQLAlchemyError:
        log.debug("the database was not asked for its workflows", exc_info=True)
        return []


def end() -> None:
    """Let the last numbers of this process out."""
    if _meters is not None:
        _meters.end()
