"""An event loop that is left in bounded time, whatever the code in it does.

``asyncio.run`` waits for every task and every thread of the loop, for ever if need be: one task that
ignores its cancellation, or one call in a thread that hangs, and the process cannot end.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_WITHIN = 2.0  #: seconds for tasks that were cancelled, and again for the threads of the loop


class Leaving:
    """Runs one coroutine, and then ends its event loop as far as that is possible in time."""

    def __init__(self, within: float = _WITHIN) -> None:
        self._within = within
        self._kept: list[Any] = []  # what would wait for a thread when it is destroyed
        self.is_clean = True  #: whether all has ended; if not, only the end of the process ends the rest

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What the coroutine returns; raises what it raises."""
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        try:
            return loop.run_until_complete(coroutine)
        finally:
            self.is_clean = self._end(loop)
            asyncio.set_event_loop(None)

    def _end(self, loop: asyncio.AbstractEventLoop) -> bool:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        is_clean = self._is_done(loop, tasks)
        shutting = {loop.create_task(loop.shutdown_asyncgens()), loop.create_task(loop.shutdown_default_executor())}
        if self._is_done(loop, shutting) and is_clean:
            loop.close()
            return True
        self._kept += [loop, tasks, shutting]
        return False

    def _is_done(self, loop: asyncio.AbstractEventLoop, tasks: "set[asyncio.Task[Any]]") -> bool:
        if not tasks:
            return True
        _, pending = loop.run_until_complete(asyncio.wait(tasks, timeout=self._within))
        return not pending
