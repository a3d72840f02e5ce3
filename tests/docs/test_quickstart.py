"""The quickstart runs as it is printed: its files, its commands, and what they print."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.embedded import servers
from tests.support import forked_python
from tests.support.wait import wait_for

BIN = Path(sys.executable).parent
WITHIN = 120
BLOCK = re.compile(r"```(\w+)\n(.*?)```\n", re.DOTALL)
#: The installation is the one that the tests run in.
INSTALLATION = "make setup"
START = "pipeline dev receipts\n"


@dataclass(frozen=True, slots=True)
class Step:
    """A block of the page, with the block of output that follows it."""

    kind: str
    text: str
    output: str


def steps(page: str) -> list[Step]:
    """The blocks of the page in their order; output belongs to the commands before it."""
    found = BLOCK.findall(page)
    following = [*found[1:], ("", "")]
    return [
        Step(kind, text, after if after_kind == "text" else "")
        for (kind, text), (after_kind, after) in zip(found, following, strict=True)
        if kind != "text"
    ]


class Terminal:
    """A shell in an empty folder, and ``pipeline dev`` beside it."""

    def __init__(self, folder: Path) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PIPELINE_")}
        path = f"{BIN}:{os.environ['PATH']}"
        self.folder, self.environ = folder, clean | {"PATH": path, "PIPELINE_TICK": "500ms", "COLUMNS": "200"}
        self.dev: subprocess.Popen[bytes] | None = None

    def start_dev(self) -> None:
        log = self.folder / "dev.log"
        with log.open("wb") as file:
            self.dev = subprocess.Popen(
                ["pipeline", "dev", "receipts", "--no-flower"],
                cwd=self.folder,
                env=self.environ,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        wait_for(lambda: " ready." in log.read_text(), within=WITHIN, why="the worker ready")

    def stop_dev(self) -> None:
        """Press Ctrl-C."""
        if self.dev and self.dev.poll() is None:
            self.dev.send_signal(signal.SIGINT)
            assert self.dev.wait(timeout=WITHIN) == 0

    def run_until_printed(self, commands: str, expected: str) -> None:
        """Run all commands once, and the last one again until the page's output appears: work takes a moment."""
        *before, last = commands.strip().splitlines()
        printed = "".join(self._run(line) for line in before)
        if matches(expected, printed + self._run(last, check=False)):
            return

        def assert_printed() -> bool:
            output = printed + self._run_again(last)
            assert matches(expected, output), output
            return True

        wait_for(assert_printed, within=WITHIN, every=0.5, why=f"{last!r} printing {expected!r}")

    def _run(self, line: str, *, check: bool = True) -> str:
        done = subprocess.run(
            line, shell=True, cwd=self.folder, env=self.environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0 or not check, done.stderr
        return done.stdout

    def _run_again(self, line: str) -> str:
        """Run a command that has run in a process of its own before; a fork costs a tenth of it."""
        program, *arguments = shlex.split(line)
        if program != "pipeline":
            return self._run(line, check=False)
        return forked_python.run(*arguments, environ=self.environ, cwd=self.folder).stdout


def matches(expected: str, printed: str) -> bool:
    """Compare output with the page, in which … stands for anything."""
    pattern = ".*".join(re.escape(part) for part in expected.strip().split("…"))
    return re.fullmatch(pattern.replace(r"\ .*", ".*"), printed.strip(), re.DOTALL) is not None


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    started = Terminal(tmp_path)
    yield started
    if started.dev and started.dev.poll() is None:
        started.dev.kill()
        started.dev.wait()
    servers.remove(tmp_path / ".pipeline")


def save(step: Step, file: Path) -> None:
    """Save the workflow; a later block is the method that the reader adds to the connector."""
    if not file.exists():
        file.write_text(step.text)
        return
    text = file.read_text().replace("import Connector,", "import Applied, Connector, NotFound,")
    file.write_text(text.replace("\n\n\nmail = Mail()", f"\n\n{step.text}\n\nmail = Mail()"))


@pytest.mark.timeout(600)
def test_the_quickstart_works_as_it_is_printed(project: Path, terminal: Terminal) -> None:
    done = 0
    for step in steps((project / "docs/quickstart.md").read_text(encoding="utf-8")):
        if step.kind == "python":
            save(step, terminal.folder / "receipts.py")
        elif step.text == START:
            terminal.stop_dev()
            terminal.start_dev()
        elif not step.text.startswith(INSTALLATION):
            terminal.run_until_printed(step.text, step.output)
            done += 1
    terminal.stop_dev()
    assert done == 7
    assert (terminal.folder / "outbox.txt").read_text().count("\n") == 3


def test_output_that_differs_from_the_page_is_found() -> None:
    assert matches("event …  [committed]\n", "event 1  [committed]\n")
    assert not matches("event …  [committed]\n", "event 1  [mutating]\n")
    assert not matches("1\n", "2\n")
