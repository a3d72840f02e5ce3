"""Recovery continues past a run that it cannot rescue."""

import logging
from datetime import timedelta

import pytest
from sqlalchemy import text

from pipeline.background import rescuer
from pipeline.domain.states import Phase
from pipeline.store.database import Database
from tests.factories import LEASE, TIMEOUT, a_run, a_workflow, some_events, the_run

_REFUSE = """
CREATE FUNCTION public.no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not this one'; END $$;
CREATE TRIGGER no BEFORE UPDATE ON pipeline.runs FOR EACH ROW
WHEN (OLD.workflow = 'broken' AND NEW.status <> OLD.status) EXECUTE FUNCTION public.no();
"""


def test_a_run_that_cannot_be_rescued_is_logged_and_does_not_stop_the_others(
    db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    a_workflow(db, "broken")
    a_workflow(db, "fine")
    bad, good = a_run(db, Phase.PREPARING, workflow="broken"), a_run(db, Phase.PREPARING, workflow="fine")
    db.advance_clock(LEASE + TIMEOUT)
    with db.transaction() as tx:
        tx.execute(text(_REFUSE))
    try:
        with caplog.at_level(logging.ERROR):
            (ended,) = rescuer.recover_crashed_runs(db)
    finally:
        with db.transaction() as tx:
            tx.execute(text("DROP FUNCTION public.no() CASCADE"))
    assert ended.run_id == good.id
    assert str(bad.id) in caplog.text
    assert the_run(db, bad.id).status == "active"
    rescuer.recover_crashed_runs(db)


def test_a_locked_workflow_costs_one_wait_and_the_runs_of_others_are_rescued(
    db: Database, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Two runs are read at a time. The older ones are all of the workflow that another transaction holds."""
    a_workflow(db, "held", concurrency=4)
    a_workflow(db, "free")
    some_events(db, "m1", "m2", "m3", workflow="held")
    stuck = [a_run(db, Phase.PREPARING, workflow="held") for _ in range(3)]
    other = a_run(db, Phase.PREPARING, workflow="free")
    db.advance_clock(LEASE + TIMEOUT)
    hurried = Database.connect(database_url, lock_timeout=timedelta(milliseconds=200))
    hurried.clock_offset = db.clock_offset
    with db.transaction() as holder:
        holder.execute(text("SELECT 1 FROM pipeline.workflows WHERE name = 'held' FOR UPDATE"))
        (ended,) = rescuer.recover_crashed_runs(hurried, limit=2)
        assert rescuer.recover_crashed_runs(hurried, limit=10) == ()
    hurried.dispose()
    assert ended.run_id == other.id
    assert caplog.text.count("cannot be rescued") == 2, "one wait for each pass"
    assert {item.run_id for item in rescuer.recover_crashed_runs(db)} == {run.id for run in stuck}
