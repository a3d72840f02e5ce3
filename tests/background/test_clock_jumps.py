"""Postgres's clock is set back or jumps ahead: no run is forgotten, and no absence counts too early."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest

from pipeline.background import redispatcher, rescuer
from pipeline.domain.errors import QuietPeriodError
from pipeline.domain.states import MutationId, Phase
from pipeline.store.database import Database, Statement, Transaction, interval
from pipeline.store.reads import invariants
from pipeline.testing import Does
from pipeline.transitions import resolution, runs
from tests.factories import LEASE, SOMEBODY, a_run, a_workflow, held, some_events
from tests.support.mutations_in_doubt import a_shop, the_mutation
from tests.support.scripted_consumers import Shop

HOUR = timedelta(hours=1)
SECOND = timedelta(seconds=1)
_SET_OFFSET = Statement[Any]("SELECT set_config('pipeline.clock_offset', :offset, true)")


class JumpingDatabase(Database):
    """A database whose clock moves without those of the hosts."""

    jump = timedelta(0)

    @contextmanager
    def transaction(self, *, is_autocommit: bool = False) -> Iterator[Transaction]:  # noqa: ARG002 - one transaction
        with super().transaction() as tx:
            tx.all(_SET_OFFSET, offset=interval(self.clock_offset + self.jump))
            yield tx

    autocommit = transaction  # a statement alone would have the clock of Postgres


def findings(db: Database) -> list[str]:
    with db.transaction() as tx:
        return [finding.invariant for finding in invariants.findings(tx)]


@pytest.mark.parametrize("phase", [Phase.PREPARING, Phase.MUTATING, Phase.EMITTING])
def test_a_run_of_a_dead_machine_is_rescued_within_two_leases_of_a_clock_set_back(db: Database, phase: Phase) -> None:
    a_workflow(db)
    some_events(db, "m1")
    db.advance_clock(HOUR)
    a_run(db, phase)
    db.clock_offset = timedelta(0)
    assert findings(db) == ["leases-are-recovered"]
    assert rescuer.recover_crashed_runs(db) == ()
    assert findings(db) == []
    db.advance_clock(LEASE + SECOND)
    (ended,) = rescuer.recover_crashed_runs(db)
    assert ended.run.phase == phase


def test_a_worker_that_lives_keeps_its_run_when_the_clock_is_set_back(db: Database) -> None:
    a_workflow(db)
    some_events(db, "m1")
    db.advance_clock(HOUR)
    run = a_run(db, Phase.MUTATING)
    db.clock_offset = timedelta(0)
    for _ in range(10):
        assert rescuer.recover_crashed_runs(db) == ()
        with db.transaction() as tx:
            assert runs.heartbeat(tx, [held(run)], lease_duration=LEASE).refused == {}
        db.advance_clock(LEASE / 3)
    db.advance_clock(LEASE)
    assert len(rescuer.recover_crashed_runs(db)) == 1


def test_a_run_whose_message_was_lost_is_redispatched_after_the_clock_was_set_back(db: Database) -> None:
    jumping = JumpingDatabase(db.engine)
    jumping.jump = HOUR
    run = Shop().started(jumping)
    run.scheduler.schedule(["shop"])
    run.messages.clear()
    jumping.jump = timedelta(0)
    assert redispatcher.redispatch(jumping, run.scheduler, redispatch_after=LEASE) == 1
    assert redispatcher.redispatch(jumping, run.scheduler, redispatch_after=LEASE) == 0


@pytest.mark.parametrize(
    ("before", "after", "hosts"),
    [
        pytest.param(timedelta(0), HOUR, timedelta(0), id="postgres-jumps-ahead"),
        pytest.param(-HOUR, timedelta(0), timedelta(0), id="postgres-was-behind-and-is-corrected"),
        pytest.param(timedelta(0), -HOUR, HOUR, id="the-hosts-jump-ahead"),
    ],
)
def test_absence_counts_only_after_the_quiet_period_whatever_one_clock_does(
    db: Database, before: timedelta, after: timedelta, hosts: timedelta
) -> None:
    jumping = JumpingDatabase(db.engine)
    jumping.jump = before
    shop = a_shop(settle=timedelta(minutes=3))
    shop.mail.will(Does.TIMES_OUT_BEFORE)
    run = shop.started(jumping)
    run.run()
    jumping.jump = after
    jumping.advance_clock(hosts)
    for _ in range(3):
        run.sweeps.reconcile()
        assert (the_mutation(run).status, the_mutation(run).reconcile_attempts) == ("needs_reconcile", 0)
        with pytest.raises(QuietPeriodError), jumping.transaction() as tx:
            resolution.did_not_happen(tx, MutationId(the_mutation(run).id), SOMEBODY)
    assert len(shop.mail.reconciled_keys) == 2, (
        "the immediate attempt and one more: the next waits for the end of the period"
    )
    run.advance(timedelta(minutes=5))
    run.sweeps.reconcile()
    assert the_mutation(run).status == "failed"
