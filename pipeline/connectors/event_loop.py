"""The event loop in which a process runs the async operations of its connectors.

There is one, so that what a connector keeps from call to call, such as a client with open connections, is used
in the loop it belongs to. Code that blocks it cannot be stopped: whoever comes next gets a new one.
"""

import asyncio
import inspect
import os
import threading
from collections.abc import Awaitable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

START_TIMEOUT = 5.0  #: seconds that a loop may take to begin with something before it is taken for blocked


def await_result(value: Any, timeout: timedelta | None = None) -> Any:
    """What an operation comes to. If it is async, it is waited for, and cancelled when that takes too long."""
    return _submit(value, timeout).result() if inspect.isawaitable(value) else value


async def await_result_async(value: Awaitable[Any]) -> Any:
    """The same for whoever waits in another loop."""
    return await asyncio.wrap_future(_submit(value))


def _submit(value: Awaitable[Any], within: timedelta | None = None) -> "Future[Any]":
    """Begin with it, in a new loop if the one there is does not come to it."""
    while True:
        loop, errand = _process_loop.get(), _LoopTask(value, within)
        loop.call_soon_threadsafe(errand.start)  # in the context of the caller
        if errand.started.wait(START_TIMEOUT) or not errand.withdraw():
            return errand.future
        _process_loop.discard(loop)


class _LoopTask:
    """One answer that somebody waits for. It is begun in one loop at most."""

    def __init__(self, value: Awaitable[Any], within: timedelta | None) -> None:
        self.started = threading.Event()
        self.future: Future[Any] = Future()
        self._value, self._within = value, None if within is None else within.total_seconds()
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
            async with asyncio.timeout(self._within):
                answer = await self._value
            self.future.set_result(answer)
        except BaseException as error:  # noqa: BLE001 - the loop outlives whatever an operation raises
            self.future.set_exception(error)

    def withdraw(self) -> bool:
        """Keep it from being begun. False: it is too late for that."""
        with self._lock:
            self._is_withdrawn = not self.started.is_set()
        return self._is_withdrawn


class _ProcessLoop:
    """The loop of this process, made when it is needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def get(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="pipeline-connectors", daemon=True).start()
            return self._loop

    def discard(self, loop: asyncio.AbstractEventLoop) -> None:
        """Leave a loop behind that is blocked; when it can, it goes on with what it has begun."""
        with self._lock:
            if self._loop is loop:
                self._loop = None

    def reset_after_fork(self) -> None:
        """In a new process, which has none of the threads of the one it was forked from."""
        self.__init__()  # type: ignore[misc]


_process_loop = _ProcessLoop()
os.register_at_fork(after_in_child=_process_loop.reset_after_fork)
