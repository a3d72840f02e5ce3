"""The rules of LIFECYCLE that only a whole run shows."""

from typing import Any

import pytest
from sqlalchemy import text

from pipeline import Call, Connector, PrepareResult, Workflow, mutation
from pipeline.admin.pages import run_page
from pipeline.admin.runs import RunFilter
from pipeline.client import Limits
from pipeline.store.database import Database, Statement
from pipeline.testing import Inline, WorkerPolicy, assert_runs, scripted
from pipeline.worker.crash_points import CrashPoint
from tests.support.rule import rule
from tests.support.scripted_consumers import UNHURRIED, Shop, statuses, take_one


@rule("L-19", "L-20", "L-26")
def test_a_mutation_is_sent_after_mutate_has_returned_and_its_result_reaches_next(db: Database) -> None:
    seen: list[Any] = []
    mail = scripted("mail", mutations=["send"])
    workflow = Workflow("shop")
    orders = workflow.topic("orders")

    class Send:
        def prepare(self, ctx: Any, state: Any) -> PrepareResult:
            del state
            return PrepareResult(reserve=ctx.peek(orders, limit=1))

        def mutate(self, ctx: Any, prepared: Any) -> Any:
            del prepared
            asked = ctx.mail.send(n=1)
            seen.append(("asked", len(mail.effects)))
            return asked

        def next(self, ctx: Any, prepared: Any, result: Any) -> None:
            del ctx, prepared
            seen.append((str(result.status), result.applied, result.value is not None))

    with pytest.warns(UserWarning, match="code after it requested"):
        workflow.consumer(subscribes=[orders])(Send)
    run = Inline(db, [workflow], [mail])
    run.publish(orders, {})
    sent_at: list[int] = []
    with run.on_crash_points(
        lambda point: sent_at.append(len(mail.effects)) if point is CrashPoint.IN_FLIGHT else None
    ):
        run.run()
    assert seen == [("asked", 0), ("applied", True, True)]
    assert sent_at == [0], "in the ledger before the world can see it"
    assert len(mail.effects) == 1


@rule("L-1")
@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_run_is_prepared_then_mutated_then_emitted(db: Database, concurrency: int) -> None:
    order: dict[int, list[str]] = {}

    def prepare(ctx: Any, _: Any) -> PrepareResult:
        taken = take_one(ctx, shop.orders)
        if taken.data:
            order.setdefault(taken.data["n"], []).append("prepare")
        return taken

    def mutate(ctx: Any, prepared: Any) -> Any:
        order[prepared.data["n"]].append("mutate")
        return ctx.mail.send(n=prepared.data["n"])

    def next_(ctx: Any, prepared: Any, result: Any) -> None:
        order[prepared.data["n"]].append("next")

    shop = Shop(prepare=prepare, mutate=mutate, next=next_, concurrency=concurrency)
    run = shop.started(db, 3)
    run.run()
    assert order == {n: ["prepare", "mutate", "next"] for n in range(3)}


@rule("L-8")
def test_a_plan_names_exact_events_data_for_the_later_phases_and_texts_for_operators(db: Database) -> None:
    seen: list[Any] = []

    def prepare(ctx: Any, _: Any) -> PrepareResult:
        events = ctx.peek(shop.orders)
        chosen = [event for event in events if event.payload["n"] in (1, 3)]
        return PrepareResult(reserve=chosen, data={"of": [1, 3]}, ui={"title": "Two orders"} if chosen else None)

    def mutate(ctx: Any, prepared: Any) -> None:
        seen.append(prepared)

    def next_(ctx: Any, prepared: Any, result: Any) -> None:
        seen.append(prepared)

    shop = Shop(prepare=prepare, mutate=mutate, next=next_)
    run = shop.started(db, 4)
    run.run()
    assert statuses(run, shop.orders) == ["pending", "consumed", "pending", "consumed"], "those and no others"
    first = run.runs()[0]
    chosen = tuple(event.id for event in run.events(shop.orders) if event.payload["n"] in (1, 3))
    assert tuple(first.event_ids) == chosen
    assert seen[0] == seen[1]
    assert (seen[0].data, seen[0].event_ids, seen[0].ui) == ({"of": [1, 3]}, chosen, {"title": "Two orders"})
    assert [summary.title for summary in run_page(db, RunFilter()).items if summary.id == first.id] == ["Two orders"]


@rule("L-15")
def test_mutate_is_given_the_saved_plan_and_nothing_that_has_changed_since(db: Database) -> None:
    given: list[tuple[Any, ...]] = []

    def mutate(*args: Any) -> Any:
        given.append(args)
        return args[0].mail.send(n=args[1].data["n"])

    shop = Shop(mutate=mutate)
    run = shop.started(db)
    run.scheduler.schedule(["shop"])
    run.deliver(run.messages.popleft())
    run.publish(shop.orders, {"n": 1})
    with db.transaction() as tx:
        tx.execute(text("""UPDATE pipeline.handlers SET state = '{"changed": true}'"""))
        tx.execute(text("""UPDATE pipeline.events SET payload = '{"n": 9}' WHERE topic = 'orders'"""))
    run.start_worker()  # one that has seen nothing
    run.deliver(run.messages.popleft())
    ((context, prepared),) = given
    assert (prepared.data, prepared.ui) == ({"n": 0}, None)
    assert prepared.event_ids == (run.events(shop.orders)[0].id,)
    assert [effect.params for effect in shop.mail.effects] == [{"n": 0}]
    assert {name for name in vars(context) if not name.startswith("_")} == {"now", "violation", "requested"}


@rule("L-21")
def test_the_call_of_a_mutation_finds_its_ledger_row_committed(db: Database) -> None:
    """Another connection sees only what is committed."""
    seen: list[tuple[bool, str]] = []

    class Ledger(Connector):
        name = "ledger"

        @mutation(timeout=UNHURRIED)
        def write(self, call: Call) -> None:
            """Read the ledger as the outside system could."""
            with db.transaction() as tx:
                found = tx.all(Statement[Any]("SELECT idempotency_key, status FROM pipeline.mutations"))
            seen.extend((row.idempotency_key == call.idempotency_key, row.status) for row in found)

    shop = Shop(mutate=lambda ctx, prepared: ctx.ledger.write())
    run = shop.started(db, connectors=[Ledger()])
    run.run()
    assert seen == [(True, "in_flight")]


#: What a system that interprets states would stumble over.
ODD_STATE = {
    "phase": "committed",
    "": None,
    "$ref": "#/x",
    "n": 1.5,
    "list": [[], {}, "null", True],
    "ü": "\u2028 ' %s {}",
}


@rule("L-31")
def test_a_state_comes_back_as_it_was_returned_and_is_saved_with_the_commit(db: Database) -> None:
    states: list[Any] = []

    def prepare(ctx: Any, state: Any) -> PrepareResult:
        states.append(state)
        return take_one(ctx, shop.orders)

    shop = Shop(prepare=prepare, next=lambda ctx, prepared, result: ODD_STATE)
    run = shop.started(db)
    with run.crash_at(CrashPoint.NEXT_RAN):
        run.run()
    assert run.state(shop.workflow, "Send") is None, "next has returned it, and nothing is committed"
    run.run_until_idle()
    assert run.state(shop.workflow, "Send") == ODD_STATE
    run.publish(shop.orders, {"n": 1})
    run.run()
    assert states[0] is None
    assert states[-1] == ODD_STATE


@rule("L-31")
def test_a_state_over_its_limit_is_a_logic_failure_and_saves_nothing(db: Database) -> None:
    shop = Shop(next=lambda ctx, prepared, result: {"text": "x" * 1000})
    run = shop.started(db, policy=WorkerPolicy(limits=Limits(state=500)))
    run.run()
    (failed,) = assert_runs(run, "failed:logic")
    assert "state returned by Send" in str(failed.error)
    assert run.state(shop.workflow, "Send") is None
    assert statuses(run, shop.orders) == ["reserved"]
