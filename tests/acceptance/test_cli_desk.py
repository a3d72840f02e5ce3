"""The desk from a shell: what waits is listed, settled with a reason, and nothing happens before it was shown."""

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from pipeline.store.database import Database
from pipeline.testing.inline import Inline
from tests.support import counter
from tests.support.cluster import PROJECT

PIPELINE = Path(sys.executable).parent / "pipeline"


@pytest.fixture
def run(db: Database) -> Inline:
    """Three letters whose mail nobody knows about, and one that waits."""
    made = Inline(db, [counter.counter], [counter.mail])
    made.publish(counter.letters, *({"to": f"{name}@example.org"} for name in ("ada", "bob", "cy")))
    made.run()
    return made


def pipeline(database_url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PIPELINE_")}
    environ |= {"PIPELINE_DATABASE_URL": database_url, "PIPELINE_WORKFLOWS": "tests.support.counter", "COLUMNS": "200"}
    command = [str(PIPELINE), *arguments]
    return subprocess.run(command, env=environ, cwd=PROJECT, capture_output=True, text=True, timeout=60, check=False)


def listed(database_url: str, *options: str) -> list[dict[str, Any]]:
    done = pipeline(database_url, "mutations", "--json", *options)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_what_waits_is_listed_without_what_is_redacted(run: Inline, database_url: str) -> None:
    shown = pipeline(database_url, "mutations")
    assert "Mail to ada@example.org" in shown.stdout
    assert "3 indeterminate" in shown.stdout
    assert "secret words" not in shown.stdout + json.dumps(listed(database_url))
    assert listed(database_url, "--status", "applied") == []
    _settle(run)


def test_one_is_settled_with_a_reason_and_refused_without(run: Inline, database_url: str) -> None:
    first = listed(database_url)[0]["id"]
    refused = pipeline(database_url, "resolve", "happened", first)
    assert (refused.returncode, "gave no reason" in refused.stderr) == (2, True)
    done = pipeline(database_url, "resolve", "happened", first, "-m", "it is in the outbox", "--result", '{"id": 7}')
    assert (done.returncode, len(listed(database_url))) == (0, 2), done.stderr
    again = pipeline(database_url, "resolve", "skip", first, "-m", "changed my mind")
    assert (again.returncode, "applied" in again.stderr) == (2, True)
    nonsense = pipeline(database_url, "resolve", "skip", "seven", "-m", "x")
    assert "'seven' is not the id of a mutation" in nonsense.stderr
    _settle(run)


def test_many_are_shown_first_and_settled_when_asked_to(run: Inline, database_url: str) -> None:
    nothing = pipeline(database_url, "resolve", "skip", "-m", "old")
    assert "Nothing says which mutations" in nothing.stderr
    preview = pipeline(database_url, "resolve", "skip", "--operation", "mail.send", "-m", "old")
    assert "Nothing was changed" in preview.stdout
    assert len(listed(database_url)) == 3
    done = pipeline(database_url, "resolve", "skip", "--workflow", "counter", "-m", "old", "--yes")
    assert "3 settled, 0 refused" in done.stdout, done.stderr
    run.settle()


def test_an_export_settles_what_it_lists(run: Inline, database_url: str, tmp_path: Path) -> None:
    export = tmp_path / "sent.csv"
    export.write_text("recipient,id\nada@example.org,1\nzoe@example.org,2\n")
    given = ("resolve-from", str(export), "--column", "recipient", "--to", "params.to", "-m", "the provider's list")
    preview = pipeline(database_url, *given)
    assert "1 answered, 2 not in the file, 0 ambiguous, 1 rows about nothing that is asked" in preview.stdout
    assert len(listed(database_url)) == 3
    assert "1 settled" in pipeline(database_url, *given, "--yes").stdout
    assert len(listed(database_url)) == 2
    _settle(run)


def test_connectors_are_listed_with_their_grades(database_url: str) -> None:
    done = pipeline(database_url, "connectors", "--json")
    assert [(row["operation"], row["grade"]) for row in json.loads(done.stdout)] == [("folders", "read"), ("send", "C")]
    assert "2 operations" in pipeline(database_url, "connectors").stdout


def test_a_plan_prints_what_would_go_out(db: Database, database_url: str) -> None:
    run = Inline(db, [counter.counter], [counter.mail])
    run.publish(counter.letters, {"to": "ada@example.org"}, {"to": "bob@example.org"})
    done = pipeline(database_url, "plan", "counter", "--json")
    found = json.loads(done.stdout)
    assert found["counts"] == {"mail.send": 2}
    assert [request["params"] for request in found["requests"]] == [
        {"to": "ada@example.org", "body": "•••"},
        {"to": "bob@example.org", "body": "•••"},
    ]
    assert "mail.send: 2" in pipeline(database_url, "plan", "counter").stdout
    unknown = pipeline(database_url, "plan", "nowhere")
    assert (unknown.returncode, "There is no workflow 'nowhere'. Known: counter" in unknown.stderr) == (2, True)
    assert run.runs() == []


def test_a_breaker_is_opened_listed_and_closed(db: Database, database_url: str) -> None:
    assert pipeline(database_url, "breaker", "open", "mail.send", "-m", "provider is down").returncode == 0
    (row,) = json.loads(pipeline(database_url, "breakers", "--json").stdout)
    assert (row["connector"], row["operation"], row["reason"]) == ("mail", "send", "provider is down")
    assert "1 open" in pipeline(database_url, "breakers").stdout
    assert "mail.send: close" in pipeline(database_url, "breaker", "close", "mail.send", "-m", "it is back").stdout
    assert "was not open" in pipeline(database_url, "breaker", "close", "mail.send", "-m", "it is back").stdout
    assert "names no operation" in pipeline(database_url, "breaker", "open", "mail", "-m", "x").stderr
    del db


def _settle(run: Inline) -> None:
    """Leave nothing behind that an invariant would speak of."""
    run.advance(timedelta(seconds=1))
    run.settle()
