"""Show supervisors that a process is alive: it touches a file as long as it runs.

A probe reads the age of the file and starts no Python process. A broker or a database that is away makes no file old,
so no supervisor ends a process that waits for its server.
"""

import logging
import threading
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger("pipeline.worker")


def touch(file: Path | None) -> None:
    """Touch the file, if one is wanted; its directory has to exist."""
    if file is not None:
        file.touch()


def touch_forever(file: Path, every: float = 1.0, stalled: Callable[[], str | None] = lambda: None) -> None:
    """Touch the file every second, as long as this process goes round and nothing is stalled."""
    pause, was_stalled = threading.Event(), False
    while True:
        problem = stalled()
        if problem is None:
            touch(file)
        elif not was_stalled:
            logger.error("stalled: %s; %s is not touched until that has ended", problem, file)
        was_stalled = problem is not None
        pause.wait(every)
