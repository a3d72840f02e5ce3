"""The driver of the engine that works with asyncio: how calls, pauses and notices happen there.

A call without a limit is awaited in the item's own task; one with a limit is a task beside it, which
is cancelled when its time is up. One that does not heed that is left behind, like a thread.
"""

import asyncio
import contextlib
import logging
from collections.abc import Generator
from typing import Any, TypeVar

from pipeline.engine.attempts import Call, Pause
from pipeline.engine.items import Hooks, Item, lived
from pipeline.engine.loop import Abandon, Loop, Notice, Settled, Start, Wait, consumed
from pipeline.engine.outcomes import Report
from pipeline.engine.steps import Ended

log = logging.getLogger("pipeline.engine")

T = TypeVar("T")

_HEED, _END = 0.05, 1.0  #: seconds a cancelled call, and all of them at the end, get to clean up


class Coroutines:
    """Drives one loop, or a single item, in the running event loop."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._loop = asyncio.get_running_loop()
        self._places = asyncio.Semaphore(hooks.policy.loop.concurrency.value)
        self._notices: list[Any] = []
        self._waker: asyncio.Future[None] | None = None
        self._hurry = asyncio.Event()
        self._items: dict[Item, asyncio.Task[None]] = {}
        self._calls: set[asyncio.Task[Any]] = set()

    def tell(self, notice: Notice) -> None:
        """Wake the loop, from any thread and from a signal handler."""
        if not self._loop.is_closed():  # else nobody listens any more
            self._loop.call_soon_threadsafe(self._put, notice)

    def _put(self, notice: Any) -> None:
        if notice is Notice.ASKED:
            self._hurry.set()
        self._notices.append(notice)
        self._wake()

    async def run(self, loop: Loop) -> Report:
        """Drive the loop to its end."""
        looping = consumed(loop)
        with loop.host.stop.heard_by(lambda: self.tell(Notice.ASKED)):
            try:
                return await self.drive(looping)
            finally:
                await self.close()

    async def drive(self, asking: Generator[Any, Any, T]) -> T:
        """Do in this task what a loop, an item or a step asks for."""
        answer: Any = None
        try:
            while True:
                request = asking.send(answer)
                if type(request) is not Call:
                    answer = await self._done(request)
                elif request.limit is None:
                    try:
                        answer = Ended(await request.function(*request.args))
                    except BaseException as error:  # noqa: BLE001 - nearly whatever the task raises is its answer
                        answer = _answer(error)
                else:
                    answer = await self._bounded(request)
        except StopIteration as end:
            value: T = end.value
            return value
        finally:
            asking.close()

    async def _done(self, request: Any) -> Any:
        match request:
            case Start(items):
                for item in items:
                    self._items[item] = self._loop.create_task(self._live(item))
            case Wait(seconds):
                return await self._heard(seconds)
            case Pause(seconds):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await self._hurry.wait()
            case Abandon():
                await self.close()
        return None

    async def _live(self, item: Item) -> None:
        try:
            async with self._places:
                outcome = await self.drive(lived(self._hooks, item))
            self._items.pop(item, None)  # gone when the loop gave the item up
            self._put(Settled(item, outcome))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - a fault of the engine itself: the loop must hear of it
            self._put(error)

    async def _heard(self, seconds: float | None) -> list[Any]:
        """Everything there is to hear; waits for the first of it only."""
        if not self._notices and seconds != 0:
            self._waker = self._loop.create_future()
            timer = None if seconds is None else self._loop.call_later(seconds, self._wake)
            try:
                await self._waker
            finally:
                self._waker = None
                if timer is not None:
                    timer.cancel()
        heard, self._notices = self._notices, []
        return heard

    def _wake(self) -> None:
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)

    async def _bounded(self, call: Call) -> Ended:
        task = self._loop.create_task(_shielded(call))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        try:
            done, _ = await asyncio.wait({task}, timeout=call.limit)
            if done:
                return task.result()
            task.cancel()
            await asyncio.wait({task}, timeout=_HEED)
            return Ended(is_late=True)
        finally:
            if not task.done():
                task.cancel()
                _leave(task, call)

    async def close(self) -> None:
        """Cancel what still runs and give it a moment. What does not heed that is named in the log."""
        items, self._items = self._items, {}
        tasks = {*items.values(), *self._calls}
        for task in tasks:
            task.cancel()
        _, stubborn = await asyncio.wait(tasks, timeout=_END) if tasks else (tasks, tasks)
        for item in items:
            if not item.is_begun:  # cancelled before it had a place: its life, which gives the id back, never was
                self._hooks.in_flight.release(item.transaction.transaction_id)
        if stubborn:
            words = "%s: %d calls do not heed that they were cancelled; they are left behind"
            log.warning(words, self._hooks.host.observer.task, len(stubborn))


async def _shielded(call: Call) -> Ended:
    """How a call ended, as a value: a task whose error nobody asks for would be complained about."""
    try:
        return Ended(await call.function(*call.args))
    except (Exception, asyncio.CancelledError, SystemExit) as error:  # noqa: BLE001 - whatever it raises is its answer
        return Ended(error=error)


def _answer(error: BaseException) -> Ended:
    """The error of a call, unless it is not the call's: somebody wants this very task to end."""
    task = asyncio.current_task()
    is_cancelled = isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling()
    if is_cancelled or isinstance(error, KeyboardInterrupt | GeneratorExit):
        raise error
    return Ended(error=error)


def _leave(task: "asyncio.Task[Ended]", call: Call) -> None:
    """Leave a call behind, and tell when it has ended after all."""
    tell = call.on_left()
    task.add_done_callback(lambda _: tell())
