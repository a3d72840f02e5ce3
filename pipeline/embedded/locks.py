"""File locks that the kernel frees when their holder dies, so none is ever stale.

A lock belongs to the open file, not to the process: a file that is handed to a child carries its lock along.
"""

import fcntl
import os
import secrets
from collections.abc import Callable
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
        """Take the lock beside others; False when another process holds it alone."""
        return try_shared(self._fd)

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> "Lock":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def try_shared(fd: int) -> bool:
    """Take the lock of an open file beside others; False when another process holds it alone."""
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


def write_private(path: Path, text: str) -> None:
    """Replace the file in one step. At no moment can another account read it."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(text)
    draft.replace(path)


def read_or_create(path: Path, make: Callable[[], str]) -> str:
    """What the file says; written first when it does not exist."""
    if not path.exists():
        write_private(path, make())
    return path.read_text().strip()


def publish_locked(path: Path, text: str) -> Lock:
    """Replace the file in one step by one that is locked for as long as the writer lives.

    The lock is taken before the file gets its name, so a reader that finds it unlocked knows that its writer
    is dead, and never mistakes the notice of a dead writer for that of the next one.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    lock = Lock(draft)
    lock.try_exclusive()
    os.write(lock.fd, text.encode())
    draft.replace(path)
    return lock


def read_locked(path: Path) -> str | None:
    """What a living writer published; None when there is no file or its writer is dead."""
    try:
        with path.open() as file:
            return None if try_shared(file.fileno()) else file.read()
    except FileNotFoundError:
        return None
