"""Real workers meet a poison event among a batch, and a provider that is away."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipeline.admin import events as admin_events
from pipeline.domain.values import Actor, NewEvent
from pipeline.store.reads import invariants, work
from pipeline.transitions import events, workflows
from tests.support.installation import Installation
from tests.support.wait import wait_for

ADA = Actor(name="ada", reason="the provider is back")
_DELIVERIES = """
SELECT e.id, e.message_id, d.status, d.failures, d.error FROM pipeline.events e
JOIN pipeline.deliveries d ON d.event_id = e.id WHERE e.topic = 'orders' ORDER BY e.id
"""
_BLOCKS = "SELECT * FROM pipeline.blocks WHERE workflow = 'poison'"


@pytest.fixture
def poison(nodes: Installation) -> Installation:
    """A worker and a beat for the orders, whose handlers may take one second for a phase."""
    nodes.workflow = "poison"
    return nodes


def begin(poison: Installation) -> None:
    limits = {"PIPELINE_STEP_TIME_LIMIT": "1s", "PIPELINE_TICK": "200ms"}
    environ = {"PIPELINE_WORKFLOWS": "tests.support.poison_workflow", **limits}
    poison.worker(POISON_AWAY=str(away(poison)), **environ)
    poison.beat(**environ)


def away(poison: Installation) -> Path:
    return poison.home / "away"


def publish(poison: Installation, count: int, *, culprit: int | None = None, lookup: str = "") -> None:
    new = [
        NewEvent(topic="orders", message_id=f"order {n}", payload={"lookup": lookup if n == culprit else "answers"})
        for n in range(count)
    ]
    with poison.db.transaction() as tx:
        events.publish(tx, "poison", new)


def by_status(poison: Installation) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for row in poison.ask(_DELIVERIES):
        found.setdefault(row.status, []).append(row)
    return found


def effects(poison: Installation) -> Counter[str]:
    """How often each order had an effect at the recorder."""
    return Counter(name for event in poison.recorder.effects().elements() for name in event.split(","))


def is_healthy(poison: Installation) -> bool:
    with poison.db.transaction() as tx:
        assert invariants.findings(tx) == []
    return True


@pytest.mark.parametrize("lookup", ["raises", "never returns", "kills"])
def test_a_poison_event_among_a_batch_is_quarantined_alone_and_the_workflow_continues(
    poison: Installation, lookup: str
) -> None:
    begin(poison)
    publish(poison, 60, culprit=27, lookup=lookup)

    def is_over() -> bool:
        found = {status: len(rows) for status, rows in by_status(poison).items()}
        assert found == {"consumed": 59, "quarantined": 1}
        return True

    wait_for(is_over, within=150, every=0.2, why=f"59 orders done and one set aside; {poison.shown()}")
    (culprit,) = by_status(poison)["quarantined"]
    assert (culprit.message_id, culprit.failures) == ("order 27", 5)
    assert not poison.ask(_BLOCKS), "the workflow was never blocked"
    assert not poison.ask("SELECT FROM pipeline.workflows WHERE maintenance")
    assert all(row.failures == 0 for row in by_status(poison)["consumed"]), "an innocent event was counted as failing"
    assert effects(poison) == Counter(f"order {n}" for n in range(60) if n != 27)
    (delivery,) = admin_events.detail(poison.db, str(culprit.id)).deliveries
    assert len(delivery.runs) >= 5, "its history shows the runs that failed"
    assert all(run.error for run in delivery.runs)
    wait_for(lambda: is_healthy(poison), within=60, every=0.2)


def test_while_the_provider_is_away_the_workflow_blocks_and_nothing_is_quarantined(poison: Installation) -> None:
    away(poison).touch()
    begin(poison)
    publish(poison, 60)

    def is_blocked() -> bool:
        with poison.db.transaction() as tx:
            return bool(work.open_blocks(tx, "poison"))

    wait_for(is_blocked, within=120, every=0.2, why=f"a block; {poison.shown()}")
    running = "SELECT FROM pipeline.runs WHERE workflow = 'poison' AND finished_at IS NULL"
    wait_for(lambda: not poison.ask(running), within=60, every=0.2, why="every run stopped")
    assert {status: len(rows) for status, rows in by_status(poison).items()} == {"pending": 60}
    away(poison).unlink()
    with poison.db.transaction() as tx:
        workflows.resume(tx, "poison", ADA)
    poison.ring()

    def is_over() -> bool:
        assert {status: len(rows) for status, rows in by_status(poison).items()} == {"consumed": 60}
        return True

    wait_for(is_over, within=120, every=0.2, why=f"every order done; {poison.shown()}")
    assert effects(poison) == Counter(f"order {n}" for n in range(60))
    wait_for(lambda: is_healthy(poison), within=60, every=0.2)
