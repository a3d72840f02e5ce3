"""The inbox at work: in this process, from the shell, and with a process that gets SIGTERM."""

import json
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from examples.inbox import ImportOrders
from tests.support.wait import wait_for

ROOT = Path(__file__).parents[2]
COMMAND = [str(Path(sys.executable).parent / "pipeline"), "consume", "examples.inbox:ImportOrders"]


@pytest.fixture
def inbox(tmp_path: Path) -> Path:
    """Twenty orders, one that is not JSON, one without a price, and one twice."""
    for number in range(20):
        (tmp_path / f"{number:02}.json").write_text(json.dumps({"order": f"o-{number}", "cents": 100 + number}))
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "free.json").write_text(json.dumps({"order": "o-free", "cents": 0}))
    (tmp_path / "twice.json").write_text(json.dumps({"order": "o-7", "cents": 107}))
    return tmp_path


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that wait for each other as long as it takes: a disk may stand still while one of them writes."""
    monkeypatch.setattr(ImportOrders, "_database", lambda task: sqlite3.connect(task.home / "orders.db", timeout=60))


#: The same for a worker in another process, which waits a moment each time, and tries as often as it takes.
PATIENT = {
    "CONSUME_STEPS__PROCESS__RETRY__MAX_ATTEMPTS": "200",
    "CONSUME_STEPS__PROCESS__RETRY__BACKOFF_MULTIPLIER": "1",
}


def rows(home: Path) -> list[str]:
    with closing(sqlite3.connect(home / "orders.db")) as database:
        return [row[0] for row in database.execute("SELECT id FROM orders ORDER BY cents")]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def claimed(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "claimed").rglob("*.json"))


@pytest.mark.usefixtures("patient")
def test_every_order_becomes_one_row_and_every_file_finds_its_place(inbox: Path) -> None:
    report = ImportOrders(inbox).consume_transactions()
    assert (report.succeeded, report.failed) == (21, 2)
    assert rows(inbox) == [f"o-{number}" for number in range(20)]
    assert len(names(inbox / "done")) == 21
    assert names(inbox / "rejected") == ["bad.json", "bad.json.why", "free.json", "free.json.why"]
    assert "greater than 0" in (inbox / "rejected" / "free.json.why").read_text()
    assert claimed(inbox) == []


def test_an_order_is_retried_while_the_database_is_busy(inbox: Path, request: pytest.FixtureRequest) -> None:
    task = ImportOrders(inbox)
    with closing(sqlite3.connect(inbox / "orders.db", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        two = task.policy.model_copy(update={"loop": task.policy.loop.model_copy(update={"limit": 2})})
        report = task.consume_transactions(policy=two)
        assert (report.failed, report.succeeded) == (2, 0)
    assert names(inbox / "later") == ["00.json", "01.json"]
    request.getfixturevalue("patient")
    again = task.consume_transactions()
    assert (again.succeeded, again.ending) == (19, "nothing left")  # it does not try them again and again
    assert ImportOrders(inbox).consume_transactions().succeeded == 2


def test_the_command_prints_its_counts(inbox: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "--limit", "5", "--json"],
        cwd=ROOT,
        env={"INBOX": str(inbox), "PATH": "/bin"} | PATIENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout)
    assert (output["processed"], output["succeeded"], output["ending"]) == (5, 5, "limit reached")
    assert len(rows(inbox)) == 5


@pytest.mark.usefixtures("patient")
def test_after_sigterm_it_settles_its_items_and_the_next_process_continues(inbox: Path) -> None:
    environ = {"INBOX": str(inbox), "PATH": "/bin", "CONSUME_LOOP__STREAMING": "true", "CONSUME_LOOP__BATCH__SIZE": "2"}
    with subprocess.Popen(COMMAND, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True) as process:
        wait_for(lambda: list((inbox / "done").glob("*.json")), within=90)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
    assert "Ended: stopped" in output
    assert claimed(inbox) == []
    ImportOrders(inbox).consume_transactions()
    assert rows(inbox) == [f"o-{number}" for number in range(20)]


@pytest.mark.usefixtures("patient")
def test_a_file_that_is_not_text_is_rejected_and_delays_no_other(inbox: Path) -> None:
    (inbox / "0.json").write_bytes(b"\xff\xfe")
    report = ImportOrders(inbox).consume_transactions()
    assert (report.succeeded, report.failed) == (21, 3)
    assert (inbox / "rejected" / "0.json.why").exists()


@pytest.mark.usefixtures("patient")
def test_the_same_order_with_another_amount_is_rejected(inbox: Path) -> None:
    ImportOrders(inbox).consume_transactions()
    (inbox / "z.json").write_text(json.dumps({"order": "o-7", "cents": 1}))
    assert ImportOrders(inbox).consume_transactions().failed == 1
    assert "another amount" in (inbox / "rejected" / "z.json.why").read_text()


@pytest.mark.usefixtures("patient")
def test_two_processes_share_an_inbox_and_only_a_dead_one_loses_its_claims(inbox: Path) -> None:
    hold = "import sys; from pathlib import Path; from examples.inbox import Folder; "
    hold += "Folder(Path(sys.argv[1])).fetch_transactions(4); print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(inbox)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        assert ImportOrders(inbox).consume_transactions().succeeded == 17
        assert len(claimed(inbox)) == 4
        first.kill()
    assert ImportOrders(inbox).consume_transactions().succeeded == 4
    assert rows(inbox) == [f"o-{number}" for number in range(20)]
