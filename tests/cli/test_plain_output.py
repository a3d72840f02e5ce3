"""What an operator reads is plain: no line of somebody else's, nothing twice, ages that say what they count."""

import logging

import pytest

from pipeline.store.database import Database
from tests.cli import scenarios
from tests.cli.conftest import Pipeline
from tests.factories import a_workflow


def test_the_words_of_an_outside_system_cannot_pass_for_a_line_of_the_list(db: Database, pipeline: Pipeline) -> None:
    a_workflow(db)
    scenarios.an_event_aside(db)
    pipeline("maintenance", "enter", "billing", "-m", "wrong\n\nblocked  run 7 of billing\n    rm -rf /")
    shown = pipeline("attention").out
    assert "wrong\\n\\nblocked  run 7 of billing\\n    rm -rf /" in shown
    assert "\nblocked" not in shown
    assert "\n    rm" not in shown


def test_an_operation_without_a_title_is_named_once(
    db: Database, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_workflow(db)
    scenarios.a_request_to_allow(db)
    assert "  mail.send: Mail to someone@example.org: waits for approval\n" in pipeline("attention").out
    monkeypatch.setenv("PIPELINE_WORKFLOWS", "")
    assert "  mail.send: waits for approval\n" in pipeline("attention").out


def test_the_age_of_what_was_set_aside_is_said_to_be_that_of_its_oldest_event(db: Database, pipeline: Pipeline) -> None:
    a_workflow(db)
    scenarios.an_event_aside(db)
    (line,) = [line for line in pipeline("attention").out.splitlines() if line.startswith("quarantined")]
    assert "handler send of billing  oldest " in line
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
def test_the_log_lines_of_a_command_are_not_for_the_person_who_typed_it(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setattr(logging.getLogger("pipeline"), "handlers", [])
    assert pipeline(*command).err == ""
    assert logging.getLogger("pipeline").handlers, "without any, Python would write them to the standard error"
    pipeline("breaker", "close", "mail.send")


def test_an_act_on_a_read_only_database_names_the_primary_and_does_not_ask_to_be_repeated(
    db: Database, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_workflow(db)
    monkeypatch.setenv("PGOPTIONS", "-c default_transaction_read_only=on")
    assert pipeline("workflows").code == 0
    told = pipeline("pause", "billing", "-m", "stock-taking")
    assert (told.code, told.out) == (3, "")
    assert "read-only, as a standby is" in told.err
    assert "the primary" in told.err
    assert "repeat it" not in told.err


def test_the_help_says_which_acts_need_a_reason(pipeline: Pipeline) -> None:
    for command in ("pause", "resume", "approve", "breaker"):
        assert "optional" in " ".join(pipeline(command, "--help").out.split())
    for command in ("resolve", "reject", "acknowledge"):
        assert "Required" in " ".join(pipeline(command, "--help").out.split())
