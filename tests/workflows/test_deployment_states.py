"""While a release introduces ``merge``, workers of both releases write one state, and none of it is lost."""

from datetime import timedelta
from typing import Any

import pytest

from pipeline.store.database import Database
from pipeline.store.reads import invariants
from pipeline.testing import Inline
from tests.support.scripted_consumers import Shop, statuses, the_workflow


def _stateful(merges: bool, **options: Any) -> Shop:
    """A shop whose consumer keeps every order it has seen in its state."""

    def merge(current: Any, returned: Any) -> Any:
        return {"seen": sorted((current or {"seen": []})["seen"] + returned["seen"])}

    return Shop(
        mutate=lambda ctx, prepared: None,
        next=lambda ctx, prepared, result: {"seen": [prepared.data["n"]]} if prepared.data else None,
        merge=merge if merges else None,
        **options,
    )


def test_older_code_that_would_replace_a_state_leaves_it_to_newer_code_that_merges(
    db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = _stateful(False, version=1), _stateful(True, version=2, concurrency=4)
    workers = [old.inline(db), new.inline(db)]
    workers[1].publish(new.orders, *({"n": n} for n in range(8)))
    for turn in range(40):
        worker, other = workers[turn % 2], workers[1 - turn % 2]
        worker.scheduler.schedule(["shop"])
        other.messages.extend(worker.messages)
        worker.messages.clear()
        for _ in range(len(other.messages)):
            other.deliver(other.messages.popleft())
    workers[1].run_until_idle()
    assert statuses(workers[1], new.orders) == ["consumed"] * 8
    assert workers[1].state(new.workflow, "Send") == {"seen": list(range(8))}
    assert "leaves the state of" in caplog.text
    assert {row.status for row in workers[1].runs()} <= {"committed", "paused:transient"}, "nobody was at fault"


def test_older_code_alone_stops_before_the_state_and_the_doctor_shows_the_run(db: Database) -> None:
    old, new = _stateful(False, version=1), _stateful(True, version=2, concurrency=4)
    newer = new.inline(db)
    older = old.inline(db)
    older.publish(old.orders, {"n": 1})
    for _ in range(3):
        older.advance(timedelta(minutes=5))
        older.sweeps.tick()
        older.run()
    with db.transaction() as tx:
        assert [finding.invariant for finding in invariants.findings(tx)] == ["handlers-are-claimed"]
    assert older.state(old.workflow, "Send") is None
    assert statuses(older, old.orders) == ["reserved"]
    newer.run_until_idle()
    assert newer.state(new.workflow, "Send") == {"seen": [1]}
    assert not the_workflow(newer).maintenance


def test_code_that_runs_alone_replaces_its_state_as_before(db: Database) -> None:
    shop = _stateful(False)
    run = shop.started(db, 3)
    run.run()
    assert run.state(shop.workflow, "Send") == {"seen": [2]}


def test_a_newer_release_that_starts_while_older_code_decides_is_seen_before_the_state_is_replaced(
    db: Database,
) -> None:
    newer: list[Inline] = []

    def decides(ctx: Any, prepared: Any, result: Any) -> Any:
        if not newer:
            new = _stateful(True, version=2, concurrency=4)
            newer.append(new.inline(db))
            newer[0].run()
        return {"seen": [prepared.data["n"]]}

    old = Shop(mutate=lambda ctx, prepared: None, next=decides)
    run = old.started(db, 3)
    run.run()
    newer[0].run_until_idle()
    assert newer[0].state(old.workflow, "Send") == {"seen": [0, 1, 2]}
