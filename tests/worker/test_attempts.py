"""A mutation that did not happen this time is attempted again inside its run."""

import time
from datetime import timedelta
from typing import Any

import pytest

from pipeline import Backoff, Call, Connector, TransientError, mutation
from pipeline.background.messages import DispatchMessage
from pipeline.domain.policies import FailurePolicy, MutationRetryPolicy
from pipeline.store.database import Database
from pipeline.store.reads import work
from pipeline.testing import Does, WorkerCrash, assert_consumed, assert_runs, scripted
from pipeline.worker.crash_points import CrashPoint
from pipeline.worker.settings import WorkerPolicy
from tests.support.rule import rule
from tests.support.scripted_consumers import Shop, each_once
from tests.support.worker_clock import Clock

PATIENT = FailurePolicy(backoff=Backoff(base=timedelta(minutes=10)))
QUICK = MutationRetryPolicy(max_attempts=3, backoff=Backoff(base=timedelta(milliseconds=20), jitter=0))


def a_shop(retry: MutationRetryPolicy = QUICK, **options: Any) -> Shop:
    shop = Shop(**options)
    shop.mail = scripted("mail", retry=retry, timeout=timedelta(seconds=30))
    return shop


@rule("L-22")
def test_a_transient_error_is_attempted_again_and_counted(db: Database) -> None:
    shop = a_shop()
    shop.mail.will(Does.FAILS, Does.FAILS)
    run = shop.started(db)
    run.run()
    assert_consumed(run, shop.orders)
    assert_runs(run, "committed")
    (row,) = run.ledger()
    assert (row.status, row.attempts) == ("applied", 3)
    assert {call.key for call in shop.mail.calls} == {row.idempotency_key}, "every attempt carries the same key"


def test_attempts_end_and_the_run_is_followed_by_a_fresh_one(db: Database) -> None:
    shop = a_shop(failures=PATIENT)
    shop.mail.will(*[Does.FAILS] * 3)
    run = shop.started(db)
    run.run()
    assert [(row.status, row.attempts) for row in run.ledger()] == [("failed", 3)]
    assert_runs(run, "paused:transient")
    run.run_until_idle()
    assert_consumed(run, shop.orders)
    assert each_once(shop, [0])


@pytest.mark.parametrize(("does", "status"), [(Does.REFUSES, "failed:logic"), (Does.DENIES, "paused:approval")])
def test_a_definite_error_is_not_attempted_again(db: Database, does: Does, status: str) -> None:
    shop = a_shop()
    shop.mail.will(does)
    run = shop.started(db)
    run.run()
    assert_runs(run, status)
    assert [row.attempts for row in run.ledger()] == [1]


class Busy(Connector):
    """Asks for a pause before each next attempt."""

    name = "busy"

    def __init__(self, after: timedelta, times: int) -> None:
        self.after, self.times = after, times
        self.at: list[float] = []

    @mutation(timeout=timedelta(seconds=30), retry=QUICK)
    def send(self, call: Call, *, n: int) -> dict[str, int]:
        """Applies once it has asked often enough."""
        del call
        self.at.append(time.monotonic())
        if len(self.at) <= self.times:
            raise TransientError("too many requests", after=self.after)
        return {"n": n}


def test_the_pause_that_the_outside_system_requests_is_kept(db: Database) -> None:
    busy = Busy(timedelta(milliseconds=300), 2)
    shop = Shop(mutate=lambda ctx, prepared: ctx.busy.send(n=prepared.data["n"]))
    run = shop.started(db, connectors=[busy])
    run.run()
    assert_consumed(run, shop.orders)
    pauses = [later - earlier for earlier, later in zip(busy.at, busy.at[1:], strict=False)]
    assert len(pauses) == 2
    assert min(pauses) >= 0.3


def test_a_pause_longer_than_the_cohort_may_take_is_left_to_the_next_run(db: Database) -> None:
    busy = Busy(timedelta(minutes=20), 1)
    shop = Shop(mutate=lambda ctx, prepared: ctx.busy.send(n=prepared.data["n"]))
    run = shop.started(db, connectors=[busy])
    before = run.now()
    run.run()
    (stopped,) = assert_runs(run, "paused:transient")
    assert len(busy.at) == 1
    handler = [row for row in _handlers(run) if row.name == "Send"]
    assert handler[0].retry_at - before >= timedelta(minutes=20), "and that waits as long as it was asked to"
    assert stopped.error == "too many requests"
    run.advance(timedelta(minutes=21))
    run.run()
    assert_consumed(run, shop.orders)


def test_others_of_the_cohort_do_not_wait_for_a_pause(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pause = Clock(monkeypatch), timedelta(seconds=25)
    shop = a_shop(MutationRetryPolicy(max_attempts=2, backoff=Backoff(base=pause, jitter=0)), concurrency=8)
    shop.mail.will(Does.FAILS, when=lambda params: params["n"] == 0)
    policy = WorkerPolicy(straggler_wait=timedelta(milliseconds=50), mutation_budget=timedelta(minutes=5))
    run = shop.started(db, 4, policy=policy)

    def broker(message: DispatchMessage) -> list[DispatchMessage]:
        if message.task == "pipeline.next" and not clock.ahead:
            clock.advance(run, pause)
        return [message]

    run.broker = broker
    run.run()
    assert clock.ahead == pause, "the other runs went on only after the pause"
    assert_consumed(run, shop.orders)
    patient = next(row for row in run.ledger() if row.attempts == 2)
    last = max(run.runs(), key=lambda row: row.finished_at or row.created_at)
    assert last.mutation_id == patient.id
    assert each_once(shop, range(4))


def test_a_worker_that_dies_between_two_attempts_leaves_a_doubt_that_a_reconcile_resolves(db: Database) -> None:
    shop = a_shop()
    shop.mail.will(Does.FAILS)
    run = shop.started(db)
    seen: list[CrashPoint] = []

    def die(point: CrashPoint) -> None:
        seen.append(point)
        if seen.count(CrashPoint.IN_FLIGHT) == 2:
            raise WorkerCrash(point)

    with pytest.raises(WorkerCrash), run.on_crash_points(die):
        run.run()
    run.start_worker()
    assert [(row.status, row.attempts) for row in run.ledger()] == [("in_flight", 2)]
    run.run_until_idle()
    assert_consumed(run, shop.orders)
    assert each_once(shop, [0])


def test_another_attempt_has_a_deadline_a_quiet_period_and_a_lease_of_its_own(db: Database) -> None:
    shop = a_shop()
    shop.mail.will(Does.FAILS)
    run = shop.started(db)
    seen: list[Any] = []

    def look(point: CrashPoint) -> None:
        if point is CrashPoint.CALLED and len(seen) == 1:
            run.advance(timedelta(seconds=20))
        if point is CrashPoint.IN_FLIGHT:
            seen.append((run.ledger()[0], run.runs()[0]))

    with run.on_crash_points(look):
        run.run()
    (first, _), (second, held) = seen
    assert (first.attempts, second.attempts) == (1, 2)
    for name in ("sent_at", "send_deadline", "quiet_until"):
        assert getattr(second, name) - getattr(first, name) >= timedelta(seconds=20), name
    assert held.lease_expires_at >= second.send_deadline
    assert_consumed(run, shop.orders)


def test_a_run_that_another_worker_claimed_is_not_attempted_again(db: Database) -> None:
    shop = a_shop()
    shop.mail.will(Does.FAILS)
    run = shop.started(db)

    def lose(point: CrashPoint) -> None:
        if point is CrashPoint.CALLED and len(shop.mail.calls) == 1:
            run.advance(timedelta(minutes=15))
            run.sweeps.rescue()

    with run.on_crash_points(lose):
        run.run()
    assert run.ledger()[0].attempts == 1
    run.run_until_idle()
    assert_consumed(run, shop.orders)
    assert each_once(shop, [0])


def _handlers(run: Any) -> Any:
    with run.db.transaction() as tx:
        return work.handlers(tx, "shop")
