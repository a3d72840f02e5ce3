"""Handlers and connectors report what their work costs: each recorded phase counts once, in the run that did it."""

import logging
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from pipeline import (
    Applied,
    Backoff,
    Call,
    Connector,
    MutationRetryPolicy,
    NotFound,
    ReconcilePolicy,
    Retry,
    TransientError,
    Workflow,
    mutation,
)
from pipeline.store.database import Database, Statement
from pipeline.testing import Inline, assert_consumed, assert_runs
from pipeline.worker.crash_points import CrashPoint
from tests.support.scripted_consumers import UNHURRIED, Shop, at_once, take_one

#: One decimal digit for each part of a run, so that a sum tells what it is made of.
PREPARE, MUTATE, CALL, NEXT, RECONCILE = 1, 10, 100, 1000, Decimal("0.1")
ALL = PREPARE + MUTATE + CALL + NEXT
QUICK = MutationRetryPolicy(max_attempts=3, backoff=Backoff(base=timedelta(0), cap=timedelta(0)))
PATIENT = ReconcilePolicy(backoff=Backoff(base=timedelta(minutes=10), jitter=0))


class Till(Connector):
    """Reports a cost for every call and every reconcile attempt."""

    name = "till"

    def __init__(self, *errors: BaseException | None, reports: Any = CALL) -> None:
        self.errors, self.reports = list(errors), reports
        self.done: set[str] = set()
        self.undecided = 0

    @mutation(timeout=UNHURRIED, settle=timedelta(0), retry=QUICK, policy=PATIENT)
    def charge(self, call: Call, *, n: int) -> dict[str, int]:
        """Apply, unless a known error is next."""
        error = self.errors.pop(0) if self.errors else None
        if not isinstance(error, TransientError):
            self.done.add(call.idempotency_key)
        call.add_cost(self.reports)
        if error is not None:
            raise error
        return {"n": n}

    @charge.reconcile
    def find(self, call: Call, *, n: int) -> Applied | NotFound | Retry:
        """Tell what was applied."""
        call.add_cost(RECONCILE)
        if self.undecided:
            self.undecided -= 1
            return Retry("not yet")
        return Applied({"n": n}) if call.idempotency_key in self.done else NotFound()


def a_shop(**handlers: Any) -> Shop:
    """A shop in which every phase reports its digit."""

    def prepare(ctx: Any, _: Any) -> Any:
        ctx.add_cost(PREPARE)
        return take_one(ctx, shop.orders)

    def mutate(ctx: Any, prepared: Any) -> Any:
        ctx.add_cost(MUTATE)
        return ctx.till.charge(n=prepared.data["n"])

    def next_(ctx: Any, prepared: Any, result: Any) -> None:
        ctx.add_cost(NEXT)

    shop = Shop(**{"prepare": prepare, "mutate": mutate, "next": next_, "failures": at_once(), **handlers})
    return shop


def costs(run: Inline) -> list[Decimal | None]:
    """The cost of each run that had inputs, oldest first."""
    return [row.cost for row in run.runs() if row.event_ids]


def session_costs(run: Inline) -> list[Any]:
    with run.db.transaction() as tx:
        return [
            row.cost for row in tx.all(Statement[Any]("SELECT cost FROM pipeline.sessions ORDER BY started_at, id"))
        ]


def test_every_phase_and_the_call_add_to_the_cost_of_the_run_and_of_its_session(db: Database) -> None:
    run = a_shop(concurrency=2).started(db, 2, connectors=[Till()])
    run.run()
    run.sweeps.sessions()
    assert costs(run) == [ALL, ALL]
    assert session_costs(run) == [ALL * 2]


def test_a_run_that_reports_nothing_has_no_cost(db: Database) -> None:
    run = Shop().started(db)
    run.run()
    run.sweeps.sessions()
    assert costs(run) == [None]
    assert session_costs(run) == [None]


def test_a_mutate_without_a_request_and_a_producer_report_costs(db: Database) -> None:
    workflow = Workflow("feed")
    items = workflow.topic("items")

    @workflow.producer(every=timedelta(days=30), publishes=[items])
    def poll(ctx: Any, state: Any) -> None:
        ctx.add_cost(Decimal("0.25"))
        ctx.add_cost(Decimal("0.5"))

    def mutate(ctx: Any, prepared: Any) -> None:
        ctx.add_cost(MUTATE)

    shop = a_shop(mutate=mutate)
    run = Inline(db, [workflow, shop.workflow], [shop.mail, Till()])
    run.publish(shop.orders, {"n": 0})
    run.advance(timedelta(days=31))
    run.run()
    assert {row.handler: row.cost for row in run.runs()} == {
        "Send": PREPARE + MUTATE + NEXT,
        "poll": Decimal("0.75"),
    }


def test_each_attempt_and_the_immediate_reconcile_cost_what_they_report(db: Database) -> None:
    till = Till(TransientError("not now"), TransientError("not now"), TimeoutError("no answer"))
    run = a_shop().started(db, connectors=[till])
    run.run()
    assert costs(run) == [ALL + 2 * CALL + RECONCILE]
    assert [row.attempts for row in run.ledger()] == [3]


def test_a_phase_that_fails_has_cost_what_it_reported_until_then(db: Database) -> None:
    failures = iter([TransientError("not now")])

    def next_(ctx: Any, prepared: Any, result: Any) -> None:
        ctx.add_cost(NEXT)
        if error := next(failures, None):
            raise error

    run = a_shop(next=next_).started(db, connectors=[Till()])
    run.run_until_idle()
    assert_runs(run, "paused:transient", "committed")
    assert costs(run) == [ALL, NEXT], "the cost of a retry is its own"


def test_a_refused_mutation_has_cost_what_its_call_reported(db: Database) -> None:
    till = Till(*[TransientError("not now")] * 3)
    run = a_shop().started(db, connectors=[till])
    run.run_until_idle()
    assert costs(run) == [PREPARE + MUTATE + 3 * CALL, ALL]


def test_reconcile_attempts_in_the_background_add_to_the_run_that_asked(db: Database) -> None:
    till = Till(TimeoutError("no answer"))
    till.undecided = 2
    run = a_shop().started(db, connectors=[till])
    run.run_until_idle()
    assert_runs(run, "paused:reconciliation", "committed")
    assert costs(run) == [PREPARE + MUTATE + CALL + 3 * RECONCILE, NEXT]


@pytest.mark.parametrize("redeliver", [False, True], ids=["message lost", "message redelivered"])
@pytest.mark.parametrize(
    "point", [point for point in CrashPoint if point not in (CrashPoint.PRODUCE_CLAIMED, CrashPoint.PRODUCED)]
)
def test_a_phase_that_is_repeated_after_a_crash_is_counted_once_in_a_run(
    db: Database, point: CrashPoint, redeliver: bool
) -> None:
    shop = a_shop()
    run = shop.started(db, connectors=[Till()])
    with run.crash_at(point, redeliver=redeliver):
        run.run()
    run.run()
    run.run_until_idle()
    assert_consumed(run, shop.orders)
    for cost in costs(run):
        assert set(str(int(cost or 0))) <= {"0", "1"}, f"a phase of one run was counted twice: {cost}"


def test_a_wrong_cost_of_a_handler_is_a_logic_error(db: Database) -> None:
    def prepare(ctx: Any, _: Any) -> Any:
        ctx.add_cost(0.1)
        return take_one(ctx, shop.orders)

    shop = a_shop(prepare=prepare)
    run = shop.started(db, connectors=[Till()])
    run.run()
    (row,) = run.runs()
    assert (row.status, row.cost) == ("failed:logic", None)
    assert "add_cost was given a float; expected a Decimal or an int" in str(row.error)


def test_a_wrong_cost_of_a_connector_does_not_change_the_outcome(
    db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """A ``LogicError`` of a call means that it did not happen. Here it has happened."""
    till = Till(reports=0.1)
    shop = a_shop()
    run = shop.started(db, connectors=[till])
    with caplog.at_level(logging.ERROR):
        run.run()
    assert_runs(run, "committed")
    assert [row.status for row in run.ledger()] == ["applied"]
    assert costs(run) == [ALL - CALL]
    assert "the cost of till.charge is not counted: add_cost was given a float" in caplog.text


def test_a_context_that_is_kept_for_later_takes_no_cost(db: Database) -> None:
    kept: list[Any] = []

    def mutate(ctx: Any, prepared: Any) -> Any:
        kept[0].add_cost(MUTATE)
        return ctx.till.charge(n=0)

    def prepare(ctx: Any, _: Any) -> Any:
        kept.append(ctx)
        return take_one(ctx, shop.orders)

    shop = a_shop(prepare=prepare, mutate=mutate)
    run = shop.started(db, connectors=[Till()])
    run.run()
    (row,) = run.runs()
    assert row.status == "failed:logic"
    assert "add_cost after the phase had ended" in str(row.error)


def test_the_cost_of_a_run_moves_with_it_to_the_session_it_joins_when_it_is_approved(db: Database) -> None:
    run = a_shop(requires_approval=True).started(db, connectors=[Till()])
    run.run()
    run.sweeps.sessions()
    assert session_costs(run) == [PREPARE + MUTATE]
    (request,) = run.ledger()
    run.approve(request)
    run.run()
    run.sweeps.sessions()
    assert costs(run) == [ALL]
    assert session_costs(run) == [0, ALL]
