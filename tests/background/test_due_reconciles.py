"""Every due reconcile is done, postponed or escalated; none delays the others."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from pipeline import ReconcilePolicy, Retention, Workflow
from pipeline.background.reconciler import Reconciler
from pipeline.domain.policies import BreakerPolicy
from pipeline.domain.states import MutationId
from pipeline.store.database import Database
from pipeline.store.reads import ledger
from pipeline.testing import Does, Inline, RecordedEffect, scripted
from pipeline.testing.inline import TESTER
from pipeline.transitions import mutations, resolution
from tests.support.scripted_consumers import Shop
from tests.support.table_reads import one

WATCHFUL = ReconcilePolicy(max_attempts=1, monitor_after=(timedelta(minutes=10), timedelta(hours=24)))
NEVER = BreakerPolicy(min_unknown=1000)


def monitored_mutations(db: Database, orders: int = 1, **switches: Any) -> tuple[Shop, Inline]:
    """Mutations that were not found, resolved so, replaced, and are still monitored."""
    shop = Shop(on_uncertain="contain", concurrency=20, **switches)
    shop.mail = scripted("mail", timeout=timedelta(seconds=30), policy=WATCHFUL, breaker=NEVER)
    shop.mail.will(*[Does.TIMES_OUT_BEFORE] * orders)
    run = shop.started(db, orders)
    run.run()
    run.advance(timedelta(minutes=1))
    run.sweeps.reconcile()
    run.run()
    assert sum(row.next_monitor_at is not None for row in run.ledger()) == orders
    return shop, run


def doubted(db: Database, version: int = 2) -> tuple[Shop, Inline]:
    """A mutation in doubt that the background has reconciled once without a verdict."""
    shop = Shop(on_uncertain="contain", concurrency=2, version=version)
    shop.mail = scripted("mail", timeout=timedelta(seconds=30))
    shop.mail.will(Does.TIMES_OUT_BEFORE)
    shop.mail.cannot_tell(50)
    run = shop.started(db)
    run.run()
    run.sweeps.reconcile()
    assert (run.ledger()[0].status, run.ledger()[0].reconcile_attempts) == ("needs_reconcile", 1)
    return shop, run


def reconcile_every_minute(run: Inline, minutes: int) -> None:
    for _ in range(minutes):
        run.advance(timedelta(minutes=1))
        run.sweeps.reconcile()


def older(db: Database, run: Inline) -> Inline:
    """A worker of the version before."""
    shop = Shop(on_uncertain="contain", concurrency=2, version=1)
    return Inline(db, [shop.workflow], run.registry.connectors.values())


def resolve_and_finish(db: Database, run: Inline) -> None:
    with db.transaction() as tx:
        resolution.happened(tx, MutationId(run.ledger()[0].id), TESTER, {})
    run.run()
    run.sweeps.sessions()


def test_monitoring_ends_with_an_audit_row_when_the_connector_is_gone_from_the_code(db: Database) -> None:
    _, run = monitored_mutations(db)
    del run.registry.connectors["mail"]
    run.advance(timedelta(minutes=11))
    run.sweeps.reconcile()
    assert run.ledger()[0].next_monitor_at is None
    told = one(db, "SELECT reason, mutation_id FROM pipeline.audit WHERE act = 'mutation.monitoring_stopped'")
    assert (told.mutation_id, "mail.send is gone from the code" in told.reason) == (run.ledger()[0].id, True)
    run.sweeps.sessions()


def test_monitoring_without_spans_in_its_policy_does_the_due_check_and_ends(db: Database) -> None:
    _, run = monitored_mutations(db)
    silent = scripted("mail", timeout=timedelta(seconds=30), policy=ReconcilePolicy(monitor_after=()))
    run.registry.connectors["mail"] = silent
    run.advance(timedelta(minutes=11))
    run.sweeps.reconcile()
    assert (len(silent.reconciled_keys), run.ledger()[0].next_monitor_at) == (1, None)
    run.sweeps.sessions()


def test_watches_that_are_due_do_not_keep_a_doubt_waiting(db: Database) -> None:
    _, run = monitored_mutations(db, orders=3)
    run.advance(timedelta(minutes=11))
    other = Workflow("other", on_uncertain="contain", concurrency=2)
    topic = other.topic("bills")

    @other.effect(topic)
    def charge(ctx: Any, event: Any) -> Any:
        return ctx.pay.send(n=event.payload["n"])

    pay = scripted("pay", timeout=timedelta(seconds=30))
    pay.will(Does.TIMES_OUT_BEFORE)
    both = Inline(db, [other], [pay])
    both.publish(topic, {"n": 1})
    both.run()
    (doubt,) = [row.id for row in both.ledger() if row.status == "needs_reconcile"]
    with db.transaction() as tx:
        assert ledger.due_mutations(tx, limit=1)[0].id == doubt
        assert len(ledger.due_mutations(tx, limit=1)) == 2, "and a watch has its share"
    resolve_all(both)


def resolve_all(run: Inline) -> None:
    run.advance(timedelta(minutes=5))
    run.sweeps.reconcile()
    run.run()
    run.sweeps.sessions()


def test_a_monitor_check_that_raises_is_not_due_again_at_once(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    _, run = monitored_mutations(db)
    run.advance(timedelta(minutes=11))
    monkeypatch.setattr(Reconciler, "_monitor", _breaks)
    with pytest.raises(ZeroDivisionError):
        run.sweeps.reconcile()
    with db.transaction() as tx:
        assert ledger.due_mutations(tx) == []
    assert run.ledger()[0].next_monitor_at is not None
    run.sweeps.sessions()


def test_a_reconcile_that_always_raises_is_postponed_and_escalated(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, run = doubted(db)
    with monkeypatch.context() as patch:
        patch.setattr(Reconciler, "_reconcile_in_doubt", _breaks)
        for _ in range(70):
            run.advance(timedelta(minutes=1))
            if run.ledger()[0].status == "indeterminate":
                break
            with pytest.raises(ZeroDivisionError):
                run.sweeps.reconcile()
            with db.transaction() as tx:
                assert ledger.due_mutations(tx) == []
    assert run.ledger()[0].status == "indeterminate"
    assert "division by zero" in str(run.ledger()[0].error)
    resolve_and_finish(db, run)


def test_a_verdict_that_cannot_be_recorded_is_an_error_and_is_reconciled_again(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = Shop()
    shop.mail.will(Does.TIMES_OUT_AFTER)
    shop.mail.cannot_tell()
    run = shop.started(db)
    run.run()
    with monkeypatch.context() as patch:
        patch.setattr(mutations, "apply", _breaks)
        with pytest.raises(ZeroDivisionError):
            run.sweeps.reconcile()
    with db.transaction() as tx:
        assert ledger.due_mutations(tx) == []
    resolve_all(run)
    assert run.ledger()[0].status == "applied"


def test_a_doubt_that_was_reconciled_before_a_rollback_is_escalated(db: Database) -> None:
    _, run = doubted(db)
    old = older(db, run)
    reconcile_every_minute(old, 55)
    assert run.ledger()[0].status == "needs_reconcile"
    reconcile_every_minute(old, 10)
    assert run.ledger()[0].status == "indeterminate"
    assert "no worker that knows the workflow 'shop' has reconciled it" in str(run.ledger()[0].error)
    resolve_and_finish(db, run)


def test_how_long_reconciling_is_deferred_does_not_depend_on_the_audit(db: Database) -> None:
    _, run = doubted(db)
    old = older(db, run)
    reconcile_every_minute(old, 30)
    since = run.ledger()[0].reconcile_deferred_since
    assert since is not None
    with db.transaction() as tx:
        tx.execute(text("SET LOCAL session_replication_role = replica; DELETE FROM pipeline.audit"))
    reconcile_every_minute(old, 25)
    assert (run.ledger()[0].status, run.ledger()[0].reconcile_deferred_since) == ("needs_reconcile", since)
    reconcile_every_minute(old, 10)
    assert run.ledger()[0].status == "indeterminate"
    resolve_and_finish(db, run)


def test_a_worker_that_cannot_reconcile_does_not_escalate_what_another_worker_reconciles(db: Database) -> None:
    _, run = doubted(db)
    old = older(db, run)
    for _ in range(3):
        reconcile_every_minute(old, 40)
        run.sweeps.reconcile_one(MutationId(run.ledger()[0].id))
        run.advance(timedelta(seconds=40))
        run.sweeps.reconcile_one(MutationId(run.ledger()[0].id))
    assert run.ledger()[0].reconcile_attempts == 4
    assert run.ledger()[0].status == "needs_reconcile"
    resolve_and_finish(db, run)


def test_a_worker_that_cannot_reconcile_does_not_end_an_operators_try_again(db: Database) -> None:
    _, run = doubted(db)
    old = older(db, run)
    reconcile_every_minute(old, 65)
    with db.transaction() as tx:
        resolution.try_again(tx, MutationId(run.ledger()[0].id), TESTER)
    reconcile_every_minute(old, 50)
    assert run.ledger()[0].status == "needs_reconcile"
    reconcile_every_minute(old, 15)
    assert run.ledger()[0].status == "indeterminate"
    resolve_and_finish(db, run)


def test_an_alarm_names_both_sides_however_short_the_retention(db: Database) -> None:
    brief = Retention(done=timedelta(hours=1), ledger=timedelta(hours=1))
    shop, run = monitored_mutations(db, retention=brief)
    first = run.ledger()[0]
    run.sweeps.sessions()
    run.advance(timedelta(hours=3))
    run.sweeps.reconcile()
    run.sweeps.retention()
    assert [row.status for row in run.ledger()] == ["failed", "applied"]
    run.advance(timedelta(hours=24))
    shop.mail.effects.append(RecordedEffect(operation="send", key=first.idempotency_key, params=first.params))
    run.sweeps.retention()
    run.sweeps.reconcile()
    evidence = one(db, "SELECT evidence FROM pipeline.audit WHERE act = 'mutation.found_late'").evidence
    assert evidence["replacement_mutation"] == str(run.ledger()[-1].id)
    with db.transaction() as tx:
        resolution.acknowledge(tx, MutationId(first.id), TESTER)


def test_a_mutation_that_is_no_longer_monitored_is_pruned(db: Database) -> None:
    brief = Retention(done=timedelta(hours=1), ledger=timedelta(hours=1))
    shop, run = monitored_mutations(db, retention=brief)
    run.sweeps.sessions()
    for _ in range(4):
        run.advance(timedelta(hours=30))
        run.sweeps.reconcile()
        run.sweeps.retention()
    assert (run.ledger(), run.events(shop.orders), run.runs()) == ([], [], [])


def _breaks(*_: Any, **__: Any) -> int:
    raise ZeroDivisionError("division by zero")
