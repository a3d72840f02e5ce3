"""An entry may name the trace that made it, in fields of its own beside its data: the payload stays what it was."""

from typing import Any

import pytest

from pipeline.consumer_engine.policies import ConsumerPolicy
from pipeline.ingest.bridge import Bridge, Route
from pipeline.ingest.engine_source import StreamSource
from pipeline.ingest.errors import PoisonError
from pipeline.store.database import Database, Statement
from tests.factories import IN, a_workflow
from tests.ingest.redis_streams import Place

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OTHER = "00-1bf7651916cd43dd8448eb211c80319c-c7ad6b7169203331-01"
DATA = b'{"to": "a"}'


def published(place: Place, db: Database, *parts: bytes) -> tuple[object, object]:
    """The payload and the trace of the event that an entry with these fields became."""
    a_workflow(db)
    bridge = Bridge(place.queue(max_read_count=10), db, Route(workflow="billing", topic=IN))
    place.add_pairs(*parts)
    bridge.read_once(block_ms=50)
    assert not place.pending()
    with db.transaction() as tx:
        (row,) = tx.all(Statement[Any]("SELECT payload, traceparent FROM pipeline.events"))
    return row.payload, row.traceparent


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param((b"data", DATA, b"traceparent", TRACE.encode()), id="after the data"),
        pytest.param((b"traceparent", TRACE.encode(), b"data", DATA), id="before the data"),
        pytest.param((b"data", DATA, b"traceparent", TRACE.encode(), b"tracestate", b"a=1"), id="with a tracestate"),
    ],
)
def test_a_field_of_the_entry_names_its_trace_and_is_no_part_of_the_payload(
    place: Place, db: Database, parts: tuple[bytes, ...]
) -> None:
    assert published(place, db, *parts) == ({"to": "a"}, TRACE)


def test_the_field_of_the_entry_counts_more_than_a_key_of_the_payload(place: Place, db: Database) -> None:
    data = b'{"traceparent": "%s"}' % OTHER.encode()
    assert published(place, db, b"data", data, b"traceparent", TRACE.encode())[1] == TRACE


@pytest.mark.parametrize("value", [b"", b"junk", b"\xff\xfe", TRACE.encode() * 1_000])
def test_an_invalid_traceparent_is_ignored_and_loses_no_event(place: Place, db: Database, value: bytes) -> None:
    assert published(place, db, b"data", DATA, b"traceparent", value) == ({"to": "a"}, None)


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param((b"data", DATA, b"baggage", b"a=1"), id="another field"),
        pytest.param((b"traceparent", TRACE.encode()), id="no data"),
        pytest.param(
            (b"data", DATA, b"traceparent", TRACE.encode(), b"traceparent", OTHER.encode()), id="a trace twice"
        ),
    ],
)
def test_another_a_missing_and_a_duplicate_field_are_unusable(place: Place, parts: tuple[bytes, ...]) -> None:
    entry = place.add_pairs(*parts)
    with pytest.raises(PoisonError, match=r"its fields are .*; expected exactly one, data"):
        place.queue().read()
    assert list(place.pending()) == [entry]


def test_an_entry_that_cannot_be_an_event_is_reported_with_all_its_fields(place: Place, db: Database) -> None:
    a_workflow(db)
    bridge = Bridge(place.queue(max_read_count=10), db, Route(workflow="billing", topic=IN, topic_field="to"))
    pairs = ((b"data", DATA), (b"traceparent", TRACE.encode()))
    place.add_pairs(*(part for pair in pairs for part in pair))
    with pytest.raises(PoisonError) as caught:
        bridge.read_once(block_ms=50)
    assert caught.value.entries[0].fields == pairs


def test_an_item_of_the_consumer_engine_is_linked_to_the_trace_of_its_entry(place: Place) -> None:
    place.add_pairs(b"data", DATA, b"traceparent", TRACE.encode())
    (item,) = StreamSource(place.queue(), ConsumerPolicy()).fetch_transactions(1)
    assert (item.traceparent, item.payload) == (TRACE, {"to": "a"})
