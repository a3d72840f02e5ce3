"""Facts that many places need are declared once, and the other places derive from them."""

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator
from typing import get_type_hints

import pipeline
from pipeline.client import EventInput
from pipeline.domain.values import HEADER_FIELDS, ConsumerOptions, EventHeader, HandlerSpec, NewEvent
from pipeline.store import functions, schema
from pipeline.store.writes import events as event_writes
from pipeline.store.writes import handlers as handler_writes
from pipeline.workflows import declaration_checks
from pipeline.workflows.authoring import Consumer

#: Columns of an event that the system fills in by itself.
SYSTEM_COLUMNS = {"id", "workflow", "caused_by", "created_by_run_id", "created_at"}
#: Columns of a handler that no declaration sets.
HANDLER_STATE_COLUMNS = set(
    [
        "id",
        "workflow",
        "retired",
        "state",
        "wake_at",
        "next_run_at",
        "retry_at",
        "consecutive_failures",
        "failing_since",
        "failing_events",
        "idle_snapshot",
        "idle_at",
        "low_watermark",
        "horizon",
        "horizon_xmax",
        "uid",
        "unclaimed_since",
    ]
)
#: Options that workers read from their own code, or that a registration follows once: they have no column.
WORKER_OPTIONS = {"renamed_from", "requires_approval", "start_at", "wake"}


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
    for statement in (functions.INSERT_NEW, event_writes.COMMIT.text, event_writes.COMMIT_PRODUCER.text):
        inserted = statement.partition("INSERT INTO pipeline.events (")[2].partition(")")[0]
        assert set(inserted.split(", ")) | {"created_at"} == set(schema.events.c.keys())


def test_keywords_for_type_checkers_are_the_options_that_are_declared() -> None:
    assert get_type_hints(declaration_checks.ConsumerKeywords) == declaration_checks.CONSUMER_OPTIONS
    assert get_type_hints(declaration_checks.ProducerKeywords) == declaration_checks.PRODUCER_OPTIONS


def test_every_column_of_a_handler_is_declared_by_code_or_kept_by_the_system() -> None:
    declared = set(handler_writes.DECLARED.values())
    assert declared & HANDLER_STATE_COLUMNS == set()
    assert set(schema.handlers.c.keys()) == declared | HANDLER_STATE_COLUMNS
    options = _field_names(ConsumerOptions)
    assert options & set(handler_writes.DECLARED) == options - WORKER_OPTIONS
    assert options <= _field_names(Consumer) & _field_names(HandlerSpec)


def test_a_registration_writes_every_declared_column() -> None:
    written = handler_writes.declared_values(HandlerSpec(name="send"))
    assert set(written) == {*handler_writes.DECLARED.values(), "first_run_at"}
    for column in set(handler_writes.DECLARED.values()) - {"name"}:
        assert f" {column} = excluded.{column}," in handler_writes.UPSERT_HANDLERS.text


def _field_names(cls: type) -> set[str]:
    return {each.name for each in dataclasses.fields(cls)}


def _dataclasses() -> Iterator[type]:
    """Every dataclass of the package."""
    for module in pkgutil.walk_packages(pipeline.__path__, "pipeline."):
        if not module.name.endswith("__main__"):
            found = vars(importlib.import_module(module.name)).values()
            yield from (cls for cls in found if isinstance(cls, type) and dataclasses.is_dataclass(cls))
