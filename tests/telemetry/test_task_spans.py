"""Spans of tasks and messages: linked, without payloads, and none stays current."""

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.app.trace import build_tracer
from opentelemetry import trace

from pipeline.background.messages import DispatchMessage
from pipeline.client import BrokerClient, UnavailableError
from pipeline.domain.states import PhaseTask
from pipeline.tasks import messages, telemetry
from pipeline.telemetry import spans, spans_export
from tests.support.recorded_spans import Seen, seeing

SECRET = "hush-4242"


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """Celery is instrumented as in a worker, and its spans go into memory."""
    from opentelemetry.instrumentation.celery import CeleryInstrumentor

    with seeing() as found:
        monkeypatch.setattr(spans_export, "start", lambda *_, **__: found.provider)
        telemetry.start_tracing("http://anywhere")
        try:
            yield found
        finally:
            CeleryInstrumentor().uninstrument()  # type: ignore[no-untyped-call]


def test_the_span_of_a_message_that_could_not_be_sent_does_not_stay_current(traced: Seen) -> None:
    app = Celery(broker="redis://127.0.0.1:1/0", broker_transport_options={"max_retries": 0})

    def publish(**_: Any) -> None:
        return

    app.task(name="pipeline.publish", shared=False)(publish)

    with traced.tracer.start_as_current_span("caller") as caller:
        with pytest.raises(UnavailableError):
            BrokerClient(app).publish("shop", [{"topic": "orders", "message_id": "1", "payload": SECRET}])
        assert trace.get_current_span() is caller
    assert SECRET not in traced.text()


def test_a_failed_task_shows_the_type_of_its_error_and_not_its_message(traced: Seen) -> None:
    app = Celery(broker="memory://")

    def fails(**_: Any) -> None:
        raise ValueError(SECRET)

    fails_task = app.task(name="pipeline.fails", shared=False)(fails)

    tracer = build_tracer(fails_task.name, fails_task, app=app)
    tracer("some-id", (), {}, {"id": "some-id", "is_eager": True, "hostname": "here"})
    span = traced.one("run/pipeline.fails")
    assert (span.attributes or {})["exception.type"] == "ValueError"
    assert SECRET not in traced.text()


def test_a_task_has_its_own_trace_linked_to_its_sender(traced: Seen) -> None:
    app = Celery(broker="memory://")

    def works(**_: Any) -> None:
        return

    works_task = app.task(name="pipeline.works", shared=False)(works)

    caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    tracer = build_tracer(works_task.name, works_task, app=app)
    tracer("some-id", (), {}, {"id": "some-id", "is_eager": True, "hostname": "here", "traceparent": caller})
    span = traced.one("run/pipeline.works")
    assert span.parent is None
    assert [spans.format_traceparent(link.context) for link in span.links] == [caller]


@pytest.mark.parametrize(
    ("ids", "shown"), [(("a",), "run a"), (("a", "b", "c"), "3 runs from a")], ids=["one", "several"]
)
def test_a_message_shows_one_whole_id_and_how_many_there_are(ids: tuple[str, ...], shown: str) -> None:
    assert messages.describe_ids(DispatchMessage(task=PhaseTask.PREPARE, run_ids=ids).run_ids) == shown
