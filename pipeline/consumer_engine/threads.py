"""The driver of the engine that works with threads: how calls, pauses and notices happen there.

Threads are daemons and not those of a ThreadPoolExecutor, which Python waits for when it ends: code
that hangs must not keep a process from ending. A call without a limit runs in the worker's own thread;
one with a limit runs in a thread beside it, which can be left behind.
"""

import contextvars
import functools
import threading
import time
from collections.abc import Callable, Generator
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from pipeline.consumer_engine.attempts import Call, Pause
from pipeline.consumer_engine.items import Hooks, Item, lived
from pipeline.consumer_engine.lifecycle import wait_ends_at
from pipeline.consumer_engine.loop import Abandon, Loop, Notice, Settled, Start, Wait, consumed
from pipeline.consumer_engine.outcomes import Outcome, Report
from pipeline.consumer_engine.steps import Ended, Steps, called

T = TypeVar("T")

Job = tuple[contextvars.Context, Item]


def drive(asking: Generator[Any, Any, T], steps: Steps, rest: Callable[[float], object]) -> T:
    """Do in this thread what an item or a step asks for; ``rest`` waits so many seconds, or less when that ends."""
    answer: Any = None
    try:
        while True:
            request = asking.send(answer)
            if type(request) is Call:
                answer = ended(request, steps)
            elif type(request) is Pause:
                rest(request.seconds)
                answer = None
    except StopIteration as end:
        value: T = end.value
        return value
    finally:
        asking.close()


def ended(call: Call, steps: Steps) -> Ended:
    """Make a call, in this thread or, when it has a limit, beside it."""
    if call.limit is not None:
        return steps.bounded(call.function, call.args, limit=call.limit, on_left=call.on_left)
    try:
        return Ended(called(call.function, call.args))
    except Exception as error:  # noqa: BLE001 - whatever the task raises is its answer
        return Ended(error=error)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise  # a person wants this very thread to end
        return Ended(error=error)


class Threads:
    """Drives one loop: as many workers as may work at once, and the thread that calls ``run``."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._most = hooks.policy.loop.concurrency.value
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._notices: SimpleQueue[Any] = SimpleQueue()
        self._workers = 0
        self._hurry = threading.Event()
        self._steps = Steps()

    def tell(self, notice: Notice) -> None:
        """Wake the loop. Takes no lock of Python's: a signal handler may call it."""
        self._notices.put(notice)

    def run(self, loop: Loop) -> Report:
        """Drive the loop to its end."""
        looping = consumed(loop)
        answer: Any = None
        with loop.host.stop.heard_by(functools.partial(self.tell, Notice.ASKED)):
            try:
                while True:
                    request = looping.send(answer)
                    answer = None  # what was heard need not live until the next fetch has returned
                    answer = self._done(request)
            except StopIteration as end:
                report: Report = end.value
                return report
            finally:
                looping.close()
                self._close()

    def live(self, item: Item) -> Outcome:
        """Live one item in this thread."""
        living = lived(self._hooks, item)
        with self._hooks.host.stop.heard_by(functools.partial(self.tell, Notice.ASKED)):
            try:
                return contextvars.copy_context().run(drive, living, self._steps, self._rest)
            finally:
                self._close()

    def _done(self, request: Any) -> Any:
        match request:
            case Start(items):
                self._start(items)
            case Wait(seconds):
                return self._heard(seconds)
            case Call(limit=None):
                return ended(request, self._steps)
            case Call():
                return self._fetched(request)
            case Pause(seconds):
                self._rest(seconds)
            case Abandon():
                self._abandon()
        return None

    def _start(self, items: list[Item]) -> None:
        for item in items:
            self._jobs.put((contextvars.copy_context(), item))
        while self._workers < min(self._most, self._jobs.qsize() + self._workers):
            self._workers += 1
            threading.Thread(target=self._work, name=f"pipeline-engine-{self._workers}", daemon=True).start()

    def _work(self) -> None:
        """Live one item after the other, each in a context of its own, so that nothing passes between them."""
        steps = Steps()
        while (job := self._jobs.get()) is not None:
            context, item = job
            try:
                outcome = context.run(drive, lived(self._hooks, item), steps, self._hurry.wait)
                self._notices.put(Settled(item, outcome))
                del outcome
            except BaseException as error:  # noqa: BLE001 - a fault of the engine itself: the loop must hear of it
                self._notices.put(error)
            del job, context, item  # an idle thread must not keep the last item alive
        steps.close()

    def _fetched(self, call: Call) -> Ended:
        """Make a fetch that has a limit. Nothing is open then, so no outcome can be missed in the wait for it."""
        assert call.limit is not None
        ends_at, is_asked = time.monotonic() + call.limit, False
        job = self._steps.begin(call.function, call.args)
        job.then(functools.partial(self._notices.put, job))
        while not job.is_done:
            rest = ends_at - time.monotonic()
            if rest <= 0:
                self._steps.leave(job, call.on_left)
                return Ended(is_late=not is_asked, is_given_up=is_asked)
            if Notice.ASKED in self._heard(rest):
                stop, is_asked = self._hooks.host.stop, True
                ends_at = wait_ends_at(ends_at, time.monotonic(), is_bounded=True, is_now=stop.is_now)
        return Ended(job.value, job.error)

    def _heard(self, seconds: float | None) -> list[Any]:
        """Everything there is to hear; waits for the first of it only."""
        heard: list[Any] = []
        try:
            if seconds != 0:
                heard.append(self._notices.get(timeout=seconds))
            while True:
                heard.append(self._notices.get_nowait())
        except Empty:
            if Notice.ASKED in heard:
                self._hurry.set()
            return heard

    def _rest(self, seconds: float) -> None:
        """A pause of the loop itself, or of a single item. Nothing else is open then, so no outcome is missed."""
        until = time.monotonic() + seconds
        while (rest := until - time.monotonic()) > 0 and Notice.ASKED not in self._heard(rest):
            pass

    def _abandon(self) -> None:
        """End the pauses, and give back the ids of what no worker has begun: its life, which does that, never is."""
        self._hurry.set()
        try:
            while (job := self._jobs.get_nowait()) is not None:
                self._hooks.in_flight.release(job[1].transaction.transaction_id)
        except Empty:
            pass

    def _close(self) -> None:
        self._hurry.set()
        self._steps.close()
        for _ in range(self._workers):
            self._jobs.put(None)
