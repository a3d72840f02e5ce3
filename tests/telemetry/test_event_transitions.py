"""Transitions of events by runs are logged and counted like those by operators."""

import logging
from typing import Any

import pytest

from pipeline.domain.states import RunStatus
from pipeline.store.database import Database
from tests.support.recorded_metrics import counting
from tests.support.scripted_consumers import Shop, at_once


def logged(caplog: pytest.LogCaptureFixture, name: str) -> list[Any]:
    return [record for record in caplog.records if getattr(record, "transition", None) == name]


def test_an_event_that_a_run_quarantines_is_logged_as_a_warning_with_both_ids(
    db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> Any:
        raise KeyError("wrong")

    shop = Shop(mutate=fail, on_logic_error="quarantine", failures=at_once(quarantine_after=2))
    run = shop.started(db, 1)
    with counting() as counted, caplog.at_level(logging.WARNING, logger="pipeline"):
        run.run()
        assert counted.one("pipeline.transitions", transition="event.quarantined", workflow="shop") == 1
    (line,) = logged(caplog, "event.quarantined")
    (delivery,) = run.deliveries(shop.orders)
    last = max(row.id for row in run.runs() if row.status == RunStatus.FAILED_LOGIC)
    assert line.levelno == logging.WARNING
    assert (line.event_id, line.run_id) == (delivery.event_id, last)
    assert (line.workflow, line.handler) == ("shop", "Send")


def test_events_that_a_run_publishes_are_counted_and_logged_without_repeats(
    db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    def next_(ctx: Any, prepared: Any, _outcome: Any) -> None:
        for name in ("always the same", f"a{prepared.data['n']}", f"b{prepared.data['n']}"):
            ctx.publish(shop.receipts, message_id=name, payload={})

    shop = Shop(next=next_, concurrency=2)
    run = shop.started(db, 2)
    with counting() as counted, caplog.at_level(logging.INFO, logger="pipeline"):
        run.run()
        assert counted.one("pipeline.transitions", transition="event.published", workflow="shop") == 5
    lines = logged(caplog, "event.published")
    assert {line.run_id for line in lines} == {row.id for row in run.runs() if row.event_ids}
    assert sorted((line.events, line.repeats) for line in lines) == [(2, 1), (3, 0)]
