"""Asking a loop to end: from any thread, and from a signal handler."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol


class StopToken:
    """Whether a task was asked to end. Once asked, it stays so.

    Asked politely, a loop fetches nothing more and settles what it has, without the pauses between
    attempts. Asked again, with ``now``, it leaves what it has.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self.is_immediate = False
        self._listeners: tuple[Callable[[], None], ...] = ()
        self._listeners_lock = threading.Lock()  # of the listeners; whoever asks only reads them

    def request(self, *, now: bool = False) -> None:
        """End. Takes no lock: a signal may interrupt a thread that holds one."""
        self.is_immediate = self.is_immediate or now
        self.is_requested = True
        for listener in self._listeners:
            listener()

    @contextmanager
    def subscribe(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call ``listener``, which must take no lock either, whenever the task is asked."""
        with self._listeners_lock:
            self._listeners = (*self._listeners, listener)
        try:
            yield
        finally:
            with self._listeners_lock:
                self._listeners = tuple(each for each in self._listeners if each is not listener)


class Stoppable(Protocol):
    """Something that can be asked to end."""

    def stop(self, *, now: bool = False) -> None:
        """End, politely or now."""
        ...


@contextmanager
def stopped_by_signals(task: Stoppable) -> Iterator[None]:
    """While this is open, SIGTERM and SIGINT ask the task to end: politely the first time, then now.

    To be used in the main thread, which alone can set handlers. Those that were there come back.
    """
    asked = 0

    def heard(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        task.stop(now=asked > 1)

    before: dict[int, Any] = {number: signal.signal(number, heard) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
