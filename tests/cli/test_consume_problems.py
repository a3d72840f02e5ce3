"""``pipeline consume``: errors of modules that cannot be imported and tasks that cannot be created."""

import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import consume
from pipeline.cli.main import main
from pipeline.consumer_engine.policies import ConsumerPolicy
from tests.cli.test_consume import usage_error


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = (", "'(' was never closed (wrong_"),
        ("import json\nraise RuntimeError('password=hunter2')", "raised RuntimeError (wrong_"),
        ("import json\nimport not_there", "needs not_there, which is not there (wrong_"),
        ("raise SystemExit(0)", "raised SystemExit"),
    ],
)
def test_a_module_that_cannot_be_imported_is_wrong_usage_and_the_line_is_named(
    here: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / f"wrong_{here.name}.py").write_text(text)
    output = usage_error([f"wrong_{here.name}:Task"], capsys)
    assert message in output
    assert f"wrong_{here.name}.py:{text.count(chr(10)) + 1})" in output
    assert "hunter2" not in output


AWAY = """
from pipeline.consumer_engine import ConsumerMixin
from pipeline.ingest import connect_redis

URL = "redis://:hunter2@127.0.0.1:1/0"


class Late(ConsumerMixin):
    def __init__(self):
        connect_redis(URL)
"""


@pytest.mark.parametrize("text", [AWAY, f"{AWAY}\nconnect_redis(URL)\n"], ids=["made", "imported"])
def test_a_task_whose_redis_is_down_exits_with_75_to_be_restarted(
    here: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / f"away_{here.name}.py").write_text(text)
    with pytest.raises(SystemExit) as caught:
        main(["consume", f"away_{here.name}:Late"])
    output = capsys.readouterr().err
    assert caught.value.code == 75
    line = next(n for n, line in reversed([*enumerate(text.splitlines(), start=1)]) if "connect_redis(URL)" in line)
    assert f"(away_{here.name}.py:{line}): Redis cannot be reached: " in output
    assert "hunter2" not in output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "from pipeline.ingest import connect_redis\nconnect_redis('amqp://x')",
            "): The URL of Redis cannot be used; expected",
        ),
        ("from pathlib import Path\nPath('/proc/nope').read_text()", "raised FileNotFoundError ("),
    ],
)
def test_the_named_line_is_user_code_and_our_own_error_text_is_shown(
    here: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / f"odd_{here.name}.py").write_text(text)
    output = usage_error([f"odd_{here.name}:Task"], capsys)
    assert message in output
    assert f"(odd_{here.name}.py:2)" in output


@pytest.mark.parametrize(
    ("policy", "seconds"),
    [
        ({}, 300),
        ({"loop": {"transaction_timeout": 200}}, 430),
        ({"steps": {"process": {"retry": {"max_attempts": 5, "timeout": 120, "backoff": 10, "backoff_cap": 10}}}}, 670),
        ({"steps": {"fetch": {"retry": {"max_attempts": 10, "timeout": 60}}}}, 630),
    ],
)
def test_an_item_within_the_limits_of_its_policy_is_not_stalled(policy: dict[str, Any], seconds: float) -> None:
    assert consume.longest_regular(ConsumerPolicy.model_validate(policy)) == seconds
