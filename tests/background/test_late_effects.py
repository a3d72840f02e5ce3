"""Mutations resolved on weak evidence are monitored; a late effect is an alarm that names both sides."""

from datetime import timedelta
from typing import Any

import pytest

from pipeline import Backoff, ReconcilePolicy
from pipeline.background.notifier import Notice
from pipeline.domain.errors import IllegalTransitionError
from pipeline.domain.policies import FailurePolicy
from pipeline.domain.states import MutationId
from pipeline.store.database import Database
from pipeline.store.reads import invariants
from pipeline.testing import Does, Inline, RecordedEffect, assert_consumed, assert_deliveries, scripted
from pipeline.testing.inline import TESTER
from pipeline.transitions import late_effects, resolution
from pipeline.worker.crash_points import CrashPoint
from tests.support.scripted_consumers import Shop
from tests.support.table_reads import one

WATCHFUL = ReconcilePolicy(max_attempts=1, monitor_after=(timedelta(minutes=10), timedelta(hours=1)))


def resolved_mutation(
    db: Database, how: str = "did_not_happen", policy: ReconcilePolicy = WATCHFUL
) -> tuple[Shop, Inline, Any]:
    """A mutation that was not found and that an operator resolved; its order was replaced if it was not skipped."""
    shop = Shop()
    shop.mail = scripted("mail", timeout=timedelta(seconds=30), policy=policy)
    shop.mail.will(Does.TIMES_OUT_BEFORE)
    shop.mail.cannot_tell(2)
    run = shop.started(db)
    run.run()
    run.sweeps.reconcile()
    (row,) = run.ledger()
    assert row.status == "indeterminate"
    run.advance(timedelta(minutes=1))
    with db.transaction() as tx:
        getattr(resolution, how)(tx, MutationId(row.id), TESTER)
    run.run()
    assert_deliveries(run, shop.orders, "skipped" if how == "skip" else "consumed")
    return shop, run, row


def arrives_late(shop: Shop, row: Any) -> None:
    """The request was under way all the time."""
    shop.mail.effects.append(RecordedEffect(operation="send", key=row.idempotency_key, params=row.params))


def findings(run: Inline) -> list[invariants.Finding]:
    run.sweeps.sessions()
    with run.db.transaction() as tx:
        return invariants.findings(tx)


@pytest.mark.broken_on_purpose
@pytest.mark.parametrize("how", ["did_not_happen", "skip"])
def test_a_late_effect_is_an_alarm_that_names_both_sides(db: Database, how: str) -> None:
    shop, run, row = resolved_mutation(db, how)
    arrives_late(shop, row)
    run.sweeps.reconcile()
    assert findings(run) == [], "it is not looked for before its time"
    run.advance(timedelta(minutes=11))
    run.sweeps.reconcile()
    (finding,) = findings(run)
    assert (finding.invariant, finding.severity) == ("failed-mutations-have-no-late-effect", "broken")
    assert str(row.id) in finding.subject
    evidence = one(db, "SELECT evidence FROM pipeline.audit WHERE act = 'mutation.found_late'").evidence
    again = run.ledger()[-1]
    assert evidence["resolved_by"] == ("operator_skip" if how == "skip" else "operator")
    assert evidence["found"] == {"id": row.idempotency_key}
    assert evidence["replacement_mutation"] == (str(again.id) if how == "did_not_happen" else None)


@pytest.mark.broken_on_purpose
def test_operators_are_notified_of_a_late_effect_once(db: Database) -> None:
    shop, run, row = resolved_mutation(db)
    arrives_late(shop, row)
    run.advance(timedelta(minutes=11))
    run.sweeps.reconcile()
    told: list[Notice] = []
    run.sweeps.notifier = _Told(told)
    run.sweeps.notices()
    run.sweeps.notices()
    (notice,) = [notice for notice in told if notice.kind == "late_effect"]
    assert "mail.send seems to have happened after all" in notice.reason
    assert row.idempotency_key in notice.reason
    assert f"run {run.ledger()[-1].run_id} did the same again (applied): there are two" in notice.reason


def test_an_acknowledged_late_effect_needs_no_attention(db: Database) -> None:
    shop, run, row = resolved_mutation(db)
    arrives_late(shop, row)
    run.advance(timedelta(minutes=11))
    run.sweeps.reconcile()
    with db.transaction() as tx:
        resolution.acknowledge(tx, MutationId(row.id), TESTER)
    assert findings(run) == []
    with pytest.raises(IllegalTransitionError, match="acknowledge"), db.transaction() as tx:
        resolution.acknowledge(tx, MutationId(row.id), TESTER)


def test_monitoring_ends_after_its_last_span(db: Database) -> None:
    shop, run, _ = resolved_mutation(db)
    looks = len(shop.mail.reconciled_keys)
    spans = []
    for _ in range(5):
        run.advance(timedelta(hours=2))
        run.sweeps.reconcile()
        spans.append(len(shop.mail.reconciled_keys) - looks)
    assert spans == [1, 2, 2, 2, 2]
    run.sweeps.sessions()
    assert run.ledger()[0].next_monitor_at is None


def test_a_mutation_that_the_outside_system_refused_is_not_monitored(db: Database) -> None:
    shop = Shop(failures=FailurePolicy(backoff=Backoff(base=timedelta(minutes=10))))
    shop.mail.will(Does.FAILS)
    run = shop.started(db)
    run.run()
    assert [row.next_monitor_at for row in run.ledger()] == [None]
    run.run_until_idle()
    assert_consumed(run, shop.orders)


def test_a_mutation_that_was_not_found_is_monitored_too(db: Database) -> None:
    shop = Shop()
    shop.mail = scripted("mail", timeout=timedelta(seconds=30), policy=WATCHFUL)
    shop.mail.will(Does.TIMES_OUT_BEFORE)
    run = shop.started(db)
    run.run()
    run.advance(timedelta(minutes=1))
    run.sweeps.reconcile()
    first = run.ledger()[0]
    assert (first.status, first.resolved_by) == ("failed", "reconcile")
    assert first.next_monitor_at is not None
    run.run_until_idle()
    assert_consumed(run, shop.orders)


@pytest.mark.broken_on_purpose
def test_a_late_result_of_a_call_that_was_resolved_as_failed_is_an_alarm(db: Database) -> None:
    """A process with the result froze for so long that an operator resolved it."""
    shop = Shop()
    shop.mail = scripted("mail", can_reconcile=False)
    run = shop.started(db)

    def freeze(point: CrashPoint) -> None:
        if point is CrashPoint.CALLED and not run.ledger()[0].resolved_by:
            run.advance(timedelta(minutes=15))
            run.sweeps.rescue()
            with db.transaction() as tx:
                resolution.did_not_happen(tx, MutationId(run.ledger()[0].id), TESTER)

    with run.on_crash_points(freeze):
        run.run()
    assert [finding.invariant for finding in findings(run)] == ["failed-mutations-have-no-late-effect"]
    assert run.ledger()[0].late_result == {"id": run.ledger()[0].idempotency_key}


def test_a_monitor_check_without_a_verdict_is_repeated(db: Database) -> None:
    shop, run, row = resolved_mutation(db)
    shop.mail.cannot_tell(3)
    run.advance(timedelta(minutes=11))
    for _ in range(3):
        run.sweeps.reconcile()
        run.advance(timedelta(minutes=11))
    assert (run.ledger()[0].monitor_attempts, run.ledger()[0].next_monitor_at is None) == (0, False)
    arrives_late(shop, row)
    run.sweeps.reconcile()
    assert run.ledger()[0].found_late_at is not None
    with db.transaction() as tx:
        resolution.acknowledge(tx, MutationId(row.id), TESTER)
    run.sweeps.sessions()


def test_a_check_of_short_monitoring_is_repeated_before_its_whole_span_is_over(db: Database) -> None:
    short = ReconcilePolicy(max_attempts=1, monitor_after=(timedelta(seconds=20), timedelta(seconds=40)))
    shop, run, row = resolved_mutation(db, policy=short)
    shop.mail.cannot_tell(1)
    run.advance(timedelta(seconds=21))
    run.sweeps.reconcile()
    arrives_late(shop, row)
    run.advance(timedelta(seconds=21))
    run.sweeps.reconcile()
    assert run.ledger()[0].found_late_at is not None
    with db.transaction() as tx:
        resolution.acknowledge(tx, MutationId(row.id), TESTER)
    run.sweeps.sessions()


def test_only_a_failed_mutation_has_a_late_effect_and_only_once(db: Database) -> None:
    shop, run, row = resolved_mutation(db)
    failed, applied = run.ledger()
    with db.transaction() as tx:
        assert late_effects.record_late_effect(tx, MutationId(applied.id), {}, TESTER) is None
        assert late_effects.record_late_effect(tx, MutationId(failed.id), {"id": 1}, TESTER) is not None
        assert late_effects.record_late_effect(tx, MutationId(failed.id), {"id": 2}, TESTER) is None
        resolution.acknowledge(tx, MutationId(row.id), TESTER)
    assert run.ledger()[0].late_result == {"id": 1}
    assert len(shop.mail.effects) == 1


class _Told:
    def __init__(self, told: list[Notice]) -> None:
        self.told = told

    def notify(self, notice: Notice) -> None:
        self.told.append(notice)
