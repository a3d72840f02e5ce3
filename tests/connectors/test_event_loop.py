"""Async operations of one process share one event loop, and code that blocks it delays no other operation."""

import asyncio
import contextvars
import os
import threading
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from pipeline.connectors import event_loop

ASKED: contextvars.ContextVar[str] = contextvars.ContextVar("asked", default="none")


async def where() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def beside(act: Callable[[], Any]) -> Any:
    """What it returns in a thread of its own."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(act()), daemon=True)
    thread.start()
    thread.join(60)
    (only,) = found
    return only


def test_operations_of_all_threads_and_loops_run_in_the_same_loop() -> None:
    async def awaits() -> asyncio.AbstractEventLoop:
        found = await event_loop.await_result_async(where())
        assert found is not asyncio.get_running_loop()
        return found  # type: ignore[no-any-return]

    found = [event_loop.await_result(where()), beside(lambda: event_loop.await_result(where())), asyncio.run(awaits())]
    assert found == [found[0]] * 3


def test_a_result_that_is_no_awaitable_is_returned() -> None:
    assert event_loop.await_result(7) == 7


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
def test_an_error_of_an_operation_is_raised_to_its_caller_and_the_loop_goes_on(error: BaseException) -> None:
    async def raises() -> None:
        raise error

    before = event_loop.await_result(where())
    with pytest.raises(type(error)):
        event_loop.await_result(raises())
    assert event_loop.await_result(where()) is before


def test_an_operation_runs_in_the_context_of_its_caller() -> None:
    async def asks() -> str:
        return ASKED.get()

    ASKED.set("the caller")
    assert event_loop.await_result(asks()) == "the caller"


def test_an_operation_that_takes_too_long_is_cancelled() -> None:
    ended = threading.Event()

    async def hangs() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(TimeoutError):
        event_loop.await_result(hangs(), timedelta(seconds=0.01))
    assert ended.is_set()


def test_an_operation_during_a_blocked_loop_runs_once_in_a_new_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocked, over, began = threading.Event(), threading.Event(), []

    async def blocks() -> asyncio.AbstractEventLoop:
        blocked.set()
        over.wait(60)
        return asyncio.get_running_loop()

    async def begins() -> asyncio.AbstractEventLoop:
        began.append(asyncio.get_running_loop())
        return began[0]

    monkeypatch.setattr(event_loop, "START_TIMEOUT", 0.2)
    found: list[asyncio.AbstractEventLoop] = []
    thread = threading.Thread(target=lambda: found.append(event_loop.await_result(blocks())), daemon=True)
    thread.start()
    assert blocked.wait(60)
    new = event_loop.await_result(begins())
    over.set()
    thread.join(60)
    assert found != [new]
    assert began == [new]


def test_a_forked_process_has_a_loop_of_its_own() -> None:
    event_loop.await_result(where())
    pid = os.fork()
    if not pid:
        os._exit(0 if _is_answered(where()) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _is_answered(value: Awaitable[Any]) -> bool:
    return beside(lambda: event_loop.await_result(value)) is not None
