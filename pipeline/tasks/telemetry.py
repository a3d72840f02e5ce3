"""Start and stop metrics and tracing in the processes of a worker.

Metrics: the children count, the main process adds up and answers scrapes. The channel between them is created before
the first child. A recycled child hands over the rest when it ends. A killed child loses at most its last second.

Spans: a task carries runs of several traces, so it has its own trace. It is linked to the message that started it and
to its runs, whose phases link back. An error of a task may quote a payload, so only its type is exported.
"""

import logging
from collections.abc import Iterable
from typing import Any

from celery import signals
from opentelemetry import trace
from opentelemetry.trace import Status, StatusCode
from sqlalchemy.exc import SQLAlchemyError

from pipeline.admin.gauges import Gauges
from pipeline.config import Settings
from pipeline.store.database import Database
from pipeline.store.reads import gauges, work
from pipeline.tasks import dead_letter
from pipeline.telemetry import metrics, spans_export
from pipeline.telemetry.metrics_export import MetricsExport, require_exporter

log = logging.getLogger(__name__)

#: Transitions whose rate the alerts use.
ALERTED_TRANSITIONS = ("mutation.applied", "mutation.failed", "mutation.escalated")

_export: MetricsExport | None = None


def open_metrics(settings: Settings, pool: str) -> None:
    """Open the channel when the worker starts, before its pool; refuse a missing exporter."""
    global _export
    require_exporter(settings)
    _export = MetricsExport(settings, is_forking="prefork" in pool)
    _export.open_channel()


def start_metrics(settings: Settings, workflows: Iterable[str]) -> None:
    """Start the export in the main process, once it is ready."""
    meters = _export or MetricsExport(settings)
    if meters.is_enabled:
        db = Database.connect(settings.database_url, pool_size=1)
        meters.begin(Gauges(db).register)
        count_zeros({*workflows, *_registered_workflows(db)})  # its sweeps rescue runs of all workflows


def start_child_metrics(workflows: Iterable[str]) -> None:
    """Start to count in a process of the pool."""
    if _export is not None and _export.is_enabled:
        _export.begin_child()
        count_zeros(workflows)


def count_zeros(workflows: Iterable[str]) -> None:
    """Start alerted counters at zero: Prometheus sees no increase in the first value of a series."""
    dead_letter.count_zeros()
    for workflow in workflows:
        metrics.record("pipeline.rescues", {"workflow": workflow}, 0)
        for name in ALERTED_TRANSITIONS:
            metrics.record("pipeline.transitions", {"transition": name, "workflow": workflow}, 0)


def _registered_workflows(db: Database) -> list[str]:
    """Return the workflows in the database; none while it does not answer."""
    try:
        with db.transaction() as tx:
            gauges.limit_reads(tx)
            return work.workflow_names(tx)
    except SQLAlchemyError:
        log.debug("the workflows could not be read from the database", exc_info=True)
        return []


def stop_metrics() -> None:
    """Export the last metrics of this process."""
    if _export is not None:
        _export.end()


def start_tracing(endpoint: str, *, traces_tasks: bool = True) -> None:
    """Trace this process, and its tasks unless it forks children or runs the tasks of another app too."""
    provider = spans_export.start(endpoint, process_wide=traces_tasks)
    if provider is None or not traces_tasks:
        return
    from opentelemetry.instrumentation.celery import CeleryInstrumentor

    instrumentor: Any = CeleryInstrumentor()  # type: ignore[no-untyped-call]
    if instrumentor.is_instrumented_by_opentelemetry:
        return
    instrumentor.instrument(tracer_provider=provider, use_span_links=True)
    signals.task_failure.disconnect(instrumentor._trace_failure)
    signals.task_retry.disconnect(instrumentor._trace_retry)
    signals.task_failure.connect(_mark_failed)


def stop_tracing() -> None:
    """Export the last spans of this process."""
    spans_export.stop()


def _mark_failed(exception: BaseException | None = None, **_: Any) -> None:
    """Set the type of a task's error on its span."""
    error_type = type(exception).__qualname__
    span = trace.get_current_span()
    span.set_attribute("exception.type", error_type)
    span.set_status(Status(StatusCode.ERROR, error_type))
