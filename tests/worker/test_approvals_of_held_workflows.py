"""A request that was allowed waits while its workflow stands still, and can be taken back until it is sent."""

from datetime import timedelta
from typing import Any

import pytest

from pipeline import PrepareResult
from pipeline.domain.errors import IllegalTransitionError
from pipeline.store.database import Database
from pipeline.testing import Does, Inline, scripted
from pipeline.testing.inline import TESTER
from pipeline.transitions import resolution, workflows
from pipeline.worker.crash_points import CrashPoint
from tests.support.scripted_consumers import Shop, blocks, statuses


def a_shop(**options: Any) -> Shop:
    """A shop in which orders with ``ask`` need approval, and the outcome of order 2 is unknown."""

    def prepare(ctx: Any, _: Any) -> PrepareResult:
        found = ctx.peek(made.orders, limit=1)
        if not found:
            return PrepareResult.nothing()
        return PrepareResult(reserve=found, data=found[0].payload, approval=found[0].payload["ask"])

    made = Shop(prepare=prepare, **options)
    made.mail = scripted("mail", timeout=timedelta(seconds=30), can_reconcile=False)
    made.mail.will(Does.TIMES_OUT_BEFORE, when=lambda params: params["n"] == 2)
    return made


def shop_with_pending_approval(shop: Shop, db: Database) -> Inline:
    """The shop with a request that waits to be allowed."""
    run = shop.inline(db)
    run.publish(shop.orders, {"n": 1, "ask": True})
    run.run()
    return run


def sent(shop: Shop) -> list[int]:
    return [effect.params["n"] for effect in shop.mail.effects]


def test_a_request_that_was_allowed_is_not_sent_while_an_unknown_outcome_blocks_its_workflow(db: Database) -> None:
    shop = a_shop(concurrency=3)
    run = shop_with_pending_approval(shop, db)
    run.publish(shop.orders, {"n": 2, "ask": False})
    run.run()
    assert blocks(run) == ["reconciliation"]
    request, doubt = run.ledger()
    run.approve(request)
    run.run()
    assert sent(shop) == []
    with db.transaction() as tx:
        resolution.skip(tx, doubt.id, TESTER)
    run.run_until_idle()
    assert sent(shop) == [1]
    assert statuses(run, shop.orders) == ["consumed", "skipped"]


def test_an_approval_is_taken_back_while_the_workflow_is_paused(db: Database) -> None:
    shop = a_shop()
    run = shop_with_pending_approval(shop, db)
    with db.transaction() as tx:
        workflows.pause(tx, "shop", TESTER)
    run.approve(run.ledger()[0])
    run.run()
    run.reject(run.ledger()[0])
    with db.transaction() as tx:
        workflows.resume(tx, "shop", TESTER)
    run.run_until_idle()
    assert sent(shop) == []
    assert statuses(run, shop.orders) == ["skipped"]
    assert [(row.phase, row.status) for row in run.runs()] == [
        ("mutated", "paused:approval"),
        ("committed", "committed"),
    ]


def test_an_approval_is_taken_back_from_a_worker_that_has_just_taken_the_run(db: Database) -> None:
    shop = a_shop()
    run = shop_with_pending_approval(shop, db)
    (request,) = run.ledger()
    run.approve(request)

    def take_back(point: CrashPoint) -> None:
        if point is CrashPoint.MUTATE_CLAIMED:
            run.reject(request)

    with run.on_crash_points(take_back):
        run.deliver(run.messages.popleft())
    run.run_until_idle()
    assert sent(shop) == []
    assert statuses(run, shop.orders) == ["skipped"]


def test_an_approval_is_not_taken_back_once_it_was_sent(db: Database) -> None:
    shop = a_shop()
    run = shop_with_pending_approval(shop, db)
    (request,) = run.ledger()
    run.approve(request)
    run.run()
    with pytest.raises(IllegalTransitionError, match="applied"):
        run.reject(request)
    assert sent(shop) == [1]
