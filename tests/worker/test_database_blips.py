"""A database that fails for a moment, between two statements of a worker, costs no run its lease and no answer."""

import threading
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy.exc import OperationalError

from pipeline.domain.policies import Backoff, MutationRetryPolicy
from pipeline.store.database import Command, Database
from pipeline.testing import Does, Inline, assert_consumed, scripted
from pipeline.worker.settings import WorkerPolicy
from tests.support.scripted_consumers import Shop
from tests.support.statement_events import Listener, observed

GONE = OperationalError("", {}, Exception("the server closed the connection unexpectedly"))
SOON = MutationRetryPolicy(max_attempts=3, backoff=Backoff(base=timedelta(milliseconds=10), jitter=0))
_UNCLAIM = Command("""
UPDATE pipeline.handlers SET unclaimed_since = pipeline.clock(), retry_at = pipeline.clock() WHERE name = 'Send'
""")


def failing_once(words: str, then: Any = lambda: None) -> Listener:
    """Let the next statement with these words find the database away."""
    failed: list[str] = []

    def fail(_: Any, statement: str) -> None:
        if words in statement and not failed:
            failed.append(statement)
            then()
            raise GONE

    return Listener(before=fail)


def dispatched(run: Inline) -> list[UUID]:
    run.scheduler.schedule(["shop"])
    return [UUID(run_id) for run_id in run.messages.popleft().run_ids]


@pytest.mark.parametrize("words", ["unclaimed_since = NULL", "AS is_leased"], ids=["clear", "explain"])
def test_a_claim_whose_second_statement_fails_keeps_its_runs(db: Database, words: str) -> None:
    shop = Shop(concurrency=8)
    run = shop.started(db, 2)
    first, second = dispatched(run)
    run.runner.prepare([first])
    with db.transaction() as tx:
        tx.execute(_UNCLAIM)
    with observed(db, failing_once(words)):
        assert run.runner.prepare([first, second]).continuing == (second,)
    run.advance(timedelta(minutes=2))
    run.run_until_idle()
    assert {row.status for row in run.runs()} == {"committed"}, "none was taken for dead"
    assert_consumed(run, shop.orders)


@pytest.mark.parametrize("wait", [timedelta(0), timedelta(minutes=5)], ids=["straggler", "task"])
def test_a_failure_at_a_retry_loses_no_answer_of_another_call(db: Database, wait: timedelta) -> None:
    go_on = threading.Event()
    shop = Shop(concurrency=8, on_uncertain="contain")

    def answer(effect: Any) -> Any:
        if effect.params["n"] == 1:
            go_on.wait(20)
        return {"n": effect.params["n"]}

    shop.mail = scripted("mail", retry=SOON, can_reconcile=False, make_result=answer, timeout=timedelta(seconds=30))
    shop.mail.will(Does.FAILS, when=lambda params: params["n"] == 0)
    run = shop.started(db, 2, policy=WorkerPolicy(straggler_wait=wait))
    ids = dispatched(run)
    run.runner.prepare(ids)
    with observed(db, failing_once("attempts = m.attempts + 1", go_on.set)):
        run.runner.mutate(ids, lambda _: None)
        run.runner.stragglers.wait()
    assert [row.status for row in run.ledger()] == ["applied", "applied"]


def test_a_database_that_is_away_before_anything_was_sent_fails_the_task(db: Database) -> None:
    shop = Shop(concurrency=8)
    run = shop.started(db, 1)
    ids = dispatched(run)
    run.runner.prepare(ids)
    with observed(db, failing_once("INSERT INTO pipeline.mutations")), pytest.raises(OperationalError):
        run.runner.mutate(ids, lambda _: None)
    run.advance(timedelta(minutes=2))
    run.run_until_idle()
    assert_consumed(run, shop.orders)
