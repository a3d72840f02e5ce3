"""Calls count for a breaker by when they were sent, however long before they were asked for and approved."""

from datetime import timedelta

from sqlalchemy import text

from pipeline.domain.policies import BreakerPolicy
from pipeline.store.database import Database
from pipeline.store.reads import ledger
from pipeline.testing import Does, Inline, scripted
from pipeline.testing.inline import TESTER
from pipeline.transitions import breakers
from tests.support.scripted_consumers import Shop

SEND = ("mail", "send")
TOUCHY = BreakerPolicy(min_unknown=3, window=timedelta(minutes=10), probe_every=timedelta(minutes=5))
_EARLIER = (
    "CAST(lpad(to_hex(('x' || translate(left(CAST({id} AS text), 13), '-', ''))::bit(48)::bigint - 3600000), 12, '0')"
    " || substr(replace(CAST({id} AS text), '-', ''), 13) AS uuid)"
)
_AGE_RUNS = text(f"UPDATE pipeline.runs SET mutation_id = {_EARLIER.format(id='mutation_id')}")
_AGE = text(
    f"UPDATE pipeline.mutations SET id = {_EARLIER.format(id='id')}, created_at = created_at - interval '1 hour'"
)


def approvals_pending_for_an_hour(db: Database, orders: int) -> tuple[Shop, Inline]:
    """So many requests that have waited for approval for an hour."""
    shop = Shop(concurrency=orders, on_uncertain="contain", requires_approval=True)
    shop.mail = scripted("mail", timeout=timedelta(seconds=30), can_reconcile=False, breaker=TOUCHY)
    run = shop.started(db, orders)
    run.run()
    with db.transaction() as tx:
        tx.execute(_AGE_RUNS)
        tx.execute(_AGE)
    for row in run.ledger():
        run.approve(row)
    return shop, run


def open_breakers(db: Database) -> list[str]:
    with db.transaction() as tx:
        return [row.reason for row in ledger.open_breakers(tx)]


def closed(db: Database, run: Inline) -> None:
    with db.transaction() as tx:
        breakers.close_by_operator(tx, SEND, TESTER)
    run.sweeps.sessions()


def test_requests_that_were_approved_late_open_the_breaker_of_their_operation(db: Database) -> None:
    shop, run = approvals_pending_for_an_hour(db, 8)
    shop.mail.will(*[Does.TIMES_OUT_BEFORE] * 8)
    run.run()
    assert open_breakers(db) == ["3 of the last 3 outcomes are unknown"]
    assert len(shop.mail.calls) == 3
    closed(db, run)


def test_approved_requests_with_a_known_outcome_count_as_well(db: Database) -> None:
    shop, run = approvals_pending_for_an_hour(db, 10)
    shop.mail.will(*[Does.APPLIES] * 7, *[Does.TIMES_OUT_BEFORE] * 3)
    run.run()
    assert (len(shop.mail.calls), open_breakers(db)) == (10, [])
    run.sweeps.sessions()


def test_calls_that_needed_no_approval_count_together_with_those_that_did(db: Database) -> None:
    shop, run = approvals_pending_for_an_hour(db, 2)
    shop.mail.will(*[Does.TIMES_OUT_BEFORE] * 4)
    run.run()
    assert open_breakers(db) == []
    free = Shop(concurrency=4, on_uncertain="contain")
    free.mail = shop.mail
    more = free.started(db)
    more.run()
    assert open_breakers(db) == ["3 of the last 3 outcomes are unknown"]
    closed(db, more)
