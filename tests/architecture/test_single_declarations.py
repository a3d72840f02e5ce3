"""Facts that many places need are declared once, and the other places derive from them."""

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator

import pipeline
from pipeline.client import EventInput
from pipeline.domain.values import HEADER_FIELDS, EventHeader, NewEvent
from pipeline.store import schema
from pipeline.store.writes import events as event_writes

#: Columns of an event that the system fills in by itself.
SYSTEM_COLUMNS = {"id", "workflow", "caused_by", "created_by_run_id", "created_at"}


def test_every_value_that_describes_an_event_derives_from_the_header() -> None:
    """All but a filter, whose fields say which events an operator wants to see."""
    described: set[type] = {cls for cls in _dataclasses() if {"topic", "message_id"} <= _field_names(cls)}
    assert NewEvent in described
    assert EventInput in described
    assert {cls.__qualname__ for cls in described if not issubclass(cls, EventHeader)} == {"EventFilter"}


def test_every_column_of_an_event_is_a_field_or_filled_in_by_the_system() -> None:
    assert set(schema.events.c.keys()) == _field_names(NewEvent) | SYSTEM_COLUMNS
    assert set(HEADER_FIELDS) < _field_names(NewEvent)


def test_the_insert_takes_every_field_of_an_event() -> None:
    for statement in (event_writes.PUBLISH.text, event_writes.COMMIT.text, event_writes.COMMIT_PRODUCER.text):
        inserted = statement.partition("INSERT INTO pipeline.events (")[2].partition(")")[0]
        assert set(inserted.split(", ")) | {"created_at"} == set(schema.events.c.keys())


def _field_names(cls: type) -> set[str]:
    return {each.name for each in dataclasses.fields(cls)}


def _dataclasses() -> Iterator[type]:
    """Every dataclass of the package."""
    for module in pkgutil.walk_packages(pipeline.__path__, "pipeline."):
        if not module.name.endswith("__main__"):
            found = vars(importlib.import_module(module.name)).values()
            yield from (cls for cls in found if isinstance(cls, type) and dataclasses.is_dataclass(cls))
