"""``pipeline consume``: tasks, reports and exit codes."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pipeline.cli.consume import find_task
from pipeline.cli.main import build_app, main
from pipeline.domain.errors import InvalidInputError
from tests.support.wait import wait_for

TASKS = '''
import asyncio
import threading
from datetime import UTC, datetime
from pathlib import Path

from pipeline.consumer_engine.consumer import AsyncConsumerMixin, ConsumerMixin
from pipeline.consumer_engine.transactions import Transaction


class Numbers:
    """Return ``count`` items."""

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
        Path("begun").touch()
        while Path("held").exists():
            threading.Event().wait(0.02)
        threading.Event().wait(0.3)


class Halfway(Good):
    def process_transaction(self, transaction):
        while transaction.transaction_id == "n-2" and Path("held").exists():
            threading.Event().wait(0.02)


class StopMarker:
    def stop(self, *, now=False):
        super().stop(now=now)
        Path("asked").touch()


class Hanging(StopMarker, Good):
    def process_transaction(self, transaction):
        Path("begun").touch()
        threading.Event().wait(60)


class Stubborn(StopMarker, Async):
    async def process_transaction(self, transaction):
        Path("begun").touch()
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                pass


class Threads(StopMarker, Async):
    async def process_transaction(self, transaction):
        Path("begun").touch()
        await asyncio.to_thread(threading.Event().wait, 60)


class Fetching(Good):
    class Waiting(Numbers):
        def fetch_transactions(self, size, **_):
            Path("begun").touch()
            threading.Event().wait(60)

    def __init__(self):
        self.source = self.Waiting()


class Unhandled(Bad):
    def handle_transaction_exception(self, transaction, error):
        raise OSError("no disk")


class Late(Good):
    def process_transaction(self, transaction):
        threading.Event().wait(20)


class Homeless(ConsumerMixin):
    pass


class Misspelt(ConsumerMixin):
    source = Numbers()

    def process_transactions(self, transaction):
        pass


class Forgetful(Good):
    def handle_transaction_success(self, transaction):
        pass


class Tabled(Good):
    policy = {"loop": {"limit": 1}}


class Needy(Good):
    def __init__(self, url):
        pass


class Falling(Good):
    def __init__(self):
        raise RuntimeError("password=hunter2")


class OtherSource(AsyncConsumerMixin):
    class source:
        def fetch_transactions(self, size):
            return []

    source = source()

    async def process_transaction(self, transaction):
        pass


ready = Good()
nothing = object()
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with tasks."""
    (tmp_path / f"tasks_{tmp_path.name}.py").write_text(TASKS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def consumed(here: Path, name: str, *options: str, environ: dict[str, str] | None = None) -> Any:
    return CliRunner().invoke(build_app(), ["consume", f"tasks_{here.name}:{name}", *options], env=environ)


@pytest.mark.parametrize("name", ["Good", "Async", "ready"])
def test_a_task_of_either_variant_or_an_object_is_run_to_its_end(here: Path, name: str) -> None:
    done = consumed(here, name, "--json")
    assert done.exit_code == 0, done.output
    output = json.loads(done.stdout)
    assert (output["processed"], output["succeeded"], output["ending"], output["problem"]) == (
        4,
        4,
        "nothing left",
        None,
    )


def test_options_outrank_the_environment_and_that_outranks_the_file(here: Path) -> None:
    (here / "p.toml").write_text("[loop]\nlimit = 1\nbatch = {size = 2}\n")
    environ = {"CONSUME_LOOP__LIMIT": "2"}
    by_file = consumed(here, "Good", "--policy", "p.toml", "--json")
    by_environ = consumed(here, "Good", "--policy", "p.toml", "--json", environ=environ)
    by_option = consumed(
        here, "Good", "--policy", "p.toml", "--limit", "3", "--concurrency", "2", "--json", environ=environ
    )
    taken = [json.loads(done.stdout)["fetched"] for done in (by_file, by_environ, by_option)]
    assert taken == [1, 2, 3]
    assert json.loads(by_option.stdout)["batches"] == 2


def test_failed_items_are_counted_and_are_an_error_only_with_strict(here: Path) -> None:
    done = consumed(here, "Bad")
    assert done.exit_code == 0
    assert "4 settled in 4 batches: 0 succeeded, 4 failed, 0 timed out, 0 left. Ended: nothing left." in done.stdout
    assert consumed(here, "Bad", "--strict").exit_code == 4
    assert consumed(here, "Good", "--strict").exit_code == 0


@pytest.mark.parametrize(
    ("name", "environ", "message"),
    [
        ("Broken", {}, "Broken cannot fetch: connection refused"),
        ("Hanging", {"CONSUME_LOOP__TIMEOUT": "0.2"}, "Hanging was not done within 0.2 s"),
    ],
)
def test_a_loop_that_breaks_exits_with_1_and_the_reason(
    here: Path, name: str, environ: dict[str, str], message: str
) -> None:
    done = consumed(here, name, environ=environ)
    assert done.exit_code == 1
    assert message in done.stderr
    assert "Ended: broken." in done.stdout


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no-colon", "names no task; expected module:Task"),
        ("nowhere:Task", "cannot be imported"),
        ("json:Nothing", "cannot be imported"),
        ("json:dumps", "is of type function; expected a ConsumerMixin or an AsyncConsumerMixin"),
        ("json:JSONDecoder", "is the class JSONDecoder; expected a ConsumerMixin or an AsyncConsumerMixin"),
    ],
)
def test_a_name_that_is_no_task_is_refused(name: str, message: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        find_task(name)
    assert message in str(caught.value)


def usage_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the sentence on stderr of wrong usage, which exits with 2."""
    with pytest.raises(SystemExit) as caught:
        main(["consume", *arguments])
    output = capsys.readouterr()
    assert (caught.value.code, output.out) == (2, "")
    assert "Traceback" not in output.err
    return output.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Homeless"], "Homeless has no source"),
        (["Good", "--policy", "gone.toml"], "No such file"),
        (["Misspelt"], "Misspelt has no process_transaction(transaction)"),
        (["Forgetful"], "handle_transaction_success of Forgetful cannot be called with (transaction, result)"),
        (["Tabled"], "it is of type dict; expected a ConsumerPolicy"),
        (["Needy"], "Needy needs arguments (missing a required argument: 'url')"),
        (["Falling"], "Falling cannot be made: RuntimeError (tasks_"),
        (["OtherSource"], "It has fetch_transactions: let the task inherit ConsumerMixin"),
    ],
)
def test_a_task_or_a_policy_that_cannot_work_is_wrong_usage(
    here: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = usage_error([f"tasks_{here.name}:{arguments[0]}", *arguments[1:]], capsys)
    assert message in output
    assert "hunter2" not in output


def test_items_whose_exception_handler_failed_are_reported_and_exit_with_1(here: Path) -> None:
    done = consumed(here, "Unhandled")
    assert done.exit_code == 1
    assert "4 failed, 0 timed out, 0 left, 4 not settled: the exception handler failed too." in done.stdout


def test_step_timeouts_are_counted_separately_in_the_summary(here: Path) -> None:
    done = consumed(here, "Late", "--limit", "1", environ={"CONSUME_STEPS__PROCESS__RETRY__TIMEOUT": "0.1"})
    assert "1 settled in 1 batch: 0 succeeded, 1 failed (1 in the timeout of a step), 0 timed out" in done.stdout


def on_a_terminal(here: Path, name: str) -> tuple[subprocess.Popen[bytes], int]:
    """Start the command in a terminal; return also the other end of the terminal."""
    mine, its = pty.openpty()
    command = [str(Path(sys.executable).parent / "pipeline"), "consume", f"tasks_{here.name}:{name}"]
    environ = {"PATH": "/bin", "TERM": "xterm", "COLUMNS": "100", "CONSUME_LOOP__BATCH__SIZE": "4"}
    process = subprocess.Popen(command, cwd=here, env=environ, stdout=its, stderr=its, stdin=its)
    os.close(its)
    return process, mine


def read(terminal: int, until: str = "") -> str:
    """Read the terminal until it is closed, or until this text appears."""
    text = b""
    while not until or until.encode() not in text:
        try:
            piece = os.read(terminal, 4096)
        except OSError:  # the other end is closed
            piece = b""
        if not piece:
            break
        text += piece
    return text.decode(errors="replace")


def test_a_terminal_shows_a_line_of_progress(here: Path) -> None:
    (here / "held").touch()  # the third item waits until the line was seen
    process, terminal = on_a_terminal(here, "Halfway")
    assert "2 settled · 0 failed" in read(terminal, until="2 settled · 0 failed")
    (here / "held").unlink()
    shown = read(terminal)
    os.close(terminal)
    assert process.wait(timeout=60) == 0
    assert "4 settled in 1 batch: 4 succeeded" in shown


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_fetched_items_and_exits_with_0(here: Path, number: int) -> None:
    (here / "held").touch()  # no item ends before the signal
    process, terminal = on_a_terminal(here, "Slow")
    wait_for(lambda: (here / "begun").exists(), within=90)
    process.send_signal(number)
    (here / "held").unlink()
    shown = read(terminal)
    os.close(terminal)
    assert process.wait(timeout=60) == 0
    assert "4 succeeded, 0 failed, 0 timed out, 0 left. Ended: stopped." in shown


def test_a_stalled_item_lets_the_liveness_file_get_old_until_it_ends(here: Path) -> None:
    (here / "held").touch()
    alive, errors = here / "alive", here / "errors"
    environ = {"PATH": "/bin", "PIPELINE_LIVENESS_FILE": str(alive), "CONSUME_LOOP__STREAMING": "true"}
    command = [str(Path(sys.executable).parent / "pipeline"), "consume", f"tasks_{here.name}:Slow", "--stalled-after=1"]
    with errors.open("w") as log, subprocess.Popen(command, cwd=here, env=environ, stderr=log) as process:
        wait_for(lambda: "is not touched until that has ended" in errors.read_text(), within=90)
        assert re.search(r"stalled: transaction n-\d is in progress for \d+ s", errors.read_text())
        touched = alive.stat().st_mtime_ns
        (here / "held").unlink()
        wait_for(lambda: alive.stat().st_mtime_ns > touched, within=60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0


@pytest.mark.parametrize("name", ["Hanging", "Stubborn", "Threads"])
def test_a_second_signal_leaves_hanging_items_and_reports_them(here: Path, name: str) -> None:
    process, terminal = on_a_terminal(here, name)
    wait_for(lambda: (here / "begun").exists(), within=90)
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    wait_for(lambda: (here / "asked").exists(), within=90)
    process.send_signal(signal.SIGTERM)
    shown = read(terminal)
    os.close(terminal)
    assert process.wait(timeout=60) == 1
    assert time.monotonic() - begun < 45
    assert "4 left. Ended: stopped." in shown


def test_a_signal_during_a_fetch_with_a_limit_exits_with_0(here: Path) -> None:
    environ = {"PATH": "/bin", "CONSUME_STEPS__FETCH__RETRY__TIMEOUT": "40"}
    command = [str(Path(sys.executable).parent / "pipeline"), "consume", f"tasks_{here.name}:Fetching"]
    with subprocess.Popen(command, cwd=here, env=environ, stdout=subprocess.PIPE, text=True) as process:
        wait_for(lambda: (here / "begun").exists(), within=90)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=50)
    assert (process.returncode, "Ended: stopped." in output) == (0, True)
