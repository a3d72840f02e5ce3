"""A process without the code of a workflow gives a reconcile attempt to one that has it. It is made once."""

from datetime import timedelta
from typing import Any

from pipeline import ReconcilePolicy
from pipeline.background.messages import ReconcileMessage
from pipeline.domain.states import MutationId
from pipeline.store.database import Database
from pipeline.testing import Does, Inline, assert_consumed, scripted
from pipeline.testing.inline import TESTER
from pipeline.transitions import reconciliation, resolution
from tests.support.mutations_in_doubt import a_shop, the_mutation
from tests.support.scripted_consumers import Shop


def stranger_of(db: Database, *workflows: Any) -> tuple[Inline, list[ReconcileMessage]]:
    """A worker that knows other workflows, and what it redispatches."""
    stranger, redispatched = Inline(db, workflows), list[ReconcileMessage]()
    stranger.sweeps.redispatch_reconcile = redispatched.append
    return stranger, redispatched


def in_doubt(db: Database, **bounds: Any) -> tuple[Shop, Inline, MutationId]:
    shop = a_shop(**bounds)
    shop.mail.will(Does.TIMES_OUT_AFTER)
    shop.mail.cannot_tell()
    run = shop.started(db)
    run.run()
    run.advance(timedelta(minutes=1))
    return shop, run, MutationId(the_mutation(run).id)


def test_an_attempt_that_a_process_does_not_know_is_made_at_once_by_one_that_does(db: Database) -> None:
    shop, run, doubt = in_doubt(db)
    stranger, redispatched = stranger_of(db)
    assert stranger.sweeps.reconcile_one(doubt).counts == {"unknown workflow": 1}
    (message,) = redispatched
    assert (message.mutation_id, message.workflow, message.version) == (str(doubt), "shop", 1)
    assert message.deferred_until == the_mutation(run).next_reconcile_at > run.now()
    assert run.sweeps.reconcile_one(doubt).counts == {}, "without the time of the deferral it is not due"
    assert run.sweeps.reconcile_one(doubt, message.deferred_until).counts == {"reconciled": 1}
    assert the_mutation(run).status == "applied"
    run.run_until_idle()
    assert_consumed(run, shop.orders)


def test_a_message_that_comes_twice_to_a_stranger_does_not_void_the_redispatched_attempt(db: Database) -> None:
    shop, run, doubt = in_doubt(db)
    stranger, redispatched = stranger_of(db)
    stranger.sweeps.reconcile_one(doubt)
    stranger.advance(timedelta(seconds=1))
    stranger.sweeps.reconcile_one(doubt)
    (message,) = redispatched
    assert run.sweeps.reconcile_one(doubt, message.deferred_until).counts == {"reconciled": 1}
    run.run_until_idle()
    assert_consumed(run, shop.orders)


def test_a_redispatched_attempt_that_arrives_twice_is_made_once(db: Database) -> None:
    shop, run, doubt = in_doubt(db)
    shop.mail.cannot_tell(2)
    stranger, redispatched = stranger_of(db)
    stranger.sweeps.reconcile_one(doubt)
    until, asked = redispatched[0].deferred_until, len(shop.mail.reconciled_keys)
    counts = [run.sweeps.reconcile_one(doubt, until).counts for _ in range(2)]
    assert counts == [{"reconciled": 1}, {}]
    assert len(shop.mail.reconciled_keys) == asked + 1
    assert the_mutation(run).reconcile_deferred_since is None
    run.advance(timedelta(hours=1))
    run.run_until_idle()


def test_a_message_that_comes_before_the_next_attempt_is_due_is_not_redispatched(db: Database) -> None:
    shop, run, doubt = in_doubt(db)
    shop.mail.cannot_tell()
    run.sweeps.reconcile()
    stranger, redispatched = stranger_of(db)
    stranger.sweeps.reconcile_one(doubt)
    assert redispatched == []
    run.advance(timedelta(hours=1))
    run.run_until_idle()


def test_an_attempt_that_was_booked_meanwhile_is_not_deferred(db: Database) -> None:
    shop, run, _ = in_doubt(db)
    shop.mail.cannot_tell()
    stale = the_mutation(run)
    run.sweeps.reconcile()
    booked = the_mutation(run)
    with db.transaction() as tx:
        assert reconciliation.defer(tx, stale, "no worker has looked") is None
    assert the_mutation(run) == booked
    run.advance(timedelta(hours=1))
    run.run_until_idle()


def test_an_older_version_redispatches_to_the_registered_version(db: Database) -> None:
    newer = Shop(version=2)
    newer.mail.will(Does.TIMES_OUT_AFTER)
    newer.mail.cannot_tell()
    run = newer.started(db)
    run.run()
    run.advance(timedelta(minutes=1))
    older, redispatched = stranger_of(db, Shop(version=1).workflow)
    older.sweeps.reconcile_one(MutationId(the_mutation(run).id))
    assert [(message.workflow, message.version) for message in redispatched] == [("shop", 2)]
    run.run_until_idle()


def test_a_doubt_that_no_process_knows_is_redispatched_until_it_is_escalated(db: Database) -> None:
    _, run, doubt = in_doubt(db)
    stranger, redispatched = stranger_of(db)
    for _ in range(70):
        stranger.sweeps.reconcile()
        stranger.advance(timedelta(minutes=1))
    assert the_mutation(run).status == "indeterminate"
    assert 55 <= len(redispatched) <= 62
    with db.transaction() as tx:
        resolution.happened(tx, doubt, TESTER, {})
    run.run_until_idle()


def test_a_doubt_whose_budget_is_spent_is_escalated_by_a_redispatched_attempt(db: Database) -> None:
    shop, run, doubt = in_doubt(db, policy=ReconcilePolicy(max_attempts=1))
    shop.mail.cannot_tell()
    with db.transaction() as tx:
        reconciliation.book(tx, [(doubt, 0, timedelta(0))])
    run.advance(timedelta(minutes=1))
    stranger, redispatched = stranger_of(db)
    stranger.sweeps.reconcile_one(doubt)
    run.sweeps.reconcile_one(doubt)
    assert the_mutation(run).status == "needs_reconcile", "the last attempt may still be under way"
    run.sweeps.reconcile_one(doubt, redispatched[0].deferred_until)
    assert the_mutation(run).status == "indeterminate"
    with db.transaction() as tx:
        resolution.happened(tx, doubt, TESTER, {})
    run.run_until_idle()


def test_a_monitor_check_that_a_process_does_not_know_is_made_once_by_one_that_does(db: Database) -> None:
    shop = Shop(on_uncertain="contain", concurrency=2)
    watchful = ReconcilePolicy(max_attempts=1, monitor_after=(timedelta(minutes=10),))
    shop.mail = scripted("mail", timeout=timedelta(seconds=30), policy=watchful)
    shop.mail.will(Does.TIMES_OUT_BEFORE)
    run = shop.started(db)
    run.run()
    run.advance(timedelta(minutes=1))
    run.sweeps.reconcile()
    run.run()
    run.advance(timedelta(minutes=11))
    monitored = MutationId(run.ledger()[0].id)
    stranger, redispatched = stranger_of(db)
    for _ in range(2):
        stranger.sweeps.reconcile_one(monitored)
    (message,) = redispatched
    assert run.sweeps.reconcile_one(monitored).counts == {}
    assert run.sweeps.reconcile_one(monitored, message.deferred_until).counts == {"monitored": 1}
    assert run.sweeps.reconcile_one(monitored, message.deferred_until).counts == {}
    assert run.ledger()[0].next_monitor_at is None
    run.sweeps.sessions()
