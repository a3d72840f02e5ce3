"""Calls that outlive their task: what holds them, what bounds them, and what becomes of their outcomes."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy.exc import OperationalError

from pipeline.domain.states import Phase
from pipeline.domain.values import RunLease
from pipeline.store.database import Database
from pipeline.testing import CrashPoint, WorkerCrash, assert_consumed, assert_runs
from pipeline.worker.leases import Leases
from pipeline.worker.settings import WorkerPolicy
from tests.factories import LEASE, a_run, a_workflow, held, some_events, the_run
from tests.support.scripted_consumers import Shop, each_once
from tests.support.statement_events import Listener, observed
from tests.support.wait import wait_for

LONG = timedelta(minutes=5)
AT_ONCE = WorkerPolicy(straggler_wait=timedelta(0))


class Slow:
    """A shop whose calls for some orders hang until the test lets them go on."""

    def __init__(self, db: Database, orders: int, *slow: int, policy: WorkerPolicy = AT_ONCE, **options: Any) -> None:
        self.go_on, self.slow, self._hung = threading.Event(), slow, set[int]()
        self.most = self._now = 0
        self._lock = threading.Lock()
        self.shop = Shop(concurrency=8, on_uncertain="contain", **options)
        type(self.shop.mail).operations()["send"].timeout = LONG
        self.shop.mail.make_result = self._answer
        self.run = self.shop.started(db, orders, policy=policy)
        self.sent: list[UUID] = []

    def _answer(self, effect: Any) -> None:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        if effect.params["n"] in {*self.slow} - self._hung:  # a reconcile attempt is answered at once
            self._hung.add(effect.params["n"])
            self.go_on.wait(LONG.total_seconds())
        with self._lock:
            self._now -= 1

    def mutate(self) -> Any:
        """Prepare everything, then run the mutate task as a pool process does. Returns what it returned."""
        run = self.run
        run.scheduler.schedule(["shop"])
        ids = [UUID(id_) for id_ in run.messages.popleft().run_ids]
        run.runner.prepare(ids)
        result = run.runner.mutate(ids, self.sent.extend)
        wait_for(lambda: len(self._outstanding()) <= len(self.slow), why="only the slow calls left")
        return result

    def _outstanding(self) -> list[Any]:
        return [row for row in self.run.runs() if row.phase == "mutating"]

    def end(self) -> None:
        """Let the calls go on, record their outcomes, and do what is left."""
        self.go_on.set()
        self.run.runner.stragglers.wait()
        self.run.run_until_idle()
        assert_consumed(self.run, self.shop.orders)

    def straggler(self) -> Any:
        """The run of the only slow call."""
        (row,) = self._outstanding()
        return row


@pytest.fixture
def made(db: Database) -> Iterator[Callable[..., Slow]]:
    """Make slow shops; whatever happens, their calls end with the test."""
    found: list[Slow] = []

    def make(*args: Any, **options: Any) -> Slow:
        found.append(Slow(db, *args, **options))
        return found[-1]

    yield make
    for slow in found:
        slow.go_on.set()
        slow.run.runner.stragglers.wait()


@pytest.fixture
def failing(db: Database) -> Iterator[Callable[..., list[str]]]:
    """Let the next writes of an outcome fail like this. Returns those that did."""
    with ExitStack() as stack:

        def fail_with(error: Exception, times: int = 2) -> list[str]:
            failed: list[str] = []

            def fail(_: Any, statement: str) -> None:
                if "mutation_outcome = 'success'" in statement and len(failed) < times:
                    failed.append(statement)
                    raise error

            stack.enter_context(observed(db, Listener(before=fail)))
            return failed

        yield fail_with


def test_a_task_ends_before_its_slow_call_and_its_other_runs_go_on(made: Callable[..., Slow]) -> None:
    slow = made(4, 2)
    result = slow.mutate()
    straggler = slow.straggler()
    others = {row.id for row in slow.run.runs() if row.id != straggler.id}
    wait_for(lambda: {*result.continuing, *slow.sent} == others, why="the other runs in their next phase")
    assert not straggler.mutation_outcome
    slow.sent.clear()
    slow.go_on.set()
    slow.run.runner.stragglers.wait()
    assert slow.sent == [straggler.id], "a message of its own brings the run to its next phase"
    assert [row.resolved_by for row in slow.run.ledger()] == ["call"] * 4
    slow.end()
    assert each_once(slow.shop, range(4))


def test_the_lease_of_a_straggler_is_extended_and_given_up_with_its_outcome(made: Callable[..., Slow]) -> None:
    slow = made(2, 1)
    slow.mutate()
    before = slow.straggler()
    slow.run.advance(LONG * 0.9)  # its lease covers its deadline from the beginning
    slow.run.leases.heartbeat()
    after = slow.straggler()
    assert after.lease_expires_at > before.lease_expires_at
    lease = RunLease(before.id, before.fence)
    assert slow.run.leases.is_held(lease)
    slow.go_on.set()
    slow.run.runner.stragglers.wait()
    assert not slow.run.leases.is_held(lease)


def test_a_straggler_that_hangs_until_its_timeout_is_reconciled_and_stopped_in_doubt(
    made: Callable[..., Slow],
) -> None:
    slow = made(2, 1)
    type(slow.shop.mail).operations()["send"].timeout = timedelta(seconds=1)
    slow.mutate()
    slow.run.runner.stragglers.wait()
    assert len(slow.shop.mail.reconciled_keys) == 1, "the reconcile attempt that follows a timeout at once"
    assert sorted(row.status for row in slow.run.ledger()) in (["applied", "applied"], ["applied", "needs_reconcile"])
    slow.end()
    assert each_once(slow.shop, range(2))


def test_a_process_never_has_more_calls_in_flight_than_its_concurrency(made: Callable[..., Slow]) -> None:
    slow = made(2, 0, 1, policy=AT_ONCE.model_copy(update={"mutation_concurrency": 2}))
    slow.mutate()
    slow.run.publish(slow.shop.orders, {"n": 2}, {"n": 3})
    waiting = threading.Thread(target=slow.mutate, daemon=True)
    waiting.start()
    wait_for(lambda: slow.run.runner.sender.places._waiting, why="a cohort that waits for a place")
    assert len(slow.run.ledger()) == 2, "nothing was sent without a place"
    slow.go_on.set()
    waiting.join(60)
    assert not waiting.is_alive(), "a place that became free wakes the cohort that waits for it"
    assert slow.most == 2
    slow.end()
    assert each_once(slow.shop, range(4))
    assert slow.run.runner.sender.places._free == 2


def test_a_cohort_that_gets_no_place_in_its_time_hands_its_runs_back(made: Callable[..., Slow]) -> None:
    policy = AT_ONCE.model_copy(update={"mutation_concurrency": 1, "mutation_budget": timedelta(0)})
    slow = made(1, 0, policy=policy)
    slow.mutate()
    slow.run.publish(slow.shop.orders, {"n": 1})
    assert not slow.mutate().continuing
    (handed_back,) = [row for row in slow.run.runs() if row.phase == "prepared"]
    assert handed_back.lease_expires_at is None
    slow.end()
    assert each_once(slow.shop, range(2))


def test_outcomes_of_stragglers_survive_a_short_outage_of_the_database(
    made: Callable[..., Slow], failing: Callable[..., list[str]]
) -> None:
    slow = made(2, 1)
    slow.mutate()
    failed = failing(OperationalError("", {}, Exception("the server closed the connection unexpectedly")))
    slow.go_on.set()
    slow.run.runner.stragglers.wait()
    assert len(failed) == 2
    assert [row.status for row in slow.run.ledger()] == ["applied", "applied"]
    slow.end()


def test_stragglers_whose_outcome_cannot_be_written_stop_at_once_with_the_reason(
    made: Callable[..., Slow], failing: Callable[..., list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    slow = made(2, 1)
    slow.mutate()
    failing(RuntimeError("out of order"), 1)
    slow.go_on.set()
    slow.run.runner.stragglers.wait()
    (stopped,) = [row for row in slow.run.runs() if row.status != "active"]
    assert "its task failed: RuntimeError: out of order" in str(stopped.error)
    assert "they are reconciled" in caplog.text
    slow.end()
    assert each_once(slow.shop, range(2))


def test_a_straggler_that_was_taken_for_dead_resolves_its_doubt_with_its_late_answer(made: Callable[..., Slow]) -> None:
    slow = made(2, 1)
    slow.mutate()
    late = slow.straggler().id
    slow.run.advance(timedelta(minutes=15))
    slow.run.sweeps.dispatch_reconcile = lambda _: None
    slow.run.sweeps.rescue()
    assert "needs_reconcile" in {row.status for row in slow.run.ledger()}
    slow.go_on.set()
    slow.run.runner.stragglers.wait()
    assert {row.status for row in slow.run.ledger()} == {"applied"}
    assert late not in slow.sent, "its run goes on as a retry"
    slow.end()
    assert each_once(slow.shop, range(2))


@pytest.mark.parametrize("point", [CrashPoint.CALLED, CrashPoint.OUTCOME_SAVED])
def test_a_process_that_dies_with_stragglers_loses_and_repeats_nothing(
    made: Callable[..., Slow], point: CrashPoint
) -> None:
    slow = made(3, 1)
    slow.mutate()
    with slow.run.crash_at(point):
        slow.go_on.set()
        slow.run.runner.stragglers.wait()
    slow.run.run_until_idle()
    assert_consumed(slow.run, slow.shop.orders)
    assert each_once(slow.shop, range(3))


def test_a_straggler_is_held_no_longer_than_the_time_limit_of_its_task(db: Database) -> None:
    a_workflow(db, concurrency=2)
    some_events(db, "m1", "m2")
    late, other = a_run(db, Phase.PREPARING), a_run(db, Phase.PREPARING)
    leases = Leases(db, lease=LEASE, every=timedelta(hours=1))
    leases.hold([held(late), held(other)])
    leases.hold_until([held(late)], time.monotonic() - 1)
    db.advance_clock(LEASE / 2)
    leases.heartbeat()
    assert the_run(db, late.id).lease_expires_at == late.lease_expires_at, (
        "a thread that hangs does not hold it forever"
    )
    assert the_run(db, other.id).lease_expires_at > other.lease_expires_at
    leases.hand_back_all()


def test_a_wait_for_stragglers_ends_when_the_process_must_end(made: Callable[..., Slow]) -> None:
    slow = made(1, 0)
    slow.mutate()
    slow.run.runner.stragglers.wait(lambda: True)
    assert slow.straggler().status == "active"
    slow.end()


def test_a_task_that_fails_leaves_its_stragglers_alone(made: Callable[..., Slow]) -> None:
    slow = made(2, 1)
    record = slow.run.runner.durations.record
    slow.run.runner.durations.record = _raise  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        slow.mutate()
    slow.run.runner.durations.record = record  # type: ignore[method-assign]
    wait_for(lambda: len(slow._outstanding()) == 1, why="only the slow call left")
    straggler = slow.straggler()
    assert straggler.status == "active"
    assert slow.run.leases.is_held(RunLease(straggler.id, straggler.fence))
    slow.end()
    assert each_once(slow.shop, range(2))


def _raise(handler_id: int, phase: str, seconds: float) -> None:
    if phase == "calls":
        raise RuntimeError("the soft time limit was exceeded")


def test_in_the_inline_harness_a_crash_of_a_straggler_is_a_crash_of_the_worker(made: Callable[..., Slow]) -> None:
    slow = made(1, 0)
    threading.Timer(0.2, slow.go_on.set).start()
    with pytest.raises(WorkerCrash), slow.run.on_crash_points(_die):
        slow.run.run()
    slow.run.start_worker()
    slow.run.run_until_idle()
    assert_runs(slow.run, "paused:reconciliation", "committed")


def _die(point: CrashPoint) -> None:
    if point is CrashPoint.CALLED:
        raise WorkerCrash(point)
