"""Output is plain: no faked lines, no repetition, clear ages."""

import logging

import pytest

from pipeline.store.database import Database
from tests.cli import scenarios
from tests.cli.conftest import Pipeline
from tests.factories import a_workflow


def test_an_outside_systems_error_cannot_fake_a_line_of_the_list(db: Database, pipeline: Pipeline) -> None:
    a_workflow(db)
    scenarios.a_quarantined_event(db)
    pipeline("maintenance", "enter", "billing", "-m", "wrong\n\nblocked  run 7 of billing\n    rm -rf /")
    shown = pipeline("attention").out
    assert "wrong\\n\\nblocked  run 7 of billing\\n    rm -rf /" in shown
    assert "\nblocked" not in shown
    assert "\n    rm" not in shown


def test_the_headline_is_shown_before_the_reason_and_ids_come_last(db: Database, pipeline: Pipeline) -> None:
    a_workflow(db)
    row = scenarios.a_pending_approval(db)
    _, _, first, reason, subject, *commands = pipeline("attention").out.splitlines()
    assert first.startswith("approval  Mail to someone@example.org  for ")
    assert (reason, subject) == ("  mail.send: waits for approval", f"  mutation {row.id} of billing")
    assert commands[0] == f"    pipeline mutations {row.id}"


def test_the_age_of_quarantined_events_is_that_of_the_oldest(db: Database, pipeline: Pipeline) -> None:
    a_workflow(db)
    scenarios.a_quarantined_event(db)
    (line,) = [line for line in pipeline("attention").out.splitlines() if line.startswith("quarantined")]
    assert "1 event of send quarantined  oldest " in line
    assert "  for " not in line


def test_breakers_are_listed_with_ages(pipeline: Pipeline) -> None:
    pipeline("breaker", "open", "mail.send", "-m", "outage")
    heading, row = pipeline("breakers").out.splitlines()[1:]
    assert heading.split() == ["connector", "operation", "opened", "by", "age", "probe", "reason"]
    assert row.split()[:3] == ["mail", "send", "ada"]
    assert row.split()[3].endswith("s")
    assert row.split()[4:] == ["none", "outage"]
    pipeline("breaker", "close", "mail.send")


@pytest.mark.parametrize("command", [("breaker", "open", "mail.send", "-m", "outage"), ("doctor",)])
def test_a_command_prints_no_log_lines(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setattr(logging.getLogger("pipeline"), "handlers", [])
    assert pipeline(*command).err == ""
    assert logging.getLogger("pipeline").handlers, "without any, Python would write them to the standard error"
    pipeline("breaker", "close", "mail.send")


def test_an_act_on_a_replica_names_the_primary_and_does_not_ask_to_be_repeated(
    db: Database, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_workflow(db)
    monkeypatch.setenv("PGOPTIONS", "-c default_transaction_read_only=on")
    assert pipeline("workflows").code == 0
    output = pipeline("pause", "billing", "-m", "stock-taking")
    assert (output.code, output.out) == (3, "")
    assert "read-only, as a standby is" in output.err
    assert "the primary" in output.err
    assert "repeat it" not in output.err


def test_the_help_says_which_acts_need_a_reason(pipeline: Pipeline) -> None:
    for command in ("pause", "resume", "approve", "breaker"):
        assert "optional" in " ".join(pipeline(command, "--help").out.split())
    for command in ("resolve", "reject", "acknowledge"):
        assert "Required" in " ".join(pipeline(command, "--help").out.split())
