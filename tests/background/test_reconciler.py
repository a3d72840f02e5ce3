"""An unknown outcome: one reconcile at once, more in the background, then an operator."""

from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from pipeline import Applied, Backoff, NotFound, ReconcilePolicy, Retry
from pipeline.background.sweeps import PERIODS
from pipeline.domain.errors import IllegalTransitionError, QuietPeriodError
from pipeline.domain.states import MutationId
from pipeline.store.database import Database
from pipeline.testing import Does, Inline, assert_consumed, assert_runs, scripted
from pipeline.testing.inline import TESTER
from pipeline.transitions import reconciliation, resolution
from pipeline.worker.crash_points import CrashPoint
from tests.support.mutations_in_doubt import STEADY, a_shop, the_mutation
from tests.support.rule import rule
from tests.support.scripted_consumers import Shop, blocks, each_once, statuses, the_workflow

SLOW = ReconcilePolicy(backoff=Backoff(base=timedelta(minutes=10), jitter=0))


@rule("R-1", "R-4")
def test_timeout_then_an_immediate_reconcile_that_finds_it_continues_to_next(db: Database) -> None:
    shop = a_shop()
    shop.mail.will(Does.TIMES_OUT_AFTER)
    run = shop.started(db)
    run.run()
    assert_consumed(run, shop.orders)
    assert shop.mail.reconciled_keys == [the_mutation(run).idempotency_key]
    assert (the_mutation(run).status, the_mutation(run).resolved_by) == ("applied", "reconcile")
    assert len(run.events(shop.receipts)) == 1


@rule("R-1", "R-5")
def test_timeout_then_an_immediate_reconcile_that_does_not_find_it_runs_mutate_again(db: Database) -> None:
    shop = a_shop(timeout=timedelta(seconds=30))
    shop.mail.will(Does.TIMES_OUT_BEFORE)
    run = shop.started(db)
    run.run()
    run.run_until_idle()
    assert_consumed(run, shop.orders)
    assert each_once(shop, [0])
    assert [row.status for row in run.ledger()] == ["failed", "applied"]


@rule("R-6", "R-17", "L-23")
def test_timeout_then_an_immediate_reconcile_without_a_verdict_leaves_it_to_the_background(db: Database) -> None:
    shop = a_shop()
    shop.mail.will(Does.TIMES_OUT_AFTER)
    shop.mail.cannot_tell()
    run = shop.started(db)
    run.run()
    assert the_mutation(run).status == "needs_reconcile"
    assert_runs(run, "paused:reconciliation")
    assert statuses(run, shop.orders) == ["reserved"]


@rule("R-9", "R-13", "R-15")
def test_the_background_reconciles_due_mutations(db: Database) -> None:
    assert PERIODS["reconcile"] == timedelta(seconds=10)
    shop = a_shop(policy=SLOW)
    shop.mail.will(Does.TIMES_OUT_AFTER)
    shop.mail.cannot_tell(2)
    run = shop.started(db)
    run.run()
    assert run.sweeps.reconcile().counts == {"dispatched": 1}
    assert run.sweeps.reconcile().counts == {}, "the next look waits for its time"
    run.advance(timedelta(minutes=11))
    run.sweeps.reconcile()
    assert (the_mutation(run).status, the_mutation(run).resolved_by) == ("applied", "reconcile")
    run.run()
    assert_consumed(run, shop.orders)
    assert each_once(shop, [0])


@rule("R-11", "R-12")
def test_reconciliation_exhausted_is_indeterminate_and_stops_the_workflow(db: Database) -> None:
    shop = a_shop()
    shop.mail.will(Does.TIMES_OUT_AFTER)
    shop.mail.cannot_tell(100)
    run = shop.started(db)
    run.run()
    for pause in (10, 20, 40, 80):
        before = run.now()
        run.sweeps.reconcile()
        row, after = the_mutation(run), run.now()
        assert row.status == "needs_reconcile"
        assert before <= row.next_reconcile_at - timedelta(seconds=pause) <= after, pause
        run.advance(timedelta(seconds=pause + 1))
    run.sweeps.reconcile()
    assert the_mutation(run).status == "indeterminate"
    assert blocks(run) == ["reconciliation"]
    assert len(shop.mail.reconciled_keys) == 6, "one at once, five in the background"


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (Retry("the index is being rebuilt"), "the index is being rebuilt"),
        (ConnectionError("no route to the index"), "ConnectionError: no route to the index"),
        ("found", "it returned a str; expected Applied, NotFound or Retry"),
    ],
    ids=["cannot tell", "fails", "says something else"],
)
def test_the_reason_of_the_last_retry_verdict_is_shown_to_operators_and_not_in_the_log(
    db: Database,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    told: Any,
    words: str,
) -> None:
    def look(*_: Any, **__: Any) -> Any:
        if isinstance(told, Exception):
            raise told
        return told

    shop = a_shop()
    shop.mail.will(Does.TIMES_OUT_AFTER)
    shop.mail.cannot_tell(1)
    run = shop.started(db)
    run.run()
    monkeypatch.setattr(run.registry.operation("mail", "send"), "reconcile_function", look)
    for _ in range(STEADY.max_attempts):
        run.advance(timedelta(minutes=11))
        run.sweeps.reconcile()
    row = the_mutation(run)
    assert row.status == "indeterminate"
    assert f"asked 5 times without an answer: {words}" in row.error
    (line,) = [vars(record) for record in caplog.records if record.getMessage().startswith("mutation.escalated")]
    assert words not in str(line)


@rule("R-18")
@pytest.mark.parametrize("answer", ["happened", "did_not_happen", "skip"])
def test_an_operator_resolves_it_and_the_workflow_continues(db: Database, answer: str) -> None:
    shop = a_shop(can_reconcile=False, timeout=timedelta(seconds=30))
    shop.mail.will(Does.TIMES_OUT_AFTER if answer == "happened" else Does.TIMES_OUT_BEFORE)
    run = shop.started(db, 2)
    run.run()
    assert blocks(run) == ["reconciliation"]
    run.advance(timedelta(minutes=1))
    with db.transaction() as tx:
        getattr(resolution, answer)(tx, MutationId(the_mutation(run).id), TESTER)
    run.run_until_idle()
    run.run()
    assert blocks(run) == []
    assert statuses(run, shop.orders) == ["skipped" if answer == "skip" else "consumed", "consumed"]
    assert each_once(shop, [1] if answer == "skip" else [0, 1])


@rule("R-2")
def test_an_operation_without_a_reconcile_is_indeterminate_at_once(db: Database) -> None:
    shop = a_shop(can_reconcile=False)
    shop.mail.will(Does.TIMES_OUT_AFTER)
    run = shop.started(db)
    run.run()
    assert the_mutation(run).status == "indeterminate"
    assert blocks(run) == ["reconciliation"]


@rule("R-3", "R-7", "R-8", "R-20")
@pytest.mark.parametrize("answer", ["raises", "hangs", "nonsense", "exits"])
def test_a_reconcile_that_raises_gives_no_verdict_and_is_repeated(db: Database, answer: str) -> None:
    assert ReconcilePolicy().immediate_timeout == timedelta(seconds=30)
    shop = a_shop(policy=ReconcilePolicy(immediate_timeout=timedelta(milliseconds=100), backoff=STEADY.backoff))
    shop.mail.will(Does.TIMES_OUT_AFTER)
    operation = type(shop.mail).operations()["send"]
    real = operation.reconcile_function

    def wrong(connector: Any, call: Any, **params: Any) -> Any:
        if answer == "raises":
            raise RuntimeError("the search is down")
        if answer == "exits":
            raise SystemExit(3)
        if answer == "hangs":
            connector._never.wait(1)
        return "who knows"

    operation.reconcile_function = wrong
    run = shop.started(db)
    run.run()
    assert the_mutation(run).status == "needs_reconcile"
    run.sweeps.reconcile()
    assert (the_mutation(run).status, the_mutation(run).reconcile_attempts) == ("needs_reconcile", 1)
    operation.reconcile_function = real
    run.run_until_idle()
    assert_consumed(run, shop.orders)
    assert each_once(shop, [0])


def test_a_reconcile_that_kills_its_worker_is_counted_and_does_not_spin(db: Database) -> None:
    shop = a_shop()
    shop.mail.will(Does.TIMES_OUT_AFTER)
    shop.mail.cannot_tell()
    run = shop.started(db)
    run.run()
    with db.transaction() as tx:  # what the task does before it looks, and all that is left of it after a crash
        reconciliation.book(tx, [(MutationId(the_mutation(run).id), 0, timedelta(minutes=10))])
    assert run.sweeps.reconcile().counts == {}
    assert the_mutation(run).reconcile_attempts == 1
    run.run_until_idle()
    assert_consumed(run, shop.orders)


def test_a_connector_that_is_gone_from_the_code_leaves_an_indeterminate_mutation(db: Database) -> None:
    shop = a_shop()
    shop.mail.will(Does.TIMES_OUT_AFTER)
    shop.mail.cannot_tell()
    run = shop.started(db)
    run.run()
    run.registry.connectors.clear()
    run.sweeps.reconcile()
    assert the_mutation(run).status == "indeterminate"


def test_a_worker_that_does_not_know_the_workflow_leaves_the_doubt_to_one_that_does(db: Database) -> None:
    shop = a_shop()
    shop.mail.will(Does.TIMES_OUT_AFTER)
    shop.mail.cannot_tell()
    run = shop.started(db)
    run.run()
    stranger = Inline(db, [])
    stranger.sweeps.reconcile_one(MutationId(the_mutation(run).id))
    assert (the_mutation(run).status, the_mutation(run).reconcile_attempts) == ("needs_reconcile", 0)
    run.run_until_idle()
    assert_consumed(run, shop.orders)


def test_not_finding_it_proves_nothing_before_the_settle_window_is_over(db: Database) -> None:
    shop = a_shop(settle=timedelta(minutes=3))
    shop.mail.will(Does.TIMES_OUT_BEFORE)
    run = shop.started(db)
    run.run()
    assert the_mutation(run).status == "needs_reconcile"
    with pytest.raises(QuietPeriodError), db.transaction() as tx:
        resolution.did_not_happen(tx, MutationId(the_mutation(run).id), TESTER)
    run.advance(timedelta(seconds=30))
    run.sweeps.reconcile()
    assert the_mutation(run).status == "needs_reconcile"
    run.advance(timedelta(minutes=4))
    run.sweeps.reconcile()
    assert run.ledger()[0].status == "failed"
    run.run_until_idle()
    assert_consumed(run, shop.orders)
    assert each_once(shop, [0])


def test_a_retry_verdict_may_ask_for_a_longer_pause(db: Database) -> None:
    shop = a_shop()
    shop.mail.will(Does.TIMES_OUT_AFTER)
    operation = type(shop.mail).operations()["send"]
    operation.reconcile_function = lambda *_, **__: Retry("search is slow today", after=timedelta(minutes=30))
    run = shop.started(db)
    run.run()
    before = run.now()
    run.sweeps.reconcile()
    assert the_mutation(run).next_reconcile_at - before >= timedelta(minutes=30)


def test_a_late_result_of_a_worker_that_was_taken_for_dead_resolves_the_doubt(db: Database) -> None:
    """A process that froze past its lease still has the result."""
    shop = a_shop(can_reconcile=False)
    run = shop.started(db)

    def freeze(point: CrashPoint) -> None:
        if point is CrashPoint.CALLED:
            run.advance(timedelta(minutes=15))
            run.sweeps.rescue()
            assert the_mutation(run).status == "indeterminate"

    with run.on_crash_points(freeze):
        run.run()
    assert (the_mutation(run).status, the_mutation(run).resolved_by) == ("applied", "call")
    run.run_until_idle()
    assert_consumed(run, shop.orders)
    assert each_once(shop, [0])
    assert not the_workflow(run).maintenance


def test_verdicts_are_values_with_a_description() -> None:
    assert Applied({"id": 1}).result == {"id": 1}
    assert NotFound().reason == "not found"
    assert Retry().after is None


def test_an_operator_tries_again_with_fresh_attempts_only_where_a_reconcile_exists(db: Database) -> None:
    shop = a_shop(can_reconcile=False)
    shop.mail.will(Does.TIMES_OUT_AFTER)
    run = shop.started(db)
    run.run()
    with pytest.raises(IllegalTransitionError, match="can reconcile"), db.transaction() as tx:
        resolution.try_again(tx, MutationId(the_mutation(run).id), TESTER)


def test_first_attempts_travel_together_and_later_ones_alone(db: Database) -> None:
    shop = Shop(concurrency=8, on_uncertain="contain")
    shop.mail = scripted("mail", policy=STEADY)
    shop.mail.will(*[Does.TIMES_OUT_AFTER] * 5)
    shop.mail.cannot_tell(5)
    run = shop.started(db, 5)
    dispatched: list[list[str]] = []
    run.run()
    run.sweeps.dispatch_reconcile = lambda ids: dispatched.append([*ids])
    run.sweeps.reconcile()
    doubts = sorted(str(row.id) for row in run.ledger())
    assert [sorted(ids) for ids in dispatched] == [doubts]
    with db.transaction() as tx:
        tx.execute(text("UPDATE pipeline.mutations SET reconcile_attempts = 1"))
    dispatched.clear()
    run.sweeps.reconcile()
    assert sorted(dispatched) == [[id_] for id_ in doubts], "the attempt before may have taken its worker down"
    assert Counter(row.status for row in run.ledger()) == {"needs_reconcile": 5}
