"""What a consumer may choose: batches, order, where to begin, and where to go on after a failed mutation."""

from collections import Counter
from typing import Any

import pytest

from pipeline import PrepareResult, Workflow
from pipeline.domain.policies import FailurePolicy
from pipeline.store.database import Database
from pipeline.testing import Does, Inline, assert_consumed, assert_runs, scripted
from pipeline.testing.inline import TESTER, describe_state
from pipeline.transitions import workflows
from pipeline.worker.crash_points import CrashPoint
from tests.support.scripted_consumers import Shop, each_once, take_one


def test_a_batch_is_one_run_for_several_events(db: Database) -> None:
    sizes: list[int] = []

    def prepare(ctx: Any, _: Any) -> PrepareResult:
        pending = ctx.peek(shop.orders)
        sizes.append(len(pending))
        return PrepareResult(reserve=pending, data={"n": pending[0].payload["n"]})

    shop = Shop(prepare=prepare, batch=4, concurrency=8)
    run = shop.started(db, 10)
    run.run()
    assert sorted(sizes) == [2, 4, 4]
    assert_consumed(run, shop.orders)
    assert len(shop.mail.effects) == 3


def test_a_consumer_that_takes_less_than_it_was_offered_gets_the_others_later(db: Database) -> None:
    shop = Shop(batch=4, concurrency=8)
    run = shop.started(db, 10)
    run.run()
    assert_consumed(run, shop.orders)
    assert each_once(shop, range(10))


@pytest.mark.parametrize("does", [Does.APPLIES, Does.FAILS, Does.TIMES_OUT_AFTER, Does.TIMES_OUT_BEFORE])
def test_events_of_one_key_stay_in_order_whatever_happens_to_the_first(db: Database, does: Does) -> None:
    shop = Shop(ordered=True, concurrency=8, on_uncertain="contain")
    shop.mail.will(does, when=lambda params: params["n"] == 0)
    run = shop.inline(db)
    for n in range(12):
        run.publish(shop.orders, {"n": n}, key=f"customer {n % 3}")
    run.run()
    run.run_until_idle()
    assert_consumed(run, shop.orders)
    sent = [effect.params["n"] for effect in shop.mail.effects]
    for key in range(3):
        assert [n for n in sent if n % 3 == key] == list(range(key, 12, 3)), describe_state(run)


@pytest.mark.parametrize(("start_at", "gets"), [("latest", [2]), ("earliest", [0, 1, 2])])
def test_a_later_consumer_begins_at_its_start_at(db: Database, start_at: str, gets: list[int]) -> None:
    before = Shop()
    run = before.started(db, 2)
    run.run()
    after = Shop(version=2)
    seen: list[int] = []
    after.mail = before.mail
    after.workflow.effect(after.orders, name="late", start_at=start_at)(
        lambda ctx, order: seen.append(order.payload["n"])
    )
    again = after.inline(db)
    again.publish(after.orders, {"n": 2})
    again.run()
    assert seen == gets
    assert each_once(after, range(3))


@pytest.mark.parametrize(("choice", "prepares"), [("prepare", 2), ("mutate", 1)])
def test_after_a_mutation_that_did_not_happen_the_next_run_starts_at_after_failed_mutation(
    db: Database, choice: str, prepares: int
) -> None:
    calls: Counter[str] = Counter()

    def prepare(ctx: Any, _: Any) -> PrepareResult:
        calls["prepare"] += 1
        return take_one(ctx, shop.orders)

    def mutate(ctx: Any, prepared: Any) -> Any:
        calls["mutate"] += 1
        return ctx.mail.send(n=prepared.data["n"])

    shop = Shop(prepare=prepare, mutate=mutate, after_failed_mutation=choice)
    shop.mail.will(Does.TIMES_OUT_BEFORE)
    run = shop.started(db)
    run.run()
    run.run_until_idle()
    assert_consumed(run, shop.orders)
    assert calls == {"prepare": prepares, "mutate": 2}
    assert each_once(shop, [0])


def test_a_worker_that_does_not_know_a_workflow_leaves_its_runs_to_one_that_does(db: Database) -> None:
    shop = Shop()
    knows = shop.started(db)
    stranger = Workflow("other")
    stranger.effect(stranger.topic("x"))(lambda ctx, event: None)
    other = Inline(db, [stranger])
    knows.scheduler.schedule(["shop"])
    message = knows.messages.popleft()
    other.deliver(message)
    assert not other.messages
    assert_runs(other, "active")
    knows.sweeps.tick()
    assert list(knows.messages) == [message], "the message that a stranger swallowed is sent again by the next tick"
    knows.run()
    assert_consumed(knows, shop.orders)


def test_an_event_passes_a_chain_of_consumers_without_waiting_for_a_tick(db: Database) -> None:
    shop = Shop(concurrency=4)
    archived: list[int] = []
    shop.workflow.effect(shop.receipts, name="archive")(lambda ctx, receipt: archived.append(receipt.payload["n"]))
    run = shop.started(db, 3)
    run.scheduler.schedule(["shop"])
    while run.messages:  # nobody but the end of a run starts what follows
        run.deliver(run.messages.popleft())
    assert sorted(archived) == [0, 1, 2]


def test_a_paused_workflow_starts_nothing_and_loses_nothing(db: Database) -> None:
    shop = Shop()
    run = shop.started(db, 2)
    with db.transaction() as tx:
        workflows.pause(tx, "shop", TESTER)
    run.run()
    run.run_until_idle()
    assert not run.runs()
    with db.transaction() as tx:
        workflows.resume(tx, "shop", TESTER)
    run.run()
    assert_consumed(run, shop.orders)


def test_an_event_that_always_kills_its_worker_ends_as_a_block_and_not_in_a_loop(db: Database) -> None:
    shop = Shop(failures=FailurePolicy(max_failures=3))
    run = shop.started(db)
    for _ in range(3):
        with run.crash_at(CrashPoint.PREPARE_RAN):
            run.run()
            run.run_until_idle()
    run.run_until_idle()
    assert_runs(run, "crashed", "crashed", "failed:internal")
    assert not shop.mail.calls


def test_an_approved_request_whose_connector_is_gone_from_the_code_stops_its_own_run_only(db: Database) -> None:
    shop = Shop(requires_approval=True)
    run = shop.started(db)
    run.run()
    again = Inline(db, [shop.workflow], [scripted("fax")])
    again.approve(run.ledger()[0])
    again.run()
    (stopped,) = assert_runs(again, "failed:logic")
    assert "mail.send is gone from the code" in str(stopped.error)
    assert [row.status for row in again.ledger()] == ["failed"]
    assert [row.status for row in again.deliveries(shop.orders)] == ["pending"]
