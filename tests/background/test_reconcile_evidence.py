"""What a reconcile proves: too early, too late, from the wrong worker, with text that must not be shown."""

import threading
from datetime import timedelta
from typing import Any

import pytest
from pydantic import SecretStr

from pipeline import Applied, Backoff, NotFound, ReconcilePolicy, Retry
from pipeline.domain.states import MutationId
from pipeline.store.database import Database, Statement
from pipeline.testing import Does, Inline, assert_consumed, scripted
from pipeline.testing.inline import TESTER
from pipeline.transitions import resolution
from tests.support.mutations_in_doubt import STEADY, a_shop, the_mutation
from tests.support.scripted_consumers import Shop, each_once
from tests.support.wait import wait_for
from tests.support.worker_clock import Clock


@pytest.mark.parametrize("who", ["at once", "in the background"])
def test_a_reconcile_that_began_in_the_quiet_period_proves_nothing_however_late_it_ends(db: Database, who: str) -> None:
    shop = a_shop(settle=timedelta(minutes=2))
    operation = type(shop.mail).operations()["send"]
    real = operation.reconcile_function

    def slow(connector: Any, call: Any, **params: Any) -> Any:
        run.advance(timedelta(minutes=30))  # the answer is from before, and the request arrives meanwhile
        operation.reconcile_function = real
        return NotFound()

    shop.mail.will(Does.TIMES_OUT_AFTER)
    run = shop.started(db)
    if who == "at once":
        operation.reconcile_function = slow
        run.run()
    else:
        shop.mail.cannot_tell()
        run.run()
        operation.reconcile_function = slow
        run.sweeps.reconcile()
    assert the_mutation(run).status == "needs_reconcile"
    run.run_until_idle()
    assert_consumed(run, shop.orders)
    assert each_once(shop, [0])


def test_a_settle_window_longer_than_all_attempts_still_ends_without_an_operator(db: Database) -> None:
    shop = a_shop(settle=timedelta(hours=3))
    shop.mail.will(Does.TIMES_OUT_BEFORE)
    run = shop.started(db)
    run.run()
    for _ in range(12):
        run.advance(timedelta(minutes=10))
        run.sweeps.reconcile()
    assert the_mutation(run).status == "needs_reconcile"
    assert the_mutation(run).reconcile_attempts <= 2, "looking before it can prove anything is pointless"
    run.advance(timedelta(hours=2))
    run.run_until_idle()
    assert_consumed(run, shop.orders)
    assert each_once(shop, [0])


def test_a_call_that_outlives_its_deadline_gets_as_much_time_again_before_absence_counts(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeout = timedelta(seconds=25)
    shop, clock = a_shop(timeout=timeout), Clock(monkeypatch)
    release = threading.Event()
    operation = type(shop.mail).operations()["send"]
    real = operation.function

    def late(connector: Any, call: Any, **params: Any) -> Any:
        clock.advance(run, timeout + timedelta(seconds=1))
        release.wait(60)
        return real(connector, call, **params)

    operation.function = late
    run = shop.started(db)
    run.run()
    row = the_mutation(run)
    assert row.status == "needs_reconcile"
    assert row.quiet_until - row.sent_at >= 2 * timeout
    operation.function = real
    release.set()
    wait_for(lambda: len(shop.mail.effects) == 1, why="the call that nobody waits for")
    run.run_until_idle()
    assert_consumed(run, shop.orders)
    assert each_once(shop, [0])


def test_a_result_that_cannot_be_stored_still_makes_the_mutation_applied(db: Database) -> None:
    shop = a_shop()
    shop.mail.will(Does.TIMES_OUT_AFTER)
    shop.mail.cannot_tell()
    run = shop.started(db)
    run.run()
    type(shop.mail).operations()["send"].reconcile_function = lambda *_, **__: Applied({1, 2})
    run.sweeps.reconcile()
    assert (the_mutation(run).status, "unstorable" in the_mutation(run).result) == ("applied", True)
    run.run_until_idle()
    assert_consumed(run, shop.orders)


def test_doubts_of_a_workflow_without_code_delay_no_others_and_are_escalated(db: Database) -> None:
    shop = a_shop()
    shop.mail.will(Does.TIMES_OUT_AFTER)
    shop.mail.cannot_tell()
    run = shop.started(db)
    run.run()
    before = run.now()
    stranger = Inline(db, [])
    assert stranger.sweeps.reconcile_one(MutationId(the_mutation(run).id)).counts == {"unknown workflow": 1}
    assert the_mutation(run).next_reconcile_at > before, "it goes to the end of the line"
    stranger.advance(timedelta(hours=2))
    stranger.sweeps.reconcile_one(MutationId(the_mutation(run).id))
    assert the_mutation(run).status == "indeterminate"


def test_code_of_an_older_version_leaves_a_doubt_to_the_newer(db: Database) -> None:
    newer = Shop(version=2)
    newer.mail = scripted("mail", policy=STEADY)
    newer.mail.will(Does.TIMES_OUT_AFTER)
    newer.mail.cannot_tell()
    run = newer.started(db)
    run.run()
    older = Inline(db, [Shop(version=1).workflow])
    assert older.sweeps.reconcile_one(MutationId(the_mutation(run).id)).counts == {"unknown workflow": 1}
    assert the_mutation(run).status == "needs_reconcile"
    run.run_until_idle()
    assert_consumed(run, newer.orders)


def test_operators_are_notified_again_when_a_mutation_is_indeterminate_again(db: Database) -> None:
    shop = a_shop(policy=ReconcilePolicy(max_attempts=1))
    shop.mail.will(Does.TIMES_OUT_AFTER)
    shop.mail.cannot_tell(3)
    run = shop.started(db)
    run.run()
    told = []
    for _ in range(2):
        run.sweeps.reconcile()
        told.append(run.sweeps.notices().counts.get("delivered"))
        with db.transaction() as tx:
            resolution.try_again(tx, MutationId(the_mutation(run).id), TESTER)
    assert told[0] == 2, "the block and the question"
    assert told[1] == 1, "the question"
    run.run_until_idle()
    assert_consumed(run, shop.orders)


def test_neither_credentials_nor_redacted_parameters_reach_any_text(
    db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    shop = a_shop(redact=frozenset({"n"}))
    shop.mail.token = SecretStr("sk_live_4711")  # type: ignore[attr-defined]
    type(shop.mail).operations()["send"].reconcile_function = lambda *_, n, **__: Retry(
        f"sk_live_4711 may not search for {n}"
    )
    shop.mail.will(Does.TIMES_OUT_AFTER)
    run = shop.inline(db)
    run.publish(shop.orders, {"n": "Ada Lovelace"})
    run.run()
    run.sweeps.reconcile()
    with db.transaction() as tx:
        words = str(
            [tx.all(Statement[Any](f"SELECT * FROM pipeline.{table}")) for table in ("blocks", "sessions", "notices")]
        )
    words += str([row.error for row in run.runs()] + [row.error for row in run.ledger()]) + caplog.text
    assert "may not search for" in words
    assert "sk_live" not in words
    assert "Ada" not in words


def test_a_retry_verdict_does_not_shorten_the_usual_pause(db: Database) -> None:
    shop = a_shop()
    shop.mail.will(Does.TIMES_OUT_AFTER)
    type(shop.mail).operations()["send"].reconcile_function = lambda *_, **__: Retry(
        "in a moment", after=timedelta(seconds=1)
    )
    run = shop.started(db)
    run.run()
    before = run.now()
    run.sweeps.reconcile()
    assert the_mutation(run).next_reconcile_at - before >= timedelta(seconds=9)


@pytest.mark.parametrize("nonsense", [None, 7, ValueError("x"), timedelta(days=99_999)])
def test_a_pause_or_a_reason_that_makes_no_sense_stops_no_reconcile(db: Database, nonsense: Any) -> None:
    shop = a_shop(timeout=timedelta(seconds=30))
    shop.mail.will(Does.TIMES_OUT_AFTER)
    answers = iter([Retry(nonsense, after=nonsense), NotFound(nonsense), Retry(nonsense, after=nonsense)])
    operation = type(shop.mail).operations()["send"]
    real = operation.reconcile_function
    operation.reconcile_function = lambda *_, **__: next(answers)
    run = shop.started(db)
    run.run()
    run.sweeps.reconcile()
    run.advance(timedelta(hours=25))
    operation.reconcile_function = real
    run.run_until_idle()
    assert_consumed(run, shop.orders)
    assert each_once(shop, [0])


def test_a_repeated_message_makes_no_second_reconcile_attempt(db: Database) -> None:
    shop = a_shop(policy=ReconcilePolicy(backoff=Backoff(base=timedelta(minutes=10), jitter=0)))
    shop.mail.will(Does.TIMES_OUT_AFTER)
    shop.mail.cannot_tell(2)
    run = shop.started(db)
    run.run()
    for _ in range(3):
        run.sweeps.reconcile_one(MutationId(the_mutation(run).id))
    assert (the_mutation(run).reconcile_attempts, len(shop.mail.reconciled_keys)) == (1, 2), (
        "one at once, one in the background"
    )
    run.run_until_idle()
    assert_consumed(run, shop.orders)
