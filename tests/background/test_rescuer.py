"""Recovery stops runs in sets, continues past one that it cannot stop, and lets what follows begin at once."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import text

from pipeline.background import reconciler, rescuer
from pipeline.background.messages import SweepReport
from pipeline.background.reconciler import Reconciler
from pipeline.domain.states import MutationId, Phase, PhaseTask
from pipeline.store.database import Database, Transaction
from pipeline.testing import CrashPoint, Inline, assert_consumed
from pipeline.transitions import runs, starts, stops
from pipeline.worker.runner import process_name
from tests.factories import LEASE, TIMEOUT, a_run, a_workflow, some_events, the_run
from tests.support.scripted_consumers import Shop
from tests.support.table_reads import rows

MANY = 450  #: runs of one workflow, more than two sets

_REFUSE = """
CREATE FUNCTION public.no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not this one'; END $$;
CREATE TRIGGER no BEFORE UPDATE ON pipeline.runs FOR EACH ROW
WHEN (OLD.error = 'broken' AND NEW.status <> OLD.status) EXECUTE FUNCTION public.no();
"""


@contextmanager
def refusing(db: Database, run_id: UUID) -> Iterator[None]:
    """Let a run refuse to be stopped."""
    with db.transaction() as tx:
        tx.execute(text("UPDATE pipeline.runs SET error = 'broken' WHERE id = :id"), id=run_id)
        tx.execute(text(_REFUSE))
    try:
        yield
    finally:
        with db.transaction() as tx:
            tx.execute(text("DROP FUNCTION public.no() CASCADE"))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many transactions and statements there were."""
    seen: Counter[str] = Counter()

    def count(owner: type, verb: str) -> None:
        plain = getattr(owner, verb)

        def counting(*args: Any, **params: Any) -> Any:
            seen[verb] += 1
            return plain(*args, **params)

        monkeypatch.setattr(owner, verb, counting)

    for owner, verb in ((Database, "transaction"), (Transaction, "all"), (Transaction, "execute")):
        count(owner, verb)
    return seen


def test_a_run_that_cannot_be_rescued_is_logged_and_does_not_stop_the_others(
    db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    a_workflow(db, "broken")
    a_workflow(db, "fine")
    bad, good = a_run(db, Phase.PREPARING, workflow="broken"), a_run(db, Phase.PREPARING, workflow="fine")
    db.advance_clock(LEASE + TIMEOUT)
    with refusing(db, bad.id), caplog.at_level(logging.ERROR):
        (ended,) = rescuer.recover_crashed_runs(db)
    assert ended.run_id == good.id
    assert str(bad.id) in caplog.text
    assert the_run(db, bad.id).status == "active"
    rescuer.recover_crashed_runs(db)


def test_a_locked_workflow_costs_one_wait_and_the_runs_of_others_are_rescued(
    db: Database, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Two runs are read at a time. The older ones are all of the workflow that another transaction holds."""
    a_workflow(db, "held", concurrency=4)
    a_workflow(db, "free")
    some_events(db, "m1", "m2", "m3", workflow="held")
    stuck = [a_run(db, Phase.PREPARING, workflow="held") for _ in range(3)]
    other = a_run(db, Phase.PREPARING, workflow="free")
    db.advance_clock(LEASE + TIMEOUT)
    hurried = Database.connect(database_url, lock_timeout=timedelta(milliseconds=200))
    hurried.clock_offset = db.clock_offset
    with db.transaction() as holder:
        holder.execute(text("SELECT 1 FROM pipeline.workflows WHERE name = 'held' FOR UPDATE"))
        (ended,) = rescuer.recover_crashed_runs(hurried, limit=2)
        assert rescuer.recover_crashed_runs(hurried, limit=10) == ()
    hurried.dispose()
    assert ended.run_id == other.id
    assert caplog.text.count("cannot be rescued") == 2, "one wait for each pass"
    assert {item.run_id for item in rescuer.recover_crashed_runs(db)} == {run.id for run in stuck}


def many_lapsed_runs(db: Database, workflow: str = "busy", count: int = MANY) -> set[UUID]:
    """Make runs of one workflow whose worker is gone, each with an event of its own."""
    a_workflow(db, workflow, concurrency=count)
    some_events(db, *(f"{workflow} {number}" for number in range(count)), workflow=workflow)
    with db.transaction() as tx:
        made = starts.start(tx, workflow, "send", count=count).runs
        claims = runs.claim(tx, PhaseTask.PREPARE, [run.id for run in made], lease_duration=LEASE, worker="gone")
    db.advance_clock(LEASE + TIMEOUT)
    return {run.id for run in claims.claimed}


def test_hundreds_of_runs_are_rescued_in_a_few_transactions(db: Database, counted: Counter[str]) -> None:
    lapsed = many_lapsed_runs(db)
    counted.clear()
    ended = rescuer.recover_crashed_runs(db, budget=timedelta(minutes=1))
    assert {item.run_id for item in ended} == lapsed
    assert len(lapsed) == MANY
    assert counted["transaction"] <= 4, "one that reads, and three sets"


def test_the_statements_of_a_rescue_do_not_grow_with_its_runs(db: Database, counted: Counter[str]) -> None:
    few, counts = many_lapsed_runs(db, "few", 2), list[int]()
    for lapsed in (few, many_lapsed_runs(db, "more", 40)):
        counted.clear()
        with db.transaction() as tx:
            assert len(stops.rescue(tx, sorted(lapsed))) == len(lapsed)
        counts.append(counted["all"] + counted["execute"])
    assert counts[0] == counts[1]


def test_one_run_that_cannot_be_stopped_delays_no_other_of_its_set(
    db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    lapsed = many_lapsed_runs(db, count=5)
    bad = min(lapsed)
    with refusing(db, bad), caplog.at_level(logging.WARNING):
        ended = rescuer.recover_crashed_runs(db)
    assert {item.run_id for item in ended} == lapsed - {bad}
    assert "5 runs cannot be rescued together" in caplog.text
    assert f"run {bad} cannot be rescued" in caplog.text
    assert [item.run_id for item in rescuer.recover_crashed_runs(db)] == [bad]


def test_a_pass_without_time_leaves_the_rest_to_the_next(db: Database) -> None:
    lapsed = many_lapsed_runs(db, count=3)
    assert rescuer.recover_crashed_runs(db, budget=timedelta(0)) == ()
    assert {item.run_id for item in rescuer.recover_crashed_runs(db)} == lapsed


def test_a_set_of_runs_without_a_database_is_not_tried_one_by_one(
    db: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lapsed = many_lapsed_runs(db, count=3)

    def cut(tx: Transaction, *_: Any, **__: Any) -> None:
        tx.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

    with monkeypatch.context() as patch:
        patch.setattr(stops, "rescue", cut)
        assert rescuer.recover_crashed_runs(db) == ()
    assert caplog.text.count("cannot be rescued") == 1
    assert {item.run_id for item in rescuer.recover_crashed_runs(db)} == lapsed


def a_run_in_flight(db: Database, **how: Any) -> tuple[Shop, Inline]:
    """A mutation that happened, and whose worker died before it could record so."""
    shop = Shop(**how)
    run = shop.started(db)
    with run.crash_at(CrashPoint.CALLED):
        run.run()
    assert [row.status for row in run.ledger()] == ["in_flight"]
    return shop, run


def lose_messages(run: Inline) -> list[list[str]]:
    """Keep reconcile messages from being delivered, and return those that were sent."""
    dispatched: list[list[str]] = []
    run.sweeps.dispatch_reconcile = lambda ids: dispatched.append([*ids])
    return dispatched


@pytest.mark.parametrize("how", ["sweep", "process"])
def test_a_rescue_dispatches_the_reconcile_attempt_of_the_doubt_that_it_makes(db: Database, how: str) -> None:
    shop, run = a_run_in_flight(db)
    dispatched = lose_messages(run)
    if how == "sweep":
        run.advance(timedelta(minutes=5))
        report = run.sweeps.rescue()
    else:
        report = run.sweeps.recover_process(process_name())
    assert report.counts == {"rescued": 1, "reconciles dispatched": 1}
    assert dispatched == [[str(row.id) for row in run.ledger()]]
    assert [row.status for row in run.ledger()] == ["needs_reconcile"]
    run.sweeps.reconcile_one(run.ledger()[0].id)
    run.run()
    assert_consumed(run, shop.orders)
    run.sweeps.sessions()


def test_doubts_of_a_lost_zone_are_dispatched_in_sets(db: Database) -> None:
    shop = Shop(concurrency=50, on_uncertain="contain")
    run = shop.started(db, 45)
    with run.crash_at(CrashPoint.CALLED):
        run.run()
    dispatched = lose_messages(run)
    in_flight = {str(row.id) for row in run.ledger() if row.status == "in_flight"}
    run.advance(timedelta(minutes=5))
    run.sweeps.rescue()
    assert {id_ for ids in dispatched for id_ in ids} == in_flight
    assert len(dispatched) == -(-len(in_flight) // 20)
    run.sweeps.reconcile_all([MutationId(UUID(id_)) for id_ in in_flight])
    run.messages.clear()
    run.run_until_idle()
    assert_consumed(run, shop.orders)


def test_a_broker_that_is_away_costs_one_try_and_the_sweep_sends_the_rest(db: Database) -> None:
    sent: list[int] = []

    def refuse(ids: Sequence[str]) -> bool:
        sent.append(len(ids))
        return False

    assert reconciler.dispatch_in_sets([uuid4() for _ in range(50)], refuse) == 0
    assert sent == [20]


def test_a_verdict_starts_what_follows_from_it_without_a_tick(db: Database) -> None:
    _, run = a_run_in_flight(db)
    run.messages.clear()
    run.sweeps.recover_process(process_name())
    assert [row.status for row in run.ledger()] == ["applied"]
    (message,) = run.messages
    (retry,) = [each for each in run.runs() if each.retry_of]
    assert (message.task, message.run_ids) == (PhaseTask.NEXT, (str(retry.id),))
    run.run()
    run.sweeps.sessions()


def test_a_verdict_that_nothing_happened_starts_the_next_run_without_a_tick(db: Database) -> None:
    shop = Shop()
    run = shop.started(db)
    with run.crash_at(CrashPoint.IN_FLIGHT):
        run.run()
    run.messages.clear()
    run.advance(timedelta(minutes=30))
    run.sweeps.rescue()
    assert [row.status for row in run.ledger()] == ["failed"]
    assert [message.task for message in run.messages] == [PhaseTask.PREPARE]
    run.run()
    assert_consumed(run, shop.orders)
    run.sweeps.sessions()


def test_an_attempt_that_raises_keeps_no_other_of_its_message_from_being_made(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = Shop(concurrency=8, on_uncertain="contain")
    run = shop.started(db, 4)
    with run.crash_at(CrashPoint.CALLED):
        run.run()
    lose_messages(run)
    run.sweeps.recover_process(process_name())
    ids = [row.id for row in run.ledger() if row.status == "needs_reconcile"]
    made = Reconciler._reconcile_if_due

    def fails_once(self: Reconciler, mutation_id: MutationId, until: Any) -> SweepReport:
        if mutation_id == ids[0]:
            raise ZeroDivisionError("division by zero")
        return made(self, mutation_id, until)

    with monkeypatch.context() as patch:
        patch.setattr(Reconciler, "_reconcile_if_due", fails_once)
        with pytest.raises(ZeroDivisionError):
            run.sweeps.reconcile_all(ids)
    assert Counter(row.status for row in run.ledger() if row.id in ids) == {
        "applied": len(ids) - 1,
        "needs_reconcile": 1,
    }
    run.messages.clear()
    run.advance(timedelta(minutes=5))
    run.sweeps.reconcile_all(ids)
    run.run_until_idle()
    assert_consumed(run, shop.orders)


def test_attempts_that_a_message_has_no_time_for_stay_due(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    shop = Shop(concurrency=50, on_uncertain="contain")
    run = shop.started(db, 45)
    with run.crash_at(CrashPoint.CALLED):
        run.run()
    lose_messages(run)
    run.sweeps.recover_process(process_name())
    ids = [row.id for row in run.ledger() if row.status == "needs_reconcile"]
    with monkeypatch.context() as patch:
        patch.setattr(reconciler, "_BUDGET_SECONDS", 0)
        run.sweeps.reconcile_all(ids)
    left = [row for row in run.ledger() if row.status == "needs_reconcile"]
    assert 0 < len(left) < len(ids)
    assert not any(row.reconcile_attempts for row in left)
    run.sweeps.reconcile_all([row.id for row in left])
    run.messages.clear()
    run.run_until_idle()
    assert_consumed(run, shop.orders)


def test_a_locked_workflow_keeps_no_session_of_another_open(db: Database) -> None:
    for name in ("held", "free"):
        a_workflow(db, name)
        some_events(db, "m1", workflow=name)
        a_run(db, Phase.COMMITTED, workflow=name)
    with db.transaction() as holder:
        holder.execute(text("SELECT 1 FROM pipeline.workflows WHERE name = 'held' FOR UPDATE"))
        assert rescuer.recover_unfinished_sessions(db) == 1
        assert [
            row.workflow for row in rows(db, "SELECT workflow FROM pipeline.sessions WHERE finished_at IS NULL")
        ] == ["held"]
    assert rescuer.recover_unfinished_sessions(db) == 1
