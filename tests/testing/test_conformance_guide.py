"""The guide to testing a connector runs as it is printed, and leaves nothing out."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import pytest

from pipeline.testing import CASES, Fault, Subject

#: What the guide takes for granted: a connector, and a server to try it on.
PAYMENTS = """
from pipeline import Applied, Call, Connector, NotFound, Retry, mutation
from tests.testing.conformance_server import get, post


class Payments(Connector):
    name = "payments"

    def __init__(self, base_url):
        self.url = base_url

    @mutation(keyed=True)
    def charge(self, call: Call, *, order: str, cents: int):
        return post(self.url, "/keyed", call, {"order": order, "cents": cents})

    @charge.reconcile
    def find(self, call: Call, **_):
        answer = get(self.url, call)
        return {200: Applied(answer.body), 404: NotFound()}.get(answer.status_code, Retry())
"""
SERVER = """
import pytest

from tests.testing.conformance_server import running


@pytest.fixture
def server():
    with running() as world:
        world.port, world.times_charged = world.server_port, world.effects
        yield world
"""


@pytest.fixture
def guide(project: Path) -> str:
    return (project / "docs/guides/test-your-connector.md").read_text(encoding="utf-8")


@pytest.mark.timeout(330)
def test_the_tests_of_the_guide_pass_as_they_are_printed(guide: str, project: Path, tmp_path: Path) -> None:
    (printed,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "payments.py").write_text(PAYMENTS)
    (tmp_path / "conftest.py").write_text(SERVER)
    (tmp_path / "test_payments.py").write_text(printed)
    halves = ["test_a_charge_says_the_truth", "test_the_outcome_of_a_charge_can_always_be_known"]
    with ThreadPoolExecutor(2) as threads:  # they mostly wait: for deadlines, and for what settles
        ran = list(threads.map(lambda half: pytest_in(tmp_path, project, half), halves))
    assert [each.returncode for each in ran] == [0, 0], "".join(each.stdout + each.stderr for each in ran)
    assert f"{len(CASES)} passed" in ran[0].stdout
    assert "1 passed" in ran[1].stdout


def pytest_in(home: Path, project: Path, which: str) -> subprocess.CompletedProcess[str]:
    """Run a test of the guide by itself, again if need be: its times are those of a quiet machine."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"test_payments.py::{which}"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = kept | {"PYTHONPATH": f"{home}:{project}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    for _ in range(3):
        ran = subprocess.run(
            command, cwd=home, env=environment, capture_output=True, text=True, check=False, timeout=100
        )
        if ran.returncode == 0:
            break
    return ran


def test_every_case_every_fault_and_every_field_is_in_the_guide(guide: str) -> None:
    names = [*CASES, *(fault.name for fault in Fault), *(each.name for each in fields(Subject))]
    shown = set(re.findall(r"`([\w-]+)`", guide)) | set(re.findall(r"^ +(\w+)=", guide, re.MULTILINE))
    assert [name for name in names if name not in shown] == []
