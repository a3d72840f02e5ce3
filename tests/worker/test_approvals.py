"""What was approved is what is sent; a request that changed meanwhile is void and asked for again."""

import hashlib
import json
from typing import Any

import pytest

from pipeline.connectors.sdk import Operation
from pipeline.domain.policies import FailurePolicy
from pipeline.store.database import Database
from pipeline.store.reads import work
from pipeline.testing import Inline, assert_consumed, assert_deliveries, assert_runs
from pipeline.workflows.handler_types import request_hash
from tests.support.scripted_consumers import Shop

NUMBERS = [1e16, 1e23, -0.0, 1.2345678901234567e16, -1.7976931348623157e308, 1.5, 1e-7, 5e-324, 2**70, 1e15, 100.0]


def test_a_request_with_any_number_is_sent_once_it_is_approved(db: Database) -> None:
    shop = Shop(
        requires_approval=True,
        concurrency=len(NUMBERS),
        mutate=lambda ctx, prepared: ctx.mail.send(x={"deep": [{"v": NUMBERS[prepared.data["n"]]}]}),
    )
    run = shop.started(db, len(NUMBERS))
    run.run()
    for row in run.ledger():
        run.approve(row)
    run.run()
    sent = [float(effect.params["x"]["deep"][0]["v"]) for effect in shop.mail.effects]
    assert sorted(sent) == sorted(map(float, NUMBERS))
    assert_consumed(run, shop.orders)
    run.sweeps.sessions()


@pytest.mark.parametrize("params", [{"n": 1, "to": "ä"}, {"a": [1.5, -2.25, 1e-7, 2**70, True, None]}, None])
def test_approvals_of_ordinary_numbers_keep_their_hash(params: Any) -> None:
    written = json.dumps(["mail", "send", params], sort_keys=True)
    assert request_hash("mail", "send", params) == hashlib.sha256(written.encode()).hexdigest()


def test_different_numbers_have_different_hashes() -> None:
    hashes = {request_hash("mail", "send", {"v": number}) for number in NUMBERS}
    assert len(hashes) == len(NUMBERS)


def deployed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release in which every operation has one parameter more, with a default."""
    before = Operation.to_stored_params
    monkeypatch.setattr(Operation, "to_stored_params", lambda self, params: {**before(self, params), "bcc": None})


def is_in_maintenance(run: Inline) -> bool:
    with run.db.transaction() as tx:
        row = work.workflow(tx, "shop")
    assert row is not None
    return bool(row.maintenance)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_an_approval_of_a_request_that_a_deployment_changed_is_void_and_needed_again(
    db: Database, monkeypatch: pytest.MonkeyPatch, concurrency: int
) -> None:
    shop = Shop(requires_approval=True, concurrency=concurrency, failures=FailurePolicy(max_failures=1))
    run = shop.started(db, concurrency)
    run.run()
    old = run.ledger()
    deployed(monkeypatch)
    for row in old:
        run.approve(row)
    run.run()
    assert (shop.mail.calls, is_in_maintenance(run)) == ([], False)
    assert_runs(run, *["paused:transient"] * concurrency, *["paused:approval"] * concurrency)
    assert "would not send what was approved" in str(run.runs()[0].error)
    assert [row.resolved_by for row in run.ledger()] == ["void"] * concurrency + [None] * concurrency
    for row in run.ledger()[concurrency:]:
        run.approve(row)
    run.run()
    assert [effect.params["bcc"] for effect in shop.mail.effects] == [None] * concurrency
    assert_consumed(run, shop.orders)
    run.sweeps.sessions()


def test_a_void_approval_is_not_a_failure_of_its_event(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    shop = Shop(requires_approval=True, concurrency=2)
    run = shop.started(db)
    run.run()
    deployed(monkeypatch)
    run.approve(run.ledger()[0])
    run.run()
    assert [row.failures for row in run.deliveries(shop.orders)] == [0]
    assert_deliveries(run, shop.orders, "reserved")
    run.reject(run.ledger()[-1])
    run.run()
    run.sweeps.sessions()
