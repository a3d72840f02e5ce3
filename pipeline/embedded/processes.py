"""Processes that cannot outlive us, and servers among them, recognised before they are signalled.

A child started here gets its stop signal from the kernel the moment its parent dies, even by `kill -9`
(Linux). Where that is not available, or was too late, `stop_orphan` ends what a dead supervisor left
behind, and only after the process has proved to be the one that owns the directory.
"""

import ctypes
import os
import pwd
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

PR_SET_PDEATHSIG = 1
POLL_INTERVAL = 0.02
START_ATTEMPTS = 3
RESTART_ATTEMPTS = 30
RETRY_DELAY = 0.3
START_WITHIN = 60.0
STOP_WITHIN = 30.0


class ServersError(RuntimeError):
    """The embedded servers cannot be had; the message says what was tried and what to do."""


@dataclass(frozen=True, slots=True)
class Account:
    """A system account a server runs as."""

    name: str
    uid: int
    gid: int


def server_account() -> Account | None:
    """The account Postgres must run as, or None when it can run as ourselves.

    Postgres refuses to run as root, so root lends it an account that every system has.
    """
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(name, entry.pw_uid, entry.pw_gid)
    raise ServersError(
        "Postgres refuses to run as root, and this system has neither a 'postgres' nor a 'nobody' account: "
        "run as another user or set PIPELINE_DATABASE_URL"
    )


def wait_until(condition: Callable[[], bool], *, within: float) -> bool:
    """Whether the condition came true in time; it is looked at at least once."""
    deadline = time.monotonic() + within
    pause = threading.Event()
    while not condition():
        if time.monotonic() >= deadline:
            return False
        pause.wait(POLL_INTERVAL)
    return True


def free_port() -> int:
    """Return a TCP port that is free now. The caller retries with another if it loses the race."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def tail(log: Path, lines: int = 15) -> str:
    """The end of a log file, for an error message; empty when there is none."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""


def run_as(account: Account | None, command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    """Run a short command to its end as the account, from a directory every account may enter."""
    return subprocess.run(
        [str(part) for part in command],
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        user=account.uid if account else None,
        group=account.gid if account else None,
        extra_groups=[] if account else None,
    )


def start(
    command: Sequence[str | Path],
    *,
    log: Path,
    end_signal: signal.Signals,
    account: Account | None = None,
    folder: str | Path = "/",
    environ: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a program as our child in a session of its own, its output appended to the log.

    It gets ``end_signal`` when we die. It is tied to the *thread* that starts it, so this belongs on the main thread.
    """
    # Postgres logs statements that failed, with their values
    with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as output:
        return subprocess.Popen(
            [str(part) for part in command],
            cwd=folder,
            env=None if environ is None else dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent(end_signal),
            user=account.uid if account else None,
            group=account.gid if account else None,
            extra_groups=[] if account else None,
        )


def _die_with_parent(end_signal: signal.Signals) -> Callable[[], None] | None:
    """What the child does before it becomes the program, so that the kernel stops it when we die.

    It runs after the change of account, which would have cleared the setting.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def tie() -> None:
        prctl(PR_SET_PDEATHSIG, int(end_signal))
        if os.getppid() != parent:  # the parent died before the tie was made
            os._exit(1)

    return tie


def stop(process: subprocess.Popen[bytes], stop_signal: signal.Signals, *, within: float) -> None:
    """End our child in order, and by force when it does not end in time."""
    if process.poll() is None:
        process.send_signal(stop_signal)
        try:
            process.wait(timeout=within)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


def read_pid(path: Path) -> int | None:
    """The process id a server wrote into the first line of a file about itself; None when it wrote none."""
    try:
        first = path.read_text().partition("\n")[0].strip()
    except FileNotFoundError:
        return None
    return int(first) if first.isdigit() else None


def stop_orphan(pid: int, directory: Path, stop_signal: signal.Signals, *, within: float) -> None:
    """End a server that a dead supervisor left behind; leave alone whoever else got its number since."""
    if not _owns(pid, directory):
        return
    for chosen in (stop_signal, signal.SIGKILL):
        try:
            os.kill(pid, chosen)
        except ProcessLookupError:
            return
        if wait_until(lambda: not is_running(pid), within=within):
            return


def _owns(pid: int, directory: Path) -> bool:
    """Whether the process is the server of this directory: it works there, or names it in its command."""
    if not is_running(pid):
        return False
    try:
        return Path(f"/proc/{pid}/cwd").readlink() == directory.resolve()
    except OSError:  # no /proc, or a container's root that may not look into other accounts' processes
        return str(directory) in _command_line(pid)


def pid_exists(pid: int) -> bool:
    """Whether the process id is taken, be it by a process that ended and was not collected yet."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def is_running(pid: int) -> bool:
    """Whether the process still runs; one that ended but was not yet collected by its parent does not."""
    if not pid_exists(pid):
        return False
    try:
        return _stat(Path(f"/proc/{pid}/stat"))[0] != "Z"
    except OSError:
        return not Path("/proc/self").exists()


def child_pids(parent: int) -> list[int]:
    """Return the running children of a process; none where there is no /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, its_parent = _stat(path)[:2]
            if int(its_parent) == parent and state != "Z":
                found.append(int(path.parent.name))
    return sorted(found)


def _stat(path: Path) -> list[str]:
    """Return the fields of /proc/PID/stat after the name of the program: its state, its parent, and more."""
    return path.read_text().rpartition(")")[2].split()


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        shown = subprocess.run(
            ["/bin/ps", "-o", "command=", "-p", str(pid)], capture_output=True, text=True, check=False
        )
        return shown.stdout


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
        for _ in range(START_ATTEMPTS):  # another program may have taken the free port meanwhile
            self.port = free_port()
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
            stop(self._process, self.stop_signal, within=STOP_WITHIN)

    def _start_once(self) -> bool:
        self._process = start(self.command(), log=self.log, end_signal=self.stop_signal, account=self.account)
        wait_until(lambda: not self.is_alive() or self.is_ready(), within=START_WITHIN)
        if self.is_alive() and self.is_ready():
            return True
        self.stop()
        threading.Event().wait(RETRY_DELAY)
        return False

    def _start_error(self) -> ServersError:
        return ServersError(f"{self.name} did not start. The end of {self.log}:\n{tail(self.log)}")
