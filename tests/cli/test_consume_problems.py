"""``pipeline consume`` of a module that cannot be imported or a task that cannot be made: what is said of it."""

import sys
from pathlib import Path

import pytest

from pipeline.cli.main import main
from tests.cli.test_consume import said_by_main


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that the shell is in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = (", "'(' was never closed (wrong_"),
        ("import json\nraise RuntimeError('password=hunter2')", "raised RuntimeError (wrong_"),
        ("import json\nimport not_there", "needs not_there, which is not there (wrong_"),
        ("raise SystemExit(0)", "raised SystemExit"),
    ],
)
def test_a_module_that_cannot_be_imported_is_wrong_usage_and_the_line_is_named(
    here: Path, text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / f"wrong_{here.name}.py").write_text(text)
    told = said_by_main([f"wrong_{here.name}:Task"], capsys)
    assert words in told
    assert f"wrong_{here.name}.py:{text.count(chr(10)) + 1})" in told
    assert "hunter2" not in told


AWAY = """
from pipeline.consumer_engine import ConsumerMixin
from pipeline.ingest import connect_redis

URL = "redis://:hunter2@127.0.0.1:1/0"


class Late(ConsumerMixin):
    def __init__(self):
        connect_redis(URL)
"""


@pytest.mark.parametrize("text", [AWAY, f"{AWAY}\nconnect_redis(URL)\n"], ids=["made", "imported"])
def test_a_task_whose_redis_is_away_says_so_and_asks_to_be_started_again(
    here: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / f"away_{here.name}.py").write_text(text)
    with pytest.raises(SystemExit) as caught:
        main(["consume", f"away_{here.name}:Late"])
    told = capsys.readouterr().err
    assert caught.value.code == 75
    line = next(n for n, line in reversed([*enumerate(text.splitlines(), start=1)]) if "connect_redis(URL)" in line)
    assert f"(away_{here.name}.py:{line}): Redis cannot be reached: " in told
    assert "hunter2" not in told


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "from pipeline.ingest import connect_redis\nconnect_redis('amqp://x')",
            "): The URL of Redis cannot be used; expected",
        ),
        ("from pathlib import Path\nPath('/proc/nope').read_text()", "raised FileNotFoundError ("),
    ],
)
def test_the_line_that_is_named_is_somebodys_own_and_what_we_say_ourselves_is_shown(
    here: Path, text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / f"odd_{here.name}.py").write_text(text)
    told = said_by_main([f"odd_{here.name}:Task"], capsys)
    assert words in told
    assert f"(odd_{here.name}.py:2)" in told
