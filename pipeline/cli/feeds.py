"""Lines of a file, a pipe or a terminal, and whether another is there already.

Python's own files say nothing of what they have read ahead. Whoever works in batches needs to know it: a
batch that waits for lines which nobody has written yet holds back those that came.
"""

import os
import select
from collections import deque
from typing import BinaryIO, Self

_CHUNK = 65_536


class LineReader:
    """Gives lines as they come, each with its end; the last one may have none."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        try:
            self._fd: int | None = stream.fileno()
        except OSError:  # it is in memory
            self._fd = None
        self._lines: deque[bytes] = deque()
        self._parts: list[bytes] = []  # of a line whose end has not come
        self._is_at_end = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bytes:
        while not self._lines and not self._is_at_end:
            self._read()
        if not self._lines:
            raise StopIteration
        return self._lines.popleft()

    def would_block(self) -> bool:
        """Whether no whole line is there now, and one may still come. Waits for nothing."""
        while not self._lines and not self._is_at_end:
            if self._fd is not None and not select.select([self._fd], [], [], 0)[0]:
                return True
            self._read()
        return False

    def _read(self) -> None:
        data = self._stream.read(_CHUNK) if self._fd is None else os.read(self._fd, _CHUNK)
        *whole, rest = data.split(b"\n")  # at line feeds only: a carriage return may be part of a line
        for part in whole:
            self._lines.append(b"".join([*self._parts, part, b"\n"]))
            self._parts = []
        self._parts.append(rest)
        if not data:
            self._is_at_end = True
            self._lines.extend(filter(None, [b"".join(self._parts)]))
