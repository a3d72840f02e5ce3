"""The output and exit codes of `pipeline ingest` where nothing needs to be killed: the command, in this process."""

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from typer.main import get_command

from pipeline.cli.main import build_app, main
from pipeline.config import EXIT_RESTART
from pipeline.ingest.bridge import Bridge
from pipeline.store.database import Database, Statement
from tests.factories import a_workflow
from tests.ingest.ingest_processes import published
from tests.ingest.redis_streams import Place

Command = Callable[..., tuple[int, str]]
TARGET = ("--workflow", "billing", "--topic", "orders.paid")


@pytest.fixture
def command(
    place: Place,
    db: Database,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Command:
    """`pipeline ingest …`: its exit code and its output."""
    a_workflow(db)
    for name in os.environ:
        if name.startswith("PIPELINE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIPELINE_DATABASE_URL", database_url)
    monkeypatch.setenv("INGEST_REDIS_URL", place.url)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["pipeline", "ingest", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, output.out + output.err

    return run


@pytest.mark.parametrize(
    ("options", "code", "expected"),
    [
        ((), 2, "expected --workflow"),
        (("--workflow", "billing"), 2, "expected --topic"),
        (TARGET, 2, "stream is ''"),
        (("--workflow", "biling", "--topic", "orders.paid", "--stream", "s"), 5, "There is no workflow 'biling'"),
        (("--workflow", "billing", "--topic", "paid", "--stream", "s"), 5, "Known: orders.paid"),
        ((*TARGET, "--stream", "s", "--batch", "0"), 2, "--batch"),
        ((*TARGET, "--stream", "s", "--block-ms", "9" * 20), 2, "--block-ms"),
        (("recover", *TARGET, "--stream", "s", "--claim-idle-ms", "9" * 20), 2, "--claim-idle-ms"),
        (("recover", *TARGET, "--stream", "s", "--every-ms", "9" * 20), 2, "--every-ms"),
        ((*TARGET, "--stream", "s", "--group", "caf\udce9"), 2, "expected text that can be written as UTF-8"),
        ((*TARGET, "--stream", "s", "--redis", "redis://127.0.0.1:1/0?foo=1"), 2, "the option 'foo'"),
        ((*TARGET, "--stream", "s", "--redis", "redis://:pw9@127.0.0.1:x/0"), 2, "special characters percent-encoded"),
        ((*TARGET, "--stream", "s", "--redis", "amqp://host/"), 2, "The broker is no Redis"),
        ((*TARGET, "--stream", "s", "--redis", "sentinel://host:26379/0"), 2, "names Redis Sentinel. Streams are read"),
        ((*TARGET, "--stream", "s", "--redis", "redis://:pw9@127.0.0.1:1/0"), EXIT_RESTART, "Redis cannot be reached"),
    ],
    ids=lambda value: str(value)[-40:],
)
def test_a_start_that_fails_prints_one_sentence_and_an_exit_code(
    command: Command, place: Place, options: tuple[str, ...], code: int, expected: str
) -> None:
    found, output = command(*options)
    place.raw.delete("s")
    assert (found, expected in output) == (code, True), output
    assert "pw9" not in output


@pytest.mark.parametrize("what", ["recover", "backlog", "park"])
def test_an_option_before_its_subcommand_is_refused(command: Command, place: Place, what: str) -> None:
    place.queue()
    place.add({"id": "order:1"})
    place.queue("dead").read()
    early = ("--message-id-field", "id", "--redis", "redis://nowhere:1/0", "--batch=100")
    code, output = command(*early, what, "--stream", place.stream)
    assert code == 2
    assert f"Options before {what} would be ignored: --redis, --batch, --message-id-field; expected after it." in output
    assert len(place.pending()) == 1


def test_no_other_command_group_has_options_that_could_be_ignored() -> None:
    root: Any = get_command(build_app())
    groups = {name: found for name, found in root.commands.items() if hasattr(found, "commands")}
    assert {"db", "ingest", "quarantine", "dead-letters"} <= set(groups)
    assert [name for name, found in groups.items() if found.params] == ["ingest"]


def test_a_redis_url_from_the_environment_is_not_a_misplaced_option(command: Command, place: Place) -> None:
    place.queue()
    code, output = command("backlog", "--stream", place.stream, "--group", "workers")
    assert (code, "0 in the stream" in output) == (0, True), output


def test_backlog_of_a_missing_stream_does_not_create_it(command: Command, place: Place) -> None:
    code, output = command("backlog", "--stream", place.stream, "--json")
    assert (code, "Check both names" in output) == (5, True), output
    assert not place.raw.exists(place.stream)


@pytest.mark.parametrize("what", [("backlog",), ("park", "1-1"), TARGET], ids=["backlog", "park", "ingest"])
def test_a_key_that_is_not_a_stream_is_a_wrong_name_and_not_a_failure_of_redis(
    command: Command, place: Place, what: tuple[str, ...]
) -> None:
    place.raw.set(place.stream, "no stream")
    code, output = command(*what, "--stream", place.stream)
    assert (code, "correct the name" in output) == (5, True), output


def test_parking_in_a_stream_or_group_that_is_not_there_is_a_wrong_name(command: Command, place: Place) -> None:
    place.add({"n": 1})
    for stream in (place.stream, f"{place.stream}x"):
        code, output = command("park", "1-1", "--stream", stream, "--group", "absent")
        assert (code, "Check both names" in output) == (5, True), output


def test_it_does_not_start_on_a_database_of_another_version(command: Command, place: Place, db: Database) -> None:
    with db.transaction() as tx:
        (before,) = tx.all(Statement[Any]("SELECT version_num FROM pipeline.alembic_version"))[0]
        tx.execute(text("UPDATE pipeline.alembic_version SET version_num = '0001'"))
    try:
        code, output = command(*TARGET, "--stream", place.stream)
    finally:
        with db.transaction() as tx:
            tx.execute(text("UPDATE pipeline.alembic_version SET version_num = :before"), before=before)
    assert (code, "pipeline db upgrade" in output) == (3, True), output


def test_a_locked_batch_ends_it_with_3_and_a_recovery_counts_the_entries_it_left(
    command: Command, place: Place, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.cli.ingest.Bridge", partial(Bridge, lock_wait=timedelta(milliseconds=50)))
    place.add({"n": 1})
    with db.engine.begin() as blocker:
        blocker.execute(text("LOCK TABLE pipeline.events IN SHARE ROW EXCLUSIVE MODE"))
        code, output = command(*TARGET, "--stream", place.stream)
        assert (code, "Another transaction holds" in output) == (3, True), output
        assert len(place.pending("pipeline")) == 1
        place.make_stale(group="pipeline")
        code, output = command("recover", *TARGET, "--stream", place.stream, "--claim-idle-ms", "60000", "--once")
    assert (code, "0 published, 0 published before, 0 not usable, 1 held by another" in output) == (0, True), output
    assert len(place.pending("pipeline")) == 1


def test_the_backlog_can_be_read_by_a_program(command: Command, place: Place) -> None:
    place.queue("dead", group="pipeline")
    (entry,) = place.add({"n": 1})
    place.queue("dead", group="pipeline").read()
    place.add({"n": 2})
    code, output = command("backlog", "--stream", place.stream, "--json")
    found = json.loads(output)
    assert (code, found["length"], found["pending"]) == (0, 2, 1)
    assert found["lag"] == (1 if place.version() >= 7 else None)
    assert [(each["id"], each["consumer"], each["times_delivered"]) for each in found["entries"]] == [
        (entry, "dead", 1)
    ]


def test_a_recovery_of_one_batch_prints_its_counts(
    command: Command, place: Place, db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    place.queue("dead", group="pipeline")
    (entry,) = place.add({"n": 1})
    bad = place.add_raw({b"data": b"bad"})
    place.queue("dead", group="pipeline").read()
    place.raw.xreadgroup("pipeline", "dead", {place.stream: ">"})
    place.make_stale(group="pipeline")
    code, output = command("recover", *TARGET, "--stream", place.stream, "--claim-idle-ms", "60000", "--once")
    assert (code, bad in caplog.text) == (65, True), output
    assert "1 published, 0 published before, 1 not usable" in output
    assert published(db) == {f"{place.stream}:{entry}": 1}
    code, output = command("park", bad, "--stream", place.stream, "--to", f"{place.stream}:parked")
    assert (code, "parked as" in output, place.pending("pipeline")) == (0, True, {})
    code, output = command("park", bad, "--stream", place.stream)
    assert (code, "is not pending" in output) == (2, True)


def test_park_prints_parked_entries_as_json_also_before_one_that_fails(
    db: Database, place: Place, command: Command
) -> None:
    place.queue("dead", group="pipeline")
    bad = place.add_raw({b"data": b"bad"})
    place.raw.xreadgroup("pipeline", "dead", {place.stream: ">"})
    to = f"{place.stream}:parked"
    code, output = command("park", bad, "1-1", "--stream", place.stream, "--to", to, "--json")
    parked, _ = json.JSONDecoder().raw_decode(output[output.index("{") :])
    assert (code, list(parked), place.pending("pipeline")) == (2, [bad], {})


def test_every_exit_code_is_in_the_guide(project: Path) -> None:
    page = (project / "docs/guides/ingest-a-stream.md").read_text(encoding="utf-8")
    assert [code for code in (0, 2, 3, 65, 75) if f"| {code} |" not in page] == []
