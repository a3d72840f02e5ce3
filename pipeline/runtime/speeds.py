"""How long a run of each handler takes, as this process has seen it: slow handlers travel in small cohorts."""

import threading
from datetime import timedelta

_WEIGHT = 0.3  #: of what was seen last; the rest is what was seen before


class Speeds:
    """Moving averages by handler and phase, shared by the threads of a process."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, str], float] = {}
        self._lock = threading.Lock()

    def seen(self, handler_id: int, phase: str, seconds: float) -> None:
        """Take note of one run."""
        with self._lock:
            before = self._seconds.get((handler_id, phase), seconds)
            self._seconds[handler_id, phase] = before + _WEIGHT * (seconds - before)

    def per_run(self, handler_id: int) -> timedelta:
        """What a run takes in its slowest phase; nothing when none was seen: the cohort's budget bounds the first."""
        with self._lock:
            found = [seconds for (handler, _), seconds in self._seconds.items() if handler == handler_id]
        return timedelta(seconds=max(found, default=0.0))
