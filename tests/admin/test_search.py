"""One box finds everything by what an operator has at hand."""

from typing import Any

import pytest

from pipeline.admin.search import search
from pipeline.domain.states import Phase
from pipeline.store.database import Database
from tests.factories import a_run, a_workflow, applied, some_events, the_mutation


@pytest.fixture
def run(db: Database) -> Any:
    for name in ("billing", "late-billing", "letters"):
        a_workflow(db, name, concurrency=4)
    some_events(db, "order-4711")
    found = a_run(db, Phase.MUTATING)
    applied(db, found, {"id": "ch_1", "deep": [{"number": 9007199254740993}]})
    return found


def found(db: Database, text: str, **options: Any) -> list[tuple[str, str, str]]:
    return [(hit.kind, hit.noun, hit.id) for hit in search(db, text, **options).hits]


def test_a_thing_is_found_by_every_name_that_it_has(db: Database, run: Any) -> None:
    event, mutation = str(run.event_ids[0]), str(run.mutation_id)
    assert found(db, "order-4711") == [("message", "event", event)]
    assert found(db, f" event:{event} ") == [("event", "event", event)]
    assert found(db, str(run.id)) == found(db, f"run:{run.id.hex[:20]}") == [("run", "run", str(run.id))]
    assert found(db, mutation) == [("mutation", "mutation", mutation)]
    assert found(db, the_mutation(db, run.mutation_id).idempotency_key) == [("key", "mutation", mutation)]
    assert found(db, "ch_1") == found(db, "external:9007199254740993") == [("external", "mutation", mutation)]


def test_workflows_are_found_by_a_part_of_their_name_the_exact_one_first(db: Database, run: Any) -> None:
    assert found(db, "BILLING") == [("workflow", "workflow", "billing"), ("workflow", "workflow", "late-billing")]
    assert found(db, "b") == []


def test_a_hit_says_where_it_belongs_and_how_it_stands(db: Database, run: Any) -> None:
    (hit,) = search(db, str(run.mutation_id)).hits
    assert (hit.workflow, hit.status) == ("billing", "applied")
    (hit,) = search(db, str(run.id)).hits
    assert (hit.workflow, hit.description, hit.status) == ("billing", "send", "active")
    (hit,) = search(db, "order-4711").hits
    assert hit.description == "orders.paid order-4711"


def test_a_thing_that_two_names_identify_is_one_hit(db: Database, run: Any) -> None:
    (event,) = some_events(db, "m")
    some_events(db, str(event), workflow="letters")
    assert [each[0] for each in found(db, str(event))] == ["event", "message"]
    assert len(found(db, "0" * 40)) == 0


def test_nothing_outside_the_workflows_of_the_caller_is_found(db: Database, run: Any) -> None:
    assert found(db, "order-4711", within=frozenset({"letters"})) == []
    assert found(db, "billing", within=frozenset({"late-billing"})) == [("workflow", "workflow", "late-billing")]


@pytest.mark.parametrize("text", ["", "  ", "nothing of the kind", "%", "run:", "999999999999999999999999"])
def test_text_that_identifies_nothing_has_no_hits(db: Database, run: Any, text: str) -> None:
    assert found(db, text) == []
