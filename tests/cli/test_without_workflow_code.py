"""Commands without the workflows' code: parameters are hidden, and approval needs --unseen."""

import pytest

from pipeline.store.database import Database
from tests.cli import scenarios
from tests.cli.conftest import Pipeline
from tests.factories import a_workflow, the_mutation


@pytest.fixture
def away(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    """Run commands without the workflows' code."""
    monkeypatch.setenv("PIPELINE_WORKFLOWS", "")
    return pipeline


def test_without_code_and_with_an_empty_ledger_no_operation_is_known(away: Pipeline) -> None:
    output = away("connectors")
    assert (output.code, output.out) == (2, "")
    assert "No workflow's code is here" in output.err
    assert "PIPELINE_WORKFLOWS" in output.err


def test_without_code_the_operations_of_the_ledger_and_of_the_breakers_are_listed(db: Database, away: Pipeline) -> None:
    a_workflow(db)
    scenarios.a_done_order(db)
    assert away("breaker", "open", "bank.transfer", "-m", "outage").code == 0
    output = away("connectors")
    assert (output.code, "2 operations" in output.out) == (0, True), output.err
    assert "No workflow's code is here" in output.err
    assert "never used" in output.err, "an operation that was never used is not in the ledger"
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
    scenarios.an_indeterminate_mutation(db, connector="bank", operation="transfer")
    output = pipeline("connectors")
    assert "3 operations" in output.out
    assert "bank.transfer" in output.err
    assert [row["grade"] for row in pipeline("connectors", "--json").json] == ["read", "C", None]


def test_the_list_of_operations_says_how_many_rows_were_searched(db: Database, away: Pipeline) -> None:
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
    output = pipeline("connectors")
    assert (output.code, "1 operation" in output.out, "'no.such.module'" in output.err) == (0, True, True)


def test_the_operations_of_the_code_are_listed_while_the_database_is_down(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/none")
    output = pipeline("connectors")
    assert (output.code, "2 operations" in output.out) == (0, True)
    assert "The ledger cannot be read" in output.err
    monkeypatch.setenv("PIPELINE_WORKFLOWS", "")
    assert pipeline("connectors").code == 3


def test_a_plan_without_the_workflows_code_is_refused_with_that_reason(db: Database, away: Pipeline) -> None:
    a_workflow(db)
    output = away("plan", "billing")
    assert (output.code, output.out) == (2, "")
    assert "The code of workflow 'billing' is not here" in output.err
    assert "There is no workflow" not in output.err
    assert "There is no workflow 'biling'. Known: billing." in away("plan", "biling").err


def test_a_hidden_request_is_approved_only_with_unseen(db: Database, away: Pipeline) -> None:
    a_workflow(db)
    row = scenarios.a_pending_approval(db)
    refused = away("approve", str(row.id), "-m", "within budget")
    assert (refused.code, refused.out) == (2, "")
    assert "--unseen" in refused.err
    assert the_mutation(db, row.id).approved_at is None
    assert away("mutations", str(row.id), "--json").json["mutation"]["is_hidden"] is True
    taken = away("approve", str(row.id), "-m", "ada read it to me", "--unseen")
    assert (taken.code, "approved" in taken.out) == (0, True), taken.err
    assert the_mutation(db, row.id).approved_by == "ada"


def test_a_visible_request_is_approved_without_unseen(db: Database, pipeline: Pipeline) -> None:
    a_workflow(db)
    row = scenarios.a_pending_approval(db)
    assert pipeline("mutations", str(row.id), "--json").json["mutation"]["is_hidden"] is False
    assert pipeline("approve", str(row.id), "-m", "within budget").code == 0
