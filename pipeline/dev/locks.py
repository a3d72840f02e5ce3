"""File locks that the kernel frees when their holder dies, so none is ever stale.

A lock belongs to the open file, not to the process: a file that is handed to a child carries its lock along.
"""

import fcntl
import os
from pathlib import Path


class Lock:
    """One open lock file; closing it gives the lock up, unless a child was handed the same open file."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    @classmethod
    def adopt(cls, fd: int) -> "Lock":
        """The lock that our parent took and handed to us."""
        lock = cls.__new__(cls)
        lock._fd = fd
        os.set_inheritable(fd, False)
        return lock

    @property
    def fd(self) -> int:
        return self._fd

    def try_exclusive(self) -> bool:
        """Take the lock alone; False when anybody else holds it in any way."""
        return _try(self._fd, fcntl.LOCK_EX)

    def try_shared(self) -> bool:
        """Take the lock beside others; False when somebody holds it alone."""
        return try_shared(self._fd)

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> "Lock":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def try_shared(fd: int) -> bool:
    """Take the lock of an open file beside others; False when somebody holds it alone."""
    return _try(fd, fcntl.LOCK_SH)


def is_held(path: Path) -> bool:
    """Whether a living process holds the lock of this file alone."""
    try:
        with path.open() as file:
            return not try_shared(file.fileno())
    except FileNotFoundError:
        return False


def _try(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
