"""Scheduler and sweeps: what they start, repair and dispatch, one bounded pass at a time."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import text

from pipeline import Workflow
from pipeline.background import rescuer
from pipeline.background.messages import DispatchMessage
from pipeline.background.scheduler import Scheduler
from pipeline.background.sweeps import PERIODS, Sweeps
from pipeline.connectors.sdk import Call, Connector, mutation
from pipeline.domain.policies import Backoff, ReconcilePolicy
from pipeline.domain.reconciliation import Applied, NotFound, Retry
from pipeline.domain.states import MutationId, Phase
from pipeline.store.database import Database
from pipeline.store.reads import work
from pipeline.transitions import runs
from pipeline.workflows.registry import Registry
from tests.factories import (
    LEASE,
    TIMEOUT,
    a_run,
    a_workflow,
    event_status,
    held,
    some_events,
    stopped,
    the_mutation,
    the_run,
)
from tests.support.rule import rule
from tests.support.table_reads import one, status_of


class Mail(Connector):
    """An outside system whose verdict is set by the test."""

    name = "mail"
    verdict: Any = None

    @mutation(policy=ReconcilePolicy(max_attempts=2, backoff=Backoff(base=timedelta(minutes=10), jitter=0)))
    def send(self, call: Call, *, to: str) -> None:
        """Never called here."""

    @send.reconcile
    def find(self, call: Call, *, to: str) -> Any:
        """Return the verdict that the test sets."""
        del call, to
        if isinstance(self.verdict, BaseException):
            raise self.verdict
        return self.verdict


@pytest.fixture
def dispatched() -> list[DispatchMessage]:
    return []


@pytest.fixture
def sweeps(db: Database, dispatched: list[DispatchMessage]) -> Sweeps:
    registry = Registry()
    registry.add(_billing())
    registry.add_connector(Mail())
    made = Sweeps(
        db=db,
        registry=registry,
        scheduler=Scheduler(db, dispatched.append, cohort_time=LEASE),
        jitter=lambda: 0.0,
        redispatch_after=timedelta(seconds=60),
        dispatch_reconcile=lambda ids: _reconciled(made, ids),
    )
    return made


def _billing() -> Workflow:
    """The workflow whose rows the factories make: it must be known here for its mutations to be reconciled."""
    billing = Workflow("billing")
    billing.effect(billing.topic("in"))(lambda ctx, event: None)
    return billing


def test_of_two_beats_one_runs_the_sweep(sweeps: Sweeps, db: Database) -> None:
    assert sweeps.run("sessions") is not None
    assert sweeps.run("sessions") is None
    db.advance_clock(PERIODS["sessions"])
    assert sweeps.run("sessions") is not None


def test_a_sweep_that_never_ran_or_not_for_long_is_late(sweeps: Sweeps, db: Database) -> None:
    for name in PERIODS:
        sweeps.run(name)
    periods = {**dict.fromkeys(PERIODS, timedelta(days=1)), "tick": timedelta(minutes=1)}
    with db.transaction() as tx:
        assert work.overdue_sweeps(tx, periods) == []
    db.advance_clock(timedelta(minutes=4))
    with db.transaction() as tx:
        assert work.overdue_sweeps(tx, periods) == ["tick"]


def test_due_runs_are_started_and_dispatched_in_cohorts(
    sweeps: Sweeps, db: Database, dispatched: list[DispatchMessage]
) -> None:
    a_workflow(db, concurrency=5, batch=2)
    some_events(db, *[f"m{n}" for n in range(7)])
    sweeps.scheduler.schedule(["billing"])
    assert [(message.task, len(message.run_ids)) for message in dispatched] == [
        ("pipeline.prepare", 3),
        ("pipeline.prepare", 1),
    ]


def test_a_run_whose_message_was_lost_is_redispatched(
    sweeps: Sweeps, db: Database, dispatched: list[DispatchMessage]
) -> None:
    a_workflow(db)
    some_events(db, "m1")
    run = a_run(db, Phase.PENDING)
    sweeps.tick()
    assert dispatched == []
    db.advance_clock(timedelta(seconds=61))
    sweeps.tick()
    assert [(message.task, message.run_ids) for message in dispatched] == [("pipeline.prepare", (str(run.id),))]
    sweeps.tick()
    assert len(dispatched) == 1, "rung for a moment ago"


@pytest.mark.parametrize(
    ("phase", "task"),
    [(Phase.PREPARED, "pipeline.mutate"), (Phase.MUTATED, "pipeline.next"), (Phase.EMITTING, "pipeline.next")],
)
def test_a_chain_that_broke_is_taken_up_where_it_broke(
    sweeps: Sweeps, db: Database, dispatched: list[DispatchMessage], phase: Phase, task: str
) -> None:
    a_workflow(db)
    some_events(db, "m1")
    run = a_run(db, phase)
    if run.lease_expires_at:
        with db.transaction() as tx:
            runs.hand_back(tx, [held(run)]).only()
    db.advance_clock(timedelta(seconds=61))
    sweeps.tick()
    assert [(message.task, message.run_ids) for message in dispatched] == [(task, (str(run.id),))]


def test_a_rescue_starts_a_run_for_the_inputs_it_released(
    sweeps: Sweeps, db: Database, dispatched: list[DispatchMessage]
) -> None:
    a_workflow(db)
    (event,) = some_events(db, "m1")
    a_run(db, Phase.PREPARED)
    db.advance_clock(LEASE + TIMEOUT)
    assert sweeps.rescue().counts == {"rescued": 1}
    assert event_status(db, event) == "pending"
    assert [message.task for message in dispatched] == ["pipeline.prepare"]


def test_runs_of_a_dead_process_are_recovered_before_their_lease_lapses(sweeps: Sweeps, db: Database) -> None:
    a_workflow(db)
    some_events(db, "m1")
    run = a_run(db, Phase.EMITTING)
    assert sweeps.recover_process("somebody else").counts == {}
    assert sweeps.recover_process("w").counts == {"rescued": 1}
    assert the_run(db, run.id).status == "crashed"


@rule("R-15")
def test_a_reconcile_that_finds_the_effect_resolves_it(sweeps: Sweeps, db: Database) -> None:
    run = in_doubt(db)
    answer(sweeps, Applied({"id": 1}))
    sweeps.reconcile()
    assert the_mutation(db, run.mutation_id).status == "applied"
    assert status_of(db) == "active"


def test_a_reconcile_that_finds_nothing_releases_the_inputs(sweeps: Sweeps, db: Database) -> None:
    run = in_doubt(db)
    answer(sweeps, NotFound())
    sweeps.reconcile()
    assert the_mutation(db, run.mutation_id).status == "failed"
    assert event_status(db, run.event_ids[0]) == "pending"


@rule("R-10", "R-11", "R-13")
@pytest.mark.parametrize("verdict", [Retry(), RuntimeError("away"), "nonsense", None])
def test_reconciles_without_a_verdict_have_growing_pauses_and_are_escalated(
    sweeps: Sweeps, db: Database, verdict: Any
) -> None:
    run = in_doubt(db)
    answer(sweeps, verdict)
    sweeps.reconcile()
    first = the_mutation(db, run.mutation_id)
    assert (first.status, first.reconcile_attempts) == ("needs_reconcile", 1)
    sweeps.reconcile()
    assert the_mutation(db, run.mutation_id).reconcile_attempts == 1, "the next look is booked, not due"
    db.advance_clock(timedelta(minutes=11))
    sweeps.reconcile()
    assert the_mutation(db, run.mutation_id).status == "indeterminate"
    assert status_of(db) == "paused"


@rule("R-14")
def test_a_mutation_whose_connector_is_gone_from_the_code_is_escalated(sweeps: Sweeps, db: Database) -> None:
    run = in_doubt(db)
    sweeps.registry.connectors.clear()
    sweeps.reconcile()
    assert the_mutation(db, run.mutation_id).status == "indeterminate"


def test_a_reconcile_of_an_unknown_mutation_does_nothing(sweeps: Sweeps) -> None:
    assert sweeps.reconcile_one(MutationId(UUID(int=7))).counts == {}


def test_the_doctor_logs_its_findings_and_repairs_nothing(sweeps: Sweeps, db: Database) -> None:
    a_workflow(db)
    assert sweeps.doctor().counts == {}


def test_maintenance_is_attended_and_watermarks_rise(sweeps: Sweeps, db: Database) -> None:
    a_workflow(db)
    stopped(db, a_run(db, Phase.PREPARING))
    assert sweeps.maintenance().counts == {}, "the task was opened with the failure"
    with db.transaction() as tx:
        tx.execute(text("DELETE FROM pipeline.maintenance_tasks"))
    assert sweeps.maintenance().counts == {"tasks opened": 1}
    sweeps.retention()
    assert one(db, "SELECT horizon FROM pipeline.handlers WHERE name = 'send'").horizon is not None


def _reconciled(sweeps: Sweeps, ids: Sequence[str]) -> None:
    for mutation_id in ids:
        sweeps.reconcile_one(MutationId(UUID(mutation_id)))


def in_doubt(db: Database) -> Any:
    a_workflow(db)
    some_events(db, "m1")
    run = a_run(db, Phase.MUTATING, params={"to": "x"})
    db.advance_clock(LEASE + TIMEOUT)
    rescuer.recover_crashed_runs(db)
    return the_run(db, run.id)


def answer(sweeps: Sweeps, verdict: Any) -> None:
    sweeps.registry.connectors["mail"].verdict = verdict  # type: ignore[attr-defined]
