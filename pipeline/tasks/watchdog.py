"""A thread of the worker's main process that sees what the worker itself cannot.

It recovers at once what a dead child held, stands in for a beat that is gone, and ends a worker whose
consumer no longer takes messages: alive to every supervisor, and of no use to anybody.
"""

import logging
import os
import threading
import time
from datetime import timedelta
from typing import Any

from celery.worker import state
from kombu.exceptions import ChannelError

from pipeline.celery import app
from pipeline.config import EXIT_AGAIN
from pipeline.store.reads import work
from pipeline.tasks import messages
from pipeline.tasks.process import Host
from pipeline.worker import liveness
from pipeline.worker.runner import process_name

log = logging.getLogger(__name__)

_LAST_WORDS = 10.0  #: seconds between asking the worker to stop and ending its process


class Stall:
    """Decides whether a worker has stopped consuming: idle for too long although messages wait for it."""

    def __init__(self, patience: timedelta) -> None:
        self.patience = patience.total_seconds()
        self._since: float | None = None
        self._taken = -1

    def seen(self, *, taken: int, busy: bool, waiting: bool, now: float) -> bool:
        """Take note of a moment: messages taken so far, whether some are being worked on, whether others wait."""
        idle = waiting and not busy and taken == self._taken
        self._taken = taken
        if not idle:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        return now - self._since >= self.patience


class Guardian:
    """Looks every second, and at what costs a query every fifth."""

    def __init__(self, here: Host, pool: Any, every: float = 1.0) -> None:
        self.here, self.pool, self.every = here, pool, every
        self.stall = Stall(here.settings.stall)
        self._children = self._pids()
        self._turn = 0
        self._born = time.monotonic()
        self._stop = threading.Event()

    def run(self) -> None:
        while not self._stop.wait(self.every):
            self._turn += 1
            duties = (self.see_children, self.stand_in, self.see_stall) if self._turn % 5 == 0 else (self.see_children,)
            for duty in duties:
                try:
                    duty()
                except Exception:
                    log.exception("the guardian failed to %s and goes on", duty.__name__)

    def see_children(self) -> None:
        """Recover at once what a child held that is gone."""
        now = self._pids()
        for pid in self._children - now:
            self.here.sweeps.forsake(process_name(pid))
        self._children = now

    def stand_in(self) -> None:
        """Ring for sweeps that beat has not rung for; the slot keeps several stand-ins from doing it twice."""
        lives = timedelta(seconds=time.monotonic() - self._born)
        with self.here.db.transaction() as tx:
            idle = work.late_sweeps(tx, self.here.sweeps.periods)
            late = work.late_sweeps(tx, self.here.sweeps.periods, since=lives)
        if late:
            log.warning("beat is late with %s: standing in for it; is it running?", ", ".join(late))
        for name in idle:  # one that never ran is rung for at once, and beat blamed for it only later
            messages.sweep(name)

    def see_stall(self) -> None:
        """End this worker if it takes no messages although some wait for it."""
        stops = state.should_stop is not None or state.should_terminate is not None
        stalled = self.stall.seen(
            taken=sum(state.total_count.values()),
            busy=bool(stops or state.active_requests or state.reserved_requests),
            waiting=_waiting(),
            now=time.monotonic(),
        )
        if stalled:
            self._end()

    def _end(self) -> None:
        log.critical(
            "this worker has taken no message for %g s although some wait for it: its connection to the broker is "
            "dead without knowing it. It ends with exit code %d; nothing is lost, let its supervisor start it again",
            self.stall.patience,
            EXIT_AGAIN,
        )
        state.should_stop = EXIT_AGAIN
        self._stop.wait(_LAST_WORDS)
        os._exit(EXIT_AGAIN)  # the thread that should have stopped is the one that is stuck

    def _pids(self) -> set[int]:
        processes = getattr(getattr(self.pool, "_pool", None), "_pool", None) or ()
        return {process.pid for process in processes if getattr(process, "pid", None)}


def start(here: Host, pool: Any) -> None:
    """Watch over this worker until its process ends. Its signs of life wait for no server, so they are given apart."""
    threading.Thread(target=Guardian(here, pool).run, name="pipeline-guardian", daemon=True).start()
    if here.settings.alive_file is not None:
        threading.Thread(target=liveness.keep_giving, args=(here.settings.alive_file,), daemon=True).start()


def _waiting() -> bool:
    """Whether a queue that this worker consumes holds messages nobody has taken; not while the broker is away."""
    with app.connection_for_read(connect_timeout=2) as connection:
        try:
            return any(_size(connection, queue) for queue in list(app.amqp.queues.consume_from))
        except connection.connection_errors:
            return False


def _size(connection: Any, queue: str) -> int:
    with connection.channel() as channel:
        try:
            return int(channel.queue_declare(queue=queue, passive=True).message_count)
        except ChannelError:  # a queue that is empty may not exist
            return 0
