"""Plan what a workflow would send, without reserving or sending anything."""

from datetime import timedelta
from typing import Any

import pytest

from pipeline import PrepareResult
from pipeline.admin.plan import PlannedRun, Planner, request_counts
from pipeline.admin.resolutions import Resolutions
from pipeline.domain.errors import NotFoundError
from pipeline.domain.values import Actor
from pipeline.store.database import Database, Statement
from pipeline.testing import Does, Inline, assert_consumed, scripted
from pipeline.transitions import breakers, starts
from tests.support.scripted_consumers import Shop, take_one

ADA = Actor(name="ada", reason="within budget")
_EVERYTHING = """
SELECT (SELECT count(*) FROM pipeline.runs) AS runs, (SELECT count(*) FROM pipeline.mutations) AS mutations,
  (SELECT string_agg(status || coalesce(offered_to::text, '') || xid::text, ',' ORDER BY event_id)
   FROM pipeline.deliveries) AS deliveries
"""


def plan(run: Inline, **options: Any) -> list[PlannedRun]:
    """Plan, and check that nothing changed."""
    with run.db.transaction() as tx:
        before = tx.first(Statement[Any](_EVERYTHING))
    planned = Planner(run.db, run.registry, step_limit=timedelta(seconds=30)).plan("shop", **options)
    with run.db.transaction() as tx:
        assert tx.first(Statement[Any](_EVERYTHING)) == before
    return planned


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_plan_lists_exactly_the_requests_that_are_then_sent(db: Database, concurrency: int) -> None:
    shop = Shop(concurrency=concurrency)
    run = shop.started(db, 5)
    planned = plan(run)
    assert [(item.handler, item.message_ids, item.request) for item in planned] == [
        ("Send", (f"m{n}",), "mail.send") for n in range(1, 6)
    ]
    assert request_counts(planned) == {"mail.send": 5}
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


def test_a_plan_names_a_run_that_would_stop_and_continues(db: Database) -> None:
    def mutate(ctx: Any, prepared: Any) -> Any:
        return ctx.mail.send(n=1 // prepared.data["n"])

    run = Shop(mutate=mutate, concurrency=4).started(db, 3)
    problems = [item.problem for item in plan(run)]
    assert problems[0].startswith("ZeroDivisionError")
    assert problems[1:] == ["", ""]


def test_a_plan_ends_when_prepare_reserves_nothing(db: Database) -> None:
    shop = Shop(prepare=lambda ctx, _: PrepareResult.nothing())
    assert plan(shop.started(db, 3)) == []


def test_a_plan_ends_at_its_limit(db: Database) -> None:
    assert len(plan(Shop(concurrency=4).started(db, 5), limit=2)) == 2


def test_a_plan_marks_runs_without_request_and_runs_that_need_approval(db: Database) -> None:
    quiet = Shop(mutate=lambda ctx, prepared: None, requires_approval=True)
    (item,) = plan(quiet.started(db))
    assert (item.request, item.needs_approval) == ("", False)


def test_redacted_parameters_are_not_in_a_plan(db: Database) -> None:
    shop = Shop(prepare=lambda ctx, _: take_one(ctx, shop.orders), requires_approval=True)
    shop.mail = scripted("mail", redact=frozenset({"n"}))
    (item,) = plan(shop.started(db))
    assert (item.params, item.needs_approval) == ({"n": "•••"}, True)
    assert "0" not in item.headline


def test_an_unknown_workflow_is_refused_with_the_known_ones(db: Database) -> None:
    run = Shop().inline(db)
    with pytest.raises(NotFoundError, match="shop"):
        Planner(db, run.registry, step_limit=timedelta(seconds=30)).plan("shopp")


def test_a_plan_includes_runs_that_wait_for_an_open_breaker(db: Database) -> None:
    shop = Shop(concurrency=4)
    run = shop.started(db, 3)
    with db.transaction() as tx:
        breakers.open_by_operator(tx, ("mail", "send"), ADA)
    run.run()
    run.publish(shop.orders, {"n": 3})
    planned = plan(run)
    assert [item.is_waiting for item in planned] == [True, True, True, False]
    assert sorted((item.message_ids, str(item.params)) for item in planned) == [
        (("m1",), "{'n': 0}"),
        (("m2",), "{'n': 1}"),
        (("m3",), "{'n': 2}"),
        (("m4",), "{'n': 3}"),
    ]
    assert len(plan(run, limit=2)) == 2
    assert len(plan(run, limit=3)) == 3


def test_a_plan_includes_runs_that_are_not_prepared_yet(db: Database) -> None:
    shop = Shop(concurrency=4)
    run = shop.started(db, 2)
    with db.transaction() as tx:
        starts.start(tx, "shop", "Send", count=2)
    assert sorted((item.message_ids, item.request, item.is_waiting) for item in plan(run)) == [
        (("m1",), "mail.send", True),
        (("m2",), "mail.send", True),
    ]


def test_a_plan_includes_pending_and_approved_requests(db: Database) -> None:
    shop = Shop(requires_approval=True, concurrency=4)
    shop.mail = scripted("mail", redact=frozenset({"n"}))
    run = shop.started(db, 2)
    run.run()
    resolutions = Resolutions(db, run.registry)
    resolutions.approve(resolutions.pending_approvals()[0], ADA)
    planned = plan(run)
    assert sorted(item.message_ids for item in planned) == [("m1",), ("m2",)]
    assert sorted((item.needs_approval, item.is_waiting) for item in planned) == [(False, True), (True, True)]
    assert [item.params for item in planned] == [{"n": "•••"}] * 2
    other = Inline(db, [shop.workflow], [scripted("mail", mutations=("cancel",))])
    gone = plan(other)
    assert [item.problem for item in gone] == ["mail.send is not known here"] * 2


def test_a_plan_includes_a_prepared_run_that_is_retried(db: Database) -> None:
    shop = Shop(after_failed_mutation="mutate", concurrency=4)
    shop.mail.will(Does.REFUSES)
    run = shop.started(db)
    run.run()
    assert [(item.message_ids, item.params, item.is_waiting) for item in plan(run)] == [(("m1",), {"n": 0}, True)]


def test_sent_requests_are_not_in_a_plan(db: Database) -> None:
    shop = Shop(concurrency=4, on_uncertain="contain")
    shop.mail.will(Does.TIMES_OUT_AFTER)
    shop.mail.cannot_tell(9)
    run = shop.started(db, 2)
    run.run()
    assert plan(run) == []
