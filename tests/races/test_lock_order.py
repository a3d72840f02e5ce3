"""One lock order for all transitions: by the text of statements, by whole transactions, and by holding rows."""

import importlib
from collections.abc import Callable
from pkgutil import iter_modules
from typing import Any

import pytest
from sqlalchemy import TextClause

from pipeline.background import rescuer
from pipeline.domain.failures import FailureKind
from pipeline.domain.lock_order import is_in_lock_order
from pipeline.domain.states import Evidence, Phase, PhaseTask
from pipeline.domain.values import AppliedMutation, FailedMutation, RunFailure, RunOutput
from pipeline.store import writes
from pipeline.store.database import Database, Statement, Transaction
from pipeline.testing import Does
from pipeline.transitions import mutations, reconciliation, resolution, runs, starts, stops, workflows
from pipeline.worker.crash_points import CrashPoint
from tests.factories import (
    LEASE,
    SOMEBODY,
    TIMEOUT,
    a_failure,
    a_request,
    a_run,
    a_workflow,
    applied,
    held,
    some_events,
    stopped,
    the_run,
)
from tests.support.concurrent_transactions import meanwhile, wait_until_blocked_by
from tests.support.row_locks import locked_tables, recorded_locks
from tests.support.scripted_consumers import Shop

Act = Callable[[Transaction, Any], object]

LOCK_WORKFLOW = Statement[Any]("SELECT 1 FROM pipeline.workflows FOR UPDATE")
LOCK_RUN = Statement[Any]("SELECT 1 FROM pipeline.runs FOR UPDATE NOWAIT")
LOCK_MUTATION = Statement[Any]("SELECT 1 FROM pipeline.mutations FOR UPDATE NOWAIT")
LOCK_EVENTS = Statement[Any]("SELECT 1 FROM pipeline.deliveries FOR UPDATE NOWAIT")


def crashed(db: Database) -> Any:
    run = a_run(db, Phase.MUTATING)
    db.advance_clock(LEASE + TIMEOUT)
    rescuer.recover_crashed_runs(db)
    return the_run(db, run.id)


def run_awaiting_retry(db: Database) -> Any:
    run = stopped(db, a_run(db, Phase.EMITTING), FailureKind.TRANSIENT)
    db.advance_clock(LEASE)
    return run


#: Verbs that start or stop runs wait for the workflow before they touch anything else.
WORKFLOW_FIRST: dict[str, tuple[Callable[[Database], Any], Act]] = {
    "start": (lambda db: a_run(db, Phase.COMMITTED), lambda tx, _: starts.start(tx, "billing", "send")),
    "retry": (run_awaiting_retry, lambda tx, run: starts.retry(tx, [run.id])),
    "stop": (
        lambda db: a_run(db, Phase.MUTATING),
        lambda tx, run: stops.stop(tx, [RunFailure(lease=held(run), failure=a_failure())]),
    ),
    "rescue": (lambda db: a_run(db, Phase.MUTATING), lambda tx, run: stops.rescue(tx, [run.id])),
    "escalate": (crashed, lambda tx, run: reconciliation.escalate(tx, [run.mutation_id], "asked")),
    "pause": (lambda db: a_run(db, Phase.PREPARED), lambda tx, _: workflows.pause(tx, "billing", SOMEBODY)),
    "resume": (lambda db: a_run(db, Phase.PREPARED), lambda tx, _: workflows.resume(tx, "billing", SOMEBODY)),
}

#: Verbs of a worker and of a person wait for the run before they touch its mutation or its events.
RUN_FIRST: dict[str, tuple[Callable[[Database], Any], Act]] = {
    "begin_mutation": (
        lambda db: a_run(db, Phase.PREPARED),
        lambda tx, run: mutations.begin_mutation(tx, [a_request(run)]),
    ),
    "apply": (
        lambda db: a_run(db, Phase.MUTATING),
        lambda tx, run: mutations.apply(tx, [AppliedMutation(mutation_id=run.mutation_id, fence=run.fence)]),
    ),
    "fail": (
        lambda db: a_run(db, Phase.MUTATING),
        lambda tx, run: mutations.fail(
            tx, [FailedMutation(mutation_id=run.mutation_id, error="", evidence=Evidence.DEFINITE, fence=run.fence)]
        ),
    ),
    "happened": (crashed, lambda tx, run: resolution.happened(tx, run.mutation_id, SOMEBODY)),
    "did_not_happen": (crashed, lambda tx, run: resolution.did_not_happen(tx, run.mutation_id, SOMEBODY)),
    "skip": (crashed, lambda tx, run: resolution.skip(tx, run.mutation_id, SOMEBODY)),
    "commit": (
        lambda db: a_run(db, Phase.EMITTING),
        lambda tx, run: runs.commit(tx, [RunOutput(lease=held(run))]),
    ),
    "no_mutation": (lambda db: a_run(db, Phase.PREPARED), lambda tx, run: runs.no_mutation(tx, [held(run)])),
    "stop": (
        lambda db: a_run(db, Phase.MUTATING),
        lambda tx, run: stops.stop(tx, [RunFailure(lease=held(run), failure=a_failure())]),
    ),
}


@pytest.mark.parametrize("verb", list(WORKFLOW_FIRST))
def test_a_transition_that_needs_the_workflow_locks_it_before_any_run(db: Database, verb: str) -> None:
    reach, act = WORKFLOW_FIRST[verb]
    a_workflow(db)
    some_events(db, "m1", "m2")
    run = reach(db)
    with meanwhile(db, lambda tx: act(tx, run)) as begin:
        with db.transaction() as holder:
            holder.all(LOCK_WORKFLOW)
            ended = begin()
            wait_until_blocked_by(db, holder)
            for lower in (LOCK_RUN, LOCK_MUTATION, LOCK_EVENTS):
                holder.all(lower)  # raises when the other side got there first
        ended.result(timeout=60)


@pytest.mark.parametrize("verb", list(RUN_FIRST))
def test_a_transition_locks_the_run_before_its_mutation_and_its_events(db: Database, verb: str) -> None:
    reach, act = RUN_FIRST[verb]
    a_workflow(db)
    some_events(db, "m1")
    run = reach(db)
    with meanwhile(db, lambda tx: act(tx, run)) as begin:
        with db.transaction() as holder:
            holder.all(LOCK_RUN)
            ended = begin()
            wait_until_blocked_by(db, holder)
            for lower in (LOCK_MUTATION, LOCK_EVENTS):
                holder.all(lower)
        ended.result(timeout=60)


def test_neither_a_publisher_nor_a_committing_worker_waits_for_the_workflow(db: Database) -> None:
    a_workflow(db)
    some_events(db, "m1")
    run = a_run(db, Phase.MUTATING)
    with db.transaction() as holder:
        holder.all(LOCK_WORKFLOW)
        some_events(db, "m2")
        run = applied(db, run)
        with db.transaction() as tx:
            (run,) = runs.claim(tx, PhaseTask.NEXT, [run.id], lease_duration=LEASE, worker="w").claimed
            runs.commit(tx, [RunOutput(lease=held(run))]).only()


def statements() -> dict[str, str]:
    """Every statement of the store's writes that locks rows."""
    modules = [importlib.import_module(f"{writes.__name__}.{found.name}") for found in iter_modules(writes.__path__)]
    return {
        f"{module.__name__.rpartition('.')[2]}.{name}": str(value)
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, TextClause) and locked_tables(str(value))
    }


def test_every_statement_locks_in_the_order() -> None:
    found = {name: locked_tables(sql) for name, sql in statements().items()}
    assert len(found) > 25, "the locks are found"
    assert found["mutations.APPLY"] == ["runs", "mutations"]
    assert {name: tables for name, tables in found.items() if not is_in_lock_order(tables)} == {}


def test_a_statement_against_the_order_would_be_noticed() -> None:
    wrong = (
        "WITH a AS (SELECT 1 FROM pipeline.mutations m JOIN pipeline.runs r ON true FOR NO KEY UPDATE OF m, r) SELECT"
    )
    assert locked_tables(wrong) == ["mutations", "runs"]
    assert not is_in_lock_order(locked_tables(wrong))
    nested = "SELECT 1 FROM pipeline.runs r WHERE EXISTS (SELECT FROM pipeline.blocks b) ORDER BY r.id FOR UPDATE"
    assert locked_tables(nested) == ["runs"]


def test_whole_transactions_lock_in_the_order(db: Database) -> None:
    shop = Shop(on_uncertain="contain", concurrency=4)
    shop.mail.will(Does.TIMES_OUT_BEFORE, Does.TIMES_OUT_AFTER, Does.REFUSES)
    shop.mail.cannot_tell(2)
    with recorded_locks(db) as transactions:
        run = shop.started(db, 6)
        with run.crash_at(CrashPoint.PREPARE_RAN):
            run.run()
        run.run_until_idle()
        run.sweeps.retention()
    assert {tuple(tables) for tables in transactions if not is_in_lock_order(tables)} == set()
    assert {table for tables in transactions for table in tables} >= {"workflows", "runs", "mutations", "handlers"}
