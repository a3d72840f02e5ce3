"""What happens when a worker starts, forks, loses a child and stops."""

import logging
import sys
import threading
from typing import Any, NoReturn

from celery import signals
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from pipeline.config import EXIT_RESTART, EXIT_UNSAFE
from pipeline.store.database import describe_error, is_transient
from pipeline.tasks import broker_mark, telemetry, watchdog
from pipeline.tasks.process import current_process
from pipeline.telemetry import logs
from pipeline.telemetry.tracing import export
from pipeline.worker.startup_checks import require_safe
from pipeline.workflows.registration import register_workflows

log = logging.getLogger(__name__)


@signals.worker_init.connect
def check_startup(sender: Any, **_: Any) -> None:
    """Refuse to start unsafe; then tell the database which workflows there are."""
    here = current_process()
    try:
        pool = getattr(sender.pool_cls, "__module__", "")
        export.require_exporter(here.settings.otlp_endpoint)
        telemetry.open_metrics(here.settings, pool)
        require_safe(here.db, here.registry, here.settings, pool=pool)
        register_workflows(here.db, here.registry, here.settings.code_version)
    except Exception as error:  # noqa: BLE001 - Celery would log it and start a worker that cannot do anything
        _exit(error)
    here.db.dispose()


def _exit(error: Exception) -> NoReturn:
    """With the code that says whether a new start may help, or a person has to change something first."""
    if is_transient(error):
        said = describe_error(error) if isinstance(error, DBAPIError) else error
        sys.stderr.write(f"the database cannot be used right now; start this worker again:\n{said}\n")
        sys.exit(EXIT_RESTART)
    sys.stderr.write(f"{error}\n")
    sys.exit(EXIT_UNSAFE)


@signals.worker_process_init.connect
def start_child(**_: Any) -> None:
    """A child opens connections of its own."""
    telemetry.start_tracing(current_process().settings.otlp_endpoint)
    telemetry.start_child_metrics(current_process().registry.workflows)


@signals.worker_process_shutdown.connect
@signals.worker_shutdown.connect
def shut_down(**_: Any) -> None:
    """Give back what is still held, so that nobody waits for leases to lapse."""
    try:
        current_process().leases.hand_back_all()
    except SQLAlchemyError as error:
        log.warning("runs could not be given back; their leases will lapse: %s", error)
    numbers = threading.Thread(target=telemetry.stop_metrics, name="pipeline-stop-metrics", daemon=True)
    numbers.start()  # beside the spans: a collector that does not answer is waited for once
    telemetry.stop_tracing()
    numbers.join()


@signals.worker_ready.connect
def start_background_threads(sender: Any, **_: Any) -> None:
    """Start the guardian: it watches over this worker from its main process."""
    forks = "prefork" in type(sender.pool).__module__
    telemetry.start_tracing(current_process().settings.otlp_endpoint, forks=forks)
    telemetry.start_metrics(current_process().settings, current_process().registry.workflows)
    watchdog.start_watchdog(current_process(), sender.pool)
    broker_mark.check_broker_owner(current_process().db, current_process().settings.broker_url)


@signals.after_setup_logger.connect
@signals.after_setup_task_logger.connect
def format_logs(logger: logging.Logger, **_: Any) -> None:
    """Let Celery's own lines look like ours. Its handlers stay, and with them its options for logging."""
    settings = current_process().settings
    logs.set_format(logger.handlers, settings.log_format)
    logs.set_level(settings.log_level)
