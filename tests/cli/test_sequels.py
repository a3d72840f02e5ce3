"""A stopped run says what became of it wherever it is listed, and what runs have cost."""

from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from pipeline.domain.failures import FailureKind
from pipeline.domain.states import Evidence, MutationId, Phase, Resolver
from pipeline.domain.values import AppliedMutation, FailedMutation
from pipeline.store.database import Database
from pipeline.transitions import mutations
from tests.cli import scenarios
from tests.cli.conftest import Pipeline
from tests.factories import a_run, a_workflow, carried_forward, committed, some_events, stopped, the_run


@pytest.fixture(autouse=True)
def workflow(db: Database) -> None:
    a_workflow(db, concurrency=9, on_uncertain="contain")


def in_doubt(db: Database, message_id: str) -> Any:
    """A run whose mutation is in doubt."""
    some_events(db, message_id)
    return stopped(db, a_run(db, Phase.MUTATING), FailureKind.TRANSIENT)


def found(db: Database, message_id: str) -> Any:
    """A run in doubt whose mutation was found afterwards."""
    run = in_doubt(db, message_id)
    with db.transaction() as tx:
        item = AppliedMutation(mutation_id=run.mutation_id, resolved_by=Resolver.RECONCILE)
        mutations.apply(tx, [item]).only()
    return the_run(db, run.id)


def not_found(db: Database, message_id: str) -> Any:
    """A run in doubt whose mutation was not found."""
    run = in_doubt(db, message_id)
    with Database(db.engine, clock_offset=timedelta(hours=1)).transaction() as tx:
        item = FailedMutation(
            mutation_id=MutationId(run.mutation_id),
            error="not found",
            evidence=Evidence.ABSENCE,
            resolved_by=Resolver.RECONCILE,
        )
        mutations.fail(tx, [item]).only()
    return the_run(db, run.id)


def sequels(pipeline: Pipeline, *options: str) -> dict[str, str]:
    return {run["id"]: run["sequel"] for run in pipeline("runs", *options, "--json").json}


def test_runs_of_one_status_are_told_apart_by_what_became_of_them(db: Database, pipeline: Pipeline) -> None:
    """After a storm every run reads ``paused:reconciliation``, and few of them wait."""
    waits = in_doubt(db, "order-1")
    resolved = found(db, "order-2")
    released = not_found(db, "order-3")
    carried = found(db, "order-4")
    retry = committed(db, carried_forward(db, carried))
    asks = scenarios.an_indeterminate_mutation(db, "order-5")
    expected = {
        str(waits.id): "waits for reconcile",
        str(resolved.id): "waits for a retry",
        str(released.id): "inputs released",
        str(carried.id): "retried",
        str(asks.run_id): "waits for an operator",
    }
    assert sequels(pipeline, "--status", "paused:reconciliation") == expected
    assert sequels(pipeline, "--waiting") == {
        run: sequel for run, sequel in expected.items() if sequel.startswith("waits")
    }
    (listed,) = [run for run in pipeline("runs", "--json").json if run["id"] == str(carried.id)]
    assert listed["retried_by"] == str(retry.id)
    assert f"retried by run {retry.id}, mutated: division by zero" in pipeline("runs").out


def test_a_pending_approval_waits_and_an_active_or_committed_run_does_not(db: Database, pipeline: Pipeline) -> None:
    approval = scenarios.a_pending_approval(db, "order-1")
    scenarios.a_done_order(db, "order-2")
    some_events(db, "order-3")
    a_run(db, Phase.MUTATING)
    assert sequels(pipeline, "--waiting") == {str(approval.run_id): "waits for approval"}
    assert pipeline("runs", "--waiting", "--status", "paused:reconciliation").plain() == "No such run."


def test_nothing_waits_when_every_stopped_run_is_over(db: Database, pipeline: Pipeline) -> None:
    not_found(db, "order-1")
    carried = found(db, "order-2")
    committed(db, carried_forward(db, carried))
    assert pipeline("runs", "--waiting").plain() == "No such run."


def test_waiting_runs_are_found_however_old_they_are(db: Database, pipeline: Pipeline) -> None:
    waits = in_doubt(db, "order-1")
    for number in range(2, 5):
        scenarios.a_done_order(db, f"order-{number}")
    listed = pipeline("runs", "--waiting", "--recent", "1")
    assert str(waits.id) in listed.out
    assert "were searched" not in listed.out


def test_a_run_a_trace_and_an_event_say_what_became_of_a_stopped_run(db: Database, pipeline: Pipeline) -> None:
    carried = found(db, "order-1")
    retry = committed(db, carried_forward(db, carried))
    sequel = f"retried by run {retry.id}"
    assert f"sequel       {sequel}" in pipeline("runs", str(carried.id)).out
    assert f"mutated, paused:reconciliation, {sequel}" in pipeline("trace", f"run:{carried.id}").out
    assert f"{sequel}: division by zero" in pipeline("events", str(carried.event_ids[0])).out


def test_the_timeline_says_that_a_reconcile_attempt_resolved_it(db: Database, pipeline: Pipeline) -> None:
    run = found(db, "order-1")
    assert "resolved by reconcile" in pipeline("mutations", str(run.mutation_id)).out


def test_the_cost_of_a_run_and_of_its_session_are_shown(db: Database, pipeline: Pipeline) -> None:
    runs = []
    for number, cost in enumerate(("0.10", "2.5")):
        some_events(db, f"order-{number}")
        runs.append(committed(db, a_run(db, Phase.EMITTING), cost=Decimal(cost)))
    assert [run["cost"] for run in pipeline("runs", "--json").json] == ["2.5", "0.10"]
    shown = pipeline("runs", str(runs[0].id)).out
    assert "cost         0.10\n" in shown
    assert f"session      {runs[0].session_id}, open, cost 2.60\n" in shown
    detail = pipeline("runs", str(runs[0].id), "--json").json
    assert (detail["run"]["cost"], detail["session"]["cost"]) == ("0.10", "2.60")
