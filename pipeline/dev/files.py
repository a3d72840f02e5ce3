"""Small files that hold secrets or that other processes read: private, and never seen half written."""

import os
import secrets
from collections.abc import Callable
from pathlib import Path

from pipeline.dev.locks import Lock, try_shared


def write_private(path: Path, text: str) -> None:
    """Replace the file in one step; nobody but its owner can read it at any moment."""
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
