"""Whoever is on call may not have the code: the command line says so, and lets nobody act on what it cannot show."""

import pytest

from pipeline.store.database import Database
from tests.cli import scenarios
from tests.cli.conftest import Pipeline
from tests.factories import a_workflow, the_mutation


@pytest.fixture
def away(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    """The command on a machine that has none of the workflows."""
    monkeypatch.setenv("PIPELINE_WORKFLOWS", "")
    return pipeline


def test_without_code_and_with_an_empty_ledger_no_operation_is_known_and_the_command_says_so(away: Pipeline) -> None:
    told = away("connectors")
    assert (told.code, told.out) == (2, "")
    assert "No workflow's code is here" in told.err
    assert "PIPELINE_WORKFLOWS" in told.err


def test_without_code_the_operations_of_the_ledger_and_of_the_breakers_are_listed(db: Database, away: Pipeline) -> None:
    a_workflow(db)
    scenarios.a_done_order(db)
    assert away("breaker", "open", "bank.transfer", "-m", "outage").code == 0
    told = away("connectors")
    assert (told.code, "2 operations" in told.out) == (0, True), told.err
    assert "No workflow's code is here" in told.err
    assert "never used" in told.err, "an operation that was never used is not in the ledger"
    rows = away("connectors", "--json").json
    assert [(row["connector"], row["operation"], row["grade"]) for row in rows] == [
        ("bank", "transfer", None),
        ("mail", "send", None),
    ]
    assert away("breaker", "close", "bank.transfer", "-m", "back").code == 0


def test_operations_that_only_the_ledger_knows_are_listed_beside_those_of_the_code(
    db: Database, pipeline: Pipeline
) -> None:
    a_workflow(db)
    assert pipeline("connectors").err == ""
    scenarios.a_question(db, connector="bank", operation="transfer")
    told = pipeline("connectors")
    assert "3 operations" in told.out
    assert "bank.transfer" in told.err
    assert [row["grade"] for row in pipeline("connectors", "--json").json] == ["read", "C", None]


def test_the_list_of_operations_says_how_far_back_it_looked(db: Database, away: Pipeline) -> None:
    a_workflow(db)
    scenarios.a_done_order(db, "order-1")
    scenarios.a_done_order(db, "order-2")
    assert "newest 1 row" in away("connectors", "--recent", "1").err
    assert "newest" not in away("connectors", "--recent", "2").err


def test_code_that_cannot_be_imported_is_named_and_the_ledger_is_listed(
    db: Database, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_workflow(db)
    scenarios.a_done_order(db)
    monkeypatch.setenv("PIPELINE_WORKFLOWS", "no.such.module")
    told = pipeline("connectors")
    assert (told.code, "1 operation" in told.out, "'no.such.module'" in told.err) == (0, True, True)


def test_the_operations_of_the_code_are_listed_while_the_database_is_away(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/none")
    told = pipeline("connectors")
    assert (told.code, "2 operations" in told.out) == (0, True)
    assert "The ledger cannot be read" in told.err
    monkeypatch.setenv("PIPELINE_WORKFLOWS", "")
    assert pipeline("connectors").code == 3


def test_a_plan_of_a_workflow_whose_code_is_elsewhere_says_that_and_not_that_there_is_none(
    db: Database, away: Pipeline
) -> None:
    a_workflow(db)
    told = away("plan", "billing")
    assert (told.code, told.out) == (2, "")
    assert "The code of workflow 'billing' is not here" in told.err
    assert "There is no workflow" not in told.err
    assert "There is no workflow 'biling'. Known: billing." in away("plan", "biling").err


def test_a_request_that_cannot_be_shown_here_is_allowed_only_by_who_says_so(db: Database, away: Pipeline) -> None:
    a_workflow(db)
    row = scenarios.a_request_to_allow(db)
    refused = away("approve", str(row.id), "-m", "within budget")
    assert (refused.code, refused.out) == (2, "")
    assert "--unseen" in refused.err
    assert the_mutation(db, row.id).approved_at is None
    assert away("mutations", str(row.id), "--json").json["mutation"]["is_hidden"] is True
    taken = away("approve", str(row.id), "-m", "ada read it to me", "--unseen")
    assert (taken.code, "approved" in taken.out) == (0, True), taken.err
    assert the_mutation(db, row.id).approved_by == "ada"


def test_a_request_that_is_shown_needs_no_such_word(db: Database, pipeline: Pipeline) -> None:
    a_workflow(db)
    row = scenarios.a_request_to_allow(db)
    assert pipeline("mutations", str(row.id), "--json").json["mutation"]["is_hidden"] is False
    assert pipeline("approve", str(row.id), "-m", "within budget").code == 0
