"""One embedded server as the supervisor sees it: started until it answers, restarted in place, stopped."""

import signal
import subprocess
import threading
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from pipeline.embedded import processes
from pipeline.embedded.processes import Account, ServersError

START_ATTEMPTS = 3
RESTART_ATTEMPTS = 30
RETRY_DELAY = 0.3
START_WITHIN = 60.0
STOP_WITHIN = 30.0


class EmbeddedServer(ABC):
    """A server process that the supervisor owns.

    The port is chosen once, so a server that dies and is started again is found under the same URL.
    """

    name: ClassVar[str]
    stop_signal: ClassVar[signal.Signals]
    account: Account | None = None

    def __init__(self, home: Path) -> None:
        self.log = home / f"{self.name}.log"
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    @abstractmethod
    def url(self) -> str:
        """Where users of the server connect, password included."""

    @abstractmethod
    def prepare(self) -> None:
        """Make the data directory ready, and end what an earlier supervisor may have left running in it."""

    @abstractmethod
    def command(self) -> list[str | Path]:
        """What to run; asked after the port has been chosen."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether users can be served now."""

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Bring the server up on a port of its own; returns only when it answers."""
        self.prepare()
        for _ in range(START_ATTEMPTS):  # another program may have taken the port since we looked
            self.port = processes.free_port()
            if self._start_once():
                return
        raise self._start_error()

    def restart(self) -> None:
        """Bring a server that died back under the URL its users already have."""
        self.stop()
        self.prepare()
        for _ in range(RESTART_ATTEMPTS):  # what is left of the dead server may hold its memory a little longer
            if self._start_once():
                return
        raise self._start_error()

    def stop(self) -> None:
        if self._process is not None:
            processes.stop(self._process, self.stop_signal, within=STOP_WITHIN)

    def _start_once(self) -> bool:
        self._process = processes.start(
            self.command(), log=self.log, account=self.account, stop_signal=self.stop_signal
        )
        processes.wait_until(lambda: not self.is_alive() or self.is_ready(), within=START_WITHIN)
        if self.is_alive() and self.is_ready():
            return True
        self.stop()
        threading.Event().wait(RETRY_DELAY)
        return False

    def _start_error(self) -> ServersError:
        return ServersError(f"{self.name} did not start. The end of {self.log}:\n{processes.tail(self.log)}")
