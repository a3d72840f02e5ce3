"""Programs under one supervisor, with programs that do nothing but live and die."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.embedded import processes
from tests.support.wait import wait_for

#: Runs two programs together and says what they say; the second is the one that a test is about.
SUPERVISOR = """
import fcntl, os, sys, termios
from pathlib import Path
from pipeline.embedded.development import Program, ProcessGroup

if os.isatty(0):  # closing it is felt only by whoever it is the terminal of
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)

def say(name, line):
    os.write(1, f"{name}|{line}\\n".encode())

patient = Program(name="patient", command=("sh", "-c", "echo $$ lives; exec sleep 600"))
other = Program(name="other", command=("sh", "-c", sys.argv[1]), is_required=sys.argv[2] == "needed")
sys.exit(ProcessGroup([patient, other], os.environ, Path.cwd(), say).run())
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def together(script: str, needed: str, output: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", SUPERVISOR, script, needed]
    return subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)


def pids(log: Path) -> list[int]:
    lines = [line for line in log.read_text().splitlines() if line.endswith(" lives")]
    return [int(line.partition("|")[2].split()[0]) for line in lines]


def are_gone(found: list[int]) -> bool:
    return not any(processes.is_running(pid) for pid in found)


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_all_of_them_end_with_it_however_it_ends(log: Path, ending: signal.Signals) -> None:
    with log.open("wb") as output:
        supervisor = together("echo $$ lives; exec sleep 600", "needed", output.fileno())
    wait_for(lambda: len(pids(log)) == 2)
    supervisor.send_signal(ending)
    code = supervisor.wait(timeout=40)
    assert code == (-signal.SIGKILL if ending is signal.SIGKILL else 0)
    wait_for(lambda: are_gone(pids(log)), why="both gone")


def test_a_terminal_that_is_closed_ends_them_although_nobody_can_be_told(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    ours, theirs = pty.openpty()
    script = f"echo $$ > {mark}; exec sleep 600"
    command = [sys.executable, "-c", SUPERVISOR, script, "needed"]
    supervisor = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    wait_for(lambda: mark.exists() and mark.read_text().strip())
    os.close(ours)
    supervisor.wait(timeout=40)
    wait_for(lambda: are_gone([int(mark.read_text())]), why="the program gone")


def test_one_that_does_not_want_to_end_is_ended_when_asked_twice(log: Path) -> None:
    with log.open("wb") as output:
        script = "trap '' TERM; echo $$ lives; while :; do sleep 0.1; done"
        supervisor = together(script, "needed", output.fileno())
    wait_for(lambda: len(pids(log)) == 2)
    supervisor.send_signal(signal.SIGINT)
    wait_for(lambda: "Stopping" in log.read_text())
    wait_for(lambda: [processes.is_running(pid) for pid in pids(log)].count(True) == 1, why="both asked to end")
    supervisor.send_signal(signal.SIGINT)
    assert supervisor.wait(timeout=40) == 0
    wait_for(lambda: are_gone(pids(log)), why="both gone")


def test_one_that_keeps_dying_is_started_again_five_times_and_then_ends_all_if_it_is_needed(log: Path) -> None:
    with log.open("wb") as output:
        supervisor = together("echo $$ lives; exit 3", "needed", output.fileno())
    assert supervisor.wait(timeout=60) == 1
    said = log.read_text()
    assert said.count("other|ended with exit code 3; it is started again") == 5
    assert "other|ended with exit code 3 and is not started again; its last lines say why" in said
    wait_for(lambda: are_gone(pids(log)), why="the patient one gone")


def test_one_that_must_not_start_is_not_started_again(log: Path) -> None:
    with log.open("wb") as output:
        supervisor = together("exit 78", "needed", output.fileno())
    assert supervisor.wait(timeout=60) == 1
    assert "other|ended with exit code 78 and is not started again" in log.read_text()


def test_the_others_go_on_without_one_that_is_not_needed(log: Path) -> None:
    with log.open("wb") as output:
        supervisor = together("exit 78", "spare", output.fileno())
    wait_for(lambda: "other|ended with exit code 78; going on without it" in log.read_text())
    wait_for(lambda: pids(log), why="the patient one said so")
    assert not are_gone(pids(log))
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(timeout=40) == 0
    wait_for(lambda: are_gone(pids(log)), why="all gone")
