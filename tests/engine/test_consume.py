"""``pipeline consume``: what it runs, what it says, and how it ends."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pipeline.cli.consume import found
from pipeline.cli.main import app, main
from pipeline.domain.errors import InvalidInputError
from tests.support.wait import wait_for

TASKS = '''
import asyncio
import threading
from datetime import UTC, datetime

from pipeline.engine.consumer import AsyncConsumerMixin, ConsumerMixin
from pipeline.engine.transactions import Transaction


class Numbers:
    """Gives out so many items."""

    def __init__(self, count=4, error=None):
        self.left, self.error = count, error

    def fetch_transactions(self, size, **_):
        if self.error and not self.left:
            raise self.error
        size = min(size, self.left)
        self.left -= size
        at = datetime(2030, 1, 1, tzinfo=UTC)
        return [Transaction(transaction_id=f"n-{self.left + n}", created_at=at) for n in range(size)]

    async def fetch_transactions_async(self, size, **extra):
        return self.fetch_transactions(size)


class Good(ConsumerMixin):
    def __init__(self):
        self.source = Numbers()

    def process_transaction(self, transaction):
        return transaction.transaction_id


class Async(AsyncConsumerMixin):
    def __init__(self):
        self.source = Numbers()

    async def process_transaction(self, transaction):
        await asyncio.sleep(0)


class Bad(Good):
    def process_transaction(self, transaction):
        raise ValueError("no")


class Broken(Good):
    def __init__(self):
        self.source = Numbers(2, OSError("connection refused"))


class Slow(Good):
    def process_transaction(self, transaction):
        threading.Event().wait(0.3)


class Hanging(Good):
    def process_transaction(self, transaction):
        threading.Event().wait(60)


class Homeless(ConsumerMixin):
    pass


ready = Good()
nothing = object()
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with tasks in it, which the shell is in."""
    (tmp_path / f"tasks_{tmp_path.name}.py").write_text(TASKS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def consumed(here: Path, name: str, *options: str, environ: dict[str, str] | None = None) -> Any:
    return CliRunner().invoke(app, ["consume", f"tasks_{here.name}:{name}", *options], env=environ)


@pytest.mark.parametrize("name", ["Good", "Async", "ready"])
def test_a_task_of_either_variant_or_an_object_is_run_to_its_end(here: Path, name: str) -> None:
    done = consumed(here, name, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert (told["processed"], told["succeeded"], told["ending"], told["problem"]) == (4, 4, "nothing left", None)


def test_options_outrank_the_environment_and_that_outranks_the_file(here: Path) -> None:
    (here / "p.toml").write_text("[loop]\nlimit = 1\nbatch = {size = 2}\n")
    environ = {"CONSUME_LOOP__LIMIT": "2"}
    by_file = consumed(here, "Good", "--policy", "p.toml", "--json")
    by_environ = consumed(here, "Good", "--policy", "p.toml", "--json", environ=environ)
    by_option = consumed(
        here, "Good", "--policy", "p.toml", "--limit", "3", "--concurrency", "2", "--json", environ=environ
    )
    taken = [json.loads(done.stdout)["taken"] for done in (by_file, by_environ, by_option)]
    assert taken == [1, 2, 3]
    assert json.loads(by_option.stdout)["batches"] == 2


def test_failed_items_are_counted_and_are_an_error_only_when_that_is_asked_for(here: Path) -> None:
    done = consumed(here, "Bad")
    assert done.exit_code == 0
    assert "4 settled in 4 batches: 0 succeeded, 4 failed, 0 timed out, 0 left. Ended: nothing left." in done.stdout
    assert consumed(here, "Bad", "--strict").exit_code == 4
    assert consumed(here, "Good", "--strict").exit_code == 0


@pytest.mark.parametrize(
    ("name", "environ", "words"),
    [
        ("Broken", {}, "Broken cannot fetch: connection refused"),
        ("Hanging", {"CONSUME_LOOP__TIMEOUT": "0.2"}, "Hanging was not done within 0.2 s"),
    ],
)
def test_a_loop_that_breaks_ends_with_one_and_says_why(
    here: Path, name: str, environ: dict[str, str], words: str
) -> None:
    done = consumed(here, name, environ=environ)
    assert done.exit_code == 1
    assert words in done.stderr
    assert "Ended: broken." in done.stdout


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no-colon", "names no task; expected module:Task"),
        ("nowhere:Task", "cannot be imported"),
        ("json:Nothing", "cannot be imported"),
        ("json:dumps", "is a function; expected a ConsumerMixin or an AsyncConsumerMixin"),
    ],
)
def test_what_is_no_task_is_refused_by_name(name: str, words: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        found(name)
    assert words in str(caught.value)


def test_a_task_without_a_source_and_a_wrong_policy_are_wrong_usage(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, words in (
        ([f"tasks_{here.name}:Homeless"], "has no source"),
        ([f"tasks_{here.name}:Good", "--policy", "gone.toml"], "No such file"),
    ):
        monkeypatch.setattr(sys, "argv", ["pipeline", "consume", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == 2
        assert words in capsys.readouterr().err


def on_a_terminal(here: Path, name: str) -> tuple[subprocess.Popen[bytes], int]:
    """The command as a person sees it, and the other end of the terminal."""
    mine, its = pty.openpty()
    command = [str(Path(sys.executable).parent / "pipeline"), "consume", f"tasks_{here.name}:{name}"]
    environ = {"PATH": "/bin", "TERM": "xterm", "COLUMNS": "100", "CONSUME_LOOP__BATCH__SIZE": "4"}
    process = subprocess.Popen(command, cwd=here, env=environ, stdout=its, stderr=its, stdin=its)
    os.close(its)
    return process, mine


def read(terminal: int) -> str:
    text = b""
    while True:
        try:
            piece = os.read(terminal, 4096)
        except OSError:  # the other end is closed
            piece = b""
        if not piece:
            return text.decode()
        text += piece


def test_on_a_terminal_a_line_tells_how_far_it_is(here: Path) -> None:
    process, terminal = on_a_terminal(here, "Slow")
    shown = read(terminal)
    os.close(terminal)
    assert process.wait(timeout=30) == 0
    assert "2 settled · 0 failed" in shown
    assert "4 settled in 1 batches: 4 succeeded" in shown


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_settles_what_was_fetched_and_ends_well(here: Path, number: int) -> None:
    process, terminal = on_a_terminal(here, "Slow")
    wait_for(lambda: b"settled" in os.read(terminal, 4096))
    process.send_signal(number)
    shown = read(terminal)
    os.close(terminal)
    assert process.wait(timeout=30) == 0
    assert "4 succeeded, 0 failed, 0 timed out, 0 left. Ended: stopped." in shown


def test_a_second_signal_leaves_what_hangs_and_says_so(here: Path) -> None:
    process, terminal = on_a_terminal(here, "Hanging")
    wait_for(lambda: b"settled" in os.read(terminal, 4096))
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    wait_for(lambda: time.monotonic() - begun > 0.3)
    process.send_signal(signal.SIGTERM)
    shown = read(terminal)
    os.close(terminal)
    assert process.wait(timeout=30) == 1
    assert time.monotonic() - begun < 10
    assert "4 left. Ended: stopped." in shown
