"""A reconcile attempt that kills its worker is counted like any other, so attempts end."""

from datetime import timedelta
from typing import Any

import pytest

from pipeline import Backoff, ReconcilePolicy
from pipeline.background.reconciler import Reconciler
from pipeline.domain.states import MutationId
from pipeline.store.database import Database
from pipeline.store.reads import ledger
from pipeline.testing import Does, Inline, RecordedEffect, assert_consumed, scripted
from pipeline.testing.inline import TESTER
from pipeline.transitions import resolution
from tests.support.mutations_in_doubt import STEADY, a_shop, the_mutation
from tests.support.rule import rule
from tests.support.scripted_consumers import Shop, blocks
from tests.support.table_reads import one, rows

QUICK = ReconcilePolicy(
    max_attempts=1, backoff=Backoff(base=timedelta(seconds=1), jitter=0), immediate_timeout=timedelta(seconds=30)
)
WATCHFUL = ReconcilePolicy(max_attempts=2, monitor_after=(timedelta(minutes=10), timedelta(hours=1)))


class _KilledError(BaseException):
    """Ends a reconcile as a killed process does: nothing after it runs."""


def _dies(*_: Any) -> Any:
    raise _KilledError


def _breaks_off(*_: Any) -> Any:
    raise OSError("connection lost")


def doubted(db: Database, **bounds: Any) -> tuple[Shop, Inline]:
    """A mutation in doubt that only the background can reconcile."""
    shop = a_shop(**bounds)
    shop.mail.will(Does.TIMES_OUT_AFTER)
    shop.mail.cannot_tell()
    run = shop.started(db)
    run.run()
    return shop, run


def run_killing_reconciles(run: Inline, monkeypatch: pytest.MonkeyPatch, *, rounds: int, pause: timedelta) -> int:
    """Run so many rounds in which every reconcile kills its worker; return how many did."""
    killed = 0
    with monkeypatch.context() as patch:
        patch.setattr(Reconciler, "_call_reconcile", _dies)
        for _ in range(rounds):
            run.advance(pause)
            with run.db.transaction() as tx:
                due = ledger.due_mutations(tx)
            for mutation in due:
                try:
                    run.sweeps.reconcile_one(mutation.id)
                except _KilledError:
                    killed += 1
    return killed


def monitored_mutation(db: Database, policy: ReconcilePolicy = WATCHFUL) -> tuple[Shop, Inline]:
    """A mutation that was not found, resolved so, replaced, and is still monitored."""
    shop = Shop()
    shop.mail = scripted("mail", timeout=timedelta(seconds=30), policy=policy)
    shop.mail.will(Does.TIMES_OUT_BEFORE)
    run = shop.started(db)
    run.run()
    run.advance(timedelta(minutes=1))
    run.sweeps.reconcile()
    run.run()
    run.sweeps.sessions()
    assert run.ledger()[0].next_monitor_at is not None
    return shop, run


@rule("R-10", "R-11")
def test_a_reconcile_that_always_kills_its_worker_makes_the_mutation_indeterminate(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, run = doubted(db)
    killed = run_killing_reconciles(run, monkeypatch, rounds=12, pause=timedelta(minutes=15))
    row = the_mutation(run)
    assert (killed, row.status, row.reconcile_attempts) == (STEADY.max_attempts, "indeterminate", STEADY.max_attempts)
    assert "asked 5 times without an answer" in row.error
    assert "taken its worker down" in row.error
    assert blocks(run) == ["reconciliation"]


def test_an_operator_can_try_a_killing_reconcile_again(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    shop, run = doubted(db)
    run_killing_reconciles(run, monkeypatch, rounds=12, pause=timedelta(minutes=15))
    with db.transaction() as tx:
        resolution.try_again(tx, MutationId(the_mutation(run).id), TESTER)
    run.run_until_idle()
    assert_consumed(run, shop.orders)


def test_a_repeated_message_does_not_end_the_last_reconcile_attempt_under_way(db: Database) -> None:
    shop, run = doubted(db, policy=QUICK)
    operation = type(shop.mail).operations()["send"]
    real = operation.reconcile_function
    assert real is not None
    seen: list[str] = []

    def slow(connector: Any, call: Any, **params: Any) -> Any:
        seen.append("looked")
        if len(seen) == 1:
            run.advance(timedelta(seconds=29))  # all that it may take; its pause of a second is over
            run.sweeps.reconcile()
            run.sweeps.reconcile_one(MutationId(the_mutation(run).id))
            seen.append(the_mutation(run).status)
        return real(connector, call, **params)

    operation.reconcile_function = slow
    run.sweeps.reconcile()
    assert seen == ["looked", "needs_reconcile"]
    assert (the_mutation(run).status, the_mutation(run).resolved_by) == ("applied", "reconcile")
    run.run_until_idle()
    assert_consumed(run, shop.orders)


@pytest.mark.parametrize("attempts", [1, 2])
def test_a_reconcile_attempt_in_the_quiet_period_is_not_counted(db: Database, attempts: int) -> None:
    policy = ReconcilePolicy(max_attempts=attempts, backoff=STEADY.backoff)
    shop = a_shop(policy=policy, settle=timedelta(hours=3))
    shop.mail.will(Does.TIMES_OUT_BEFORE)
    run = shop.started(db)
    run.run()
    run.sweeps.reconcile()
    assert (the_mutation(run).status, the_mutation(run).reconcile_attempts) == ("needs_reconcile", 0)
    shop.mail.cannot_tell(attempts - 1)
    for _ in range(attempts):
        run.advance(timedelta(hours=4))
        run.sweeps.reconcile()
    assert run.ledger()[0].status == "failed", "the last look of the budget was taken, and could prove it"
    run.run_until_idle()
    assert_consumed(run, shop.orders)


def test_a_worker_that_cannot_reconcile_respects_an_attempt_in_the_quiet_period(db: Database) -> None:
    shop = a_shop(settle=timedelta(hours=3))
    shop.mail.will(Does.TIMES_OUT_BEFORE)
    run = shop.started(db)
    run.run()
    stranger = Inline(db, [])
    stranger.sweeps.reconcile_one(MutationId(the_mutation(run).id))
    run.advance(timedelta(minutes=1))
    run.sweeps.reconcile()
    assert the_mutation(run).next_reconcile_at == the_mutation(run).quiet_until
    run.advance(timedelta(hours=4))
    stranger.sweeps.reconcile_one(MutationId(the_mutation(run).id))
    assert the_mutation(run).status == "needs_reconcile", "one that can has looked meanwhile"
    run.advance(timedelta(minutes=61))
    stranger.sweeps.reconcile_one(MutationId(the_mutation(run).id))
    assert the_mutation(run).status == "indeterminate"


def test_monitoring_whose_checks_always_kill_their_worker_ends_with_an_audit_row(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, run = monitored_mutation(db)
    killed = run_killing_reconciles(run, monkeypatch, rounds=12, pause=timedelta(minutes=11))
    row = run.ledger()[0]
    assert (killed, row.next_monitor_at, row.status) == (
        len(WATCHFUL.monitor_after) + WATCHFUL.max_attempts,
        None,
        "failed",
    )
    audited = one(db, "SELECT reason, mutation_id FROM pipeline.audit WHERE act = 'mutation.monitoring_stopped'")
    assert (audited.mutation_id, "did not end" in audited.reason) == (row.id, True)


def test_a_monitor_check_that_dies_once_leaves_the_later_checks(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    shop, run = monitored_mutation(db)
    assert run_killing_reconciles(run, monkeypatch, rounds=1, pause=timedelta(minutes=11)) == 1
    looks = len(shop.mail.reconciled_keys)
    run.advance(timedelta(minutes=11))
    run.sweeps.reconcile()
    assert run.ledger()[0].next_monitor_at is not None
    run.advance(timedelta(minutes=51))
    run.sweeps.reconcile()
    assert (len(shop.mail.reconciled_keys) - looks, run.ledger()[0].next_monitor_at) == (2, None)


def test_the_last_monitor_check_is_repeated_when_it_died_with_its_worker(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop, run = monitored_mutation(db)
    run.advance(timedelta(minutes=11))
    run.sweeps.reconcile()
    assert run_killing_reconciles(run, monkeypatch, rounds=1, pause=timedelta(minutes=51)) == 1
    row = run.ledger()[0]
    shop.mail.effects.append(RecordedEffect(operation="send", key=row.idempotency_key, params=row.params))
    run.advance(timedelta(minutes=11))
    run.sweeps.reconcile()
    assert run.ledger()[0].found_late_at is not None
    with db.transaction() as tx:
        resolution.acknowledge(tx, MutationId(row.id), TESTER)


def test_a_check_of_short_monitoring_that_broke_off_is_repeated_before_its_whole_span_is_over(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = ReconcilePolicy(max_attempts=2, monitor_after=(timedelta(seconds=20), timedelta(seconds=40)))
    _, run = monitored_mutation(db, short)
    row = run.ledger()[0]
    run.advance(timedelta(seconds=21))
    with monkeypatch.context() as patch:
        patch.setattr(Reconciler, "_monitor", _breaks_off)
        with pytest.raises(OSError, match="connection lost"):
            run.sweeps.reconcile_one(MutationId(row.id))
    run.advance(timedelta(seconds=21))
    with db.transaction() as tx:
        assert [mutation.id for mutation in ledger.due_mutations(tx)] == [row.id]


def test_a_monitor_check_left_to_another_worker_is_not_counted(db: Database) -> None:
    _, run = monitored_mutation(db)
    stranger = Inline(db, [])
    for _ in range(6):
        run.advance(timedelta(minutes=11))
        stranger.sweeps.reconcile_one(MutationId(run.ledger()[0].id))
    assert (run.ledger()[0].monitor_attempts, run.ledger()[0].next_monitor_at is None) == (0, False)
    assert rows(db, "SELECT 1 FROM pipeline.audit WHERE act = 'mutation.monitoring_stopped'") == []


def test_monitoring_without_a_verdict_ends_when_its_time_is_over(db: Database) -> None:
    shop, run = monitored_mutation(db)
    shop.mail.cannot_tell(1000)
    run.advance(timedelta(minutes=90))
    run.sweeps.reconcile()
    assert run.ledger()[0].next_monitor_at is not None
    for _ in WATCHFUL.monitor_after:
        run.advance(timedelta(hours=2))
        run.sweeps.reconcile()
    assert (run.ledger()[0].next_monitor_at, run.ledger()[0].found_late_at) == (None, None)
