"""What a workflow would send, without reserving or sending anything."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from pipeline import PrepareResult
from pipeline.domain.errors import UnknownError
from pipeline.runtime.plan import Planned, Planner, counts
from pipeline.store.database import Database
from pipeline.testing.asserts import assert_consumed
from pipeline.testing.inline import Inline
from pipeline.testing.scripted import scripted
from tests.support.handlers import Shop, take_one

_EVERYTHING = """
SELECT (SELECT count(*) FROM pipeline.runs) AS runs, (SELECT count(*) FROM pipeline.mutations) AS mutations,
  (SELECT string_agg(status || coalesce(offered_to::text, '') || xid::text, ',' ORDER BY event_id)
   FROM pipeline.deliveries) AS deliveries
"""


def plan(run: Inline, **options: Any) -> list[Planned]:
    """A plan that is seen to change nothing."""
    with run.db.transaction() as tx:
        before = tx.first(text(_EVERYTHING))
    planned = Planner(run.db, run.registry, step_limit=timedelta(seconds=30)).plan("shop", **options)
    with run.db.transaction() as tx:
        assert tx.first(text(_EVERYTHING)) == before
    return planned


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_plan_lists_exactly_the_requests_that_then_go_out(db: Database, concurrency: int) -> None:
    shop = Shop(concurrency=concurrency)
    run = shop.started(db, 5)
    planned = plan(run)
    assert [(item.handler, item.message_ids, item.request) for item in planned] == [
        ("Send", (f"m{n}",), "mail.send") for n in range(1, 6)
    ]
    assert counts(planned) == {"mail.send": 5}
    assert shop.mail.calls == []
    run.run()
    assert_consumed(run, shop.orders)
    sent = sorted(call.params["n"] for call in shop.mail.calls)
    assert sent == [item.params and item.params["n"] for item in planned]


def test_a_plan_takes_batches_as_the_scheduler_would(db: Database) -> None:
    def prepare(ctx: Any, _: Any) -> PrepareResult:
        pending = ctx.peek(shop.orders)
        return PrepareResult(reserve=pending, data={"n": len(pending)})

    shop = Shop(prepare=prepare, concurrency=4, batch=2)
    planned = plan(shop.started(db, 5))
    assert [len(item.message_ids) for item in planned] == [2, 2, 1]
    assert [item.params for item in planned] == [{"n": 2}, {"n": 2}, {"n": 1}]


def test_a_plan_says_what_would_stop_and_goes_on(db: Database) -> None:
    def mutate(ctx: Any, prepared: Any) -> Any:
        return ctx.mail.send(n=1 // prepared.data["n"])

    run = Shop(mutate=mutate, concurrency=4).started(db, 3)
    problems = [item.problem for item in plan(run)]
    assert problems[0].startswith("ZeroDivisionError")
    assert problems[1:] == ["", ""]


def test_a_plan_ends_when_prepare_wants_nothing_more(db: Database) -> None:
    shop = Shop(prepare=lambda ctx, _: PrepareResult.nothing())
    assert plan(shop.started(db, 3)) == []


def test_a_plan_is_as_long_as_asked_for(db: Database) -> None:
    assert len(plan(Shop(concurrency=4).started(db, 5), most=2)) == 2


def test_a_run_that_asks_for_nothing_and_one_that_asks_for_approval_are_shown_as_such(db: Database) -> None:
    quiet = Shop(mutate=lambda ctx, prepared: None, requires_approval=True)
    (item,) = plan(quiet.started(db))
    assert (item.request, item.needs_approval) == ("", False)


def test_what_is_redacted_is_not_in_a_plan(db: Database) -> None:
    shop = Shop(prepare=lambda ctx, _: take_one(ctx, shop.orders), requires_approval=True)
    shop.mail = scripted("mail", redact=frozenset({"n"}))
    (item,) = plan(shop.started(db))
    assert (item.params, item.needs_approval) == ({"n": "•••"}, True)
    assert "0" not in item.title


def test_a_workflow_nobody_knows_is_refused_with_those_that_are_known(db: Database) -> None:
    run = Shop().inline(db)
    with pytest.raises(UnknownError, match="shop"):
        Planner(db, run.registry, step_limit=timedelta(seconds=30)).plan("shopp")
