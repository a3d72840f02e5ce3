"""The driver that works with asyncio: how calls, pauses and signals happen there.

A call without a limit is awaited in the item's own asyncio task. A call with a limit is a task beside
it, which is cancelled when its time is up. A call that ignores the cancellation is abandoned.
"""

import asyncio
import contextlib
import contextvars
import functools
import logging
import math
from collections import deque
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

from pipeline.consumer_engine.attempts import Invoke, Pause, StepGenerator, StepResult
from pipeline.consumer_engine.bounded import CallResult
from pipeline.consumer_engine.items import ConsumerSetup, WorkItem, run_item
from pipeline.consumer_engine.lifecycle import ItemOutcome, LoopReport, wait_ends_at
from pipeline.consumer_engine.loop import (
    Abandon,
    FetchDone,
    ItemDone,
    Loop,
    LoopSignal,
    Start,
    StartFetch,
    Wait,
    run_loop,
)
from pipeline.domain.errors import quantity

log = logging.getLogger("pipeline.consumer_engine")

T = TypeVar("T")

_ENOUGH, _GATHER = 8, 0.0005  #: waiting items at which the loop gathers outcomes, and for how many seconds
_CANCEL_GRACE, _CLOSE_GRACE = 0.05, 1.0  #: seconds a cancelled call, and all of them at the end, get to clean up
#: abandoned tasks; an event loop alone does not keep them alive
_ABANDONED: set["asyncio.Task[Any]"] = set()


class AsyncioDriver:
    """Drives one loop, or a single item, in the running event loop."""

    def __init__(self, setup: ConsumerSetup) -> None:
        self._setup = setup
        self._loop = asyncio.get_running_loop()
        self._concurrency = setup.policy.loop.concurrency.value
        self._inbox: list[Any] = []
        self._waker: asyncio.Future[None] | None = None
        self._stop_requested = asyncio.Event()
        self._fetch_signal: asyncio.Future[None] | None = None  #: set on a stop request while a fetch runs
        self._waiting: deque[WorkItem] = deque()  #: started by the loop, not yet begun
        self._items: dict[asyncio.Task[Any], WorkItem] = {}
        self._context = contextvars.copy_context()  #: of the loop; every item has a copy
        self._calls: set[asyncio.Task[Any]] = set()
        self._is_gathering = False  #: whether a timer will wake the loop
        self._is_closing = False  #: only while this is set, a cancellation of an item's task is the engine's own

    def post(self, signal: LoopSignal) -> None:
        """Wake the loop, from any thread and from a signal handler."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._put, signal)

    def _put(self, signal: Any) -> None:
        if signal is LoopSignal.STOP_REQUESTED:
            self._stop_requested.set()
            if self._fetch_signal is not None and not self._fetch_signal.done():
                self._fetch_signal.set_result(None)
        self._inbox.append(signal)
        self._wake()

    async def run(self, loop: Loop) -> LoopReport:
        """Drive the loop to its end."""
        with loop.context.stop.subscribe(functools.partial(self.post, LoopSignal.STOP_REQUESTED)):
            try:
                return await self._drive(run_loop(loop))
            finally:
                await self._close()

    async def run_item(self, item: WorkItem) -> ItemOutcome:
        """Process one item in this asyncio task."""
        with self._setup.context.stop.subscribe(functools.partial(self.post, LoopSignal.STOP_REQUESTED)):
            try:
                return await self._drive(run_item(self._setup, item))
            finally:
                await self._close()

    async def _drive(self, requests: Generator[Any, Any, T], own: "asyncio.Task[Any] | None" = None) -> T:
        """Perform the requests of a loop or an item. ``own`` is this task if the engine made it."""
        answer: Any = None
        try:
            while True:
                request = requests.send(answer)
                try:
                    if type(request) is tuple:
                        answer = await request[0](*request[1]), None
                    else:
                        answer = await self._perform(request)
                except BaseException as error:  # noqa: BLE001 - nearly every error of the task is a result
                    answer = self._error_answer(error, request, own)
                if own is not None and own.cancelling() and not self._is_closing:
                    answer = await self._undo_cancel(request, own)
        except StopIteration as end:
            value: T = end.value
            return value
        finally:
            requests.close()

    def _error_answer(self, error: BaseException, request: Any, own: "asyncio.Task[Any] | None") -> Any:
        """Return the error of a call; raise it if it asks this very task to end."""
        if isinstance(error, asyncio.CancelledError):
            task = own or asyncio.current_task()
            is_for_this_task = self._is_closing if own is not None else task is not None and task.cancelling() > 0
        else:
            is_call = type(request) in (tuple, Invoke)
            is_for_this_task = isinstance(error, KeyboardInterrupt) or _is_coroutine_closing(error) or not is_call
        if is_for_this_task:
            raise error
        return _failed(request, error)

    async def _undo_cancel(self, request: Any, own: "asyncio.Task[Any]") -> Any:
        """Undo a cancellation of an item's task by foreign code: the call failed, the item goes on."""
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)  # another cancellation may be pending
        if self._is_closing:
            raise asyncio.CancelledError
        while own.cancelling():
            own.uncancel()
        message = "the asyncio task of the item was cancelled by other code than the engine"
        return _failed(request, asyncio.CancelledError(message))

    async def _perform(self, request: Any) -> Any:
        match request:
            case Invoke():
                return await self._call(request)
            case Start(items):
                self._context = contextvars.copy_context()
                self._waiting.extend(items)
                self._refill()
            case StartFetch(attempts):
                self._start_fetch(attempts)
            case Wait(seconds):
                return await self._receive(seconds)
            case Pause(seconds):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await self._stop_requested.wait()
            case Abandon():
                await self._close()
        return None

    def _start_fetch(self, attempts: StepGenerator) -> None:
        """Run the attempts of a fetch in a task beside the loop."""
        task = self._loop.create_task(self._fetch_beside(attempts))
        self._calls.add(task)
        task.add_done_callback(functools.partial(self._on_fetch_done, attempts))

    async def _fetch_beside(self, attempts: StepGenerator) -> StepResult | BaseException:
        try:
            return await self._drive(attempts, asyncio.current_task())
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - a fault of the engine itself: the loop raises it
            return error

    def _on_fetch_done(self, attempts: StepGenerator, task: "asyncio.Task[Any]") -> None:
        """Report to the loop that a fetch has ended."""
        self._calls.discard(task)
        if self._is_closing:
            return
        if task.cancelled():  # by foreign code, before it ran: it could not undo that
            self._start_fetch(attempts)
            return
        ended = task.result()
        self._put(ended if isinstance(ended, BaseException) else FetchDone(ended))

    def _refill(self) -> None:
        """Begin the next items, up to the concurrency."""
        while self._waiting and len(self._items) < self._concurrency:
            item = self._waiting.popleft()
            task = self._loop.create_task(self._item_task(item), context=self._context.copy())
            self._items[task] = item
            task.add_done_callback(self._on_item_cancelled)

    async def _item_task(self, item: WorkItem) -> None:
        """Process an item, report how it has ended, and begin the next."""
        own = asyncio.current_task()
        assert own is not None
        try:
            done: Any = ItemDone(item, await self._drive(run_item(self._setup, item), own))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - a fault of the engine itself: the loop raises it
            done = error
        own.remove_done_callback(self._on_item_cancelled)
        if self._items.pop(own, None) is None:  # the loop gave it up
            return
        if len(self._waiting) > _ENOUGH:  # no item waits for the loop: let more outcomes arrive
            self._gather(done)
        else:
            self._put(done)
        self._refill()

    def _on_item_cancelled(self, task: "asyncio.Task[Any]") -> None:
        """Begin an item again whose task foreign code cancelled before it ran: it could not undo that."""
        item = self._items.pop(task, None)
        if item is not None:
            self._waiting.appendleft(item)
            self._refill()

    def _gather(self, done: Any) -> None:
        """Wake the loop a little later."""
        self._inbox.append(done)
        if not self._is_gathering:
            self._is_gathering = True
            self._loop.call_later(_GATHER, self._end_gathering)

    def _end_gathering(self) -> None:
        self._is_gathering = False
        self._wake()

    async def _receive(self, seconds: float | None) -> list[Any]:
        """Return everything that has arrived; wait only for the first arrival."""
        if not self._inbox and seconds != 0:
            self._waker = self._loop.create_future()
            timer = None if seconds is None else self._loop.call_later(seconds, self._wake)
            try:
                await self._waker
            finally:
                self._waker = None
                if timer is not None:
                    timer.cancel()
        arrived, self._inbox = self._inbox, []
        return arrived

    def _wake(self) -> None:
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)

    async def _fetch(self, call: Invoke) -> CallResult:
        """Make a fetch. A stop request shortens the wait for it."""
        limit = math.inf if call.limit is None else call.limit
        ends_at, is_stopping = self._loop.time() + limit, False
        task = self._create_call_task(call)
        try:
            while not task.done():
                rest = ends_at - self._loop.time()
                if rest <= 0:
                    await self._cancel(task)
                    return CallResult(is_timed_out=not is_stopping, is_stopped=is_stopping)
                self._fetch_signal = signal = self._loop.create_future()
                timeout = None if rest == math.inf else rest
                await asyncio.wait({task, signal}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                if signal.done():
                    stop, is_stopping = self._setup.context.stop, True
                    is_bounded = call.limit is not None
                    ends_at = wait_ends_at(
                        ends_at, self._loop.time(), is_bounded=is_bounded, is_immediate=stop.is_immediate
                    )
            return task.result()  # a call that cancelled itself raises that here
        finally:
            self._abandon(task, call)

    async def _call(self, call: Invoke) -> CallResult:
        if call.is_stoppable:
            return await self._fetch(call)
        if call.limit is None:
            return CallResult(await call.function(*call.args))
        task = self._create_call_task(call)
        try:
            done, _ = await asyncio.wait({task}, timeout=call.limit)
            if done:
                return task.result()  # a call that cancelled itself raises that here
            await self._cancel(task)
            return CallResult(is_timed_out=True)
        finally:
            self._abandon(task, call)

    def _create_call_task(self, call: Invoke) -> "asyncio.Task[CallResult]":
        task = self._loop.create_task(_call_result(call))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return task

    async def _cancel(self, task: "asyncio.Task[CallResult]") -> None:
        """Cancel a call and give it a moment to clean up."""
        task.cancel()
        await asyncio.wait({task}, timeout=_CANCEL_GRACE)

    def _abandon(self, task: "asyncio.Task[CallResult]", call: Invoke) -> None:
        """Abandon a call that has not ended, and report when it has."""
        if task.done():
            return
        task.cancel()
        _keep_alive(task)
        on_end = call.on_abandon()
        task.add_done_callback(lambda _: on_end())
        if not self._is_closing:
            self._calls.discard(task)  # the end of the loop does not wait for it a second time

    async def _close(self) -> None:
        """Cancel everything that still runs and give it a moment. Log what did not end."""
        self._is_closing = True
        items, self._items, waiting = self._items, {}, [*self._waiting]
        self._waiting.clear()
        tasks = {*items, *self._calls}
        for task in tasks:
            task.cancel()
        _, stubborn = await asyncio.wait(tasks, timeout=_CLOSE_GRACE) if tasks else (tasks, tasks)
        for item in (*waiting, *items.values()):
            if not item.is_started:  # run_item, which releases the id, never ran
                self._setup.in_flight.release(item.transaction.transaction_id)
        for task in stubborn:
            _keep_alive(task)
        if stubborn:
            self._calls -= stubborn
            message = "%s: abandoned %s that did not end when cancelled"
            log.warning(message, self._setup.context.observer.task, quantity(len(stubborn), "call"))


def _failed(request: Any, error: BaseException) -> Any:
    """Return the answer to a call that failed."""
    return (None, error) if type(request) is tuple else CallResult(error=error)


def _keep_alive(task: "asyncio.Task[Any]") -> None:
    _ABANDONED.add(task)
    task.add_done_callback(_ABANDONED.discard)


async def _call_result(call: Invoke) -> CallResult:
    """Return how a call ended as a value. asyncio would log an error that is never retrieved."""
    try:
        return CallResult(await call.function(*call.args))
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) or _is_coroutine_closing(error):
            raise
        return CallResult(error=error)


def _is_coroutine_closing(error: BaseException) -> bool:
    """Return whether Python is closing the coroutine itself because its event loop is gone.

    The same error raised by a call has a longer traceback.
    """
    return isinstance(error, GeneratorExit) and (error.__traceback__ is None or error.__traceback__.tb_next is None)


_SHUTDOWN_TIMEOUT = 2.0  #: seconds for tasks that were cancelled, and again for the threads of the loop


class BoundedRunner:
    """Runs one coroutine, then closes its event loop within a limited time."""

    def __init__(self, within: float = _SHUTDOWN_TIMEOUT) -> None:
        self._within = within
        self._leaked: list[Any] = []  # kept alive: their destructors would wait for a thread
        self.is_clean = True  #: whether everything has ended; the rest ends with the process

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the result of the coroutine, or raise its error."""
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        try:
            return loop.run_until_complete(coroutine)
        finally:
            self.is_clean = self._shut_down(loop)
            asyncio.set_event_loop(None)

    def _shut_down(self, loop: asyncio.AbstractEventLoop) -> bool:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        is_clean = self._is_done(loop, tasks)
        shutting = {loop.create_task(loop.shutdown_asyncgens()), loop.create_task(loop.shutdown_default_executor())}
        if self._is_done(loop, shutting) and is_clean:
            loop.close()
            return True
        self._leaked += [loop, tasks, shutting]
        return False

    def _is_done(self, loop: asyncio.AbstractEventLoop, tasks: "set[asyncio.Task[Any]]") -> bool:
        if not tasks:
            return True
        _, pending = loop.run_until_complete(asyncio.wait(tasks, timeout=self._within))
        return not pending
