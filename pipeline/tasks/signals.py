"""What happens when a worker starts, forks, loses a child and stops."""

import logging
import sys
import threading
from typing import Any, NoReturn

from celery import signals
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError, TimeoutError

from pipeline.config import EXIT_AGAIN, EXIT_UNSAFE
from pipeline.store.database import passes, plainly
from pipeline.tasks import broker_mark, metrics, tracing, watchdog
from pipeline.tasks.process import host
from pipeline.telemetry import logs
from pipeline.telemetry.tracing import export
from pipeline.worker.startup_checks import require_safe
from pipeline.workflows.registration import sync

log = logging.getLogger(__name__)


@signals.worker_init.connect
def check(sender: Any, **_: Any) -> None:
    """Refuse to start unsafe; then tell the database which workflows there are."""
    here = host()
    try:
        pool = getattr(sender.pool_cls, "__module__", "")
        export.require(here.settings.otlp_endpoint)
        metrics.open_(here.settings, pool)
        require_safe(here.db, here.registry, here.settings, pool=pool)
        sync(here.db, here.registry)
    except Exception as error:  # noqa: BLE001 - Celery would log it and start a worker that cannot do anything
        _end(error)
    here.db.dispose()


def _end(error: Exception) -> NoReturn:
    """With the code that says whether a new start may help, or a person has to change something first."""
    passing = isinstance(error, DBAPIError) and passes(error)
    if passing or isinstance(error, OperationalError | TimeoutError):
        said = plainly(error) if isinstance(error, DBAPIError) else error
        sys.stderr.write(f"the database cannot be used right now; start this worker again:\n{said}\n")
        sys.exit(EXIT_AGAIN)
    sys.stderr.write(f"{error}\n")
    sys.exit(EXIT_UNSAFE)


@signals.worker_process_init.connect
def begin_child(**_: Any) -> None:
    """A child opens connections of its own."""
    tracing.begin(host().settings.otlp_endpoint)
    metrics.begin_child(host().registry.workflows)


@signals.worker_process_shutdown.connect
@signals.worker_shutdown.connect
def release(**_: Any) -> None:
    """Give back what is still held, so that nobody waits for leases to lapse."""
    try:
        host().leases.release()
    except SQLAlchemyError as error:
        log.warning("runs could not be given back; their leases will lapse: %s", error)
    numbers = threading.Thread(target=metrics.end, name="pipeline-last-words", daemon=True)
    numbers.start()  # beside the spans: a collector that does not answer is waited for once
    tracing.end()
    numbers.join()


@signals.worker_ready.connect
def watch(sender: Any, **_: Any) -> None:
    """Start the guardian: it watches over this worker from its main process."""
    forks = "prefork" in type(sender.pool).__module__
    tracing.begin(host().settings.otlp_endpoint, forks=forks)
    metrics.begin(host().settings, host().registry.workflows)
    watchdog.start(host(), sender.pool)
    broker_mark.check(host().db, host().settings.broker_url)


@signals.after_setup_logger.connect
@signals.after_setup_task_logger.connect
def dress(logger: logging.Logger, **_: Any) -> None:
    """Let Celery's own lines look like ours. Its handlers stay, and with them its options for logging."""
    settings = host().settings
    logs.dress(logger.handlers, settings.log_format)
    logs.level(settings.log_level)
