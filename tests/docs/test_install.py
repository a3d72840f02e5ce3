"""The page about an app that exists runs as it is printed: its files, its commands, and what they print."""

import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.embedded.servers import Servers
from tests.support import databases
from tests.support.installation import own_broker
from tests.support.page_runner import Step, Terminal, matches, steps

#: The installation is the one that the tests run in.
INSTALLATION = "pip install "
WORKER = "celery -A shop.app worker"


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    shell = Terminal(tmp_path, {WORKER: " ready."})
    yield shell
    shell.close()


@pytest.mark.timeout(600)
def test_the_page_about_an_app_that_exists_works_as_it_is_printed(
    project: Path, terminal: Terminal, embedded: Servers
) -> None:
    page = (project / "docs/guides/install.md").read_text(encoding="utf-8")
    name = f"installed_{os.getpid()}"
    with databases.empty(embedded.database_url, name) as url, own_broker(terminal.folder / "broker") as broker_url:
        addresses = {"postgresql://pipeline:secret@localhost/shop": url, "redis://localhost:6379/0": broker_url}
        for printed, real in addresses.items():
            assert page.count(printed) == 1
            page = page.replace(printed, real)
        done = 0
        for step in steps(page):
            if not step.text.startswith(INSTALLATION):
                terminal.follow(step)
                done += 1
        assert done == 9
        assert len([*(terminal.folder / "charges").iterdir()]) == 1
        terminal.close()  # before its database and its broker are gone


def test_every_extra_of_the_page_is_one(project: Path) -> None:
    page = (project / "docs/guides/install.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    declared = tomllib.loads((project / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert named
    assert named <= {*declared}


def test_the_steps_of_a_page_are_found_with_their_files_and_output() -> None:
    page = "Save as `a.py`, or not:\n\n```python\nx = 1\n```\n\nThen\n\n```sh\npython a.py\n```\n\n```text\n1…\n```\n"
    assert [*steps(page)] == [Step("x = 1\n", "a.py"), Step("python a.py\n", "", "1…\n")]
    assert matches("1…", "1 and more")
    assert not matches("1…", "2")
