"""Commands without the workflows' code show and act by what workers have registered."""

import pytest

from pipeline.store.database import Command, Database
from tests.cli import scenarios
from tests.cli.conftest import Pipeline
from tests.factories import a_workflow, the_mutation


@pytest.fixture
def away(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    """Run commands without the workflows' code."""
    monkeypatch.setenv("PIPELINE_WORKFLOWS", "")
    return pipeline


def test_without_code_the_registered_operations_are_listed_with_their_grades(db: Database, away: Pipeline) -> None:
    a_workflow(db)
    output = away("connectors")
    assert (output.code, "2 operations" in output.out, output.err) == (0, True, "")
    rows = away("connectors", "--json").json
    assert [(row["connector"], row["operation"], row["grade"]) for row in rows] == [
        ("mail", "folders", "read"),
        ("mail", "send", "C"),
    ]


def test_operations_that_no_worker_registered_are_named(db: Database, away: Pipeline) -> None:
    a_workflow(db)
    scenarios.an_indeterminate_mutation(db, connector="bank", operation="transfer")
    output = away("connectors")
    assert "3 operations" in output.out
    assert "No worker has registered bank.transfer; the ledger or a breaker has it." in output.err
    assert [row["grade"] for row in away("connectors", "--json").json] == ["read", "C", None]
    forget_operations(db)
    assert away("breaker", "open", "bank.transfer", "-m", "outage").code == 0
    assert "No worker has registered" in away("breaker", "close", "bank.transfer", "-m", "back").err


def test_without_code_and_without_registered_operations_none_is_listed(db: Database, away: Pipeline) -> None:
    forget_operations(db)
    output = away("connectors")
    assert (output.code, output.out) == (2, "")
    assert "No worker has registered an operation" in output.err


def forget_operations(db: Database) -> None:
    with db.transaction() as tx:
        tx.execute(Command("DELETE FROM pipeline.operations"))


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
    assert (output.code, "2 operations" in output.out, "'no.such.module'" in output.err) == (0, True, True)


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


def test_a_request_is_shown_and_approved_without_code(db: Database, away: Pipeline) -> None:
    a_workflow(db)
    row = scenarios.a_pending_approval(db)
    shown = away("mutations", str(row.id))
    assert ("someone@example.org" in shown.out, shown.err) == (True, "")
    assert away("approve", str(row.id), "-m", "within budget").code == 0
    assert the_mutation(db, row.id).approved_by == "ada"
