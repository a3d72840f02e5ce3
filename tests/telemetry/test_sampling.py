"""Which spans the sampler and the standard variables drop."""

from typing import Any

import pytest
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBasedTraceIdRatio

from pipeline import TransientError
from pipeline.client.publishing import publish
from pipeline.store.database import Database
from pipeline.telemetry import spans, spans_export
from tests.support.recorded_spans import Seen, about
from tests.support.scripted_consumers import Shop, at_once

OUTSIDE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(("ratio", "runs"), [(0.0, 0), (1.0, 3)])
def test_a_retry_is_sampled_as_the_run_that_began_its_trace(db: Database, ratio: float, runs: int) -> None:
    tries: list[int] = []

    def next_(*_: Any) -> None:
        tries.append(1)
        if len(tries) < 3:
            raise TransientError("not now")

    found = Seen()
    found.provider.sampler = spans_export.rotated_id_sampler(ParentBasedTraceIdRatio(ratio))
    spans.use_provider(found.provider)
    try:
        run = Shop(next=next_, failures=at_once()).started(db)
        run.run()
    finally:
        spans.use_provider(None)
    assert len(tries) == 3
    assert len([span for span in found.named("run") if about(span, "mutation.outcome") == ("success",)]) == runs


def test_an_always_off_sampler_drops_spans_of_sampled_callers_too(db: Database) -> None:
    found = Seen()
    found.provider.sampler = spans_export.rotated_id_sampler(ALWAYS_OFF)
    spans.use_provider(found.provider)
    try:
        shop = Shop()
        run = shop.inline(db)
        with db.transaction() as tx:
            event = {"topic": "orders", "message_id": "order 0", "payload": {"n": 0}, "traceparent": OUTSIDE}
            publish(tx, "shop", [event])
        run.run()
    finally:
        spans.use_provider(None)
    assert len(shop.mail.effects) == 1
    assert found.named("run") == []


@pytest.mark.parametrize(("name", "value"), [("OTEL_SDK_DISABLED", "True"), ("OTEL_TRACES_EXPORTER", "none")])
def test_the_standard_variables_turn_tracing_off(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert spans_export.start("http://127.0.0.1:1", process_wide=False) is None
    assert not spans.is_on()
