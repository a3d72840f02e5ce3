"""Which items are being worked on.

That includes code that was left behind: a thread cannot be killed, and as long as it may still touch
an item nobody else starts on that item.
"""

import threading
from collections.abc import Callable


class InFlight:
    """The ids somebody works on in this task. An id is free again when the last piece of code on it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: dict[str, int] = {}
        self._waiting: dict[str, set[Callable[[], None]]] = {}

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

    def share(self, transaction_id: str) -> Callable[[], None]:
        """Note one more piece of code that works on a taken id; what is returned gives it back, once."""
        with self._lock:
            self._holders[transaction_id] += 1
        back = threading.Lock()

        def give_back() -> None:
            if back.acquire(blocking=False):
                self.release(transaction_id)

        return give_back

    def release(self, transaction_id: str) -> None:
        """Give the id back."""
        with self._lock:
            self._holders[transaction_id] -= 1
            if self._holders[transaction_id]:
                return
            del self._holders[transaction_id]
            waiting = self._waiting.pop(transaction_id, set())
        for wake in waiting:
            wake()
