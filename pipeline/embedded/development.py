"""``pipeline dev``: Postgres, Redis, a worker, beat and Flower in one terminal, and nothing left behind."""

import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from pipeline.embedded import locks, processes, servers
from pipeline.embedded.process_group import ProcessGroup, Program
from pipeline.store import migrate
from pipeline.store.database import Database

_SERVERS_STOP_WITHIN = 15.0
LOCALHOST = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class DevOptions:
    """What a person chose."""

    home: Path
    workflows: str
    concurrency: int = 2
    flower_port: int | None = 5555  #: None: without Flower


def run(options: DevOptions, environ: Mapping[str, str], print_line: Callable[[str, str], None]) -> int:
    """Run everything until asked to stop; 1 when the worker or beat keeps ending."""
    write_line = _LineWriter(print_line)
    with servers.running(options.home, environ) as urls:
        db = Database.connect_unpooled(urls.database_url)
        write_line("", f"Postgres and Redis are up; schema version {migrate.upgrade(db)}.")
        port = _flower_port(options.flower_port)
        given = {
            **environ,
            "PIPELINE_DATABASE_URL": urls.database_url,
            "PIPELINE_BROKER_URL": urls.broker_url,
            "PIPELINE_WORKFLOWS": options.workflows,
            "PYTHONUNBUFFERED": "1",
        }
        for line in _start_lines(options, port):
            write_line("", line)
        code = ProcessGroup(_programs(options, port), given, Path.cwd(), write_line).run()
    _report_stop(options.home, environ, write_line)
    return code


class _LineWriter:
    """Write lines until the output is closed, as by a closed terminal."""

    def __init__(self, print_line: Callable[[str, str], None]) -> None:
        self._print_line, self._lock = print_line, threading.Lock()

    def __call__(self, name: str, line: str) -> None:
        with self._lock:
            try:
                self._print_line(name, line)
            except (OSError, ValueError):
                self._print_line = lambda *_: None


def _programs(options: DevOptions, port: int | None) -> list[Program]:
    def celery(*arguments: str) -> tuple[str, ...]:
        return (sys.executable, "-W", "ignore", "-m", "celery", "-q", "-A", "pipeline", *arguments)

    alone = ("--without-mingle", "--without-gossip")  # no other worker runs here
    worker = ("worker", "-l", "INFO", f"--concurrency={options.concurrency}", "-n", "dev@%h", *alone)
    found = [
        Program(name="worker", command=celery(*worker, *(("--task-events",) if port else ()))),
        Program(
            name="beat",
            command=celery("beat", "-l", "WARNING", "--schedule", str(options.home.resolve() / "beat-schedule")),
        ),
    ]
    if port is not None:
        flower = celery("flower", f"--address={LOCALHOST}", f"--port={port}", "--logging=error")
        found.append(Program(name="flower", command=flower, is_required=False))
    return found


def _flower_port(wanted: int | None) -> int | None:
    """The port for Flower: the one that was asked for if it is free. None when Flower is not there, or not wanted."""
    if wanted is None or find_spec("flower") is None:
        return None
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOCALHOST, wanted))
        except OSError:
            return processes.free_port()
    return wanted


def _start_lines(options: DevOptions, port: int | None) -> list[str]:
    flower = f"Flower: http://{LOCALHOST}:{port}" if port else "Flower is left out; it comes with the extra `flower`."
    if options.flower_port is None:
        flower = ""
    lines = [
        f"Workflows: {options.workflows}.",
        flower,
        "In another terminal, in this folder: pipeline top, pipeline workflows, pipeline attention.",
        "Ctrl-C stops everything.",
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
