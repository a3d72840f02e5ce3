"""Which items are being worked on, and how much code was left behind.

A thread cannot be killed: as long as code that was left behind may still touch an item, nobody else
starts on that item.
"""

import functools
import threading
from collections import Counter
from collections.abc import Callable


class InFlight:
    """The ids somebody works on in this task. An id is free again when the last piece of code on it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: dict[str, int] = {}
        self._abandoned: Counter[str] = Counter()  # of the holders, those that were left behind
        self._waiting: dict[str, set[Callable[[], None]]] = {}
        self._stuck: set[str] = set()

    def __len__(self) -> int:
        return len(self._holders)

    def take(self, transaction_id: str, wake: Callable[[], None]) -> bool:
        """Take the id if it is free; if it is not, ``wake`` is called once when it may be, however often given."""
        with self._lock:
            if transaction_id in self._holders:
                self._waiting.setdefault(transaction_id, set()).add(wake)
                return False
            self._holders[transaction_id] = 1
            return True

    def hold_abandoned(self, transaction_id: str) -> Callable[[], None]:
        """Note that code on a taken id is left behind; what is returned gives it back, to be called once."""
        with self._lock:
            self._holders[transaction_id] += 1
            self._abandoned[transaction_id] += 1
        return functools.partial(self.release, transaction_id, is_abandoned=True)

    def release(self, transaction_id: str, *, is_abandoned: bool = False) -> None:
        """Give the id back."""
        with self._lock:
            self._holders[transaction_id] -= 1
            self._abandoned[transaction_id] -= is_abandoned
            if self._holders[transaction_id]:
                return
            del self._holders[transaction_id], self._abandoned[transaction_id]
            self._stuck.discard(transaction_id)
            waiting = self._waiting.pop(transaction_id, set())
        for wake in waiting:
            wake()

    def has_worker(self, transaction_id: str) -> bool:
        """Whether a worker holds the id, of this loop or of another of the task; else only code left behind does."""
        with self._lock:
            return self._holders.get(transaction_id, 0) > self._abandoned.get(transaction_id, 0)

    def mark_stuck(self, transaction_id: str) -> None:
        """Note that somebody waited for the id in vain: as long as it is held nobody waits for it again."""
        with self._lock:
            if transaction_id in self._holders:
                self._stuck.add(transaction_id)

    def is_stuck(self, transaction_id: str) -> bool:
        """Whether somebody waited for the id in vain."""
        return transaction_id in self._stuck


class AbandonedCalls:
    """How many calls of a task were left behind and still run. Each keeps a thread, or a task, and its memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0

    def change(self, by: int) -> None:
        """One more, or one less."""
        with self._lock:
            self.count += by
