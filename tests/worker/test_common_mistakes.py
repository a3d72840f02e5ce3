"""Common mistakes of authors: reused dicts, deadly events, renamed handlers, raised limits."""

# ruff: noqa: ARG002 - the host decides which arguments a handler takes

import logging
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy
import sqlalchemy.event
from pydantic import BaseModel
from sqlalchemy.exc import OperationalError

from pipeline import LogicError, PrepareResult, Workflow
from pipeline.domain.errors import PhaseViolationError
from pipeline.domain.values import Limits
from pipeline.store.database import Database
from pipeline.store.reads import invariants
from pipeline.testing import Inline, WorkerCrash, assert_consumed, assert_runs
from pipeline.worker.crash_points import CrashPoint
from pipeline.worker.settings import WorkerPolicy
from pipeline.workflows.contexts import CURRENT_CONTEXT, ContextInputs, MutateContext
from pipeline.workflows.registration import register_workflows
from pipeline.workflows.registry import Registry
from tests.support.scripted_consumers import Shop, at_once, blocks, each_once, statuses, take_one, the_workflow
from tests.support.statement_events import Listener, observed
from tests.support.table_reads import one

NOW = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("batch", [1, 4])
def test_an_event_that_kills_its_process_takes_the_others_of_its_cohort_along_once(db: Database, batch: int) -> None:
    deaths: list[int] = []
    doomed: list[bool] = []

    def prepare(ctx: Any, _: Any) -> Any:
        doomed.extend(event.payload["n"] == 7 for event in ctx.peek(shop.orders))
        return take_one(ctx, shop.orders)

    def die(point: CrashPoint) -> None:
        if point is CrashPoint.PREPARE_RAN:
            dies = any(doomed)
            count = len(doomed)
            doomed.clear()
            if dies:
                deaths.append(count)
                raise WorkerCrash(point)

    shop = Shop(prepare=prepare, concurrency=64, batch=batch, failures=at_once(max_failures=5))
    run = shop.started(db, 20)
    for _ in range(10):
        try:
            with run.on_crash_points(die):
                run.run()
        except WorkerCrash:
            run.start_worker()
            run.advance(timedelta(minutes=15))
            run.sweeps.rescue()
    alone = 4 if batch == 1 else 5  # the death of a run with several events counts against none of them
    assert deaths == [20, *[1] * alone], "after the first death the deadly event was alone"
    assert Counter(statuses(run, shop.orders)) == {"consumed": 19, "pending": 1}
    assert each_once(shop, [n for n in range(20) if n != 7])
    assert blocks(run) == ["internal"]


def test_a_run_that_crashes_after_its_mutation_is_retried_alone(db: Database) -> None:
    shop = Shop(concurrency=8)
    run = shop.started(db, 4)
    with run.crash_at(CrashPoint.NEXT_RAN):
        run.run()
    run.advance(timedelta(minutes=15))
    run.sweeps.rescue()
    assert [len(message.run_ids) for message in run.messages] == [1, 1, 1, 1]
    run.run()
    assert_consumed(run, shop.orders)
    assert each_once(shop, range(4))


def test_a_dict_used_again_after_it_was_published_or_sent_is_kept_as_it_was_then(db: Database) -> None:
    def mutate(ctx: Any, prepared: Any) -> Any:
        params = {"n": prepared.data["n"], "tags": ["a"]}
        asked = ctx.mail.send(**params)
        params["tags"].append({1, 2})
        return asked

    def next(ctx: Any, prepared: Any, result: Any) -> None:
        payload = {"n": 0}
        for n in range(3):
            payload["n"] = n
            ctx.publish(shop.receipts, message_id=f"{prepared.data['n']}-{n}", payload=payload)

    shop = Shop(mutate=mutate, next=next, concurrency=8)
    run = shop.started(db, 2)
    run.run()
    assert_consumed(run, shop.orders)
    assert [effect.params["tags"] for effect in shop.mail.effects] == [["a"], ["a"]]
    assert sorted(event.payload["n"] for event in run.events(shop.receipts)) == [0, 0, 1, 1, 2, 2]


def test_limits_that_an_installation_raised_hold_everywhere(db: Database) -> None:
    large = "x" * 1_500_000
    limits = Limits(payload=2_000_000, prepare_result=2_000_000, state=2_000_000, params=2_000_000, result=2_000_000)

    def prepare(ctx: Any, state: Any) -> Any:
        plan = take_one(ctx, shop.orders)
        return type(plan)(reserve=plan.reserve, data={**(plan.data or {}), "x": large})

    def next(ctx: Any, prepared: Any, result: Any) -> Any:
        if result.applied:
            ctx.publish(shop.receipts, message_id="r", payload={"x": large})
            return {"x": large}
        return None

    shop = Shop(prepare=prepare, mutate=lambda ctx, prepared: ctx.mail.send(n=0, x=large), next=next)
    run = shop.started(db, policy=WorkerPolicy(limits=limits))
    run.run()
    assert_consumed(run, shop.orders)
    assert run.state(shop.workflow, "Send") == {"x": large}


def test_runs_of_a_handler_this_worker_does_not_have_are_left_to_one_that_has(db: Database) -> None:
    """While a release that renames a consumer rolls out, workers of both kinds serve the workflow."""
    old, new = Shop(), Shop(name="Deliver")
    run = old.started(db)
    run.scheduler.schedule(["shop"])
    (message,) = run.messages
    released = new.inline(db)
    released.deliver(message)
    assert_runs(released, "active")
    assert not released.messages
    run.run()
    assert_consumed(run, old.orders)


@pytest.mark.broken_on_purpose
def test_events_that_wait_for_a_handler_that_is_gone_are_shown_by_the_doctor(db: Database) -> None:
    Shop().started(db, 2)
    run = Shop(name="Deliver").inline(db)
    run.run()
    (first, _) = _findings(run)
    assert (first.invariant, first.detail) == (
        "retired-handlers-hold-nothing",
        "pending for Send of shop, which is gone from the code",
    )


def test_a_producer_whose_schedule_changed_follows_the_new_one_at_once(db: Database) -> None:
    def registered(**schedule: Any) -> Any:
        workflow = Workflow("clock")
        workflow.producer(publishes=[workflow.topic("ticks")], name="tick", **schedule)(lambda ctx, state: None)
        registry = Registry()
        registry.add(workflow)
        register_workflows(db, registry)
        return one(db, "SELECT next_run_at FROM pipeline.handlers WHERE name = 'tick'").next_run_at

    yearly = registered(cron="0 0 1 1 *")
    assert registered(cron="0 0 1 1 *") == yearly
    assert registered(cron="*/5 * * * *") < yearly
    assert registered(cron="0 0 1 1 *") == yearly


@pytest.mark.parametrize("concurrency", [1, 4])
def test_new_code_is_offered_again_what_the_old_code_declined(db: Database, concurrency: int) -> None:
    old = Shop(prepare=lambda ctx, _: PrepareResult.nothing(), concurrency=concurrency)
    run = old.started(db, 2)
    run.run()
    assert statuses(run, old.orders) == ["pending", "pending"]
    same = Shop(concurrency=concurrency).inline(db)
    assert not same.scheduler.schedule(["shop"]).counts
    new = Shop(version=2, concurrency=concurrency)
    run = new.inline(db)
    run.run()
    assert_consumed(run, new.orders)


def test_the_context_of_another_run_is_refused_even_while_that_run_is_busy() -> None:
    shop = Shop()
    given = ContextInputs(now=NOW, connectors={"mail": shop.mail})
    mine, other = MutateContext(given), MutateContext(given)
    token = CURRENT_CONTEXT.set(mine)
    try:
        with pytest.raises(PhaseViolationError, match="through the context of another run"):
            other.mail.send(n=1)
    finally:
        CURRENT_CONTEXT.reset(token)
    assert mine.violation is other.violation is not None
    assert other.requested is None


def test_a_handlers_error_is_in_the_log_with_its_line_and_in_the_run_with_its_message(
    db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    shop = Shop(prepare=lambda ctx, _: ctx.peek(shop.orders)[0].payload["customer"])
    run = shop.started(db)
    with caplog.at_level(logging.WARNING):
        run.run()
    (failed,) = assert_runs(run, "failed:logic")
    assert str(failed.error).startswith("KeyError: 'customer' (test_common_mistakes.py:")
    (record,) = [record for record in caplog.records if record.message.startswith("Send.prepare failed")]
    assert "KeyError" in record.message
    assert "test_common_mistakes.py" in record.message
    assert "'customer'" not in record.message.replace('["customer"]', ""), "its words may quote a payload"


@pytest.mark.parametrize(
    ("look", "words"),
    [
        pytest.param(lambda ctx, topic: ctx.peek(topic, limit=-1), "limit=-1; expected a positive integer", id="limit"),
        pytest.param(lambda ctx, topic: ctx.peek(topic, limit="5"), "limit='5'; expected", id="limit is text"),
        pytest.param(lambda ctx, topic: ctx.get_by_ids(topic, ["x"]), "'x'; expected ids of events", id="id is text"),
        pytest.param(lambda ctx, topic: ctx.get_by_ids(topic, [2**70]), "expected ids of events", id="id too large"),
    ],
)
def test_a_peek_with_a_wrong_argument_is_a_logic_failure_with_a_plain_message(
    db: Database, look: Any, words: str
) -> None:
    shop = Shop(prepare=lambda ctx, _: look(ctx, shop.orders))
    run = shop.started(db)
    run.run()
    (failed,) = assert_runs(run, "failed:logic")
    assert words in str(failed.error)


def _findings(run: Inline) -> Any:
    with run.db.transaction() as tx:
        return invariants.findings(tx)


class Order(BaseModel):
    """What the topic of these tests carries."""

    n: int


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("limit", [1, 100])
def test_an_event_that_does_not_fit_its_model_is_quarantined_and_the_others_continue(
    db: Database, concurrency: int, limit: int
) -> None:
    workflow = Workflow("shop", concurrency=concurrency, on_logic_error="quarantine")
    orders = workflow.topic("orders", schema=Order)
    seen: list[int] = []

    class Read:
        def prepare(self, ctx: Any, state: Any) -> PrepareResult:
            pending = ctx.peek(orders, limit=limit)[:1]
            return PrepareResult(reserve=pending, data=[event.payload.n for event in pending])

        def mutate(self, ctx: Any, prepared: Any) -> None: ...

        def next(self, ctx: Any, prepared: Any, result: Any) -> None:
            seen.extend(prepared.data)

    workflow.consumer(subscribes=[orders], failures=at_once(quarantine_after=2))(Read)
    run = Inline(db, [workflow])
    with db.transaction() as tx:  # published before the topic had a model
        tx.execute(sqlalchemy.text("UPDATE pipeline.topics SET schema = NULL"))
    run.publish(orders, {"n": 1}, {"n": "one"}, {"n": 2})
    run.run()
    run.run_until_idle()
    assert sorted(seen) == [1, 2]
    assert statuses(run, orders) == ["consumed", "quarantined", "consumed"]
    (bad,) = [row for row in run.deliveries(orders) if row.status == "quarantined"]
    assert "('m2') of topic 'orders' does not fit Order: n: Input should be a valid integer" in str(bad.error)


def test_wrong_code_that_fails_before_it_was_shown_an_event_stops_its_workflow(db: Database) -> None:
    def prepare(ctx: Any, _: Any) -> Any:
        raise LogicError("cannot decide anything")

    shop = Shop(prepare=prepare, on_logic_error="quarantine")
    run = shop.started(db, 3)
    run.run()
    assert statuses(run, shop.orders) == ["pending"] * 3
    assert the_workflow(run).maintenance


def test_older_code_serves_the_handlers_it_has_and_registers_nothing(
    db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """While a release rolls out, a worker of the old version may be restarted after one of the new has started."""
    new = Shop(version=2, concurrency=4)
    new.workflow.effect(new.orders, name="copy", start_at="earliest")(lambda ctx, event: None)
    new.inline(db)
    old = Shop(version=1, concurrency=4)
    run = old.started(db, 2)
    assert "registered with version 2 and this worker has 1" in caplog.text
    run.run()
    assert each_once(old, range(2)), "the old worker does its part"
    both = new.inline(db)
    both.run_until_idle()
    assert_consumed(both, new.orders)
    assert {row.handler for row in both.deliveries(new.orders)} == {"Send", "copy"}


def test_runs_without_time_left_are_handed_back_before_they_are_in_the_ledger(db: Database) -> None:
    shop = Shop(concurrency=8)
    policy = WorkerPolicy(mutation_concurrency=1, mutation_budget=timedelta(0))
    run = shop.started(db, 3, policy=policy)
    run.run()
    run.run_until_idle()
    assert_consumed(run, shop.orders)
    assert each_once(shop, range(3))
    assert {row.status for row in run.runs()} == {"committed"}, "nothing crashed for lack of time"


def test_results_survive_a_short_outage_of_the_database(db: Database) -> None:
    shop = Shop(concurrency=8)
    run = shop.started(db, 3)
    failures: list[str] = []

    def fail(_: Any, statement: str) -> None:
        if "mutation_outcome = 'success'" in statement and len(failures) < 2:
            failures.append(statement)
            raise OperationalError(statement, {}, Exception("the server closed the connection unexpectedly"))

    with observed(db, Listener(before=fail)):
        run.run()
    assert len(failures) == 2
    assert {row.status for row in run.ledger()} == {"applied"}
    assert_consumed(run, shop.orders)


def test_a_task_that_fails_stops_its_runs_at_once_with_the_reason(db: Database) -> None:
    shop = Shop(concurrency=8)
    run = shop.started(db, 2)

    def fail(point: CrashPoint) -> None:
        if point is CrashPoint.MUTATE_CLAIMED:
            raise RuntimeError("the soft time limit was exceeded")

    with run.on_crash_points(fail), pytest.raises(RuntimeError):
        run.run()
    stopped = assert_runs(run, "crashed", "crashed")
    assert "its task failed: RuntimeError: the soft time limit was exceeded" in str(stopped[0].error)
    run.run()
    assert_consumed(run, shop.orders)
