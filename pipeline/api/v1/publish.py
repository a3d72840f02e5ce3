"""Endpoints that publish events. They go through ``pipeline.client``, as every other publisher does."""

from fastapi import APIRouter

from pipeline.api.access import Publisher
from pipeline.api.idempotency import IdempotentRoute
from pipeline.api.v1.models import EventBatchBody, NewEventBody, PublishedView, ReceiptView
from pipeline.api.v1.parameters import Found, Name
from pipeline.client import EventInput, Receipt, publish

router = APIRouter(tags=["events"], route_class=IdempotentRoute)


@router.post("/workflows/{workflow}/topics/{topic}/events", status_code=201)
def publish_event(found: Found, caller: Publisher, workflow: Name, topic: Name, event: NewEventBody) -> ReceiptView:
    """Publish one event. A message id that was published before changes nothing."""
    caller.check_workflow(workflow)
    given = EventInput(topic=topic, **event.model_dump())
    with found.db.autocommit() as tx:
        receipt = publish(tx, workflow, [given])
    return _answer(found, workflow, topic, [event], receipt)


@router.post("/workflows/{workflow}/topics/{topic}/events:batch", status_code=201)
def publish_events(found: Found, caller: Publisher, workflow: Name, topic: Name, batch: EventBatchBody) -> ReceiptView:
    """Publish up to 1,000 events of one topic: all of them, or none."""
    caller.check_workflow(workflow)
    given = [EventInput(topic=topic, **event.model_dump()) for event in batch.events]
    with found.db.transaction() as tx:
        receipt = publish(tx, workflow, given, replace=batch.replace)
    return _answer(found, workflow, topic, batch.events, receipt)


def _answer(found: Found, workflow: str, topic: str, events: list[NewEventBody], receipt: Receipt) -> ReceiptView:
    if receipt.new or receipt.replaced:
        found.wake_workflow(workflow)
    outcomes = {
        **dict.fromkeys(receipt.repeated, "repeated"),
        **dict.fromkeys(receipt.replaced, "replaced"),
        **dict.fromkeys(receipt.new, "new"),
    }
    return ReceiptView(
        workflow=workflow,
        topic=topic,
        events=[PublishedView(message_id=each.message_id, outcome=outcomes[each.message_id]) for each in events],
    )
