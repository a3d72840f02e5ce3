"""Every command that the runbooks and the guides of running it name exists, and takes what it is given there."""

import re
import shlex
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from typer.main import get_command

from pipeline.cli.main import build_app
from pipeline.config import Settings
from tests.deploy import promql
from tests.deploy.known_names import metrics
from tests.support.source_code import ROOT

PAGES = sorted(
    [*(ROOT / "docs/runbooks").glob("*.md"), *(ROOT / "docs/guides").glob("*.md"), ROOT / "deploy/README.md"]
)
RUNBOOKS = sorted(path for path in (ROOT / "docs/runbooks").glob("*.md") if path.name != "README.md")
#: In running text a command stands alone in backticks, in a block at the start of a line.
INLINE = re.compile(r"`(pipeline [^`\n]+(?:\n[^`\n]+)?)`")
BLOCK = re.compile(r"^```(?:sh)?\n(.*?)^\s*```", re.DOTALL | re.MULTILINE)


def commands(text: str) -> Iterator[str]:
    """Everything that begins with `pipeline` and is to be typed."""
    for block in BLOCK.findall(text):
        lines = (line.strip() for line in block.replace("\\\n", " ").splitlines())
        yield from (line for line in lines if line.startswith("pipeline "))
    without = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    yield from (" ".join(found.split()) for found in INLINE.findall(without))


@cache
def whole() -> Any:
    """The command with all its parts, which takes a while to put together."""
    return get_command(build_app())


def understood(line: str) -> None:
    """Walk down to the command, and see that every option is one of its own. Arguments may be shortened with …"""
    words = shlex.split(line, comments=True)[1:]
    command: Any = whole()
    while words:
        options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        word = words.pop(0)
        if word in ("…", "|", ">"):
            return
        if word.startswith("-"):
            assert word.partition("=")[0] in options, f"{line}: no option {word}"
        elif word in getattr(command, "commands", {}):
            command = command.commands[word]
        else:
            takes = command.name != "pipeline" and not getattr(command, "commands", {})
            assert takes or "--database-url" in line or command.name == "ingest", f"{line}: no command {word}"


def test_a_command_that_is_named_is_one(subtests: pytest.Subtests) -> None:
    for page in PAGES:
        for line in dict.fromkeys(commands(page.read_text(encoding="utf-8"))):
            with subtests.test(page=page.stem, line=line):
                understood(line)


@pytest.mark.parametrize(
    "line", ["pipeline unstick", "pipeline resolve happened x --force", "pipeline maintenance leave"]
)
def test_an_unknown_command_is_found(line: str) -> None:
    if line.endswith("leave"):
        command: Any = whole()
        with pytest.raises(Exception, match="leave"):
            command.commands["maintenance"].make_context("it", ["leave", "billing"])
        return
    with pytest.raises(AssertionError, match=r"no (command|option)"):
        understood(line)


def test_a_runbook_has_signs_meaning_actions_and_an_end(subtests: pytest.Subtests) -> None:
    for page in RUNBOOKS:
        with subtests.test(page=page.stem):
            text = page.read_text(encoding="utf-8")
            wanted = ["## What you see", "## What it means", "## What to do", "## How to see that it is over"]
            assert [heading for heading in wanted if f"\n{heading}\n" not in text] == []


def test_every_setting_that_is_named_is_one() -> None:
    known = {row.variable for row in Settings().describe()}
    for page in [*RUNBOOKS, *(ROOT / "docs/guides").glob("deploy*.md"), ROOT / "deploy/README.md"]:
        named = set(re.findall(r"\bPIPELINE_[A-Z_]+[A-Z]", page.read_text(encoding="utf-8")))
        assert named - known == set(), page.name


def test_every_metric_that_is_named_is_one() -> None:
    known = set(metrics())
    for page in [*RUNBOOKS, *(ROOT / "docs/guides").glob("deploy*.md")]:
        named = set(re.findall(r"`(?:rate\()?(pipeline_[a-z_]+)", page.read_text(encoding="utf-8")))
        assert {name for name in named if promql.family(name, known) not in known} == set(), page.name
