"""Control characters, other schema versions, and unusable folders."""

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from pipeline import LogicError
from pipeline.cli.common import printable
from pipeline.store.database import Database, Statement
from tests.cli.conftest import Pipeline
from tests.support.scripted_consumers import Shop

#: Clears a screen, sets a title, reorders text, hides a character, breaks a line.
HIDDEN = "\x1b[2J\x1b]0;title\x07\u202e\u2066\u200b\u2028"


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ("a\x1b[2Jb", "a\\x1b[2Jb"),
        ("a\rb", "a\\rb"),
        ("99\u202e10", "99\\u202e10"),
        ("a\u2028b", "a\\u2028b"),
        ("a\x9bb", "a\\x9bb"),
        ("a\tb\nc é", "a\tb\\nc é"),
        (7, "7"),
    ],
)
def test_control_characters_are_escaped(given: object, seen: str) -> None:
    assert printable(given) == seen


def test_an_error_message_cannot_clear_the_screen(db: Database, pipeline: Pipeline) -> None:
    def fail(*_: object) -> None:
        raise LogicError(f"evil {HIDDEN}")

    run = Shop(mutate=fail).started(db)
    run.run()
    run.sweeps.maintenance()
    (failed,) = run.runs()
    for command in (("runs",), ("runs", str(failed.id)), ("workflows",), ("attention",), ("top", "--once")):
        answer = pipeline(*command)
        assert "evil" in answer.out, command
        assert not set(HIDDEN) & set(answer.out) - set("[2J]0;title"), command


@pytest.mark.broken_on_purpose
@pytest.mark.parametrize("command", ["workflows", "events", "runs", "mutations", "attention", "breakers", "doctor"])
def test_a_database_of_an_older_version_is_named_and_not_read(db: Database, pipeline: Pipeline, command: str) -> None:
    with db.transaction() as tx:
        now = tx.all(Statement[Any]("SELECT version_num FROM pipeline.alembic_version"))[0][0]
        tx.execute(text("UPDATE pipeline.alembic_version SET version_num = '0001'"))
    try:
        answer = pipeline(command)
    finally:
        with db.transaction() as tx:
            tx.execute(text("UPDATE pipeline.alembic_version SET version_num = :now"), now=now)
    assert answer.code == 3
    assert "pipeline db upgrade" in answer.err


def test_a_folder_that_cannot_be_used_is_named(
    pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIPELINE_DATABASE_URL")
    monkeypatch.delenv("PIPELINE_BROKER_URL")
    (tmp_path / "file").write_text("in the way")
    answer = pipeline("dev", "--home", str(tmp_path / "file" / "home"))
    assert answer.code == 2
    assert "cannot be made" in answer.err
