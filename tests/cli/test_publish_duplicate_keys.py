"""``pipeline publish`` refuses JSON objects with duplicate keys."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.store.database import Database, Statement
from tests.cli.conftest import Pipeline
from tests.factories import IN, a_workflow


def published(db: Database) -> list[str]:
    with db.transaction() as tx:
        return [row.message_id for row in tx.all(Statement[Any]("SELECT message_id FROM pipeline.events ORDER BY id"))]


@pytest.mark.parametrize(
    ("line", "key"),
    [
        pytest.param('{"message_id": "a", "payload": {}, "message_id": "b"}', "message_id", id="of the event"),
        pytest.param('{"message_id": "a", "payload": {"n": [{"x": 1, "x": 2}]}}', "x", id="deep in the payload"),
    ],
)
def test_a_line_with_a_key_twice_is_refused_by_its_number(
    db: Database, pipeline: Pipeline, tmp_path: Path, line: str, key: str
) -> None:
    a_workflow(db)
    file = tmp_path / "events.jsonl"
    file.write_text(f'{{"message_id": "good", "payload": {{}}}}\n{line}\n')
    output = pipeline("publish", "billing", IN, "--file", str(file))
    assert (output.code, f"Line 2 is no JSON: the key '{key}' is there twice" in output.err) == (2, True)
    assert published(db) == []


def test_a_payload_with_a_key_twice_is_refused(db: Database, pipeline: Pipeline) -> None:
    a_workflow(db)
    output = pipeline("publish", "billing", IN, '{"n": 1, "n": 2}', "--message-id", "a")
    assert (output.code, "the key 'n' is there twice" in output.err) == (2, True)
    assert published(db) == []
