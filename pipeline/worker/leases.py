"""Extend leases: one thread per process sends a heartbeat for every run that the process holds.

A run whose heartbeat is refused belongs to another worker; it is remembered as lost, and nothing may
be sent for it any more. The thread belongs to the process that started it: after a fork the child
begins with no runs and a thread of its own.

A heartbeat that fails is tried again soon. It has a database connection of its own: a pool that is used up delays none.
"""

import logging
import os
import threading
import time
from collections.abc import Iterable
from datetime import timedelta

from pipeline.domain.states import Fence, RunId
from pipeline.domain.values import RunLease
from pipeline.store.database import Database
from pipeline.transitions import runs

log = logging.getLogger(__name__)

_RETRIES = 4  #: of a heartbeat that fails, in the time of one


class Leases:
    """The runs this process holds."""

    def __init__(self, db: Database, *, lease: timedelta, every: timedelta) -> None:
        self.db, self.lease, self.every = db, lease, every
        self._fresh_for = min(every / 2, lease / 8)
        self._held: dict[RunId, Fence] = {}
        self._until: dict[RunLease, float] = {}
        self._lost: set[RunLease] = set()
        self._lock = threading.Lock()
        self._pid = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._extended_at = time.monotonic()  #: when the leases were last extended, or there were none

    def hold(self, leases: Iterable[RunLease]) -> None:
        """Begin to extend these leases."""
        self._start()
        with self._lock:
            if not self._held:
                self._extended_at = time.monotonic()
            self._held.update({item.run_id: item.fence for item in leases})

    def hold_until(self, leases: Iterable[RunLease], until: float) -> None:
        """Extend these no longer after ``until`` on the monotonic clock, whatever becomes of their work."""
        with self._lock:
            self._until.update(dict.fromkeys(leases, until))

    def drop(self, leases: Iterable[RunLease]) -> None:
        """The work is done, or given up: extend these no longer."""
        with self._lock:
            for item in leases:
                if self._held.get(item.run_id) == item.fence:
                    del self._held[item.run_id]
                self._until.pop(item, None)
                self._lost.discard(item)

    def is_held(self, lease: RunLease) -> bool:
        """Whether this run is still extended here."""
        return self._held.get(lease.run_id) == lease.fence

    def is_lost(self, lease: RunLease) -> bool:
        """Whether another worker was found to own this run."""
        return lease in self._lost

    def heartbeat(self) -> bool:
        """Extend every lease once. False: it failed, and is to be tried again soon."""
        begun = time.monotonic()
        with self._lock:
            held = [RunLease(run_id, fence) for run_id, fence in self._held.items()]
            mine = [item for item in held if self._until.get(item, begun) >= begun]
        if not mine:
            return True
        try:
            with self.db.autocommit() as tx:
                refused = runs.heartbeat(tx, mine, lease_duration=self.lease, fresh_for=self._fresh_for).refused
        except Exception as error:  # noqa: BLE001 - whatever it is, the thread must go on
            log.warning("leases could not be extended, trying again in %s: %s", self.every / _RETRIES, error)
            return False
        with self._lock:
            late, self._extended_at = begun - self._extended_at, begun
            for item in mine:
                if item.run_id in refused and self._held.get(item.run_id) == item.fence:
                    del self._held[item.run_id]
                    self._lost.add(item)
        if late > self.lease.total_seconds():
            log.warning(
                "the leases of %d runs were extended %.1f s after the last time, later than they lasted: is this "
                "machine overloaded or suspended, or was Postgres away? %d of them were taken from this process",
                len(mine),
                late,
                len(refused),
            )
        return True

    def hand_back_all(self) -> None:
        """Give back what can be given back: a clean shutdown need not wait for its leases to lapse."""
        self._stop.set()
        with self._lock:
            mine = [RunLease(run_id, fence) for run_id, fence in self._held.items()]
            self._held.clear()
        if mine:
            with self.db.transaction() as tx:
                runs.hand_back(tx, mine)

    def _start(self) -> None:
        with self._lock:
            if self._pid != os.getpid():
                self._pid, self._held, self._until, self._lost = os.getpid(), {}, {}, set()
            elif self._thread is not None and self._thread.is_alive():
                return
            self._stop = threading.Event()
            self._thread = threading.Thread(target=self._run, args=(self._stop,), name="pipeline-leases", daemon=True)
            self._thread.start()

    def _run(self, stop: threading.Event) -> None:
        pause = self.every
        while not stop.wait(pause.total_seconds()):
            pause = self.every if self.heartbeat() else self.every / _RETRIES
