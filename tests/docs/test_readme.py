"""The example of the README runs as it is printed, and its figures are those of the documents."""

import base64
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from pipeline.store.database import Database
from pipeline.testing.inline import Inline, assert_consumed
from pipeline.worker.crash_points import CrashPoint
from tests.deploy.test_documented_commands import understood


@pytest.fixture
def example(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that the example defines, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    (printed,) = re.findall(r"```python\n(.*?)```", (project / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(printed, names)
    return names


def test_the_example_sends_one_mail_for_an_order(db: Database, example: dict[str, Any]) -> None:
    run = Inline(db, [example["shop"]], [example["mail"]])
    run.publish(example["paid"], {"email": "ada@example.org"})
    run.run()
    assert_consumed(run, example["paid"])
    assert [line.split()[1:] for line in Path("outbox.txt").read_text().splitlines()] == [["ada@example.org"]]


def test_the_example_sends_no_second_mail_when_its_worker_dies(db: Database, example: dict[str, Any]) -> None:
    run = Inline(db, [example["shop"]], [example["mail"]])
    run.publish(example["paid"], {"email": "ada@example.org"})
    with run.crash_at(CrashPoint.CALLED):
        run.run()
    run.run_until_idle()
    assert_consumed(run, example["paid"])
    assert len(Path("outbox.txt").read_text().splitlines()) == 1


def test_the_commands_of_the_readme_fit_its_example(project: Path, example: dict[str, Any]) -> None:
    text = (project / "README.md").read_text(encoding="utf-8")
    (commands,) = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    start, publish = [shlex.split(line) for line in commands.splitlines()]
    assert start == ["pipeline", "dev", "receipts"]
    assert "Save it as `receipts.py`" in text
    assert publish[:4] == ["pipeline", "publish", example["shop"].name, example["paid"].name]
    assert json.loads(publish[4]) == {"email": "ada@example.org"}
    understood(commands.splitlines()[0])
    understood(commands.splitlines()[1])


def test_the_figures_of_the_readme_are_those_of_the_performance_page(project: Path) -> None:
    page = (project / "docs/performance.md").read_text(encoding="utf-8")
    rates = dict(re.findall(r"^\| ([^|]+?) \| ([\d,]+) \([^|]*\| [^|]*\| [^|]*\|$", page, re.MULTILINE))
    names = {
        "Pipeline": "ours, 1 worker with 2 processes",
        "Celery chain, no ledger": "Celery chain of three, no ledger",
        "Celery chain, hand-written ledger": "Celery chain with a hand-written ledger",
        "DBOS queue": "DBOS queue, 2 processes",
    }
    text = (project / "README.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"^\| ([^|]+?) \| ([\d,]+) \| [\d.]* ?\|$", text, re.MULTILINE))
    assert shown == {name: rates[row] for name, row in names.items()}
    (ours, chain) = re.findall(r"([\d.]+) ms at the median, where the chain with a ledger takes (\d+\.\d+)", text)[0]
    assert f"| ours | {ours} (" in page
    assert f"| Celery chain with a hand-written ledger | {chain} (" in page


def test_the_encrypted_example_leaves_no_card_in_the_database(
    db: Database, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = (project / "docs/guides/encrypt-payloads.md").read_text(encoding="utf-8")
    (printed,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    monkeypatch.setenv("PIPELINE_CODEC_KEYS", f"k1:{base64.b64encode(bytes(32)).decode()}")
    names: dict[str, Any] = {}
    exec(printed, names)
    run = Inline(db, [names["billing"]], [names["bank"]])
    run.publish(names["due"], {"order": "4711", "card": "planted card"})
    run.run()
    (charged,) = run.ledger()
    assert (charged.headline, charged.result) == ("Charge of order 4711", {"receipt": "4711 was charged"})
    db.codecs = None
    assert "planted card" not in str([*run.ledger(), *run.events(names["due"]), *run.runs()])


def test_the_readme_is_short(project: Path) -> None:
    assert len((project / "README.md").read_text(encoding="utf-8").split()) <= 600
    assert len((project / "docs/comparison.md").read_text(encoding="utf-8").split()) <= 900
