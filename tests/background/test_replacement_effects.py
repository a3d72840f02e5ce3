"""A reconcile that cannot tell requests apart finds the replacement effect, which is no late effect."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import text

from pipeline import Applied, Call, Connector, NotFound, ReconcilePolicy, Retry, Verdict, Workflow, mutation
from pipeline.domain.states import MutationId
from pipeline.store.database import Database
from pipeline.store.reads import invariants
from pipeline.testing import Inline
from pipeline.testing.inline import TESTER
from pipeline.transitions import resolution
from tests.support.table_reads import one, rows

WATCHFUL = ReconcilePolicy(monitor_after=(timedelta(minutes=10), timedelta(hours=1)))
Charge = dict[str, Any]


class Till(Connector):
    """Takes charges, of which the first never arrives, and finds them as the test sets it."""

    name = "till"

    def __init__(self, find: Callable[[list[Charge], str], Verdict], result: Any = None) -> None:
        self.find, self.result = find, result
        self.asked: list[str] = []
        self.answers = True
        self.charges: list[Charge] = []

    def arrives(self, key: str) -> Any:
        self.charges.append({"key": key, "result": self.result or {"id": f"ch_{len(self.charges) + 1}"}})
        return self.charges[-1]["result"]

    @mutation(timeout=timedelta(seconds=20), settle=timedelta(0), policy=WATCHFUL)
    def charge(self, call: Call, *, order: str) -> Any:
        return self._taken(call, order)

    @charge.reconcile
    def find_charge(self, _call: Call, *, order: str) -> Verdict:
        return self.find(self.charges, _call.idempotency_key) if order else NotFound()

    @mutation(timeout=timedelta(seconds=20), settle=timedelta(0))
    def refund(self, call: Call, *, order: str) -> Any:
        return self._taken(call, order)

    def _taken(self, call: Call, order: str) -> Any:
        self.asked.append(order)
        if len(self.asked) == 1:
            raise TimeoutError("it never arrived")
        result = self.arrives(call.idempotency_key)
        if not self.answers:
            raise TimeoutError("it arrived, and was not answered")
        return result


def by_order(charges: list[Charge], _key: str) -> Verdict:
    """The last one of this order, whichever run requested it."""
    return Applied(charges[-1]["result"]) if charges else NotFound()


def by_key(charges: list[Charge], key: str) -> Verdict:
    found = [charge for charge in charges if charge["key"] == key]
    return Applied(found[0]["result"]) if found else NotFound()


def done_again(db: Database, till: Till, then: str = "charge") -> tuple[Inline, Any]:
    """A charge that was not found, and the run that did it again."""
    shop = Workflow("shop")
    orders = shop.topic("orders")

    @shop.effect(orders)
    def pay(ctx: Any, order: Any) -> Any:
        return getattr(ctx.till, then if till.asked else "charge")(order=order.payload)

    run = Inline(db, [shop], [till])
    run.publish(orders, "4711")
    run.run()
    run.advance(timedelta(minutes=1))
    run.sweeps.reconcile()
    for _ in range(3):
        run.advance(timedelta(minutes=1))
        run.sweeps.tick()
        run.run()
    first, second = run.ledger()
    assert (first.status, first.resolved_by, second.status == "applied") == ("failed", "reconcile", till.answers)
    return run, first


def findings_after_monitor_check(run: Inline) -> list[str]:
    """The doctor's findings after the next monitor check."""
    run.advance(timedelta(minutes=11))
    run.sweeps.reconcile()
    run.sweeps.sessions()
    with run.db.transaction() as tx:
        return [finding.invariant for finding in invariants.findings(tx)]


def evidence(db: Database) -> dict[str, Any]:
    found: dict[str, Any] = one(db, "SELECT evidence FROM pipeline.audit WHERE act = 'mutation.found_late'").evidence
    return found


def acknowledged(run: Inline, id_: UUID) -> None:
    with run.db.transaction() as tx:
        resolution.acknowledge(tx, MutationId(id_), TESTER)
    run.sweeps.sessions()


def test_the_effect_of_the_replacement_run_is_not_taken_for_a_late_effect(db: Database) -> None:
    run, first = done_again(db, Till(by_order))
    assert findings_after_monitor_check(run) == []
    kept = one(db, "SELECT reason, evidence FROM pipeline.audit WHERE act = 'mutation.replacement_effect_found'")
    again = run.ledger()[-1]
    assert (kept.evidence["replacement_mutation"], kept.evidence["found"]) == (str(again.id), {"id": "ch_1"})
    assert str(again.run_id) in kept.reason
    (row, _) = run.ledger()
    assert (row.found_late_at, row.next_monitor_at is None) == (None, False), "a late one would still be seen"
    run.advance(timedelta(hours=1))
    run.sweeps.reconcile()
    assert (run.ledger()[0].id, run.ledger()[0].found_late_at, run.ledger()[0].next_monitor_at) == (
        first.id,
        None,
        None,
    )


def test_a_result_other_than_the_replacement_runs_is_an_alarm_that_asks_to_count(db: Database) -> None:
    till = Till(by_order)
    run, first = done_again(db, till)
    till.arrives(first.idempotency_key)
    findings_after_monitor_check(run)
    told, again = evidence(db), run.ledger()[-1]
    assert (told["found"], told["replacement_result"], told["is_own_effect"]) == (
        {"id": "ch_2"},
        {"id": "ch_1"},
        False,
    )
    assert told["advice"].startswith(f"it may be the effect of run {again.run_id}")
    assert "undo one only if there are two" in told["advice"]
    acknowledged(run, first.id)


def test_the_same_result_is_an_alarm_where_a_reconcile_tells_requests_apart(db: Database) -> None:
    till = Till(by_key, result={"is": "done"})
    run, first = done_again(db, till)
    till.arrives(first.idempotency_key)
    findings_after_monitor_check(run)
    told = evidence(db)
    assert (told["is_own_effect"], told["found"], told["replacement_result"]) == (
        True,
        {"is": "done"},
        {"is": "done"},
    )
    assert "there are two" in told["advice"]
    acknowledged(run, first.id)


@pytest.mark.parametrize("what", ["nothing to compare", "no answer about another key"])
def test_results_that_cannot_be_compared_are_an_alarm_that_asks_to_count(db: Database, what: str) -> None:
    till = Till(by_order)
    run, first = done_again(db, till)
    if what == "nothing to compare":
        with db.transaction() as tx:
            tx.execute(text("UPDATE pipeline.mutations SET result = 'null' WHERE status = 'applied'"))
        till.charges[-1]["result"] = None
    else:
        key = first.idempotency_key
        till.find = lambda charges, asked: by_order(charges, asked) if asked == key else Retry("who is that?")
    findings_after_monitor_check(run)
    told = evidence(db)
    assert told["is_own_effect"] is False
    assert "undo one only if there are two" in told["advice"]
    acknowledged(run, first.id)


def test_another_mutation_of_the_replacement_run_is_not_taken_for_the_late_effect(db: Database) -> None:
    till = Till(by_order)
    run, first = done_again(db, till, then="refund")
    findings_after_monitor_check(run)
    told = evidence(db)
    assert told["advice"] == f"run {run.ledger()[-1].run_id} took its inputs since, and did not do the same"
    assert rows(db, "SELECT 1 FROM pipeline.audit WHERE act = 'mutation.replacement_effect_found'") == []
    acknowledged(run, first.id)


def test_an_alarm_names_the_replacement_run_with_its_status(db: Database) -> None:
    till = Till(lambda charges, _: Retry("the search is down") if charges else NotFound())
    till.answers = False
    run, first = done_again(db, till)
    till.find = lambda charges, key: by_key(charges, key) if key == first.idempotency_key else Retry("who is that?")
    till.arrives(first.idempotency_key)
    findings_after_monitor_check(run)
    again = run.ledger()[-1]
    assert again.status == "needs_reconcile"
    assert evidence(db)["advice"].startswith(
        f"it may be the effect of run {again.run_id}, which did the same again (needs_"
    )
    acknowledged(run, first.id)
