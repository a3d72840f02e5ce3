"""A sign of life for supervisors: a file that a process touches as long as it goes round.

A probe then costs a look at a file and not a Python process: it is alive if the file is young. A broker or a database
that is away makes no file old, so that no supervisor ends a process that is waiting for its server.
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
