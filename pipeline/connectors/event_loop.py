"""The event loop in which a process runs the async operations of its connectors.

All operations share one loop. So a client that a connector keeps from call to call is used in the loop that its
connections belong to. Code that blocks the loop cannot be stopped. The next operation gets a new loop.
"""

import asyncio
import inspect
import os
import threading
from collections.abc import Awaitable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

START_TIMEOUT = 5.0  #: seconds that a loop may take to start an operation before it counts as blocked
_THREADS = 64  #: threads of a loop for blocking work such as name lookups


def await_result(value: Any, timeout: timedelta | None = None, loop: "ProcessLoop | None" = None) -> Any:
    """Return the result of an operation. An awaitable is awaited, and cancelled when it takes too long."""
    return _submit(value, timeout, loop).result() if inspect.isawaitable(value) else value


async def await_result_async(value: Awaitable[Any]) -> Any:
    """Await the result of an operation from another event loop."""
    return await asyncio.wrap_future(_submit(value))


def _submit(
    value: Awaitable[Any], timeout: timedelta | None = None, loop: "ProcessLoop | None" = None
) -> "Future[Any]":
    """Start an awaitable in the loop; in a new one if it is blocked."""
    owner = loop or _process_loop
    while True:
        running, task = owner.get(), _LoopTask(value, timeout)
        running.call_soon_threadsafe(task.start)  # in the context of the caller
        if task.started.wait(START_TIMEOUT) or not task.withdraw():
            return task.future
        owner.discard(running)


class _LoopTask:
    """An awaitable with the future of its result. It is started in at most one loop."""

    def __init__(self, value: Awaitable[Any], timeout: timedelta | None) -> None:
        self.started = threading.Event()
        self.future: Future[Any] = Future()
        self._value, self._timeout = value, None if timeout is None else timeout.total_seconds()
        self._lock, self._is_withdrawn = threading.Lock(), False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        with self._lock:
            if self._is_withdrawn:
                return
            self.started.set()
        try:
            async with asyncio.timeout(self._timeout):
                answer = await self._value
            self.future.set_result(answer)
        except BaseException as error:  # noqa: BLE001 - the loop outlives whatever an operation raises
            self.future.set_exception(error)

    def withdraw(self) -> bool:
        """Prevent the start. Returns False if it has started already."""
        with self._lock:
            self._is_withdrawn = not self.started.is_set()
        return self._is_withdrawn


class ProcessLoop:
    """An event loop in its own thread, created on first use and after a fork."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        os.register_at_fork(after_in_child=self.reset_after_fork)

    def get(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                # A name lookup that hangs holds its thread. By default a few of them would stop all others.
                self._loop.set_default_executor(ThreadPoolExecutor(_THREADS, f"{self._name}-lookup"))
                threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True).start()
            return self._loop

    def discard(self, loop: asyncio.AbstractEventLoop) -> None:
        """Stop using a loop that is blocked. When it can, it continues with what it has started."""
        with self._lock:
            if self._loop is loop:
                self._loop = None

    def reset_after_fork(self) -> None:
        """Start without a loop, since a forked process has no threads of its parent."""
        self._lock, self._loop = threading.Lock(), None


_process_loop = ProcessLoop("pipeline-connectors")
