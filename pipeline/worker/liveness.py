"""Show supervisors that a process is alive: it touches a file as long as it runs.

A probe reads the age of the file and starts no Python process. A broker or a database that is away makes no file old,
so no supervisor ends a process that waits for its server.
"""

import threading
from pathlib import Path


def touch(file: Path | None) -> None:
    """Touch the file, if one is wanted; its directory has to exist."""
    if file is not None:
        file.touch()


def touch_forever(file: Path, every: float = 1.0) -> None:
    """Touch the file every second, as long as this process goes round."""
    pause = threading.Event()
    while True:
        touch(file)
        pause.wait(every)
