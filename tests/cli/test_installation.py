"""Commands ``audit``, ``workers``, ``settings`` and ``open``."""

import os
import pty
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from pipeline.embedded import locks
from pipeline.store.database import Database
from pipeline.transitions import housekeeping, workflows
from tests.admin.test_system import a_worker
from tests.cli import scenarios
from tests.cli.conftest import Pipeline
from tests.factories import SOMEBODY, a_workflow, some_events
from tests.support.wait import wait_for

PIPELINE = Path(sys.executable).parent / "pipeline"


def test_the_audit_lists_acts_page_by_page_and_by_what_they_were_about(db: Database, pipeline: Pipeline) -> None:
    a_workflow(db)
    a_workflow(db, "mails")
    assert pipeline("audit", "--act", "workflow.pause").out == "No such act.\n"
    mutation = scenarios.an_indeterminate_mutation(db)
    assert pipeline("resolve", "skip", str(mutation.id), "--reason", "the customer left").code == 0
    with db.transaction() as tx:
        workflows.pause(tx, "mails", SOMEBODY)
        yesterday = f"{tx.clock() - timedelta(days=1):%Y-%m-%d %H:%M}"
    newest = pipeline("audit", "--limit", "1", "--since", yesterday)
    assert "1 act\n" in newest.out
    assert "mails" in newest.out
    cursor = newest.out.partition("--after ")[2].partition("`")[0]
    older = pipeline("audit", "--limit", "1", "--since", yesterday, "--after", cursor)
    assert f"mutation {mutation.id}" in older.out
    assert "ada (claimed)" in older.out, "no login says who typed the command"
    assert pipeline("audit", "--until", yesterday).out == "No such act.\n"
    page = pipeline("audit", "--mutation", str(mutation.id)[:13], "--actor", "ada", "--json").json
    (act,) = page["items"]
    assert (act["act"], act["reason"], act["claimed"]) == ("mutation.skip", "the customer left", True)
    assert page["next"] is None


def test_a_wrong_instant_or_cursor_of_the_audit_is_named(pipeline: Pipeline) -> None:
    assert "'soon' is not an instant; expected one such as" in pipeline("audit", "--since", "soon").err
    assert "'xyz' is no cursor" in pipeline("audit", "--after", "xyz").err


def test_workers_are_listed_with_their_code_and_whether_they_run(db: Database, pipeline: Pipeline) -> None:
    assert pipeline("workers").out == "No worker has run within the last day.\n"
    with db.transaction() as tx:
        housekeeping.record_worker(tx, a_worker("one"))
    (shown,) = pipeline("workers", "--json").json
    assert (shown["name"], shown["is_gone"]) == ("one", False)
    line = pipeline("workers").out.splitlines()[2]
    assert line.startswith("one   runs")
    assert f"pipeline {shown['package_version']}" in line


def test_settings_are_listed_with_default_and_meaning_and_without_secrets(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_NOTIFY_URL", "https://ops:hunter2@example.org/hook")
    monkeypatch.setenv("PIPELINE_NOTIFY_SECRET", "hunter3")
    shown = pipeline("settings")
    assert "how often a worker renews its leases" in shown.out
    assert "hunter" not in shown.out + pipeline("settings", "--json").out
    rows = {each["variable"]: each for each in pipeline("settings", "--json").json}
    assert (rows["PIPELINE_HEARTBEAT"]["value"], rows["PIPELINE_HEARTBEAT"]["default"]) == ("2s", "2s")


def test_open_prints_the_page_of_each_kind_of_thing(
    db: Database, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    a_workflow(db)
    mutation = scenarios.an_indeterminate_mutation(db)
    (event,) = some_events(db, "order-2")
    monkeypatch.setenv("PIPELINE_CONSOLE_URL", "https://ops.example.org/console/")
    base = "https://ops.example.org/console"
    pages = {
        "billing": f"{base}/w/billing",
        "order-2": f"{base}/e/{event}",
        str(mutation.run_id): f"{base}/r/{mutation.run_id}",
        str(mutation.id): f"{base}/m/{mutation.id}",
    }
    assert {thing: pipeline("open", thing).out.strip() for thing in pages} == pages
    assert pipeline("open").out == f"{base}/\n"
    assert pipeline("open", "order-3").code == 5
    monkeypatch.delenv("PIPELINE_CONSOLE_URL")
    monkeypatch.setenv("PIPELINE_HOME", str(tmp_path))
    assert pipeline("open").out == "http://127.0.0.1:8080/\n"
    with locks.publish_locked(tmp_path / "console.url", "http://127.0.0.1:8081"):
        assert pipeline("open").out == "http://127.0.0.1:8081/\n"


def test_open_starts_the_browser_in_a_terminal_only(tmp_path: Path) -> None:
    browser, opened = tmp_path / "browser", tmp_path / "opened"
    browser.write_text(f'#!/bin/sh\necho "$1" >> {opened}\n')
    browser.chmod(0o755)
    environ = {**os.environ, "BROWSER": str(browser), "PIPELINE_CONSOLE_URL": "http://127.0.0.1:8080"}
    environ |= {"PIPELINE_DATABASE_URL": "postgresql://nowhere/x", "PIPELINE_BROKER_URL": "redis://nowhere"}
    subprocess.run([PIPELINE, "open"], env=environ, check=True, capture_output=True)
    assert not opened.exists()
    outer, inner = pty.openpty()
    subprocess.run([PIPELINE, "open"], env=environ, check=True, stdout=inner)
    wait_for(opened.exists, why="the browser opened")
    assert opened.read_text() == "http://127.0.0.1:8080/\n"
    os.close(outer)
    os.close(inner)
