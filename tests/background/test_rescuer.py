"""Recovery continues past a run that it cannot rescue."""

import logging

import pytest
from sqlalchemy import text

from pipeline.background import rescuer
from pipeline.domain.states import Phase
from pipeline.store.database import Database
from tests.factories import LEASE, TIMEOUT, a_run, a_workflow, the_run

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
