"""The driver of the engine that works with asyncio: how calls, pauses and notices happen there.

A call without a limit is awaited in the item's own task; one with a limit is a task beside it, which
is cancelled when its time is up. One that does not heed that is left behind, like a thread.
"""

import asyncio
import contextlib
import functools
import logging
import math
from collections import deque
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

from pipeline.consumer_engine.attempts import Call, Pause
from pipeline.consumer_engine.items import Hooks, Item, lived
from pipeline.consumer_engine.lifecycle import wait_ends_at
from pipeline.consumer_engine.loop import Abandon, Loop, Notice, Settled, Start, Wait, consumed
from pipeline.consumer_engine.outcomes import Outcome, Report
from pipeline.consumer_engine.steps import Ended
from pipeline.consumer_engine.words import counted

log = logging.getLogger("pipeline.engine")

T = TypeVar("T")

_HEED, _END = 0.05, 1.0  #: seconds a cancelled call, and all of them at the end, get to clean up
_LEFT: set["asyncio.Task[Any]"] = set()  #: tasks that nobody waits for; an event loop alone does not keep them alive


class Coroutines:
    """Drives one loop, or a single item, in the running event loop."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._loop = asyncio.get_running_loop()
        self._most = hooks.policy.loop.concurrency.value
        self._notices: list[Any] = []
        self._waker: asyncio.Future[None] | None = None
        self._hurry = asyncio.Event()
        self._waiting: deque[Item] = deque()  #: started by the loop, without a place yet
        self._items: dict[asyncio.Task[Any], Item] = {}
        self._calls: set[asyncio.Task[Any]] = set()
        self._is_closing = False  #: the engine itself cancels the tasks of items; nobody else may

    def tell(self, notice: Notice) -> None:
        """Wake the loop, from any thread and from a signal handler."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._put, notice)

    def _put(self, notice: Any) -> None:
        if notice is Notice.ASKED:
            self._hurry.set()
        self._notices.append(notice)
        self._wake()

    async def run(self, loop: Loop) -> Report:
        """Drive the loop to its end."""
        with loop.host.stop.heard_by(functools.partial(self.tell, Notice.ASKED)):
            try:
                return await self._drive(consumed(loop))
            finally:
                await self._close()

    async def live(self, item: Item) -> Outcome:
        """Live one item in this task."""
        with self._hooks.host.stop.heard_by(functools.partial(self.tell, Notice.ASKED)):
            try:
                return await self._drive(lived(self._hooks, item))
            finally:
                await self._close()

    async def _drive(self, asking: Generator[Any, Any, T], own: "asyncio.Task[Any] | None" = None) -> T:
        """Do in this task what a loop, an item or a step asks for. ``own`` is this task if the engine made it."""
        answer: Any = None
        try:
            while True:
                request = asking.send(answer)
                try:
                    if type(request) is not Call:
                        answer = await self._done(request)
                    elif request.is_stoppable:
                        answer = await self._fetched(request)
                    elif request.limit is None:
                        answer = Ended(await request.function(*request.args))
                    else:
                        answer = await self._bounded(request)
                except BaseException as error:  # noqa: BLE001 - nearly whatever the task raises is its answer
                    answer = self._answer(error, request, own)
                if own is not None and own.cancelling() and not self._is_closing:
                    answer = await self._taken_back(own)
        except StopIteration as end:
            value: T = end.value
            return value
        finally:
            asking.close()

    def _answer(self, error: BaseException, request: Any, own: "asyncio.Task[Any] | None") -> Ended:
        """The error of a call, unless it is not the call's: somebody wants this very task to end."""
        if isinstance(error, asyncio.CancelledError):
            task = own or asyncio.current_task()
            is_meant = self._is_closing if own is not None else task is not None and task.cancelling() > 0
        else:
            is_meant = isinstance(error, KeyboardInterrupt) or _is_closed(error) or type(request) is not Call
        if is_meant:
            raise error
        return Ended(error=error)

    async def _taken_back(self, own: "asyncio.Task[Any]") -> Ended:
        """Code that does not own the task of an item has cancelled it: that call has failed, and the item goes on."""
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)  # one may still be on its way
        if self._is_closing:
            raise asyncio.CancelledError
        while own.cancelling():
            own.uncancel()
        return Ended(error=asyncio.CancelledError("the task of the item was cancelled by code it does not belong to"))

    async def _done(self, request: Any) -> Any:
        match request:
            case Start(items):
                self._waiting.extend(items)
                self._refill()
            case Wait(seconds):
                return await self._heard(seconds)
            case Pause(seconds):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await self._hurry.wait()
            case Abandon():
                await self._close()
        return None

    def _refill(self) -> None:
        """Begin the next items, as many as there are places."""
        while self._waiting and len(self._items) < self._most:
            item = self._waiting.popleft()
            task = self._loop.create_task(self._live(item))
            self._items[task] = item
            task.add_done_callback(self._ended)

    async def _live(self, item: Item) -> Outcome | BaseException:
        try:
            return await self._drive(lived(self._hooks, item), asyncio.current_task())
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - a fault of the engine itself: the loop must hear of it
            return error

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        """Tell the loop of an item that has ended, and give its place to the next."""
        item = self._items.pop(task, None)
        if item is None:  # the loop gave it up
            return
        if task.cancelled():  # by code it does not belong to, before it ran at all: it could not notice that
            self._waiting.appendleft(item)
        else:
            ended = task.result()
            self._put(ended if isinstance(ended, BaseException) else Settled(item, ended))
        self._refill()

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

    async def _fetched(self, call: Call) -> Ended:
        """Make a fetch. Nothing is open then, so no outcome can be missed in the wait for it."""
        limit = math.inf if call.limit is None else call.limit
        ends_at, is_asked = self._loop.time() + limit, False
        task = self._called(call)
        task.add_done_callback(self._put)
        try:
            while not task.done():
                rest = ends_at - self._loop.time()
                if rest <= 0:
                    await self._cancelled(task)
                    return Ended(is_late=not is_asked, is_given_up=is_asked)
                if Notice.ASKED in await self._heard(None if rest == math.inf else rest):
                    stop, is_asked = self._hooks.host.stop, True
                    is_bounded = call.limit is not None
                    ends_at = wait_ends_at(ends_at, self._loop.time(), is_bounded=is_bounded, is_now=stop.is_now)
            return task.result()  # a call that cancelled itself raises that here
        finally:
            self._leave(task, call)

    async def _bounded(self, call: Call) -> Ended:
        task = self._called(call)
        try:
            done, _ = await asyncio.wait({task}, timeout=call.limit)
            if done:
                return task.result()  # a call that cancelled itself raises that here
            await self._cancelled(task)
            return Ended(is_late=True)
        finally:
            self._leave(task, call)

    def _called(self, call: Call) -> "asyncio.Task[Ended]":
        task = self._loop.create_task(_shielded(call))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return task

    async def _cancelled(self, task: "asyncio.Task[Ended]") -> None:
        """Cancel a call and give it a moment to clean up."""
        task.cancel()
        await asyncio.wait({task}, timeout=_HEED)

    def _leave(self, task: "asyncio.Task[Ended]", call: Call) -> None:
        """Leave a call behind if it has not ended, and tell when it has after all."""
        if task.done():
            return
        task.cancel()
        _keep(task)
        tell = call.on_left()
        task.add_done_callback(lambda _: tell())
        if not self._is_closing:
            self._calls.discard(task)  # it had its moment; the end of the loop does not wait for it again

    async def _close(self) -> None:
        """Cancel what still runs and give it a moment. What does not heed that is named in the log."""
        self._is_closing = True
        items, self._items, waiting = self._items, {}, [*self._waiting]
        self._waiting.clear()
        tasks = {*items, *self._calls}
        for task in tasks:
            task.cancel()
        _, stubborn = await asyncio.wait(tasks, timeout=_END) if tasks else (tasks, tasks)
        for item in (*waiting, *items.values()):
            if not item.is_begun:  # its life, which gives the id back, never was
                self._hooks.in_flight.release(item.transaction.transaction_id)
        for task in stubborn:
            _keep(task)
        if stubborn:
            self._calls -= stubborn
            words = "%s: %s that did not end when cancelled; left behind"
            log.warning(words, self._hooks.host.observer.task, counted(len(stubborn), "call"))


def _keep(task: "asyncio.Task[Any]") -> None:
    _LEFT.add(task)
    task.add_done_callback(_LEFT.discard)


async def _shielded(call: Call) -> Ended:
    """How a call ended, as a value: a task whose error nobody asks for would be complained about."""
    try:
        return Ended(await call.function(*call.args))
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) or _is_closed(error):
            raise
        return Ended(error=error)


def _is_closed(error: BaseException) -> bool:
    """Whether Python closes the very coroutine that caught this, whose event loop is gone. Raised by a call, the
    same error has a longer way behind it."""
    return isinstance(error, GeneratorExit) and (error.__traceback__ is None or error.__traceback__.tb_next is None)


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
