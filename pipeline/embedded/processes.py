"""Server processes: started so that they cannot outlive us, recognised before they are signalled.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1
POLL_INTERVAL = 0.02


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
    command: Sequence[str | Path], *, log: Path, account: Account | None, stop_signal: signal.Signals
) -> subprocess.Popen[bytes]:
    """Start a server as our child, its output appended to the log.

    The child is tied to the *thread* that starts it, so this belongs on the main thread.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            [str(part) for part in command],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=_die_with_parent(stop_signal),
            user=account.uid if account else None,
            group=account.gid if account else None,
            extra_groups=[] if account else None,
        )


def _die_with_parent(stop_signal: signal.Signals) -> Callable[[], None] | None:
    """What the child does before it becomes the server, so that the kernel stops it when we die.

    It runs after the change of account, which would have cleared the setting.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def tie() -> None:
        prctl(PR_SET_PDEATHSIG, int(stop_signal))
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
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return not Path("/proc/self").exists()
    return state != "Z"


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        shown = subprocess.run(
            ["/bin/ps", "-o", "command=", "-p", str(pid)], capture_output=True, text=True, check=False
        )
        return shown.stdout
