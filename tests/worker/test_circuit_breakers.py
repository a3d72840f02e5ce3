"""An operation whose outcomes are mostly unknown starts no new mutation until a probe is answered."""

from collections import Counter
from datetime import timedelta
from typing import Any

import pytest

from pipeline import Backoff, MutationRetryPolicy, ReconcilePolicy
from pipeline.domain.policies import BreakerPolicy
from pipeline.store.database import Database, Statement
from pipeline.store.reads import ledger
from pipeline.testing import Does, Inline, assert_consumed, scripted
from pipeline.testing.inline import TESTER
from pipeline.transitions import breakers
from pipeline.worker.calls import PendingCall
from pipeline.worker.settings import WorkerPolicy
from tests.support.scripted_consumers import Shop, each_once
from tests.support.table_reads import one

SEND = ("mail", "send")
TOUCHY = BreakerPolicy(unknown_share=0.5, min_unknown=3, probe_every=timedelta(seconds=30))
_AUDIT = Statement[Any]("SELECT act FROM pipeline.audit ORDER BY id")
ONE_BY_ONE = WorkerPolicy(mutation_concurrency=1)


def a_shop(breaker: BreakerPolicy = TOUCHY, **bounds: Any) -> Shop:
    shop = Shop(concurrency=16, on_uncertain="contain")
    policy = ReconcilePolicy(max_attempts=50)
    shop.mail = scripted("mail", mutations=("send", "cancel"), breaker=breaker, policy=policy, **bounds)
    return shop


def make_outcomes_unknown(shop: Shop, times: int = 1000) -> None:
    """From now on the outcome of each call is unknown; all of them arrive."""
    shop.mail.will(*[Does.TIMES_OUT_AFTER] * times)
    shop.mail.cannot_tell(100_000)


def make_outcomes_known(shop: Shop) -> None:
    """From now on calls and reconciles are answered."""
    shop.mail._lines.clear()
    shop.mail._undecided = 0


def open_breakers(run: Inline) -> list[str]:
    with run.db.transaction() as tx:
        return [f"{row.connector}.{row.operation}: {row.reason}" for row in ledger.open_breakers(tx)]


def test_too_many_unknown_outcomes_stop_new_mutations_before_they_are_in_the_ledger(db: Database) -> None:
    shop = a_shop()
    make_outcomes_unknown(shop)
    run = shop.started(db, 12, policy=ONE_BY_ONE)
    run.run()
    assert open_breakers(run) == ["mail.send: 3 of the last 3 outcomes are unknown"]
    assert len(shop.mail.calls) == 3
    assert len(run.ledger()) == 3
    waiting = [row for row in run.runs() if row.status == "active"]
    assert {(row.phase, row.mutation_id) for row in waiting} == {("prepared", None)}
    assert len(waiting) == 9
    make_outcomes_known(shop)
    run.run_until_idle()
    assert_consumed(run, shop.orders)
    assert each_once(shop, range(12))
    assert open_breakers(run) == []


def test_one_probe_at_a_time_is_let_through_until_its_outcome_is_known(db: Database) -> None:
    shop = a_shop()
    make_outcomes_unknown(shop)
    run = shop.started(db, 12, policy=ONE_BY_ONE)
    run.run()
    for calls in (4, 5):
        run.advance(timedelta(seconds=61))
        run.sweeps.tick()
        run.run()
        assert len(shop.mail.calls) == calls, "each probe that is not answered books the next one"
    make_outcomes_known(shop)
    run.advance(timedelta(seconds=61))
    run.sweeps.tick()
    run.run()
    assert open_breakers(run) == []
    run.run_until_idle()
    assert_consumed(run, shop.orders)
    assert each_once(shop, range(12))


def test_an_open_breaker_stops_no_other_operation(db: Database) -> None:
    shop = a_shop()
    with db.transaction() as tx:
        breakers.open_by_operator(tx, ("mail", "cancel"), TESTER)
    run = shop.started(db, 3)
    run.run()
    assert_consumed(run, shop.orders)


def test_a_breaker_that_an_operator_opened_lets_no_probe_through_until_an_operator_closes_it(db: Database) -> None:
    shop = a_shop()
    run = shop.started(db, 3)
    with db.transaction() as tx:
        breakers.open_by_operator(tx, SEND, TESTER)
    run.run()
    run.advance(timedelta(hours=1))
    run.sweeps.tick()
    run.run()
    assert shop.mail.calls == []
    with db.transaction() as tx:
        assert breakers.close_by_operator(tx, SEND, TESTER)
        assert not breakers.close_by_operator(tx, SEND, TESTER)
    run.run_until_idle()
    assert_consumed(run, shop.orders)
    acts = [row.act for row in _audit(db)]
    assert acts == ["breaker.open mail.send", "breaker.close mail.send"]


def test_an_operator_may_close_a_breaker_that_the_system_opened(db: Database) -> None:
    shop = a_shop()
    make_outcomes_unknown(shop, 3)
    run = shop.started(db, 6, policy=ONE_BY_ONE)
    run.run()
    assert open_breakers(run)
    make_outcomes_known(shop)
    with db.transaction() as tx:
        breakers.close_by_operator(tx, SEND, TESTER)
    run.run_until_idle()
    assert_consumed(run, shop.orders)


@pytest.mark.parametrize(
    ("policy", "opens"),
    [
        pytest.param(BreakerPolicy(unknown_share=0.5, min_unknown=4), False, id="too few"),
        pytest.param(BreakerPolicy(unknown_share=0.9, min_unknown=3), False, id="too small a share"),
        pytest.param(BreakerPolicy(unknown_share=0.3, min_unknown=3), True, id="enough of both"),
        pytest.param(
            BreakerPolicy(unknown_share=0.3, min_unknown=3, last_calls=2),
            False,
            id="of the last two only two can be unknown",
        ),
    ],
)
def test_share_and_count_decide_together(db: Database, policy: BreakerPolicy, opens: bool) -> None:
    shop = a_shop(policy)
    shop.mail.will(*[Does.APPLIES] * 4, *[Does.TIMES_OUT_AFTER] * 3)
    shop.mail.cannot_tell(100)
    run = shop.started(db, 7, policy=ONE_BY_ONE)
    run.run()
    assert Counter(row.status for row in run.ledger()) == {"applied": 4, "needs_reconcile": 3}
    assert bool(open_breakers(run)) == opens
    make_outcomes_known(shop)
    run.run_until_idle()
    assert_consumed(run, shop.orders)


def test_unknown_outcomes_of_long_ago_open_nothing(db: Database) -> None:
    shop = a_shop()
    make_outcomes_unknown(shop, 2)
    run = shop.started(db, 2, policy=ONE_BY_ONE)
    run.run()
    run.advance(timedelta(hours=1))
    shop.mail.will(Does.TIMES_OUT_AFTER)
    run.publish(shop.orders, {"n": 2})
    run.run()
    assert open_breakers(run) == []
    make_outcomes_known(shop)
    run.run_until_idle()
    assert_consumed(run, shop.orders)


def test_an_approved_request_waits_behind_a_breaker_and_keeps_its_approval(db: Database) -> None:
    shop = Shop(requires_approval=True)
    run = shop.started(db)
    run.run()
    (row,) = run.ledger()
    with db.transaction() as tx:
        breakers.open_by_operator(tx, SEND, TESTER)
    run.approve(row)
    run.run()
    for _ in range(3):
        run.advance(timedelta(minutes=15))
        run.sweeps.rescue()
        run.sweeps.tick()
        run.run()
    assert shop.mail.calls == []
    assert [(row.status, row.approved_by) for row in run.ledger()] == [("pending", TESTER.name)]
    with db.transaction() as tx:
        breakers.close_by_operator(tx, SEND, TESTER)
    run.run_until_idle()
    assert_consumed(run, shop.orders)
    assert each_once(shop, [0])


def test_operators_are_notified_of_an_open_breaker(db: Database, caplog: pytest.LogCaptureFixture) -> None:
    with db.transaction() as tx:
        breakers.open_by_operator(tx, SEND, TESTER)
    assert "breaker.opened connector=mail operation=send" in caplog.text
    run = Shop().inline(db)
    run.sweeps.notices()
    assert one(db, "SELECT subject FROM pipeline.notices WHERE kind = 'breaker'").subject.startswith("mail.send at ")
    with db.transaction() as tx:
        breakers.close_by_operator(tx, SEND, TESTER)


def _audit(db: Database) -> Any:
    with db.transaction() as tx:
        return tx.all(_AUDIT)


def test_a_reconcile_in_the_quiet_period_leaves_an_unknown_outcome(db: Database) -> None:
    shop = a_shop()
    shop.mail.will(*[Does.TIMES_OUT_BEFORE] * 100)
    run = shop.started(db, 8, policy=ONE_BY_ONE)
    run.run()
    assert open_breakers(run) == ["mail.send: 3 of the last 3 outcomes are unknown"]
    make_outcomes_known(shop)
    run.run_until_idle()
    assert_consumed(run, shop.orders)
    assert each_once(shop, range(8))


def test_after_an_operator_closed_it_earlier_outcomes_no_longer_count(db: Database) -> None:
    shop = a_shop()
    make_outcomes_unknown(shop)
    run = shop.started(db, 5, policy=ONE_BY_ONE)
    run.run()
    with db.transaction() as tx:
        breakers.close_by_operator(tx, SEND, TESTER)
    run.advance(timedelta(seconds=61))
    run.sweeps.tick()
    run.run()
    assert len(shop.mail.calls) == 5, "two more unknown outcomes are not three"
    assert open_breakers(run) == []
    make_outcomes_known(shop)
    run.run_until_idle()
    assert_consumed(run, shop.orders)


def test_a_probe_that_was_never_sent_closes_nothing(db: Database) -> None:
    shop = a_shop()
    make_outcomes_unknown(shop)
    run = shop.started(db, 5, policy=ONE_BY_ONE)
    run.run()
    run.advance(timedelta(seconds=61))
    run.leases.is_lost = lambda lease: True  # type: ignore[method-assign]
    run.sweeps.tick()
    run.run()
    assert open_breakers(run)
    del run.leases.is_lost
    make_outcomes_known(shop)
    run.run_until_idle()
    assert_consumed(run, shop.orders)


@pytest.mark.parametrize(
    ("does", "closes"), [(Does.FAILS, False), (Does.REFUSES, True), (Does.DENIES, True), (Does.APPLIES, True)]
)
def test_a_probe_closes_the_breaker_only_if_the_outside_system_responded(
    db: Database, does: Does, closes: bool
) -> None:
    shop = a_shop()
    make_outcomes_unknown(shop)
    run = shop.started(db, 5, policy=ONE_BY_ONE)
    run.run()
    make_outcomes_known(shop)
    shop.mail.will(does)
    run.advance(timedelta(seconds=61))
    run.sweeps.tick()
    run.run()
    assert (open_breakers(run) == []) is closes


def test_a_probe_that_succeeds_at_its_second_attempt_closes_the_breaker(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = a_shop(retry=MutationRetryPolicy(max_attempts=2, backoff=Backoff(base=timedelta(0), jitter=0)))
    make_outcomes_unknown(shop)
    run = shop.started(db, 4, policy=ONE_BY_ONE)
    run.run()
    make_outcomes_known(shop)
    run.advance(timedelta(seconds=61))
    late = iter([True])
    monkeypatch.setattr(PendingCall, "is_late", property(lambda _: next(late, False)))
    run.sweeps.tick()
    run.run()
    assert [(row.status, row.attempts) for row in run.ledger()][-1] == ("applied", 2)
    assert open_breakers(run) == []


def test_a_probe_resolved_by_a_reconcile_does_not_close_the_breaker(db: Database) -> None:
    shop = a_shop()
    make_outcomes_unknown(shop)
    run = shop.started(db, 5, policy=ONE_BY_ONE)
    run.run()
    make_outcomes_known(shop)
    shop.mail.will(Does.TIMES_OUT_AFTER)
    run.advance(timedelta(seconds=61))
    run.sweeps.tick()
    run.run()
    assert run.ledger()[-1].status == "applied"
    assert open_breakers(run), "its call was not answered"
