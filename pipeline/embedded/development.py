"""``pipeline dev``: Postgres, Redis, a worker, beat, the console and Flower in one terminal, and nothing left behind.

What a program says is passed on line by line with its name before it. One that ends is started again,
unless it keeps ending. When the supervisor is asked to stop (Ctrl-C, SIGTERM, a closed terminal) all
of them are asked to; when it is killed, the kernel ends them.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pipeline.config import EXIT_UNSAFE
from pipeline.embedded import locks, processes, servers
from pipeline.store import migrate
from pipeline.store.database import Database

_SERVERS_STOP_WITHIN = 15.0
LOCALHOST = "127.0.0.1"
_CONSOLE_FILE = "console.url"  #: in the home, locked while the console runs
POLL_INTERVAL = 0.1
MAX_RESTARTS = 5
RESTART_WINDOW = 60.0
_PORTS_TO_TRY = 20
_COMMAND = "from pipeline.cli.main import main; main()"
STOP_WITHIN = 60.0
KILL_WITHIN = 10.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

#: Runs in the child before it becomes the program, so that the kernel ends it when we die. A process of its own
#: instead of code between fork and exec: we have threads by then, and their locks are not to be met there.
_BOOTSTRAP = f"""
import ctypes, os, sys
if sys.platform.startswith("linux"):
    ctypes.CDLL(None).prctl({processes.PR_SET_PDEATHSIG}, {int(signal.SIGTERM)})
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""

PrintLine = Callable[[str, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Something to run. Without one that is needed, the others make no sense."""

    name: str
    command: tuple[str, ...]
    is_required: bool = True
    pid_file: Path | None = None  #: holds the process id while it runs


class _ManagedProcess:
    """A program as it runs, in a session of its own: a Ctrl-C in the terminal reaches the supervisor alone."""

    def __init__(self, program: Program, environ: Mapping[str, str], folder: Path, say: PrintLine) -> None:
        self.program, self._environ, self._folder, self._print_line = program, dict(environ), folder, say
        self._restarts: list[float] = []
        self.is_given_up = False
        self.start()

    def start(self) -> None:
        """Start it. Called on the main thread, which the kernel ties the program's life to."""
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", _BOOTSTRAP, str(os.getpid()), *self.program.command],
            cwd=self._folder,
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        if self.program.pid_file:
            self.program.pid_file.write_text(f"{self.process.pid}\n")
        output = self.process.stdout
        assert output is not None
        threading.Thread(target=self._forward_output, args=(output,), daemon=True).start()

    def may_restart(self) -> bool:
        """Whether it has not ended too often lately. Exit code 78 means that a new start cures nothing."""
        now = time.monotonic()
        self._restarts = [at for at in self._restarts if now - at < RESTART_WINDOW] + [now]
        return self.process.returncode != EXIT_UNSAFE and len(self._restarts) <= MAX_RESTARTS

    def ask_to_stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and whatever it started, which is in its session too."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        if self.program.pid_file:
            self.program.pid_file.unlink(missing_ok=True)

    def _forward_output(self, output: IO[bytes]) -> None:
        with output:
            for line in output:
                self._print_line(self.program.name, line.decode(errors="replace").rstrip())


class ProcessGroup:
    """Programs under one supervisor."""

    def __init__(self, programs: Sequence[Program], environ: Mapping[str, str], folder: Path, say: PrintLine) -> None:
        self._programs, self._environ, self._folder, self._print_line = programs, environ, folder, say
        self._stop_requests = 0
        self._running: list[_ManagedProcess] = []

    def run(self) -> int:
        """Run until asked to stop (0), or until a needed program keeps ending (1). Nothing lives on afterwards."""
        before = {asked: signal.signal(asked, self._count_stop_request) for asked in _STOP_SIGNALS}
        try:
            self._running = [
                _ManagedProcess(each, self._environ, self._folder, self._print_line) for each in self._programs
            ]
            return self._supervise()
        finally:
            self._stop()
            for asked, handler in before.items():
                signal.signal(asked, handler)

    def _count_stop_request(self, *_: object) -> None:
        self._stop_requests += 1

    def _supervise(self) -> int:
        pause = threading.Event()
        while not self._stop_requests:
            for each in self._running:
                if each.process.poll() is not None and not each.is_given_up and not self._restart(each):
                    return 1
            pause.wait(POLL_INTERVAL)
        return 0

    def _restart(self, each: _ManagedProcess) -> bool:
        """Start a program again that ended. False: it is needed and there is no use."""
        name, code = each.program.name, each.process.returncode
        each.kill()  # what it may have left behind
        if each.may_restart():
            self._print_line(name, f"ended with exit code {code}; it is started again")
            each.start()
            return True
        each.is_given_up = True
        if each.program.is_required:
            self._print_line(name, f"ended with exit code {code} and is not started again; its last lines say why")
            return False
        self._print_line(name, f"ended with exit code {code}; going on without it")
        return True

    def _stop(self) -> None:
        """Ask all to stop, wait for what they have in hand, and end what does not come to an end."""
        patience = self._stop_requests  # before the line below says that a second request ends everything
        if any(each.process.poll() is None for each in self._running):
            self._print_line("", "Stopping: what is in hand is finished first. Ctrl-C again ends everything at once.")
        for each in self._running:
            each.ask_to_stop()
        processes.wait_until(lambda: self._have_all_ended() or self._stop_requests > patience, within=STOP_WITHIN)
        for each in self._running:
            each.kill()
        processes.wait_until(self._have_all_ended, within=KILL_WITHIN)

    def _have_all_ended(self) -> bool:
        return all(each.process.poll() is not None for each in self._running)


@dataclass(frozen=True, slots=True, kw_only=True)
class DevOptions:
    """What a person chose."""

    home: Path
    workflows: str
    concurrency: int = 2
    flower_port: int | None = 5555  #: None: without Flower
    console_port: int | None = 8080  #: None: without the console


def run(options: DevOptions, environ: Mapping[str, str], print_line: PrintLine) -> int:
    """Run everything until asked to stop; 1 when the worker or beat keeps ending."""
    write_line = _LineWriter(print_line)
    with servers.running(options.home, environ) as urls:
        db = Database.connect_unpooled(urls.database_url)
        write_line("", f"Postgres and Redis are up; schema version {migrate.upgrade(db)}.")
        ports = _Ports(flower=_free_port(options.flower_port), console=_free_port(options.console_port))
        given = {
            "PIPELINE_LOG_FORMAT": "short",
            **({"PIPELINE_FLOWER_URL": ports.url(ports.flower)} if ports.flower else {}),
            **environ,
            "PIPELINE_DATABASE_URL": urls.database_url,
            "PIPELINE_BROKER_URL": urls.broker_url,
            "PIPELINE_WORKFLOWS": options.workflows,
            "PYTHONUNBUFFERED": "1",
        }
        for line in _start_lines(options, ports):
            write_line("", line)
        with published_console(options.home, ports.url(ports.console)) if ports.console else nullcontext():
            code = ProcessGroup(_programs(options, ports), given, Path.cwd(), write_line).run()
    _report_stop(options.home, environ, write_line)
    return code


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ports:
    """Ports of the web pages on this machine. None: it does not run."""

    flower: int | None
    console: int | None

    def url(self, port: int) -> str:
        return f"http://{LOCALHOST}:{port}"


def published_console(home: Path, url: str) -> locks.Lock:
    """Let other commands find the console's address until the returned lock is closed."""
    return locks.publish_locked(home.resolve() / _CONSOLE_FILE, url)


def console_url(home: Path) -> str | None:
    """Return the address of the console that ``run`` has started in this home; None if none runs."""
    return locks.read_locked(home / _CONSOLE_FILE)


class _LineWriter:
    """Write lines until the output is closed, as by a closed terminal."""

    def __init__(self, print_line: PrintLine) -> None:
        self._print_line, self._lock = print_line, threading.Lock()

    def __call__(self, name: str, line: str) -> None:
        with self._lock:
            try:
                self._print_line(name, line)
            except (OSError, ValueError):
                self._print_line = lambda *_: None


def _programs(options: DevOptions, ports: _Ports) -> list[Program]:
    def celery(*arguments: str) -> tuple[str, ...]:
        return (sys.executable, "-W", "ignore", "-m", "celery", "-q", "-A", "pipeline", *arguments)

    alone = ("--without-mingle", "--without-gossip")  # no other worker runs here
    worker = ("worker", "-l", "INFO", f"--concurrency={options.concurrency}", "-n", "dev@%h", *alone)
    found = [
        Program(
            name="worker",
            command=celery(*worker, *(("--task-events",) if ports.flower else ())),
            pid_file=options.home / "worker.pid",
        ),
        Program(
            name="beat",
            command=celery("beat", "-l", "WARNING", "--schedule", str(options.home.resolve() / "beat-schedule")),
        ),
    ]
    if ports.console is not None:
        api = (sys.executable, "-c", _COMMAND, "api", "--host", LOCALHOST, "--port", str(ports.console))
        found.append(Program(name="console", command=api, is_required=False))
    if ports.flower is not None:
        flower = celery("flower", f"--address={LOCALHOST}", f"--port={ports.flower}", "--logging=error")
        found.append(Program(name="flower", command=flower, is_required=False))
    return found


def _free_port(wanted: int | None) -> int | None:
    """Return the wanted port, or the next free one. None: no port is wanted."""
    if wanted is None:
        return None
    return next((port for port in range(wanted, wanted + _PORTS_TO_TRY) if _is_free(port)), processes.free_port())


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOCALHOST, port))
        except (OSError, OverflowError):
            return False
    return True


def _start_lines(options: DevOptions, ports: _Ports) -> list[str]:
    lines = [
        f"Workflows:  {options.workflows}",
        f"Console:    {ports.url(ports.console)}; the link that logs in follows" if ports.console else "",
        f"Flower:     {ports.url(ports.flower)}, Celery's tasks and workers" if ports.flower else "",
        "Commands:   in another terminal, in this folder: pipeline top, pipeline attention, pipeline open ID",
        f"Data, logs: {options.home}",
        "Each line below is one outcome: workflow, input, operation, what happened, how long. Ctrl-C stops everything.",
    ]
    return [line for line in lines if line]


def _report_stop(home: Path, environ: Mapping[str, str], write_line: _LineWriter) -> None:
    """Report the end of the servers, which stop when no process uses them."""
    if all(environ.get(name, "").strip() for name in servers.URL_VARIABLES):
        write_line("", "Stopped. Postgres and Redis were given by URL and were left alone.")
        return
    gone = processes.wait_until(lambda: not locks.is_held(home / "supervisor.lock"), within=_SERVERS_STOP_WITHIN)
    ended = (
        "Stopped. Its data stays in" if gone else "Stopped. Postgres and Redis stay up, another process uses them in"
    )
    write_line("", f"{ended} {home}.")
