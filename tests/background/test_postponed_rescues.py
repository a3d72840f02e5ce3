"""After an outage in which no worker could extend its leases, living workers keep their runs."""

from datetime import timedelta
from typing import Any

import pytest

from pipeline.background.sweeps import PERIODS
from pipeline.domain.states import Phase
from pipeline.store.database import Database
from pipeline.testing import Inline
from pipeline.transitions import runs
from tests.factories import LEASE, a_run, a_workflow, held, some_events, the_run

EVERY = PERIODS["rescue"]


@pytest.fixture
def swept(db: Database) -> Inline:
    """A process whose rescue has just run, with runs of a living and of a dead worker."""
    a_workflow(db, concurrency=2)
    some_events(db, "m1", "m2")
    run = Inline(db, [])
    run.sweeps.outage = timedelta(seconds=5)
    assert run.sweeps.run("rescue") is not None
    return run


def next_report(run: Inline, pause: timedelta = EVERY) -> dict[str, int]:
    run.advance(pause)
    report = run.sweeps.run("rescue")
    assert report is not None
    return report.counts


def test_a_rescue_after_an_outage_waits_until_living_workers_could_extend_their_leases(
    db: Database, swept: Inline
) -> None:
    living, dead = a_run(db, Phase.PREPARING), a_run(db, Phase.PREPARING)
    assert next_report(swept, LEASE * 2) == {"postponed": 1}
    extend(db, living)
    assert next_report(swept) == {"postponed": 2}
    assert next_report(swept) == {"rescued": 1}
    assert (the_run(db, living.id).status, the_run(db, dead.id).status) == ("active", "crashed")


def test_a_rescue_that_is_not_late_is_not_postponed(db: Database, swept: Inline) -> None:
    run = a_run(db, Phase.PREPARING)
    assert next_report(swept, timedelta(seconds=5)) == {}
    with db.transaction() as tx:
        runs.expire_leases_of_process(tx, the_run(db, run.id).worker or "")
    assert next_report(swept) == {"rescued": 1}


def test_rescues_that_always_come_late_rescue_all_the_same(db: Database, swept: Inline) -> None:
    a_run(db, Phase.PREPARING)
    reports = [next_report(swept, LEASE * 2) for _ in range(6)]
    assert reports == [{"postponed": 1}, {"postponed": 2}, {"rescued": 1}, {"postponed": 1}, {"postponed": 2}, {}]


def extend(db: Database, run: Any) -> None:
    with db.transaction() as tx:
        runs.heartbeat(tx, [held(run)], lease_duration=LEASE).only()
