"""``pipeline publish``: input, reports, and events that stay after an error."""

import io
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from pipeline import Workflow
from pipeline.cli import common
from pipeline.cli import publish as command
from pipeline.cli.main import build_app
from pipeline.domain.errors import InvalidInputError, PayloadError
from pipeline.domain.payloads import parsed_json
from pipeline.store.database import Database, Statement
from pipeline.testing import Inline
from tests.support.wait import wait_for

Run = Callable[..., Result]


@pytest.fixture
def run(db: Database, database_url: str, embedded: Any) -> Run:
    workflow = Workflow("shop")
    workflow.effect(workflow.topic("orders"))(lambda ctx, event: None)
    Inline(db, [workflow])
    urls = {"PIPELINE_DATABASE_URL": database_url, "PIPELINE_BROKER_URL": embedded.broker_url}

    def invoke(*arguments: str, given: str | bytes = "", **environ: str) -> Result:
        return CliRunner().invoke(
            build_app(), ["publish", "shop", "orders", *arguments], input=given, env=urls | environ
        )

    return invoke


def lines(count: int, start: int = 0) -> str:
    return "".join(json.dumps({"message_id": f"l{n}", "payload": n}) + "\n" for n in range(start, start + count))


def published(db: Database) -> int:
    with db.transaction() as tx:
        return int(tx.all(Statement[Any]("SELECT count(*) FROM pipeline.events"))[0][0])


def test_json_lists_new_and_repeated_message_ids(run: Run) -> None:
    run("1", "--message-id", "l1")
    found = json.loads(run("--file", "-", "--json", given=lines(3)).stdout)
    assert (found["new"], found["repeated"], found["replaced"]) == (["l0", "l2"], ["l1"], [])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "Line 703 is no JSON"),
        ('{"payload": 1}', "Line 703: message_id: Field required"),
        ("[1]", "Line 703 is a list"),
        ("[" * 100_000, "Line 703 is nested too deeply"),
        (b"\xff", "Line 703 is no UTF-8 text"),
        ('{"message_id": "x", "payload": NaN}', "is nan, which JSON does not have"),
    ],
    ids=["broken", "nameless", "list", "deep", "latin", "nan"],
)
def test_a_bad_line_is_named_by_its_number_and_events_before_it_stay(
    run: Run, db: Database, bad: str | bytes, message: str
) -> None:
    given = lines(702).encode() + (bad if isinstance(bad, bytes) else bad.encode()) + b"\n"
    done = run("--file", "-", given=given)
    assert isinstance(done.exception, InvalidInputError | PayloadError)
    assert message in str(done.exception)
    assert "500 new, 0 repeated, 0 replaced before this error; they stay" in done.stderr
    assert published(db) == 500


def test_an_interruption_reports_the_events_before_it(run: Run, db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "parsed_json", interrupted_at(1200, parsed_json))
    done = run("--file", "-", given=lines(2000))
    assert "1000 new, 0 repeated, 0 replaced before this error; they stay" in done.stderr
    assert published(db) == 1000


def interrupted_at(number: int, read: Callable[..., Any]) -> Callable[..., Any]:
    def reads(text: str, what: str) -> Any:
        if what == f"Line {number}":
            raise KeyboardInterrupt
        return read(text, what=what)

    return reads


def test_a_file_with_byte_order_mark_carriage_returns_and_empty_lines_is_read(
    run: Run, db: Database, tmp_path: Path
) -> None:
    file = tmp_path / "orders.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + lines(3).replace("\n", "\r\n\r\n").encode())
    assert run("--file", str(file)).stdout.startswith("3 new")
    assert published(db) == 3


@pytest.mark.parametrize("name", ["nowhere.jsonl", ""], ids=["no file", "a folder"])
def test_a_file_that_cannot_be_read_is_named(run: Run, tmp_path: Path, name: str) -> None:
    done = run("--file", str(tmp_path / name))
    assert isinstance(done.exception, InvalidInputError)
    assert "cannot be read" in str(done.exception)


def test_a_message_id_is_for_one_payload(run: Run) -> None:
    for arguments in (("--file", "-", "--message-id", "x"), ("{}",)):
        assert isinstance(run(*arguments, given=lines(1)).exception, InvalidInputError)


def test_the_largest_payload_is_that_of_the_settings(run: Run) -> None:
    done = run(json.dumps("x" * 200), "--message-id", "x", PIPELINE_MAX_PAYLOAD_BYTES="100")
    assert "at most 100 bytes" in str(done.exception)
    assert run(json.dumps("x" * 400_000), "--message-id", "x", PIPELINE_MAX_PAYLOAD_BYTES="500000").exit_code == 0


def test_lines_of_a_pipe_are_published_and_notified_while_the_pipe_is_open(
    run: Run, db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rung: list[int] = []
    monkeypatch.setattr(common.WakeUps, "wake_workflow", lambda self, name: rung.append(published(db)))
    os.mkfifo(tmp_path / "live")
    with ThreadPoolExecutor() as pool:
        done = pool.submit(run, "--file", str(tmp_path / "live"), "--json")
        with (tmp_path / "live").open("wb", buffering=0) as live:
            live.write(lines(3).encode() + b'{"message_id": "half",')
            wait_for(lambda: 3 in rung, why="three whole lines came")
            live.write(b' "payload": 1}\n\n{"message_id": "endless", "payload": 2}')
    assert json.loads(done.result().stdout)["new"] == ["l0", "l1", "l2", "half", "endless"]
    assert published(db) == rung[-1] == 5


@pytest.mark.parametrize("size", [1, 7, 65_536])
def test_lines_are_the_same_for_every_size_of_reads(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(given: bytes) -> list[bytes]:
        stream: Any = io.BytesIO(given)
        return [line for lines, _ in command._lines_at_once(stream) for line in lines]

    monkeypatch.setattr(command, "_CHUNK", size)
    given = b"one\r\n\ntwo\rstill two\n" + b"x" * 20 + b"\nlast"
    assert read(given) == given.split(b"\n")
    assert read(b"one\n") == read(b"one") == [b"one"]
    assert read(b"") == []


def test_a_file_notifies_workers_once_and_not_for_each_read(
    run: Run, db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rung: list[int] = []
    monkeypatch.setattr(common.WakeUps, "wake_workflow", lambda self, name: rung.append(published(db)))
    (tmp_path / "orders.jsonl").write_text(lines(3000))
    assert run("--file", str(tmp_path / "orders.jsonl")).stdout.startswith("3000 new")
    assert rung == [3000]
    assert run("--file", str(tmp_path / "orders.jsonl")).stdout.startswith("0 new, 3000 repeated")
    assert rung == [3000]
