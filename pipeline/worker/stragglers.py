"""Let calls outlive the task that sent them: a slow call must not keep a pool process from other work.

Each cohort whose task has ended gets a thread that records the outcomes of its last calls. Its number is bounded: a
cohort is followed only while it has a call in flight or a pause before another attempt.
"""

import contextvars
import threading
from collections.abc import Callable, Collection

from pipeline.domain.values import RunLease

_POLL_SECONDS = 0.2  #: how often a wait asks whether it has to end


class Stragglers:
    """The cohorts of this process that are still in flight without a task."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._followed: dict[threading.Thread, Collection[RunLease]] = {}
        self._crashes: list[BaseException] = []

    def __contains__(self, lease: object) -> bool:
        with self._lock:
            return any(lease in leases for leases in self._followed.values())

    def follow(self, leases: Collection[RunLease], finish: Callable[[], None]) -> None:
        """Call ``finish`` in a thread of its own, in the caller's context; it holds these leases meanwhile."""
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(self._run, finish), name="pipeline-stragglers", daemon=True)
        with self._lock:
            self._followed[thread] = frozenset(leases)
            try:
                thread.start()
            except RuntimeError:  # the machine has no thread left: the caller's does it
                del self._followed[thread]
        if not thread.ident:
            finish()

    def wait(self, must_end: Callable[[], bool] = lambda: False) -> None:
        """Wait until the last outcome is recorded, or the caller must end."""
        while (thread := next(iter(self._threads()), None)) is not None and not must_end():
            thread.join(_POLL_SECONDS)
        if self._crashes:
            raise self._crashes.pop()

    def _run(self, finish: Callable[[], None]) -> None:
        try:
            finish()
        except BaseException as crash:  # noqa: BLE001 - a crash that a test ordered ends the waiting caller
            self._crashes.append(crash)
        finally:
            self._forget(threading.current_thread())

    def _forget(self, thread: threading.Thread) -> None:
        with self._lock:
            del self._followed[thread]

    def _threads(self) -> list[threading.Thread]:
        with self._lock:
            return list(self._followed)
