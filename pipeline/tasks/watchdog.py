"""A watchdog thread in the main process of a worker.

- It recovers crashed runs when the worker starts, and at once the runs of a dead child.
- It dispatches the sweeps while beat is gone.
- It ends a worker whose consumer takes no messages any more. A supervisor cannot see that.
- It records in the database that the worker runs, for operators.
- It reports when a database that was lost is back.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from celery.worker import state
from sqlalchemy.exc import SQLAlchemyError

from pipeline.celery import app, installed
from pipeline.config import EXIT_RESTART, package_version
from pipeline.domain.workflows import WORKER_HEARTBEAT, WorkerInfo
from pipeline.store.reads import work
from pipeline.tasks import messages, outages
from pipeline.tasks.process import WorkerProcess
from pipeline.transitions import housekeeping
from pipeline.worker import liveness
from pipeline.worker.runner import process_name

log = logging.getLogger(__name__)

_STOP_GRACE_SECONDS = 10.0  #: seconds between asking the worker to stop and ending its process
_MAX_ROUNDS = 10  #: checks of the children between two that cost a query


class StallDetector:
    """Decide whether a worker has stopped consuming: idle for too long although messages wait."""

    def __init__(self, timeout: timedelta) -> None:
        self.timeout = timeout.total_seconds()
        self._since: float | None = None
        self._taken = -1

    def observe(self, *, taken: int, is_busy: bool, has_waiting: bool, now: float) -> bool:
        """Record one observation and return whether the worker is stalled.

        ``taken`` counts the messages so far, ``is_busy`` says that one is in work, ``has_waiting`` that others wait.
        """
        idle = has_waiting and not is_busy and taken == self._taken
        self._taken = taken
        if not idle:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        return now - self._since >= self.timeout


class Watchdog:
    """Checks the children twice a second, and once per tick what costs a query.

    A long tick does not delay it: a query is sent at least every tenth time.
    """

    def __init__(self, here: WorkerProcess, worker: Any, every: float = 0.5) -> None:
        self.process, self.worker, self.pool, self.every = here, worker, worker.pool, every
        self._rounds = min(max(round(here.settings.tick.total_seconds() / every), 1), _MAX_ROUNDS)
        self.stall = StallDetector(here.settings.stall_timeout)
        self.outages = outages.report_once()
        self._children = self._pids()
        self._round = 0
        self._started_at = time.monotonic()
        self._stop = threading.Event()

    def run(self) -> None:
        self._try(self.process.sweeps.recover_at_start)
        self._try(self.record_worker)
        while not self._stop.wait(self.every):
            self._round += 1
            if self._round % round(WORKER_HEARTBEAT.total_seconds() / self.every) == 0:
                self._try(self.record_worker)
            self._try(self.recover_dead_children)
            if self.outages.is_on:
                self._try(self.end_outage)
            if self._round % self._rounds == 0:
                self._try(self.dispatch_late_sweeps)
                self._try(self.exit_if_stalled)

    def _try(self, duty: Callable[[], None]) -> None:
        try:
            duty()
        except Exception:
            log.exception("the watchdog failed to %s and goes on", duty.__name__)

    def record_worker(self) -> None:
        """Record that this worker runs."""
        with self.process.db.autocommit() as tx:
            housekeeping.record_worker(tx, worker_info(self.process, self.worker))

    def end_outage(self) -> None:
        """Ask the database whether it is back, and report it."""
        with self.process.db.autocommit() as tx:
            tx.clock()
        self.outages.end()

    def stop(self) -> None:
        """Stop this thread, and remove the record of the worker."""
        self._stop.set()
        try:
            with self.process.db.autocommit() as tx:
                housekeeping.remove_worker(tx, _worker_name(self.worker))
        except SQLAlchemyError as error:
            log.warning("the record of this worker could not be removed: %s", str(error).partition("\n")[0])

    def recover_dead_children(self) -> None:
        """Recover at once the runs of a child that is gone."""
        now = self._pids()
        for pid in self._children - now:
            self.process.sweeps.recover_process(process_name(pid))
        self._children = now

    def dispatch_late_sweeps(self) -> None:
        """Dispatch sweeps that beat has not dispatched; the slot of a sweep lets one worker run it."""
        uptime = timedelta(seconds=time.monotonic() - self._started_at)
        periods = self.process.sweeps.periods
        seldom = {name: max(every, periods["tick"]) for name, every in periods.items()}  # a busy pool is no dead beat
        with self.process.db.autocommit() as tx:
            ages = work.sweep_ages(tx)
        idle = work.overdue(ages, periods)
        late = work.overdue(ages, seldom, since=uptime)
        if late:
            log.warning("beat is late with %s: this worker dispatches them; is beat running?", ", ".join(late))
        for name in idle:  # one that never ran is dispatched at once; the warning about beat comes later
            messages.dispatch_sweep(name)

    def exit_if_stalled(self) -> None:
        """End this worker if it takes no messages although some wait for it."""
        is_stopping = state.should_stop is not None or state.should_terminate is not None
        stalled = self.stall.observe(
            taken=sum(state.total_count.values()),
            is_busy=bool(is_stopping or state.active_requests or state.reserved_requests),
            has_waiting=_has_waiting_messages(),
            now=time.monotonic(),
        )
        if stalled:
            self._exit()

    def _exit(self) -> None:
        log.critical(
            "this worker has taken no message for %g s although some wait for it: its connection to the broker is "
            "dead without knowing it. It ends with exit code %d; nothing is lost, let its supervisor start it again",
            self.stall.timeout,
            EXIT_RESTART,
        )
        state.should_stop = EXIT_RESTART
        self._stop.wait(_STOP_GRACE_SECONDS)
        os._exit(EXIT_RESTART)  # the thread that should have stopped is the one that is stuck

    def _pids(self) -> set[int]:
        processes = getattr(getattr(self.pool, "_pool", None), "_pool", None) or ()
        return {process.pid for process in processes if getattr(process, "pid", None)}


def worker_info(process: WorkerProcess, worker: Any) -> WorkerInfo:
    """Describe a worker by Celery's consumer of its messages."""
    return WorkerInfo(
        name=_worker_name(worker),
        host=socket.gethostname(),
        pid=os.getpid(),
        pool=type(worker.pool).__module__.rpartition(".")[2],
        concurrency=worker.controller.concurrency,
        queues=tuple(app.amqp.queues.consume_from),
        workflows={each.name: each.version for each in process.registry.workflows.values()},
        code_version=process.settings.code_version,
        package_version=package_version(),
    )


def _worker_name(worker: Any) -> str:
    """Return Celery's name of a worker and its process id: two workers may have the same name."""
    return f"{worker.hostname}:{os.getpid()}"


def start_watchdog(process: WorkerProcess, worker: Any) -> Watchdog:
    """Start the watchdog, and the thread that touches the liveness file; that thread waits for no server."""
    watchdog = Watchdog(process, worker)
    threading.Thread(target=watchdog.run, name="pipeline-watchdog", daemon=True).start()
    if process.settings.liveness_file is not None:
        threading.Thread(target=liveness.touch_forever, args=(process.settings.liveness_file,), daemon=True).start()
    return watchdog


def _has_waiting_messages() -> bool:
    """Return whether a queue of ours that this worker reads holds messages; False while the broker is away."""
    queues = [queue for queue in list(app.amqp.queues.consume_from) if installed().is_ours(queue)]
    with app.connection_for_read(connect_timeout=2) as connection:
        try:
            return any(messages.queue_depth(connection, queue) for queue in queues)
        except connection.connection_errors:
            return False
