"""The quickstart is typed as it is printed, from an empty folder, with the built wheel in an empty environment.

No index of packages is needed. pip installs the wheel, and finds its dependencies installed: links to those of this
environment, found by what the packages themselves declare. A dependency that is not declared would be missing.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from pipeline.config import DISTRIBUTION
from pipeline.embedded import servers
from tests.support.wait import wait_for

WITHIN = 180
BLOCK = re.compile(r"```(\w+)\n(.*?)```\n", re.DOTALL)
INSTALLED = (f"{DISTRIBUTION}[console,servers]", "pytest")


@dataclass(frozen=True, slots=True)
class Step:
    """Lines to type, and the output that follows them on the page."""

    lines: tuple[str, ...]
    output: str


def steps(page: str) -> list[Step]:
    """The blocks of the page in their order."""
    found = BLOCK.findall(page)
    following = [*found[1:], ("", "")]
    return [
        Step(tuple(text.strip().splitlines()), after if after_kind == "text" else "")
        for (kind, text), (after_kind, after) in zip(found, following, strict=True)
        if kind == "sh"
    ]


class Terminal:
    """A shell in a folder. What it prints goes to a file."""

    def __init__(self, folder: Path, environ: dict[str, str], log: Path) -> None:
        self.log, self.typed = log, 0
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                ["bash", "--norc"],
                cwd=folder,
                env=environ,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def type(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()

    def run(self, line: str) -> tuple[str, int]:
        """Type a line, and return what it prints and its exit code."""
        self.typed += 1
        mark, before = f"line {self.typed} ended with ", self.log.stat().st_size
        self.type(line)
        self.type(f"echo '{mark}'$?")

        def ended() -> re.Match[str] | None:
            assert self.process.poll() is None, self.log.read_text()
            return re.search(f"(.*){mark}(\\d+)\n", self.log.read_bytes()[before:].decode(), re.DOTALL)

        found = wait_for(ended, within=WITHIN, why=f"{line!r} to end")
        assert found is not None
        return found[1], int(found[2])

    def press_ctrl_c(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
        self.process.communicate(timeout=WITHIN)


def matches(expected: str, printed: str) -> bool:
    """Compare output with the page, in which … stands for anything."""
    pattern = ".*".join(re.escape(part) for part in expected.strip().split("…"))
    return re.fullmatch(pattern.replace(r"\ .*", ".*"), printed.strip(), re.DOTALL) is not None


def carry_out(terminal: Terminal, step: Step) -> None:
    """Type the lines of a step; the last one again, as the page says, until its output is there."""
    *before, last = step.lines
    printed = ""
    for line in before:
        output, code = terminal.run(line)
        assert code == 0, output
        printed += output

    def is_as_printed() -> bool:
        output, code = terminal.run(last)
        assert matches(step.output, printed + output) if step.output else code == 0, printed + output
        return True

    wait_for(is_as_printed, within=WITHIN, every=2, why=f"{last!r} printing {step.output!r}")


def closure(*wanted: str) -> dict[str, Distribution]:
    """Return what these need and what that needs, by what each declares, as it is installed here."""
    waiting, found = [Requirement(each) for each in wanted], dict[str, Distribution]()
    while waiting:
        requirement = waiting.pop()
        if str(requirement) not in found:
            found[str(requirement)] = package = distribution(requirement.name)
            extras = ("", *requirement.extras)
            waiting += [
                needed
                for needed in map(Requirement, package.requires or ())
                if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras)
            ]
    return found


def link_dependencies(folder: Path, *wanted: str) -> None:
    """Link the packages that these need, without our own."""
    for package in closure(*wanted).values():
        tops = {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}
        for top in tops if package.name != DISTRIBUTION else ():
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(package.locate_file(top))))


@pytest.fixture
def environ(project: Path, tmp_path: Path) -> dict[str, str]:
    """The environment of a user: Python, the wheel where pip looks for it, and nothing of ours."""
    programs, links, wheels = (tmp_path / name for name in ("bin", "links", "wheels"))
    programs.mkdir()
    links.mkdir()
    (programs / "python3").symlink_to(Path(sys.executable).resolve())
    link_dependencies(links, *INSTALLED)
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(wheels), str(project)]
    subprocess.run(build, cwd=tmp_path, check=True, capture_output=True, timeout=WITHIN)
    unwanted = ("PIPELINE_", "PYTHON", "PYTEST_", "PIP_", "VIRTUAL_ENV", "COV")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    path = [folder for folder in kept["PATH"].split(os.pathsep) if Path(folder) != Path(sys.executable).parent]
    pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": os.devnull}
    return kept | pip | {"PATH": os.pathsep.join([str(programs), *path]), "PYTHONPATH": str(links), "COLUMNS": "200"}


@pytest.fixture
def terminals(tmp_path: Path, environ: dict[str, str]) -> Iterator[list[Terminal]]:
    """The terminals that the reader has open. The first one is in an empty folder."""
    folder = tmp_path / "empty"
    folder.mkdir()
    opened = [Terminal(folder, environ, tmp_path / "first.log")]
    yield opened
    for each in opened:
        each.end()
    servers.remove(folder / ".pipeline")


@pytest.mark.timeout(600)
def test_the_quickstart_works_as_it_is_printed(
    project: Path, tmp_path: Path, environ: dict[str, str], terminals: list[Terminal]
) -> None:
    page = (project / "docs/quickstart.md").read_text(encoding="utf-8")
    done = steps(page)
    for step in done:
        if step.lines[0].startswith("pipeline dev "):
            terminals[0].type(step.lines[0])
            wait_for(lambda: " ready." in terminals[0].log.read_text(), within=WITHIN, why="the worker ready")
            terminals.append(Terminal(tmp_path / "empty", environ, tmp_path / "second.log"))
        else:
            carry_out(terminals[-1], step)
    assert (len(terminals), len(done)) == (2, page.count("```sh"))
    terminals[0].press_ctrl_c()
    wait_for(lambda: "Stopped. Its data stays in" in terminals[0].log.read_text(), within=WITHIN)
    sent = (tmp_path / "empty/sent.txt").read_text().splitlines()
    assert [line.split(" ", 1)[1] for line in sent] == [
        "ada: Order 4711 is paid",
        "slow: Order 4712 is paid",
        "slow: Order 4713 is sent",
    ]


def test_output_that_differs_from_the_page_is_found() -> None:
    assert matches("event …  [committed]\n", "event 1  [committed]\n")
    assert not matches("event …  [committed]\n", "event 1  [mutating]\n")
    assert not matches("1\n", "2\n")


def test_the_page_is_short(project: Path) -> None:
    assert len((project / "docs/quickstart.md").read_text(encoding="utf-8").split()) <= 600
