"""``pipeline dev`` as real processes: it restarts crashed ones and leaves none behind."""

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.embedded import locks, processes, servers
from tests.support import forked_python
from tests.support.environ import clean_environ
from tests.support.wait import wait_for

PIPELINE = Path(sys.executable).parent / "pipeline"
PROJECT = Path(__file__).parents[2]
WITHIN = 60


class Dev:
    """A running ``pipeline dev``, in its own session as in a terminal."""

    def __init__(self, home: Path, place: Path, *options: str) -> None:
        clean = clean_environ()
        self.home, self.log = home, place / "dev.log"
        self.environ = clean | {
            "PIPELINE_HOME": str(home),
            "PIPELINE_TICK": "500ms",
            "RECEIPTS_OUTBOX": str(place / "outbox"),
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [PIPELINE, "dev", *options],
                cwd=PROJECT,
                env=self.environ,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.seen: set[int] = set()

    def wait_for(self, text: str, times: int = 1) -> None:
        def is_printed() -> bool:
            if self.log.read_text().count(text) >= times:
                return True
            if self.process.poll() is not None:
                raise RuntimeError(f"it ended with {self.process.returncode}: {self._tail()}")
            return False

        wait_for(is_printed, within=WITHIN, why=f"{text!r} printed {times} times")

    def family(self) -> set[int]:
        """Every process that descends from it or from the servers' supervisor, remembered for afterwards."""
        parents: dict[int, int] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
        board = processes.read_pid(self.home / "postgres" / "postmaster.pid")
        found = {self.process.pid} | ({board} if board else set())
        while more := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= more
        self.seen |= found
        return found

    def worker(self) -> int:
        """The parent of the worker's pool."""
        for pid in self.family():
            text = _command(pid)
            if " worker " in text and _parent(pid) == self.process.pid:
                return pid
        raise AssertionError(f"no worker among {[_command(pid) for pid in self.family()]}")

    def nothing_is_left(self) -> None:
        gone = lambda: [(pid, _command(pid)) for pid in self.seen if processes.is_running(pid)] == []  # noqa: E731
        wait_for(gone, within=WITHIN, why=f"{[(p, _command(p)) for p in self.seen if processes.is_running(p)]} gone")
        wait_for(lambda: not locks.is_held(self.home / "supervisor.lock"), within=WITHIN, why="the servers gone")

    def pipeline(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another command in the same folder: it finds the servers by itself."""
        return forked_python.run(*arguments, environ=self.environ, timeout=WITHIN)

    def _tail(self) -> str:
        return self.log.read_text()[-2000:]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Share the data directory: the first test creates the servers, the second finds them."""
    found = tmp_path_factory.mktemp("dev") / "home"
    yield found
    servers.remove(found)


@pytest.fixture
def started() -> Iterator[list[Dev]]:
    """Kill every ``pipeline dev`` that a test started."""
    every: list[Dev] = []
    yield every
    for dev in every:
        if dev.process.poll() is None:
            dev.family()
            dev.process.kill()
            dev.process.wait()
        dev.nothing_is_left()


@pytest.mark.timeout(240)
def test_it_works_restarts_crashed_processes_and_leaves_none_behind(
    home: Path, tmp_path: Path, started: list[Dev], request: pytest.FixtureRequest
) -> None:
    request.addfinalizer((taken := socket.create_server(("127.0.0.1", 0))).close)
    wanted = taken.getsockname()[1]
    ports = ("--flower-port", str(processes.free_port()), "--console-port", str(wanted))
    dev = Dev(home, tmp_path, "examples.receipts", *ports)
    started.append(dev)
    dev.wait_for("worker  │ ")
    dev.wait_for(" ready.")
    order = ("orders.paid", '{"order": "4711", "email": "you@example.org"}', "--message-id", "4711")
    assert dev.pipeline("publish", "receipts", *order).stdout == "1 new, 0 repeated, 0 replaced\n"
    wait_for(lambda: "committed" in dev.pipeline("runs").stdout, within=WITHIN, every=0.2, why="a committed run")
    assert "receipt:4711" in dev.pipeline("trace", "message:4711").stdout
    dev.wait_for("worker  │ receipts  4711  mail.send  applied  ")
    assert not re.search(r"Task pipeline\.|run\.prepared|sweep", dev.log.read_text())

    dev.wait_for("console │ http://127.0.0.1:")
    console = dev.pipeline("open").stdout.strip()
    places = (f"Console:    {console.rstrip('/')};", "Commands:   in another terminal, in this folder: pipeline top, ")
    assert [words for words in places if words not in dev.log.read_text()] == []
    assert f":{wanted}" not in console
    assert f"console │ {console}login?link=" in dev.log.read_text()
    with urllib.request.urlopen(f"{console}healthz", timeout=WITHIN) as answer:
        assert answer.status == 200

    os.kill(dev.worker(), signal.SIGKILL)
    dev.wait_for("ended with exit code -9; it is started again")
    dev.wait_for(" ready.", times=2)

    dev.family()
    dev.process.send_signal(signal.SIGINT)
    assert dev.process.wait(timeout=WITHIN) == 0
    dev.wait_for("Stopped. Its data stays in")
    assert dev.pipeline("open").stdout == "http://127.0.0.1:8080/\n"
    dev.nothing_is_left()


@pytest.mark.timeout(240)
def test_no_process_survives_when_it_is_killed(home: Path, tmp_path: Path, started: list[Dev]) -> None:
    dev = Dev(home, tmp_path, "examples.receipts", "--no-flower", "--no-console", "--concurrency", "1")
    started.append(dev)
    dev.wait_for(" ready.")
    dev.family()
    dev.process.kill()
    dev.process.wait(timeout=WITHIN)
    dev.nothing_is_left()


def test_without_a_workflow_it_says_what_to_type_and_starts_nothing(tmp_path: Path, started: list[Dev]) -> None:
    dev = Dev(tmp_path / "home", tmp_path)
    started.append(dev)
    assert dev.process.wait(timeout=WITHIN) == 2
    assert "pipeline dev examples.receipts" in dev.log.read_text()
    assert not (tmp_path / "home").exists()
