"""The driver that works with threads: how calls, pauses and signals happen there.

The threads are daemons. Python waits for the threads of a ThreadPoolExecutor at exit; code that hangs
must not keep a process from ending. A call without a limit runs in the worker's own thread. A call
with a limit runs in a thread beside it, which can be abandoned.
"""

import contextlib
import contextvars
import functools
import threading
import time
from collections.abc import Callable, Generator
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from pipeline.consumer_engine.attempts import Invoke, Pause, StepGenerator
from pipeline.consumer_engine.bounded import CallResult, StepRunner, call_and_await
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

T = TypeVar("T")

_ENOUGH, _GATHER = 8, 0.0005  #: waiting items at which the loop gathers outcomes, and for how many seconds
QueuedItem = tuple[contextvars.Context, WorkItem]


def drive(requests: Generator[Any, Any, T], perform: Callable[[Any], Any]) -> T:
    """Perform in this thread the requests of a loop or an item."""
    answer: Any = None
    try:
        while True:
            request = requests.send(answer)
            answer = None  # free the settled items before the next fetch
            answer = perform(request)
    except StopIteration as end:
        value: T = end.value
        return value
    finally:
        requests.close()


def item_performer(steps: StepRunner, pause: Callable[[float], object]) -> Callable[[Any], Any]:
    """Return what performs the requests of an item. ``pause`` waits so many seconds, or less on a stop request."""

    def perform(request: Any) -> Any:
        if type(request) is tuple:
            return call_now(*request)
        if type(request) is Invoke:
            return make_call(request, steps)
        pause(request.seconds)
        return None

    return perform


def make_call(call: Invoke, steps: StepRunner) -> CallResult:
    """Make a call in this thread or, when it has a limit, beside it."""
    if call.limit is not None:
        return steps.run_bounded(call.function, call.args, limit=call.limit, on_abandon=call.on_abandon)
    return CallResult(*call_now(call.function, call.args))


def call_now(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, BaseException | None]:
    """Make a call in this thread; return its value and its error."""
    try:
        return call_and_await(function, args), None
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise  # Ctrl-C is meant for this thread
        return None, error  # every error of the task is a result


class ThreadDriver:
    """Drives one loop: its workers, and the thread that calls ``run``."""

    def __init__(self, setup: ConsumerSetup) -> None:
        self._setup = setup
        self._concurrency = setup.policy.loop.concurrency.value
        self._queued: SimpleQueue[QueuedItem | None] = SimpleQueue()
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._workers = 0
        self._stop_requested = threading.Event()
        self._steps = StepRunner()
        self._fetcher, self._fetch_steps = StepRunner(), StepRunner()  # of fetches beside the loop, and of their calls
        self._fetch_signals: SimpleQueue[Any] = SimpleQueue()

    def post(self, signal: LoopSignal) -> None:
        """Wake the loop. Takes no lock of Python's: a signal handler may call it."""
        self._inbox.put(signal)

    def run(self, loop: Loop) -> LoopReport:
        """Drive the loop to its end."""
        with loop.context.stop.subscribe(self._on_stop):
            try:
                return drive(run_loop(loop), self._perform)
            finally:
                self._close()

    def _on_stop(self) -> None:
        """Wake the loop, and the thread that waits for a fetch."""
        self.post(LoopSignal.STOP_REQUESTED)
        self._fetch_signals.put(LoopSignal.STOP_REQUESTED)

    def run_item(self, item: WorkItem) -> ItemOutcome:
        """Process one item in this thread."""
        perform = item_performer(self._steps, self._pause)
        with self._setup.context.stop.subscribe(functools.partial(self.post, LoopSignal.STOP_REQUESTED)):
            try:
                return contextvars.copy_context().run(drive, run_item(self._setup, item), perform)
            finally:
                self._close()

    def _perform(self, request: Any) -> Any:
        match request:
            case Start(items):
                self._start(items)
            case Wait(seconds):
                return self._receive(seconds)
            case StartFetch(attempts):
                self._fetcher.begin(self._fetch_beside, (attempts,))
            case Invoke(limit=None) | Invoke(is_stoppable=False):
                return make_call(request, self._steps)
            case Invoke():
                return self._fetch(request)
            case Pause(seconds):
                self._pause(seconds)
            case Abandon():
                self._abandon()
        return None

    def _start(self, items: list[WorkItem]) -> None:
        for item in items:
            self._queued.put((contextvars.copy_context(), item))
        while self._workers < min(self._concurrency, self._queued.qsize() + self._workers):
            self._workers += 1
            threading.Thread(target=self._work, name=f"pipeline-consumer-engine-{self._workers}", daemon=True).start()

    def _work(self) -> None:
        """Process one item after the other, each in its own context."""
        steps = StepRunner()
        perform = item_performer(steps, self._stop_requested.wait)
        while (job := self._queued.get()) is not None:
            context, item = job
            try:
                outcome = context.run(drive, run_item(self._setup, item), perform)
                self._inbox.put(ItemDone(item, outcome))
                del outcome
            except BaseException as error:  # noqa: BLE001 - a fault of the engine itself: the loop raises it
                self._inbox.put(error)
            del job, context, item  # an idle thread must not keep the last item alive
        steps.close()

    def _fetch_beside(self, attempts: StepGenerator) -> None:
        """Run the attempts of a fetch in the thread for fetches, and report to the loop."""
        try:
            self._inbox.put(FetchDone(drive(attempts, self._perform_fetch)))
        except BaseException as error:  # noqa: BLE001 - a fault of the engine itself: the loop raises it
            self._inbox.put(error)

    def _perform_fetch(self, request: Invoke | Pause) -> Any:
        if isinstance(request, Invoke):
            return make_call(request, self._fetch_steps) if request.limit is None else self._fetch(request)
        self._stop_requested.wait(request.seconds)
        return None

    def _fetch(self, call: Invoke) -> CallResult:
        """Make a fetch that has a limit, or that a stop request may end."""
        assert call.limit is not None
        ends_at, is_stopping = time.monotonic() + call.limit, False
        context, self._fetch_signals = self._setup.context, (signals := SimpleQueue[Any]())
        if context.stop.is_requested:
            signals.put(LoopSignal.STOP_REQUESTED)
        job = self._fetch_steps.begin(call.function, call.args)
        job.then(functools.partial(signals.put, None))
        while not job.is_done:
            rest = ends_at - time.monotonic()
            if rest <= 0:
                self._fetch_steps.abandon(job, call.on_abandon)
                return CallResult(is_timed_out=not is_stopping, is_stopped=is_stopping)
            with contextlib.suppress(Empty):
                if signals.get(timeout=rest) is LoopSignal.STOP_REQUESTED:
                    is_stopping = True
                    is_immediate = context.stop.is_immediate or context.is_over
                    ends_at = wait_ends_at(ends_at, time.monotonic(), is_bounded=True, is_immediate=is_immediate)
        return CallResult(job.value, job.error)

    def _receive(self, seconds: float | None) -> list[Any]:
        """Return everything that has arrived; wait only for the first arrival."""
        arrived: list[Any] = []
        try:
            if seconds != 0:
                arrived.append(self._inbox.get(timeout=seconds))
                if self._queued.qsize() > _ENOUGH:  # no worker waits for the loop: let more outcomes arrive
                    self._stop_requested.wait(_GATHER)
            while True:
                arrived.append(self._inbox.get_nowait())
        except Empty:
            if LoopSignal.STOP_REQUESTED in arrived:
                self._stop_requested.set()
            return arrived

    def _pause(self, seconds: float) -> None:
        """Pause the loop, or a single item. No item is open then, so no outcome is missed."""
        until = time.monotonic() + seconds
        while (rest := until - time.monotonic()) > 0 and LoopSignal.STOP_REQUESTED not in self._receive(rest):
            pass

    def _abandon(self) -> None:
        """End all pauses, and release the ids of items that no worker has begun."""
        self._stop_requested.set()
        try:
            while (job := self._queued.get_nowait()) is not None:
                self._setup.in_flight.release(job[1].transaction.transaction_id)
        except Empty:
            pass

    def _close(self) -> None:
        self._stop_requested.set()
        self._fetch_signals.put(LoopSignal.STOP_REQUESTED)  # a fetch beside the loop is not waited for
        for runner in (self._steps, self._fetcher, self._fetch_steps):
            runner.close()
        for _ in range(self._workers):
            self._queued.put(None)
