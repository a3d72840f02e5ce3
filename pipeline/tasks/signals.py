"""Celery signals: what a worker does when it starts, forks and stops."""

import logging
import sys
import threading
from typing import Any, NoReturn

from billiard.common import terminate_handler_fired
from celery import signals
from celery.worker import state
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from pipeline.config import EXIT_RESTART, EXIT_UNSAFE
from pipeline.store.database import describe_error, is_transient
from pipeline.tasks import broker_owner, messages, telemetry, watchdog
from pipeline.tasks.process import current_process
from pipeline.telemetry import logs, spans_export
from pipeline.worker.startup_checks import require_safe
from pipeline.workflows.registration import register_workflows

log = logging.getLogger(__name__)

_watchdogs: list[watchdog.Watchdog] = []  #: of this process: none, or one


@signals.worker_init.connect
def check_startup(sender: Any, **_: Any) -> None:
    """Refuse an unsafe start; then register the workflows in the database."""
    here = current_process()
    try:
        pool = getattr(sender.pool_cls, "__module__", "")
        spans_export.require_exporter(here.settings.otlp_endpoint)
        telemetry.open_metrics(here.settings, pool)
        require_safe(here.db, here.registry, here.settings, pool=pool)
        register_workflows(here.db, here.registry, here.settings.code_version)
        messages.consume_more_queues((each.name, each.version) for each in here.registry.workflows.values())
    except Exception as error:  # noqa: BLE001 - Celery would log it and start a worker that can do nothing
        _exit(error)
    here.db.dispose()


def _exit(error: Exception) -> NoReturn:
    """Exit with the code for a restart, or with the code for an operator who must change something first."""
    if is_transient(error):
        message = describe_error(error) if isinstance(error, DBAPIError) else error
        sys.stderr.write(f"the database cannot be used right now; start this worker again:\n{message}\n")
        sys.exit(EXIT_RESTART)
    sys.stderr.write(f"{error}\n")
    sys.exit(EXIT_UNSAFE)


@signals.worker_process_init.connect
def start_child(**_: Any) -> None:
    """Start tracing and metrics in a child of the pool."""
    telemetry.start_tracing(current_process().settings.otlp_endpoint)
    telemetry.start_child_metrics(current_process().registry.workflows)


@signals.worker_process_shutdown.connect
@signals.worker_shutdown.connect
def shut_down(**_: Any) -> None:
    """Wait for calls that outlived their tasks, then hand back the runs of this process.

    Celery sends this when a worker stops, and in a child of the pool also when the child is recycled.
    """
    current_process().drain(is_cold)
    try:
        current_process().leases.hand_back_all()
    except SQLAlchemyError as error:
        log.warning("runs could not be handed back; their leases will lapse: %s", error)
    stopping = threading.Thread(target=telemetry.stop_metrics, name="pipeline-stop-metrics", daemon=True)
    stopping.start()  # beside the spans: one wait for a collector that does not answer
    telemetry.stop_tracing()
    stopping.join()


@signals.worker_shutdown.connect
def stop_watchdog(**_: Any) -> None:
    """Stop the watchdog of this worker, and remove the record of the worker."""
    while _watchdogs:
        _watchdogs.pop().stop()


def is_cold() -> bool:
    """Return whether this process was asked to end at once: a child by SIGTERM, a worker by SIGQUIT or a second signal.

    What it has in flight is then left as a crash leaves it.
    """
    return bool(state.should_terminate) or terminate_handler_fired()


@signals.worker_ready.connect
def start_background_threads(sender: Any, **_: Any) -> None:
    """Start metrics, tracing and the watchdog of this worker in its main process."""
    forks = "prefork" in type(sender.pool).__module__
    telemetry.start_tracing(current_process().settings.otlp_endpoint, forks=forks)
    telemetry.start_metrics(current_process().settings, current_process().registry.workflows)
    _watchdogs.append(watchdog.start_watchdog(current_process(), sender))
    broker_owner.check_broker_owner(current_process().db, current_process().settings.broker_url)


@signals.after_setup_logger.connect
@signals.after_setup_task_logger.connect
def format_logs(logger: logging.Logger, **_: Any) -> None:
    """Give Celery's log lines our format. Its handlers stay, and with them its logging options."""
    settings = current_process().settings
    logs.set_format(logger.handlers, settings.log_format)
    logs.set_level(settings.log_level)
