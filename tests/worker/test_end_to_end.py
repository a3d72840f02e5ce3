"""What follows: approvals, state, sessions, several consumers, retries, quarantine, maintenance."""

from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from pipeline import PrepareResult
from pipeline.domain.errors import LogicError, StaleWriteError, TransientError
from pipeline.domain.policies import Backoff, FailurePolicy
from pipeline.domain.states import EventId, MutationId
from pipeline.store.database import Database, Statement
from pipeline.store.reads import work
from pipeline.testing import Does, assert_consumed, assert_deliveries, assert_runs
from pipeline.testing.inline import TESTER, describe_state
from pipeline.transitions import events, resolution, workflows
from tests.support.rule import rule
from tests.support.scripted_consumers import Shop, at_once, blocks, each_once, statuses, take_one, the_workflow

HOUR = timedelta(hours=1)
_HANDLER = text("SELECT * FROM pipeline.handlers WHERE name = :name")
_SESSIONS = Statement[Any]("SELECT * FROM pipeline.sessions ORDER BY id")


def test_an_approved_request_is_sent_exactly_as_it_was_approved(db: Database) -> None:
    shop = Shop(requires_approval=True)
    run = shop.started(db)
    run.run()
    assert_runs(run, "paused:approval")
    assert statuses(run, shop.orders) == ["reserved"]
    assert not shop.mail.calls
    (asked,) = run.ledger()
    with pytest.raises(StaleWriteError), db.transaction() as tx:
        resolution.approve(tx, MutationId(asked.id), TESTER, request_hash="another")
    run.approve(asked)
    run.run()
    assert_consumed(run, shop.orders)
    assert each_once(shop, [0])
    assert run.ledger()[0].request_hash == asked.request_hash


def test_an_approved_request_is_sent_even_if_its_message_is_lost(db: Database) -> None:
    shop = Shop(requires_approval=True)
    run = shop.started(db)
    run.run()
    run.approve(run.ledger()[0])
    run.messages.clear()
    run.run_until_idle()
    assert_consumed(run, shop.orders)
    assert each_once(shop, [0])


@rule("L-26")
def test_a_rejected_request_is_skipped_and_next_gets_skipped(db: Database) -> None:
    told: list[Any] = []
    shop = Shop(requires_approval=True, next=lambda ctx, prepared, result: told.append(result))
    run = shop.started(db)
    run.run()
    run.reject(run.ledger()[0])
    run.run()
    assert [result.skipped for result in told] == [True]
    assert_deliveries(run, shop.orders, "skipped")
    assert not shop.mail.calls


@pytest.mark.parametrize(("general", "here", "waits"), [(False, True, True), (True, False, False), (True, None, True)])
def test_a_prepare_may_require_approval_or_waive_it(
    db: Database, general: bool, here: bool | None, waits: bool
) -> None:
    def prepare(ctx: Any, _: Any) -> PrepareResult:
        plan = take_one(ctx, shop.orders)
        return PrepareResult(reserve=plan.reserve, data=plan.data, approval=here)

    shop = Shop(prepare=prepare, requires_approval=general)
    run = shop.started(db)
    run.run()
    assert_runs(run, "paused:approval" if waits else "committed")


@rule("L-2")
def test_state_is_handed_from_run_to_run(db: Database) -> None:
    seen: list[Any] = []

    def prepare(ctx: Any, state: Any) -> PrepareResult:
        seen.append(state)
        return take_one(ctx, shop.orders)

    shop = Shop(prepare=prepare, next=lambda ctx, prepared, result: {"last": prepared.data["n"]})
    run = shop.started(db, 3)
    run.run()
    assert seen == [None, {"last": 0}, {"last": 1}]
    assert run.state(shop.workflow, "Send") == {"last": 2}


def test_states_of_parallel_runs_are_folded_and_none_is_lost(db: Database) -> None:
    shop = Shop(
        next=lambda ctx, prepared, result: {"count": 1},
        merge=lambda current, returned: {"count": (current or {"count": 0})["count"] + returned["count"]},
        concurrency=8,
    )
    run = shop.started(db, 20)
    run.run()
    assert run.state(shop.workflow, "Send") == {"count": 20}


@pytest.mark.parametrize("overlap", [{"concurrency": 8}, {"on_uncertain": "contain"}], ids=["several", "contain"])
def test_state_of_runs_that_may_overtake_each_other_without_a_merge_is_a_logic_failure(
    db: Database, overlap: dict[str, Any]
) -> None:
    shop = Shop(next=lambda ctx, prepared, result: {"count": 1}, **overlap)
    run = shop.started(db)
    run.run()
    (failed,) = assert_runs(run, "failed:logic")
    assert "define merge(current, returned)" in str(failed.error)
    assert run.state(shop.workflow, "Send") is None


def test_a_doubt_resolved_after_later_runs_committed_does_not_undo_their_state(db: Database) -> None:
    shop = Shop(
        next=lambda ctx, prepared, result: 1,
        merge=lambda current, returned: (current or 0) + returned,
        on_uncertain="contain",
    )
    shop.mail.will(Does.TIMES_OUT_AFTER)
    shop.mail.cannot_tell(1)
    run = shop.started(db, 4)
    run.run()
    assert run.state(shop.workflow, "Send") == 3
    run.run_until_idle()
    assert run.state(shop.workflow, "Send") == 4


def test_runs_started_together_are_one_session_that_is_completed(db: Database) -> None:
    shop = Shop(concurrency=8)
    run = shop.started(db, 5)
    run.run()
    run.sweeps.sessions()
    with db.transaction() as tx:
        (session,) = tx.all(_SESSIONS)
    assert session.result == "completed"
    assert {row.session_id for row in run.runs()} == {session.id}


def test_a_failed_run_ends_its_session_as_failed(db: Database) -> None:
    shop = Shop(mutate=lambda ctx, prepared: 1 / 0)
    run = shop.started(db)
    run.run()
    with db.transaction() as tx:
        assert [row.result for row in tx.all(_SESSIONS)] == ["failed"]


def test_each_consumer_of_a_topic_gets_every_event_and_fails_alone(db: Database) -> None:
    shop = Shop(concurrency=8, on_logic_error="quarantine", failures=at_once())
    seen: Counter[int] = Counter()

    @shop.workflow.effect(shop.orders, failures=at_once(quarantine_after=1))
    def audit(ctx: Any, order: Any) -> None:
        seen[order.payload["n"]] += 1
        if order.payload["n"] == 1:
            raise LogicError("cannot audit one")

    run = shop.started(db, 3)
    run.run()
    assert_consumed(run, shop.orders, by="Send")
    assert_deliveries(run, shop.orders, "consumed", "quarantined", "consumed", by="audit")
    assert seen == {0: 1, 1: 1, 2: 1}
    assert each_once(shop, range(3))


def test_a_poisonous_event_is_quarantined_after_its_tries_and_can_be_released(db: Database) -> None:
    poison = {1}
    tries: Counter[int] = Counter()

    def mutate(ctx: Any, prepared: Any) -> Any:
        n = prepared.data["n"]
        tries[n] += 1
        if n in poison:
            raise LogicError("poison")
        return ctx.mail.send(n=n)

    shop = Shop(mutate=mutate, concurrency=8, on_logic_error="quarantine", failures=at_once(quarantine_after=3))
    run = shop.started(db, 3)
    run.run()
    assert_deliveries(run, shop.orders, "consumed", "quarantined", "consumed")
    assert tries == {0: 1, 1: 3, 2: 1}
    assert not the_workflow(run).maintenance
    poison.clear()
    event = run.deliveries(shop.orders)[1]
    with db.transaction() as tx:
        events.release(tx, "shop", "Send", EventId(event.event_id), TESTER)
    run.run()
    assert_consumed(run, shop.orders)
    assert each_once(shop, range(3))


def test_maintenance_holds_the_workflow_until_new_code_ends_it(db: Database) -> None:
    broken = Shop(mutate=lambda ctx, prepared: 1 / 0)
    run = broken.started(db, 2)
    run.run()
    assert the_workflow(run).maintenance
    run.run_until_idle()
    assert_runs(run, "failed:logic")
    same = Shop(mutate=lambda ctx, prepared: 1 / 0)
    assert the_workflow(same.inline(db)).maintenance, "the same code would fail the same way"
    mended = Shop(version=2)
    again = mended.inline(db)
    assert not the_workflow(again).maintenance
    again.run()
    assert_consumed(again, mended.orders)
    assert each_once(mended, range(2))


def test_a_run_that_failed_after_its_mutation_continues_with_new_code_and_sends_nothing_again(db: Database) -> None:
    broken = Shop(next=lambda ctx, prepared, result: 1 / 0)
    run = broken.started(db)
    run.run()
    mended = Shop(version=2)
    mended.mail = broken.mail
    again = mended.inline(db)
    again.run()
    assert_consumed(again, mended.orders)
    assert each_once(mended, [0])
    assert [event.payload["n"] for event in again.events(mended.receipts)] == [0]


def test_retries_wait_longer_each_time_and_end_in_a_block_that_an_operator_lifts(db: Database) -> None:
    world_is_broken = [True]

    def mutate(ctx: Any, prepared: Any) -> Any:
        if world_is_broken:
            raise TransientError("not now")
        return ctx.mail.send(n=prepared.data["n"])

    backoff = Backoff(base=timedelta(minutes=10), multiplier=2, cap=HOUR, jitter=0)
    shop = Shop(mutate=mutate, failures=FailurePolicy(max_failures=3, backoff=backoff))
    run = shop.started(db)
    run.run()
    for pause in (10, 20):
        count = len(run.runs())
        run.advance(timedelta(minutes=pause - 2))
        run.run()
        assert len(run.runs()) == count, describe_state(run)
        run.advance(timedelta(minutes=4))
        run.run()
        assert len(run.runs()) == count + 1, describe_state(run)
    assert_runs(run, "paused:transient", "paused:transient", "failed:internal")
    assert blocks(run) == ["internal"]
    world_is_broken.clear()
    run.run_until_idle()
    assert len(run.runs()) == 3
    with db.transaction() as tx:
        workflows.resume(tx, "shop", TESTER)
    run.run()
    assert_consumed(run, shop.orders)
    assert each_once(shop, [0])


@pytest.mark.parametrize(
    ("does", "status", "kinds"),
    [
        (Does.REFUSES, "failed:logic", []),
        (Does.DENIES, "paused:approval", ["approval"]),
        (Does.FAILS, "paused:transient", []),
    ],
)
def test_a_refusal_of_the_outside_system_releases_the_inputs(
    db: Database, does: Does, status: str, kinds: list[str]
) -> None:
    shop = Shop(failures=FailurePolicy(backoff=Backoff(base=timedelta(minutes=10))))
    shop.mail.will(does)
    run = shop.started(db)
    run.run()
    assert_runs(run, status)
    assert statuses(run, shop.orders) == ["pending"]
    assert blocks(run) == kinds
    assert not shop.mail.effects


def test_a_doubt_without_a_reconcile_becomes_indeterminate_and_continues_after_its_resolution(db: Database) -> None:
    shop = Shop()
    shop.mail.will(Does.TIMES_OUT_AFTER)
    shop.mail.cannot_tell(100)
    run = shop.started(db, 2)
    run.run()
    assert blocks(run) == ["reconciliation"]
    for _ in range(8):
        run.run_until_idle()
    (question,) = run.ledger()
    assert question.status == "indeterminate"
    assert len(shop.mail.reconciled_keys) == 1 + 5
    assert each_once(shop, [0])
    with db.transaction() as tx:
        resolution.happened(tx, MutationId(question.id), TESTER, {"id": "seen in the log"})
        assert work.open_blocks(tx, "shop") == []
    run.run()
    run.run_until_idle()
    assert_consumed(run, shop.orders)
    assert each_once(shop, [0, 1])
