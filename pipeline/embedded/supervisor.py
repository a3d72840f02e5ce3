"""The process that owns the embedded servers: `python -m pipeline.embedded.supervisor HOME`.

At most one lives per home: it holds `supervisor.lock` for life. `servers.json` is locked by it as well, so a
reader knows whether the writer still lives. It stops when it can take `users.lock` alone, which means that
no user is left; users that were killed have lost their share of the lock, so nothing waits for the dead.
"""

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from pipeline.embedded import binaries, processes
from pipeline.embedded.locks import Lock, publish_locked
from pipeline.embedded.postgres import EmbeddedPostgres
from pipeline.embedded.processes import EmbeddedServer, ServersError
from pipeline.embedded.redis import EmbeddedRedis

READY = "ready"
POLL_INTERVAL = 0.1
MAX_RESTARTS = 20
RESTART_WINDOW = 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the servers in the background; exit 0 once they answer, else 1 with the reason on stderr."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.embedded.supervisor")
    parser.add_argument("home", type=Path)
    parser.add_argument("--lock-fd", type=int, help="supervisor.lock, already taken by the caller")
    options = parser.parse_args(arguments)
    home: Path = options.home.resolve()
    lock = Lock.adopt(options.lock_fd) if options.lock_fd is not None else Lock(home / "supervisor.lock")
    if not lock.try_exclusive():
        sys.stderr.write(f"the servers of {home} have a supervisor already\n")
        return 1
    readable, writable = os.pipe()
    if os.fork() == 0:
        os.close(readable)
        return _serve_in_background(home, writable)
    os.close(writable)
    with os.fdopen(readable) as report:
        reason = report.read()
    if reason == READY:
        return 0
    log = home / "supervisor.log"
    sys.stderr.write(reason or f"the supervisor died. The end of {log}:\n{processes.tail(log)}")
    return 1


def _serve_in_background(home: Path, report: int) -> int:
    """Run as the detached process, which has nothing but its log to write to."""
    log = os.open(home / "supervisor.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(source, stream)
    os.chdir(home)  # the folder of the start may be removed
    try:
        Supervisor(home, os.environ).run(report)
    except ServersError as error:
        _report(report, str(error))
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _report(report: int, text: str) -> None:
    """Tell the process that waits for us; it may have gone away, which changes nothing for us."""
    try:
        os.write(report, text.encode())
        os.close(report)
    except OSError:
        return


class Supervisor:
    """Owns the servers from the first start to the last stop."""

    def __init__(self, home: Path, environ: Mapping[str, str]) -> None:
        self._home = home
        self._status_file = home / "servers.json"
        self._status_lock: Lock | None = None
        self._children: list[EmbeddedServer] = []
        self._restarts: list[float] = []
        if not environ.get("PIPELINE_DATABASE_URL", "").strip():
            self._children.append(EmbeddedPostgres(home, binaries.find_postgres(environ)))
        if not environ.get("PIPELINE_BROKER_URL", "").strip():
            self._children.append(EmbeddedRedis(home, binaries.find_redis(environ)))

    def run(self, report: int) -> None:
        """Serve until no user is left or a signal asks to stop. The servers are down when this returns."""
        for asked in (signal.SIGTERM, signal.SIGINT):
            signal.signal(asked, _exit)
        with ExitStack() as undo:
            undo.callback(self._stop_all)
            for child in self._children:
                child.start()
            self._publish_status()
            _report(report, READY)
            self._supervise(undo.enter_context(Lock(self._home / "users.lock")))

    def _supervise(self, users: Lock) -> None:
        pause = threading.Event()
        while not users.try_exclusive():
            for child in self._children:
                if not child.is_alive():
                    self._restart(child)
            pause.wait(POLL_INTERVAL)

    def _restart(self, child: EmbeddedServer) -> None:
        """Start a server that died again, under the same URL, unless it keeps dying."""
        now = time.monotonic()
        self._restarts = [at for at in self._restarts if now - at < RESTART_WINDOW] + [now]
        if len(self._restarts) > MAX_RESTARTS:
            raise ServersError(f"{child.name} keeps dying; see {child.log}")
        child.restart()
        self._publish_status()

    def _publish_status(self) -> None:
        """Tell users where the servers are; the lock on the file says that we still live."""
        urls = {child.name: child.url for child in self._children}
        pids = {child.name: child.pid for child in self._children}
        text = json.dumps({"supervisor": os.getpid(), "urls": urls, "pids": pids}, indent=2)
        previous, self._status_lock = self._status_lock, publish_locked(self._status_file, text)
        if previous is not None:
            previous.close()

    def _stop_all(self) -> None:
        """Remove the notice first, so that no process joins servers that are about to stop."""
        for late in (signal.SIGTERM, signal.SIGINT):
            signal.signal(late, signal.SIG_IGN)
        self._status_file.unlink(missing_ok=True)
        for child in reversed(self._children):
            child.stop()


def _exit(_signal: int, _frame: object) -> None:
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main())
