"""``pipeline doctor``: findings and exit codes."""

import json

import pytest
from sqlalchemy import text

from pipeline.domain.states import Phase
from pipeline.store.database import Database
from tests.cli.conftest import Pipeline
from tests.factories import a_run, a_workflow, some_events, stopped


def test_a_healthy_database_has_no_findings(db: Database, pipeline: Pipeline) -> None:
    a_workflow(db)
    some_events(db, "m1", "m2")
    a_run(db, Phase.COMMITTED)
    a_run(db, Phase.MUTATING)
    done = pipeline("doctor")
    assert (done.code, done.err) == (0, "")
    assert "invariants hold" in done.out
    as_json = pipeline("doctor", "--json")
    assert (as_json.code, as_json.json) == (0, [])


@pytest.mark.broken_on_purpose
def test_a_broken_invariant_is_named_with_its_row_and_advice_and_exits_1(db: Database, pipeline: Pipeline) -> None:
    a_workflow(db)
    (event,) = some_events(db, "m1")
    run = stopped(db, a_run(db, Phase.EMITTING))
    with db.transaction() as tx:
        tx.execute(text("UPDATE pipeline.runs SET retry_pending = false WHERE id = :id"), id=run.id)
    done = pipeline("doctor")
    assert done.code == 1
    for part in ("no-orphaned-reservation", f"event {event}", str(run.id), "do not edit the rows"):
        assert part in " ".join(done.out.split())
    as_json = pipeline("doctor", "--json")
    assert as_json.code == 1
    (finding,) = json.loads(as_json.out)
    assert (finding["severity"], finding["subject"]) == ("broken", f"event {event}")


def test_overdue_work_is_listed_and_is_not_a_broken_invariant(db: Database, pipeline: Pipeline) -> None:
    a_workflow(db)
    run = a_run(db, Phase.PREPARING)
    with db.transaction() as tx:
        tx.execute(
            text("UPDATE pipeline.runs SET lease_expires_at = now() - interval '1 hour' WHERE id = :id"), id=run.id
        )
    done = pipeline("doctor", "--json")
    assert done.code == 0
    (finding,) = done.json
    assert (finding["invariant"], finding["severity"]) == ("leases-are-recovered", "overdue")
    with db.transaction() as tx:
        tx.execute(
            text("UPDATE pipeline.runs SET lease_expires_at = now() + interval '1 minute' WHERE id = :id"), id=run.id
        )
