"""What happens when a worker starts, forks, loses a child and stops."""

import logging
import sys
import threading
from typing import Any

from celery import signals
from sqlalchemy.exc import SQLAlchemyError

from pipeline.runtime.runner import process_name
from pipeline.runtime.safety import require_safe
from pipeline.runtime.sync import sync
from pipeline.store import views
from pipeline.tasks import chains
from pipeline.tasks.host import Host, host

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
    """Start the guardian: it sees children die, and stands in for a beat that is gone."""
    guardian = Guardian(host(), sender.pool)
    threading.Thread(target=guardian.run, name="pipeline-guardian", daemon=True).start()


class Guardian:
    """A thread of the worker's main process."""

    def __init__(self, here: Host, pool: Any, every: float = 1.0) -> None:
        self.here, self.pool, self.every = here, pool, every
        self._children = self._pids()
        self._stop = threading.Event()

    def run(self) -> None:
        turn = 0
        while not self._stop.wait(self.every):
            turn += 1
            try:
                self.see_children()
                if turn % 5 == 0:
                    self.stand_in()
            except Exception:
                log.exception("the guardian failed and goes on")

    def see_children(self) -> None:
        """Recover at once what a child held that is gone."""
        now = self._pids()
        for pid in self._children - now:
            self.here.sweeps.forsake(process_name(pid))
        self._children = now

    def stand_in(self) -> None:
        """Ring for sweeps that beat has not rung for; the slot keeps several stand-ins from doing it twice."""
        with self.here.db.transaction() as tx:
            late = views.late_sweeps(tx, self.here.sweeps.periods)
        if late:
            log.warning("beat is late with %s: standing in for it; is it running?", ", ".join(late))
        for name in late:
            chains.sweep(name)

    def _pids(self) -> set[int]:
        processes = getattr(getattr(self.pool, "_pool", None), "_pool", None) or ()
        return {process.pid for process in processes if getattr(process, "pid", None)}
