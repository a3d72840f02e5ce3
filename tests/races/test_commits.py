"""Commits beside deploys and beside each other: no deadlock, and no state is lost."""

from dataclasses import replace
from typing import Any

from sqlalchemy import text

from pipeline.domain.states import Phase
from pipeline.domain.values import HandlerSpec, NewEvent, RunOutput
from pipeline.store.database import Database, Transaction
from pipeline.store.reads import work
from pipeline.transitions import events, registration, runs
from tests.factories import IN, OUT, a_run, a_workflow, held, some_events, the_run
from tests.support.concurrent_transactions import meanwhile, raced, wait_until_blocked_by
from tests.support.transition_steps import a_handler


def test_a_deploy_that_changes_who_listens_waits_for_a_committing_worker_and_not_in_a_circle(db: Database) -> None:
    spec = a_workflow(db, concurrency=2)
    some_events(db, "m1", "m2")
    first, second = a_run(db, Phase.EMITTING), a_run(db, Phase.EMITTING)
    made = NewEvent(topic=OUT, message_id="made", payload={})
    late = replace(spec, handlers=(*spec.handlers, HandlerSpec(name="late", subscribes=(IN,))))
    with meanwhile(db, lambda tx: registration.register(tx, late)) as deploy:
        with db.transaction() as worker:
            runs.commit(worker, [RunOutput(lease=held(first), events=(made,))]).only()
            deployed = deploy()
            wait_until_blocked_by(db, worker)
            runs.commit(worker, [RunOutput(lease=held(second), events=(made,), state={"n": 1}, has_state=True)]).only()
        deployed.result(timeout=60)
    assert a_handler(db).state == {"n": 1}
    with db.transaction() as tx:
        assert (IN, "late") in work.subscriptions_by_name(tx, "billing")


def test_a_deploy_that_changes_nothing_does_not_wait_for_publishers(db: Database) -> None:
    spec = a_workflow(db)
    with db.transaction() as publisher:
        events.publish(publisher, "billing", [NewEvent(topic=IN, message_id="m1", payload={})])
        with db.transaction() as tx:
            tx.execute(text("SET LOCAL lock_timeout = '2s'"))
            registration.register(tx, spec)


def test_two_commits_at_once_fold_both_states(db: Database) -> None:
    a_workflow(db, concurrency=2)
    some_events(db, "m1", "m2")
    first, second = a_run(db, Phase.EMITTING), a_run(db, Phase.EMITTING)
    ended = raced(db, lambda tx: _counted(tx, first), lambda tx: _counted(tx, second))
    ended.result()
    assert a_handler(db).state == {"n": 2}
    assert [the_run(db, run.id).status for run in (first, second)] == ["committed", "committed"]


def _counted(tx: Transaction, run: Any) -> None:
    """A commit whose consumer counts its runs."""
    merge = {run.handler_id: lambda current, returned: {"n": (current or {"n": 0})["n"] + returned["n"]}}
    runs.commit(tx, [RunOutput(lease=held(run), state={"n": 1}, has_state=True)], merge=merge).only()
