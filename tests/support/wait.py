"""Waiting for facts instead of for time."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(condition: Callable[[], T], *, within: float = 30.0, every: float = 0.02, why: str = "") -> T:
    """The first true answer of the condition; fails with its last answer when none came in time.

    An AssertionError raised by the condition counts as "not yet", so a block of asserts can be waited for.
    """
    deadline = time.monotonic() + within
    pause = threading.Event()
    while True:
        last: object
        try:
            answer = condition()
            if answer:
                return answer
            last = answer
        except AssertionError as error:
            last = error
        if time.monotonic() >= deadline:
            what = why or getattr(condition, "__name__", "the condition")
            raise AssertionError(f"{what}: not within {within} s; last seen: {last!r}")
        pause.wait(every)
