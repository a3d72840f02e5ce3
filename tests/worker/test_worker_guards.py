"""Guards of the runtime: what each of them keeps from happening, one test for each."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from threading import Event
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from pipeline import Call, Connector, PrepareResult, TransientError, Workflow, mutation
from pipeline.background.messages import DispatchMessage
from pipeline.background.reconciler import Reconciler
from pipeline.config import Settings
from pipeline.consumer_engine.bounded import ConcurrentCalls
from pipeline.domain.policies import Backoff, FailurePolicy
from pipeline.domain.states import MutationId, Phase, PhaseTask
from pipeline.store.database import Database
from pipeline.testing import Does, Inline, assert_consumed, assert_runs
from pipeline.transitions import runs
from pipeline.worker.crash_points import CrashPoint
from pipeline.worker.leases import Leases
from pipeline.worker.runner import Runner, process_name
from pipeline.worker.settings import WorkerPolicy
from pipeline.worker.startup_checks import UnsafeError, require_pool, require_safe
from tests.factories import LEASE, a_run, a_workflow, claimed_next, held, some_events, the_run
from tests.support.scripted_consumers import Shop, each_once, take_one
from tests.support.statement_events import Listener, observed
from tests.support.table_reads import one
from tests.support.wait import wait_for
from tests.support.worker_clock import Clock

SHORT, LONG = timedelta(seconds=0.3), timedelta(seconds=30)
PATIENT = FailurePolicy(backoff=Backoff(base=timedelta(minutes=10)))


def an_hour(db: Database) -> Leases:
    """Leases whose own thread does nothing during a test: it sends a heartbeat when the test calls it."""
    return Leases(db, lease=LEASE, every=timedelta(hours=1))


def timeout_of(shop: Shop, timeout: timedelta) -> None:
    type(shop.mail).operations()["send"].timeout = timeout


class Slow(ConcurrentCalls):
    """Calls on a busy machine: each begins only a while after it was launched."""

    def __init__(self, pause: timedelta) -> None:
        super().__init__()
        self.pause, self.is_any_done = pause.total_seconds(), Event()

    def start(self, key: Any, function: Callable[..., Any], *args: Any, ends_at: float) -> None:
        def later() -> Any:
            Event().wait(self.pause)
            try:
                return function(*args)
            finally:
                self.is_any_done.set()

        super().start(key, later, ends_at=ends_at)


@pytest.fixture
def failing(db: Database) -> Iterator[Callable[[str, int], list[str]]]:
    """Let the next so many statements with this text find the database away. Returns those that did."""
    with ExitStack() as stack:

        def fail_on(words: str, times: int) -> list[str]:
            failed: list[str] = []

            def fail(_: Any, statement: str) -> None:
                if words in statement and len(failed) < times:
                    failed.append(statement)
                    raise OperationalError(statement, {}, Exception("the server closed the connection unexpectedly"))

            stack.enter_context(observed(db, Listener(before=fail)))
            return failed

        yield fail_on


def test_a_call_that_does_not_return_by_its_operations_timeout_is_reconciled(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop, never, clock = Shop(), Event(), Clock(monkeypatch)

    def answer(_: Any) -> Any:
        if not shop.mail.reconciled_keys:
            clock.advance(run, LONG)
            never.wait(60)

    shop.mail.make_result = answer
    timeout_of(shop, LONG)
    run = shop.started(db)
    run.run()
    never.set()
    assert shop.mail.reconciled_keys == [run.ledger()[0].idempotency_key]
    assert_consumed(run, shop.orders)
    assert each_once(shop, [0])


def test_a_mutation_whose_time_passed_before_its_call_is_known_not_to_have_been_sent(db: Database) -> None:
    shop = Shop(failures=PATIENT)
    timeout_of(shop, SHORT)
    run = shop.started(db)
    run.runner.sender._local.calls = Slow(SHORT / 3)

    def freeze(point: CrashPoint) -> None:
        if point is CrashPoint.IN_FLIGHT:
            Event().wait(SHORT.total_seconds() + 0.1)

    with run.on_crash_points(freeze):
        run.run()
    (refused,) = run.ledger()
    assert (refused.status, shop.mail.calls, shop.mail.reconciled_keys) == ("failed", [], [])
    assert "had passed before anything was sent" in str(refused.error)


def test_a_call_that_begins_only_after_its_time_has_passed_sends_nothing(db: Database) -> None:
    shop = Shop()
    timeout_of(shop, SHORT)
    run = shop.started(db)
    slow = run.runner.sender._local.calls = Slow(2 * SHORT)
    run.run()
    wait_for(lambda: slow.is_any_done.is_set(), why="the call is through")
    assert not shop.mail.calls


def test_nothing_is_sent_for_a_run_that_another_worker_holds(db: Database) -> None:
    shop = Shop()
    run = shop.started(db)
    taken: list[CrashPoint] = []

    def take_over(point: CrashPoint) -> None:
        if point is CrashPoint.IN_FLIGHT and not taken:
            taken.append(point)
            run.sweeps.recover_process(process_name())
            run.leases.heartbeat()

    with run.on_crash_points(take_over):
        run.run()
    assert taken
    assert not shop.mail.calls
    run.run_until_idle()
    assert_consumed(run, shop.orders)
    assert each_once(shop, [0])


class Post(Connector):
    """A connector that describes its parameters."""

    name = "post"

    @mutation()
    def send(self, call: Call, *, n: int) -> None:
        """Never called here."""


@pytest.mark.parametrize("params", [{"number": 1}, {"n": 1, "to": "x"}, {"n": "one"}, {}])
def test_parameters_an_operation_does_not_take_are_refused_before_they_are_in_the_ledger(
    db: Database, params: dict[str, Any]
) -> None:
    shop = Shop(mutate=lambda ctx, _: ctx.post.send(**params))
    run = shop.started(db, connectors=[Post()])
    run.run()
    (failed,) = assert_runs(run, "failed:logic")
    assert ("send was given a wrong" if params else "send was not given n") in str(failed.error)
    assert not run.ledger()


def test_of_two_reconciles_at_once_one_calls_the_outside_system(db: Database) -> None:
    shop = Shop()
    shop.mail.will(Does.TIMES_OUT_AFTER)
    shop.mail.cannot_tell(times=3)
    run = shop.started(db)
    run.run()
    (doubted,) = run.ledger()
    before = len(shop.mail.reconciled_keys)
    other = Reconciler(db, run.registry, lambda: 0.0)

    def meanwhile() -> float:
        """Drawn after the mutation was read and before its reconcile attempt is booked."""
        other.reconcile(MutationId(doubted.id))
        return 0.0

    report = Reconciler(db, run.registry, meanwhile).reconcile(MutationId(doubted.id))
    assert len(shop.mail.reconciled_keys) == before + 1
    assert not report.counts


def test_finished_runs_do_not_wait_for_the_slow_calls_of_their_cohort(db: Database) -> None:
    shop, handed_on = Shop(concurrency=8), Event()
    waited: list[bool] = []

    def answer(effect: Any) -> None:
        if effect.params["n"] == 0:
            waited.append(handed_on.wait(LONG.total_seconds()))

    shop.mail.make_result = answer
    timeout_of(shop, 2 * LONG)
    run = shop.started(db, 3, policy=WorkerPolicy(straggler_wait=timedelta(0)))

    def broker(message: DispatchMessage) -> list[DispatchMessage]:
        if message.task == "pipeline.next":
            handed_on.set()
        return [message]

    run.broker = broker
    run.run()
    assert waited == [True], "the other runs went on only after the slow call"
    assert_consumed(run, shop.orders)


def test_runs_that_a_cohort_has_no_time_for_are_handed_back_and_done_later(db: Database) -> None:
    prepared: list[int] = []

    def prepare(ctx: Any, _: Any) -> PrepareResult:
        plan = take_one(ctx, shop.orders)
        prepared.append(plan.data["n"])
        return plan

    shop = Shop(prepare=prepare, concurrency=8)
    run = shop.started(db, 3, policy=WorkerPolicy(cohort_budget=timedelta(0)))
    run.scheduler.schedule(["shop"])
    run.deliver(run.messages.popleft())
    assert len(prepared) == 1
    assert not [row for row in run.runs() if row.lease_expires_at], "nobody waits for a lease to lapse"
    run.run_until_idle()
    assert_consumed(run, shop.orders)
    assert sorted(prepared) == [0, 1, 2]
    assert {row.status for row in run.runs()} == {"committed"}


def _not_now(*_: Any) -> Any:
    raise TransientError("not now")


@pytest.mark.parametrize("chance", [0.0, 0.5])
@pytest.mark.parametrize("where", ["handler", "call"])
def test_the_pause_after_a_failure_is_spread_by_chance(db: Database, where: str, chance: float) -> None:
    backoff = Backoff(base=timedelta(minutes=10), jitter=1.0)
    shop = Shop(prepare=_not_now if where == "handler" else None, failures=FailurePolicy(backoff=backoff))
    shop.mail.will(Does.FAILS)
    run = shop.started(db)
    run.runner = Runner(db, run.registry, run.leases, run.policy, lambda: chance)
    run.run()
    (stopped,) = assert_runs(run, "paused:transient")
    handler = one(db, "SELECT * FROM pipeline.handlers WHERE name = 'Send'")
    assert handler.retry_at - stopped.finished_at == backoff.delay(1, jitter=chance)


def test_a_heartbeat_that_finds_the_database_away_beats_again(
    db: Database, failing: Callable[[str, int], list[str]]
) -> None:
    a_workflow(db)
    some_events(db, "m1")
    run = a_run(db, Phase.PREPARING)
    failed = failing("extended AS", 3)
    leases = Leases(db, lease=2 * LEASE, every=timedelta(milliseconds=20))
    leases.hold([held(run)])
    try:
        wait_for(lambda: the_run(db, run.id).lease_expires_at > run.lease_expires_at, why="the lease extended")
    finally:
        leases.hand_back_all()
    assert len(failed) == 3


def test_the_end_of_an_old_claim_keeps_a_newer_claim_of_the_same_process(db: Database) -> None:
    a_workflow(db)
    some_events(db, "m1")
    old = a_run(db, Phase.EMITTING)
    with db.transaction() as tx:
        runs.hand_back(tx, [held(old)]).only()
    new = claimed_next(db, old)
    leases = an_hour(db)
    leases.hold([held(new)])
    leases.drop([held(old)])
    db.advance_clock(LEASE / 2)
    leases.heartbeat()
    assert the_run(db, new.id).lease_expires_at > new.lease_expires_at
    leases.hand_back_all()


def test_runs_that_are_handed_back_need_not_wait_for_their_lease(db: Database) -> None:
    a_workflow(db)
    some_events(db, "m1")
    run = a_run(db, Phase.PREPARING)
    leases = an_hour(db)
    leases.hold([held(run)])
    leases.hand_back_all()
    assert the_run(db, run.id).lease_expires_at is None
    with db.transaction() as tx:
        assert runs.claim(tx, PhaseTask.PREPARE, [run.id], lease_duration=LEASE, worker="another").claimed


def test_a_database_that_is_away_is_not_tried_run_by_run(
    db: Database, failing: Callable[[str, int], list[str]]
) -> None:
    shop = Shop(concurrency=8)
    run = shop.started(db, 3)
    failed = failing("prepare_result = ", 100)
    with pytest.raises(OperationalError):
        run.run()
    assert len(failed) == 1
    assert {row.status for row in run.runs()} == {"active"}, "no run is blamed for it"
    failed.extend([""] * 100)
    run.run_until_idle()
    assert_consumed(run, shop.orders)
    assert each_once(shop, range(3))


def test_a_woken_consumer_is_shown_everything_that_waits(db: Database) -> None:
    shown: list[int] = []

    def prepare(ctx: Any, _: Any) -> PrepareResult:
        shown.append(len(ctx.peek(shop.orders)))
        return PrepareResult.nothing(wake_at=ctx.now + timedelta(minutes=5) if len(shown) == 1 else None)

    shop = Shop(prepare=prepare, concurrency=4)
    run = shop.started(db, 3)
    run.run()
    assert shown == [1, 1, 1]
    run.advance(timedelta(minutes=6))
    run.run()
    assert shown[3:] == [3]


@pytest.mark.parametrize("by", [timedelta(minutes=15), timedelta(minutes=-15)])
def test_a_worker_whose_clock_differs_from_the_database_s_is_refused(db: Database, by: timedelta) -> None:
    shop = Shop()
    registry = shop.inline(db).registry
    settings = Settings(lease=timedelta(seconds=60), heartbeat=timedelta(seconds=15))
    require_safe(db, registry, settings)
    db.advance_clock(by)
    with pytest.raises(UnsafeError, match=r"clock and Postgres's differ by (8|9)\d\d\.\d s; expected less than 30 s"):
        require_safe(db, registry, settings)
    db.advance_clock(-by * 0.98)
    require_safe(db, registry, settings)


def test_a_crash_point_that_was_never_reached_fails_the_test(db: Database) -> None:
    shop = Shop()
    run = shop.started(db)
    with pytest.raises(AssertionError, match="never reached"), run.crash_at(CrashPoint.PRODUCED):
        run.run()
    run.publish(shop.orders, {"n": 1})
    with pytest.raises(AssertionError, match="never reached"), run.crash_at(CrashPoint.PREPARE_RAN, times=2):
        run.run()
    run.run_until_idle()


def test_a_topic_without_events_was_not_consumed(db: Database) -> None:
    shop = Shop()
    run = shop.inline(db)
    with pytest.raises(AssertionError, match="topic 'orders' has no event for any consumer"):
        assert_consumed(run, shop.orders)
    run.publish(shop.orders, {"n": 0})
    run.run()
    with pytest.raises(AssertionError, match="topic 'orders' has no event for Nobody"):
        assert_consumed(run, shop.orders, by="Nobody")
    assert_consumed(run, shop.orders, by="Send")


def test_a_workflow_that_feeds_itself_for_ever_is_reported(db: Database) -> None:
    workflow = Workflow("circle")
    rounds = workflow.topic("rounds")

    class Again:
        def prepare(self, ctx: Any, _: Any) -> PrepareResult:
            return take_one(ctx, rounds)

        def mutate(self, ctx: Any, prepared: Any) -> None: ...

        def next(self, ctx: Any, prepared: Any, _: Any) -> None:
            ctx.publish(rounds, message_id=f"round {prepared.data + 1}", payload=prepared.data + 1)

    workflow.consumer(subscribes=[rounds], publishes=[rounds])(Again)
    run = Inline(db, [workflow])
    run.publish(rounds, 0)
    with pytest.raises(AssertionError, match="still busy after 30 messages"):
        run.run(max_messages=30)


@pytest.mark.parametrize("pool", ["celery.concurrency.gevent", "celery.concurrency.eventlet:TaskPool"])
def test_a_pool_of_greenlets_is_refused_in_a_sentence(pool: str) -> None:
    with pytest.raises(UnsafeError, match="cannot keep leases alive; use prefork, threads or solo"):
        require_pool(pool)
    require_pool("celery.concurrency.prefork")
