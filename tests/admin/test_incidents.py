"""Which unknown outcomes are one incident, and which items belong to it."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from pipeline.admin import attention
from pipeline.admin.resolutions import ResolutionKind, Resolutions
from pipeline.domain.errors import NotFoundError
from pipeline.domain.incidents import INCIDENT_GAP, INCIDENT_SPAN
from pipeline.domain.values import Actor
from pipeline.store.database import Database
from tests.cli import scenarios
from tests.factories import a_workflow

EVE = Actor(name="eve", reason="it was an outage")
_MINUTE = timedelta(minutes=1)


@pytest.fixture
def ask(db: Database) -> Any:
    """Make an unknown outcome so long after the first one, of an operation and with a class of error."""
    a_workflow(db, concurrency=30, on_uncertain="contain")
    made: list[Any] = []

    def ask(after: timedelta, operation: str = "charge", error: str = "TimeoutError") -> Any:
        row = scenarios.an_indeterminate_mutation(db, f"order-{len(made)}")
        made.append(row)
        with db.engine.begin() as connection:
            given = {"id": row.id, "since": made[0].created_at + after, "operation": operation}
            connection.execute(
                text("UPDATE pipeline.mutations SET doubted_at = :since, operation = :operation WHERE id = :id"), given
            )
            run = {"id": row.run_id, "error": error}
            connection.execute(text("UPDATE pipeline.runs SET error_type = :error WHERE id = :id"), run)
        return row.id

    return ask


def incidents(db: Database) -> list[list[Any]]:
    """The mutations of each incident; the list of items says the same."""
    resolutions, found = Resolutions(db), []
    listed = {each.mutation_id: each.incident for each in attention.items(resolutions, recent=None)}
    for incident in attention.open_incidents(resolutions):
        found.append([each.id for each in attention.incident_mutations(resolutions, incident.id)])
        assert set(found[-1]) == {id_ for id_, name in listed.items() if name == incident.id}
        assert incident.count == len(found[-1])
    alone = {id_ for id_, name in listed.items() if name is None}
    assert not alone & {id_ for ids in found for id_ in ids}
    return [sorted(ids) for ids in found]


def test_one_operation_and_error_close_in_time_is_one_incident_and_a_single_question_is_none(
    db: Database, ask: Any
) -> None:
    first = [ask(_MINUTE), ask(3 * _MINUTE)]
    other = [ask(0 * _MINUTE, operation="refund"), ask(2 * _MINUTE, operation="refund")]
    ask(2 * _MINUTE, error="WorkerLost")
    assert incidents(db) == [other, first], "the oldest incident comes first"


def test_a_pause_longer_than_the_gap_and_a_long_stream_begin_another_incident(db: Database, ask: Any) -> None:
    near = [ask(timedelta(0)), ask(INCIDENT_GAP)]  # one gap apart still joins
    apart = 2 * INCIDENT_GAP + timedelta(seconds=1)
    later = [ask(apart), ask(apart)]
    stream = [ask(n * INCIDENT_GAP, operation="refund") for n in range(9)]
    whole = int(INCIDENT_SPAN / INCIDENT_GAP)
    assert sorted(incidents(db)) == sorted([near, later, stream[:whole], stream[whole:]])


def test_an_incident_is_found_by_its_name_until_it_is_another_one(db: Database, ask: Any) -> None:
    resolutions, times = Resolutions(db), (0, 9, 12, 20, 21)
    oldest, second, *rest = [ask(n * _MINUTE) for n in times]
    (whole,) = attention.open_incidents(resolutions)

    resolutions.resolve(oldest, ResolutionKind.SKIP, EVE)
    assert [each.id for each in attention.incident_mutations(resolutions, whole.id)] == [second, *rest]
    resolutions.resolve(second, ResolutionKind.SKIP, EVE)
    with pytest.raises(NotFoundError):
        attention.incident_mutations(resolutions, whole.id)
