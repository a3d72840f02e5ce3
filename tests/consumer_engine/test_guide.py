"""The guide: its code is the code that is checked here, and it runs."""

import asyncio
import re
from pathlib import Path

import pytest

from pipeline.consumer_engine import load_policy
from tests.consumer_engine import guide_code

POLICY = re.compile(r"```toml\n(.*?)```", re.DOTALL)
CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)


@pytest.fixture
def page(project: Path) -> str:
    return (project / "docs/guides/consume-items.md").read_text(encoding="utf-8")


def test_every_piece_of_code_in_the_guide_is_the_one_that_is_run(page: str) -> None:
    checked = Path(guide_code.__file__).read_text(encoding="utf-8")
    pieces = CODE.findall(page)
    assert len(pieces) == 5
    assert [piece for piece in pieces if piece.strip() not in checked] == []


def test_the_code_of_the_guide_does_what_it_says(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = POLICY.findall(page)
    (tmp_path / "policy.toml").write_text(text.replace("streaming = true", "streaming = false"))
    assert load_policy(tmp_path / "policy.toml", {}).loop.concurrency.value == 8
    monkeypatch.chdir(tmp_path)
    for name in ("threads", "asyncio"):
        home = tmp_path / name
        home.mkdir()
        (home / "a.txt").write_text("one\ntwo\n")
        (home / "empty.txt").touch()
    with_threads = guide_code.run(tmp_path / "threads")
    with_asyncio = asyncio.run(guide_code.CountLinesAsync(tmp_path / "asyncio").consume_transactions())
    for name, report in (("threads", with_threads), ("asyncio", with_asyncio)):
        assert (report.succeeded, report.failed) == (1, 1)
        assert [path.name for path in (tmp_path / name / "done").iterdir()] == ["a.txt"]
        assert [path.name for path in (tmp_path / name / "rejected").iterdir()] == ["empty.txt"]
    guide_code.test_an_empty_file_is_a_business_failure(tmp_path / "threads")
