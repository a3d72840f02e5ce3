"""Standard output whose reader may leave, as `head` does: then a command ends quietly, with a code of its own.

The signal that ends other programs then is not let through: it would also end a process whose server hung up.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

EXIT_BROKEN_PIPE = 141  #: what a shell reports of a program that this signal ended


class BrokenPipeGuard:
    """A stream like the one it stands for; a write that nobody can read any more ends the program."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._exit_on_broken_pipe():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._exit_on_broken_pipe():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _exit_on_broken_pipe(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # what is left in the buffer goes there when Python ends
            os.close(nowhere)
            raise SystemExit(EXIT_BROKEN_PIPE) from None
