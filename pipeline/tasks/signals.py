"""Celery signals: what a worker does when it starts, forks and stops.

Only a worker of the app that Pipeline is installed in acts on them, and of another app than ours only if it reads one
of our queues.
"""

import gc
import logging
import sys
import threading
from typing import Any, NoReturn

from billiard.common import terminate_handler_fired
from celery import signals
from celery.worker import state
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from pipeline.celery import installed
from pipeline.config import EXIT_RESTART, EXIT_UNSAFE
from pipeline.store.database import describe_error, is_transient
from pipeline.tasks import broker_owner, dead_letter, messages, outages, telemetry, watchdog
from pipeline.tasks.process import current_process
from pipeline.telemetry import logs, spans_export
from pipeline.worker import liveness
from pipeline.worker.startup_checks import require_pool, require_safe
from pipeline.workflows.registration import register_workflows

log = logging.getLogger(__name__)

_watchdogs: list[watchdog.Watchdog] = []  #: of this process: none, or one


@signals.worker_init.connect
def prepare_worker(sender: Any, **_: Any) -> None:
    """Let a worker of the installed app run workflows; other workers stay as they are."""
    found, queues = installed(), sender.app.amqp.queues
    reads_ours = [found.is_ours(queue) for queue in queues.consume_from]
    if sender.app is not found.app or not (found.is_own or any(reads_ours)):
        return
    check_startup(sender)
    outages.report_once()  # before the worker forks
    leave_out_of_collection()
    sender.consumer_cls = dead_letter.dead_letter_consumer(sender.consumer_cls)
    if all(reads_ours):  # a prefetched message of a busy worker cannot go to an idle one
        sender.prefetch_multiplier = 1
    signals.worker_process_init.connect(start_child)
    signals.worker_ready.connect(start_background_threads)
    signals.worker_process_shutdown.connect(shut_down)
    signals.worker_shutdown.connect(shut_down)
    signals.worker_shutdown.connect(stop_watchdog)


def check_startup(sender: Any) -> None:
    """Refuse an unsafe start; then register the workflows in the database."""
    try:
        pool = sender.pool_cls if isinstance(sender.pool_cls, str) else getattr(sender.pool_cls, "__module__", "")
        require_pool(pool)
        here = current_process()
        spans_export.require_exporter(here.settings.otlp_endpoint)
        telemetry.open_metrics(here.settings, pool)
        require_safe(here.db, here.registry, here.settings, found=installed().problems(here.settings))
        register_workflows(here.db, here.registry, here.settings.code_version)
        messages.consume_more_queues((each.name, each.version) for each in here.registry.workflows.values())
    except Exception as error:  # noqa: BLE001 - Celery would log it and start a worker that can do nothing
        _exit(error)
    here.db.dispose()


def leave_out_of_collection() -> None:
    """Leave what the worker has loaded out of garbage collection.

    It lives as long as the worker. A cohort makes so many objects that it would be searched again and again, in pages
    of memory that children share.
    """
    gc.collect()
    gc.freeze()


def _exit(error: Exception) -> NoReturn:
    """Exit with the code for a restart, or with the code for an operator who must change something first."""
    if is_transient(error):
        message = describe_error(error) if isinstance(error, DBAPIError) else error
        sys.stderr.write(f"the database cannot be used right now; start this worker again:\n{message}\n")
        sys.exit(EXIT_RESTART)
    sys.stderr.write(f"{error}\n")
    sys.exit(EXIT_UNSAFE)


def start_child(**_: Any) -> None:
    """Start tracing and metrics in a child of the pool."""
    telemetry.start_tracing(current_process().settings.otlp_endpoint, traces_tasks=installed().is_own)
    telemetry.start_child_metrics(current_process().registry.workflows)


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


def stop_watchdog(**_: Any) -> None:
    """Stop the watchdog of this worker, and remove the record of the worker."""
    while _watchdogs:
        _watchdogs.pop().stop()


def is_cold() -> bool:
    """Return whether this process was asked to end at once: a child by SIGTERM, a worker by SIGQUIT or a second signal.

    What it has in flight is then left as a crash leaves it.
    """
    return bool(state.should_terminate) or terminate_handler_fired()


def start_background_threads(sender: Any, **_: Any) -> None:
    """Start metrics, tracing and the watchdog of this worker in its main process."""
    forks = "prefork" in type(sender.pool).__module__
    telemetry.start_tracing(current_process().settings.otlp_endpoint, traces_tasks=installed().is_own and not forks)
    telemetry.start_metrics(current_process().settings, current_process().registry.workflows)
    _watchdogs.append(watchdog.start_watchdog(current_process(), sender))
    broker_owner.check_broker_owner(current_process().db)


@signals.after_setup_logger.connect
@signals.after_setup_task_logger.connect
def format_logs(logger: logging.Logger, **_: Any) -> None:
    """Give the log lines of our own app our format. Celery's handlers stay, and with them its logging options."""
    if installed().is_own:
        settings = current_process().settings
        logs.set_format(logger.handlers, settings.log_format)
        logs.set_level(settings.log_level)


@signals.beat_init.connect
def touch_liveness_file(sender: Any, **_: Any) -> None:
    """Touch the liveness file of beat, in a thread that waits for no broker and stops with the process."""
    file = installed().load_settings().liveness_file
    if sender.app is installed().app and file is not None:
        threading.Thread(target=liveness.touch_forever, args=(file,), name="pipeline-liveness", daemon=True).start()
