"""The example of the README runs as it is printed."""

import base64
import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.store.database import Database
from pipeline.testing.inline import Inline, assert_consumed
from pipeline.worker.crash_points import CrashPoint


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
    run.publish(example["paid"], {"order": "4711", "email": "ada@example.org"})
    run.run()
    assert_consumed(run, example["paid"])
    assert [line.split()[1:] for line in Path("outbox.txt").read_text().splitlines()] == [
        ["ada@example.org", "Receipt", "for", "4711"]
    ]
    assert [event.message_id for event in run.events(example["sent"])] == ["receipt:4711"]


def test_the_example_sends_no_second_mail_when_its_worker_dies(db: Database, example: dict[str, Any]) -> None:
    run = Inline(db, [example["shop"]], [example["mail"]])
    run.publish(example["paid"], {"order": "4711", "email": "ada@example.org"})
    with run.crash_at(CrashPoint.CALLED):
        run.run()
    run.run_until_idle()
    assert_consumed(run, example["paid"])
    assert len(Path("outbox.txt").read_text().splitlines()) == 1


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
    assert len((project / "README.md").read_text(encoding="utf-8").split()) <= 700
