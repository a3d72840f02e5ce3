"""The example of an engine task that publishes into a workflow in its success handler."""

from collections.abc import Callable

import pytest

from examples import paid_orders, receipts
from pipeline.consumer_engine import ConsumerPolicy
from pipeline.testing import Inline, scripted
from tests.ingest.redis_streams import Place


def test_each_good_order_is_one_event_and_a_wrong_one_is_parked(
    place: Place, pipeline_run: Callable[..., Inline], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = pipeline_run(receipts.receipts, connectors=[scripted("mail")])
    database_url = run.db.engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    monkeypatch.setenv("ORDERS_REDIS_URL", place.url)
    monkeypatch.setenv("ORDERS_STREAM", place.stream)
    monkeypatch.setenv("PIPELINE_DATABASE_URL", database_url)
    good = {"order": "1", "email": "a@example.org", "cents": 5}
    place.add(good, {**good, "cents": 0}, {**good, "order": "2"}, good)  # the first one came twice
    until_empty = ConsumerPolicy.of(batch=10, concurrency=4, attempts=3, timeout=20)
    report = paid_orders.check_order.consume_transactions(policy=until_empty)
    paid_orders.workflows().close()
    assert (report.succeeded, report.failed, report.unfinished) == (3, 1, 0)
    assert place.pending("checks") == {}
    assert place.raw.xlen(f"{place.stream}:parked") == 1
    assert {event.message_id for event in run.events(receipts.paid)} == {"order:1", "order:2"}
