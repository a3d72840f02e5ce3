"""Python programs as forks of a process that has imported what they need.

A new Python process imports everything again before it starts to work. One process per test process imports what the
programs need, and forks one for each ``start``. The fork behaves as if ``python -m MODULE ...`` had been started: it
has its own session, environment, folder and output, and signals and exit codes are real. The process that forks has one
thread, no settings and no connection, so a fork inherits none.
"""

import atexit
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[2]
PIPELINE = "pipeline.cli.main:main"  #: what the installed command ``pipeline`` calls
#: What a worker, a beat and the commands that tests type have imported when they are ready. No module that reads the
#: environment.
NEEDED = (
    "celery.__main__",
    "celery.bin.celery",
    "celery.app.amqp",
    "celery.app.control",
    "celery.app.events",
    "celery.app.log",
    "celery.app.routes",
    "celery.apps.beat",
    "celery.apps.worker",
    "celery.concurrency.prefork",
    "celery.concurrency.solo",
    "celery.concurrency.thread",
    "celery.worker.autoscale",
    "celery.worker.components",
    "celery.worker.consumer",
    "celery.worker.consumer.delayed_delivery",
    "celery.worker.strategy",
    "kombu.transport.redis",
    "psycopg2.extras",
    "rich.table",
    "rich.tree",
    "sqlalchemy.dialects.postgresql.psycopg2",
    "pipeline.celery",
    "pipeline.cli.attention",
    "pipeline.cli.connectors",
    "pipeline.cli.database",
    "pipeline.cli.dead_letters",
    "pipeline.cli.ingest",
    "pipeline.cli.main",
    "pipeline.cli.mutations",
    "pipeline.cli.publish",
    "pipeline.cli.quarantine",
    "pipeline.cli.runs",
    "pipeline.cli.setup",
    "pipeline.cli.system",
    "pipeline.cli.workflows",
    "pipeline.tasks.supervised",
    "pipeline.tasks.dead_letter",
    "pipeline.tasks.phases",
    "pipeline.tasks.publish",
    "pipeline.tasks.signals",
)


class ForkedProcess:
    """A fork, with the part of ``subprocess.Popen`` that tests use."""

    def __init__(self, connection: socket.socket) -> None:
        self._answers = connection.makefile("r")
        self._connection = connection
        self.pid = int(self._answers.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None while the fork runs."""
        return self._exit_code(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit code."""
        code = self._exit_code(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal unless the fork has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _exit_code(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection, selectors.EVENT_READ)
                if not selector.select(timeout):
                    return None
            with self._connection, self._answers:
                self.returncode = int(self._answers.readline())
        return self.returncode


def start(
    module: str,
    arguments: Sequence[str],
    *,
    environ: Mapping[str, str],
    output: Path,
    errors: Path | None = None,
    cwd: Path = PROJECT,
    has_ours: bool = True,
) -> ForkedProcess:
    """Run ``python -m MODULE ARGUMENTS``, or the function MODULE:FUNCTION, in a fork; it has begun on return.

    Without ``errors`` they are in the output. A program of another team has to import our modules by itself: in its
    fork only packages of others are imported (``has_ours``).
    """
    request = {
        "module": module,
        "arguments": list(arguments),
        "environ": dict(environ),
        "output": str(output),
        "errors": str(errors or ""),
        "cwd": str(cwd),
    }
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(_address(has_ours))
    connection.sendall(json.dumps(request).encode() + b"\n")
    return ForkedProcess(connection)


def run(
    *arguments: str,
    environ: Mapping[str, str],
    module: str = PIPELINE,
    cwd: Path = PROJECT,
    timeout: float = 60,
    has_ours: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run the command ``pipeline`` in a fork, as ``subprocess.run`` would run the installed one, or another module."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        fork = start(module, arguments, environ=environ, output=output, errors=errors, cwd=cwd, has_ours=has_ours)
        try:
            code = fork.wait(timeout)
        except BaseException:
            fork.kill()
            fork.wait()
            raise
        return subprocess.CompletedProcess([module, *arguments], code, output.read_text(), errors.read_text())


@cache
def _address(has_ours: bool) -> str:
    """Start the process that forks, and return its socket. It ends when the test process ends, even by a kill."""
    folder = tempfile.TemporaryDirectory()
    address = f"{folder.name}/forks"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PIPELINE_")}
    needed = [name for name in NEEDED if has_ours or not name.startswith("pipeline.")]
    command = [sys.executable, "-m", "tests.support.forked_python", address, *needed]
    process = subprocess.Popen(
        command, cwd=PROJECT, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def end() -> None:
        process.communicate()
        folder.cleanup()

    atexit.register(end)
    assert process.stdout.readline() == b"ready\n"
    return address


def _serve(address: str) -> dict[str, Any] | None:
    """Fork for each request until the tests are over. Returns None in the parent, and in a fork its request."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
        listener.bind(address)
        listener.listen()
        for source in (sys.stdin, woken, listener):
            selector.register(source, selectors.EVENT_READ)
        os.write(sys.stdout.fileno(), b"ready\n")
        while True:
            for source in [key.fileobj for key, _ in selector.select()]:
                if source is sys.stdin:
                    return None
                if source is woken:
                    os.read(woken, 1024)
                    _report(running)
                    continue
                connection, _ = listener.accept()
                request: dict[str, Any] = json.loads(connection.makefile("rb").readline())
                pid = os.fork()
                if not pid:
                    _begin(request, connection)
                    os.close(woken)
                    os.close(wake)
                    for other in running.values():
                        other.close()
                    return request
                running[pid] = connection


def _report(running: dict[int, socket.socket]) -> None:
    """Send the exit code of each fork that has ended to the test that started it."""
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with running.pop(pid) as connection:
            try:
                connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
            except OSError:
                continue  # the test did not wait for it


def _begin(request: Mapping[str, Any], connection: socket.socket) -> None:
    """Give the fork its own session, folder, environment and output, and send its pid to the test."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.chdir(request["cwd"])
    sys.path[:1] = [request["cwd"], *filter(None, request["environ"].get("PYTHONPATH", "").split(os.pathsep))]
    os.environ.clear()
    os.environ.update(request["environ"])
    written = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for target, place, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, request["output"], written),
        (2, request["errors"], written),
    ):
        opened = os.open(place, flags, 0o644) if place else 1
        os.dup2(opened, target)
        if place:
            os.close(opened)
    with connection:
        connection.sendall(f"{os.getpid()}\n".encode())


def _replace_children_soon() -> None:
    """Let Celery replace ended children of its pool every quarter of a second, not only every five."""
    from celery.concurrency.asynpool import AsynPool

    AsynPool.timers = property(lambda pool: {pool.maintain_pool: 0.25})


def main() -> None:
    for name in sys.argv[2:]:
        with suppress(ModuleNotFoundError):  # modules of newer versions of Celery
            import_module(name)
    _replace_children_soon()
    gc.collect()
    gc.freeze()  # no fork searches what was imported for garbage: that would copy every page of it
    request = _serve(sys.argv[1])
    if request is not None:
        sys.argv = [request["module"], *request["arguments"]]
        module, _, function = request["module"].partition(":")
        if function:
            getattr(import_module(module), function)()
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
