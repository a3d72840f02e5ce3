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
from pipeline.telemetry.metrics_export.meters import MetricsExport, require_exporter

log = logging.getLogger(__name__)

#: Of these transitions alerts ask how fast they come.
ALERTED_TRANSITIONS = ("mutation.applied", "mutation.failed", "mutation.escalated")

_export: MetricsExport | None = None


def open_metrics(settings: Settings, pool: str) -> None:
    """When the worker starts, before its pool does. What is not installed is said now."""
    global _export
    require_exporter(settings)
    _export = MetricsExport(settings, is_forking="prefork" in pool)
    _export.open_channel()


def start_metrics(settings: Settings, workflows: Iterable[str]) -> None:
    """In the main process, once it is ready: add up, and answer whoever asks."""
    meters = _export or MetricsExport(settings)
    if meters.is_enabled:
        db = Database.connect(settings.database_url, pool_size=1)
        meters.begin(Gauges(db).register)
        count_zeros({*workflows, *_registered_workflows(db)})  # its sweeps rescue the runs of others, too


def start_child_metrics(workflows: Iterable[str]) -> None:
    """In a process of the pool."""
    if _export is not None and _export.is_enabled:
        _export.begin_child()
        count_zeros(workflows)


def count_zeros(workflows: Iterable[str]) -> None:
    """Begin at zero what alerts rate: of a series whose first value is 200, Prometheus sees no step at all."""
    dead_letter.count_zeros()
    for workflow in workflows:
        metrics.record("pipeline.rescues", {"workflow": workflow}, 0)
        for name in ALERTED_TRANSITIONS:
            metrics.record("pipeline.transitions", {"transition": name, "workflow": workflow}, 0)


def _registered_workflows(db: Database) -> list[str]:
    """The workflows that the database knows; none while it does not answer."""
    try:
        with db.transaction() as tx:
            gauges.limit_reads(tx)
            return work.workflow_names(tx)
    except SQLAlchemyError:
        log.debug("the database was not asked for its workflows", exc_info=True)
        return []


def stop_metrics() -> None:
    """Let the last numbers of this process out."""
    if _export is not None:
        _export.end()
