"""Real workers run every kind of handler: producers, requests that need approval, bad events, leaking code."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import pytest

from pipeline.domain.errors import IllegalTransitionError, StaleWriteError
from pipeline.domain.states import MutationId
from pipeline.domain.values import Actor, NewEvent
from pipeline.store.reads import invariants, work
from pipeline.testing import CrashPoint
from pipeline.transitions import events, resolution
from tests.support import handler_kind_workflows
from tests.support.installation import RARE, UNHURRIED, Installation
from tests.support.wait import wait_for

WORKS = {"PIPELINE_WORKFLOWS": "tests.support.handler_kind_workflows"}
ADA = Actor(name="ada", reason="has read it")
_DELIVERIES = """
SELECT e.message_id, e.payload, d.status, d.error FROM pipeline.events e
JOIN pipeline.deliveries d ON d.event_id = e.id WHERE e.topic = :topic ORDER BY e.id
"""
_RUNS = """
SELECT r.* FROM pipeline.runs r JOIN pipeline.handlers h ON h.id = r.handler_id
WHERE h.name = :handler AND r.status = 'committed'
"""


@pytest.fixture
def empty(nodes: Installation) -> Installation:
    """An installation without nodes and without history, so that its producer never ran."""
    nodes.workflow = "works"
    return nodes


@pytest.fixture
def works(installation: Installation, request: pytest.FixtureRequest) -> Installation:
    """A worker whose processes may not grow, and a beat; they stay from test to test. Its producer makes nothing.

    No call runs out of time: what is sent once and what no doubt stops is proved of calls that were answered.
    """
    installation.workflow = "works"
    installation.stand(begin, failed=request.session.testsfailed)
    return installation


def begin(works: Installation) -> None:
    options = ("--pool=prefork", "--concurrency=2", "--max-memory-per-child=180000")
    works.worker(*options, PIPELINE_MAX_COHORT_SIZE="2", **WORKS, **UNHURRIED)
    works.beat()


def publish(works: Installation, topic: str, *payloads: dict[str, Any]) -> list[str]:
    """Publish to a topic of the works. Returns the message ids."""
    first = len(standing(works, topic)) + 1
    ids = [f"{topic} {number}" for number in range(first, first + len(payloads))]
    new = [NewEvent(topic=topic, message_id=id_, payload=given) for id_, given in zip(ids, payloads, strict=True)]
    with works.db.transaction() as tx:
        events.publish(tx, "works", new)
    return ids


def standing(works: Installation, topic: str) -> Sequence[Any]:
    """The events of a topic, oldest first, and where they stand."""
    return works.ask(_DELIVERIES, topic=topic)


def wait_until(works: Installation, topic: str, **statuses: Sequence[str]) -> None:
    """Return once these events of a topic stand like this."""

    def is_so() -> bool:
        found = {row.message_id: row.status for row in standing(works, topic)}
        assert {id_: found.get(id_) for ids in statuses.values() for id_ in ids} == {
            id_: status for status, ids in statuses.items() for id_ in ids
        }
        return True

    wait_for(is_so, within=60, every=0.1, why=f"events of {topic}")


def had_effects_once(works: Installation, done: Sequence[str], not_done: Sequence[str] = ()) -> None:
    """These events had one effect each and those none; the ledger, the recorder and the doctor agree."""
    effects = works.recorder.effects()
    assert {id_: effects[id_] for id_ in (*done, *not_done)} == dict.fromkeys(done, 1) | dict.fromkeys(not_done, 0)
    assert sorted(row.idempotency_key for row in works.ledger() if row.status == "applied") == works.recorder.keys()

    def is_healthy() -> bool:
        with works.db.transaction() as tx:
            assert invariants.findings(tx) == []
        return True

    wait_for(is_healthy, within=60, every=0.1)


def test_a_producer_whose_processes_die_runs_once_for_each_slot_whatever_starts_it(empty: Installation) -> None:
    works, count = empty, 8
    expected = [f"tick {number}" for number in range(1, count + 1)]
    worker = works.worker(**WORKS, SHOP_OBEYS="1", WORKS_TICKS=str(count))
    works.beat()
    works.beat()
    for point in (CrashPoint.PRODUCE_CLAIMED, CrashPoint.PRODUCED):
        works.recorder.order(point, "die")
        works.recorder.wait_until_obeyed(point)
    worker.kill_children()
    wait_until(works, "ticks", consumed=expected)
    found = standing(works, "ticks")
    assert [row.message_id for row in found] == expected
    (handler,) = works.ask("SELECT * FROM pipeline.handlers WHERE name = 'tick'")
    assert handler.state == count
    grid: datetime = handler.next_run_at
    taken = [(datetime.fromisoformat(row.payload["at"]) - grid) // handler_kind_workflows.SLOT for row in found]
    assert len(set(taken)) == len(taken), "two runs for one slot"
    had_effects_once(works, expected)


def test_events_of_a_producer_are_started_by_its_end_however_rare_the_tick(empty: Installation) -> None:
    works = empty
    works.sweep_nothing()
    works.worker(**WORKS, **RARE, WORKS_TICKS="1")
    due = "SELECT FROM pipeline.handlers WHERE name = 'tick' AND next_run_at <= pipeline.clock()"
    wait_for(lambda: works.ask(due), why="the producer due")
    assert not standing(works, "ticks"), "somebody else has rung"
    works.ring()
    wait_until(works, "ticks", consumed=["tick 1"])


def test_exactly_the_request_that_an_operator_approved_is_sent(works: Installation) -> None:
    first, second, third = ids = publish(works, "letters", {}, {}, {})
    wait_for(lambda: len(pending_approvals(works)) == 3, within=60, why="three requests wait for a person")
    requests = pending_approvals(works)
    with works.db.transaction() as tx, pytest.raises(StaleWriteError):
        resolution.approve(tx, MutationId(requests[first].id), ADA, request_hash="what ada has not read")
    with works.db.transaction() as tx:
        resolution.approve(tx, MutationId(requests[first].id), ADA, request_hash=requests[first].request_hash)
        resolution.reject(tx, MutationId(requests[second].id), ADA)
    wait_until(works, "letters", consumed=[first], skipped=[second], reserved=[third])
    had_effects_once(works, [first], [second, third])
    (sent,) = [row for row in works.ledger() if row.id == requests[first].id]
    kept = ("request_hash", "params", "idempotency_key")
    assert [getattr(sent, name) for name in kept] == [getattr(requests[first], name) for name in kept]
    assert (sent.status, sent.attempts, sent.approved_by) == ("applied", 1, "ada")
    with works.db.transaction() as tx, pytest.raises(IllegalTransitionError):
        resolution.approve(tx, MutationId(requests[second].id), ADA, request_hash=requests[second].request_hash)
    with works.db.transaction() as tx:
        resolution.approve(tx, MutationId(requests[third].id), ADA, request_hash=requests[third].request_hash)
    wait_until(works, "letters", consumed=[first, third])
    had_effects_once(works, [first, third], [second])
    assert len(ids) == len([row for row in works.ledger() if row.params["event"] in ids])


def pending_approvals(works: Installation) -> dict[str, Any]:
    """The requests that wait for approval, by event."""
    return {row.params["event"]: row for row in works.ledger() if row.status == "pending"}


def test_events_that_always_fail_are_quarantined_and_the_others_continue(works: Installation) -> None:
    ids = publish(works, "parcels", *({"broken": number % 3 == 0} for number in range(9)))
    broken, good = ids[::3], [id_ for number, id_ in enumerate(ids) if number % 3]
    wait_until(works, "parcels", consumed=good, quarantined=broken)
    had_effects_once(works, good, broken)
    errors = {row.message_id: row.error for row in standing(works, "parcels") if row.status == "quarantined"}
    assert all(f"{id_} cannot be packed" in errors[id_] for id_ in broken)
    assert not works.ask("SELECT FROM pipeline.workflows WHERE maintenance")
    with works.db.transaction() as tx:
        assert not work.open_blocks(tx, "works")


def test_processes_that_are_replaced_because_their_code_leaks_lose_and_repeat_nothing(works: Installation) -> None:
    first = {str(pid) for pid in works.nodes[0].children()}
    ids = publish(works, "crates", *({} for _ in range(24)))
    wait_until(works, "crates", consumed=ids)
    had_effects_once(works, ids)
    runs = works.ask(_RUNS, handler="stack")
    assert len(runs) == len(ids)
    assert {run.worker.rpartition(":")[2] for run in runs} - first, "no process was replaced, so nothing was proved"
