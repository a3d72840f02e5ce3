"""Type what a page of the documents shows: save its files, run its commands, compare what they print."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.environ import clean_environ
from tests.support.wait import wait_for

WITHIN = 120
_BLOCK = re.compile(r"```(\w+)\n(.*?)```\n", re.DOTALL)
_SAVE = re.compile(r"Save as `([^`]+)`[^`]*$")


@dataclass(frozen=True, slots=True)
class Step:
    """A block of a page: a file to save or lines to type, with the output that is shown behind them."""

    text: str
    file: str = ""
    output: str = ""


def steps(page: str) -> Iterator[Step]:
    """The blocks of a page in their order. A block of text is the output of the lines before it."""
    found = [*_BLOCK.finditer(page)]
    for match, after in zip(found, [*found[1:], None], strict=True):
        kind, text = match.groups()
        if kind != "text":
            before = page[: match.start()].rstrip().rpartition("\n\n")[2]
            named = _SAVE.search(before)
            assert named or kind == "sh", f"no file is named for {text!r}"
            output = after[2] if after is not None and after[1] == "text" else ""
            yield Step(text, named[1] if named else "", output)


def matches(expected: str, printed: str) -> bool:
    """Compare output with the page, in which … stands for anything."""
    pattern = ".*".join(re.escape(part) for part in expected.strip().split("…"))
    return re.fullmatch(pattern.replace(r"\ .*", ".*"), printed.strip(), re.DOTALL) is not None


@dataclass
class Terminal:
    """A shell in a folder. ``export`` lasts from one line to the next, and lines in `background` go on running."""

    folder: Path
    background: dict[str, str]  #: the beginning of a line that stays, and what its log says when it is ready
    environ: dict[str, str] = field(default_factory=clean_environ)
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Find the installed commands, and give lists room for their columns."""
        kept = {name: value for name, value in self.environ.items() if not name.startswith("PYTEST_")}
        self.environ = kept | {"PATH": f"{Path(sys.executable).parent}:{kept['PATH']}", "COLUMNS": "200"}

    def follow(self, step: Step) -> None:
        """Save the file of a step, or type its lines until the last one prints what the page shows."""
        if step.file:
            (self.folder / step.file).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / step.file).write_text(step.text)
            return
        *before, last = [line.partition("   #")[0] for line in step.text.strip().splitlines()]
        printed = "".join(self._type(line) for line in before)

        def assert_printed() -> bool:
            output = printed + self._type(last)
            assert not step.output or matches(step.output, output), output
            return True

        wait_for(assert_printed, within=WITHIN, every=0.5, why=f"{last!r} printing {step.output!r}")

    def _type(self, line: str) -> str:
        name, _, value = line.removeprefix("export ").partition("=")
        if line.startswith("export "):
            self.environ[name] = value
            return ""
        for start, ready in self.background.items():
            if line.startswith(start):
                self._start(line, ready)
                return ""
        done = subprocess.run(
            line, shell=True, cwd=self.folder, env=self.environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        return done.stdout

    def _start(self, line: str, ready: str) -> None:
        log = self.folder / f"background-{len(self.running)}.log"
        with log.open("wb") as file:
            started = subprocess.Popen(
                f"exec {line}",
                shell=True,
                cwd=self.folder,
                env=self.environ,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self.running.append(started)
        wait_for(lambda: ready in log.read_text(), within=WITHIN, why=f"{line!r} saying {ready!r}")

    def close(self) -> None:
        """Stop what runs in the background; kill what does not stop."""
        for each in self.running:
            each.send_signal(signal.SIGTERM)
        for each in self.running:
            try:
                each.wait(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(each.pid, signal.SIGKILL)
                each.wait()
