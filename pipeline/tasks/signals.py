"""What happens when a worker starts, forks, loses a child and stops."""

import logging
import sys
from typing import Any

from celery import signals
from sqlalchemy.exc import SQLAlchemyError

from pipeline.runtime.safety import require_safe
from pipeline.runtime.sync import sync
from pipeline.tasks import guardian
from pipeline.tasks.host import host

log = logging.getLogger(__name__)

EXIT_UNSAFE = 78  #: the conventional code for a configuration that cannot be used


@signals.worker_init.connect
def check(**_: Any) -> None:
    """Refuse to start unsafe; then tell the database which workflows there are."""
    here = host()
    try:
        require_safe(here.db, here.registry, lease=here.settings.lease, heartbeat=here.settings.heartbeat)
        sync(here.db, here.registry)
    except Exception as error:  # noqa: BLE001 - Celery would log it and start a worker that cannot do anything
        sys.stderr.write(f"{error}\n")
        sys.exit(EXIT_UNSAFE)
    here.db.dispose()


@signals.worker_process_init.connect
def begin_child(**_: Any) -> None:
    """A child opens connections of its own."""
    host()


@signals.worker_process_shutdown.connect
@signals.worker_shutdown.connect
def release(**_: Any) -> None:
    """Give back what is still held, so that nobody waits for leases to lapse."""
    try:
        host().leases.release()
    except SQLAlchemyError as error:
        log.warning("runs could not be given back; their leases will lapse: %s", error)


@signals.worker_ready.connect
def watch(sender: Any, **_: Any) -> None:
    """Start the guardian: it watches over this worker from its main process."""
    guardian.start(host(), sender.pool)
