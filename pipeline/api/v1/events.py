"""Endpoints that publish events, and about events, their deliveries and the quarantine."""

from typing import Annotated

from fastapi import APIRouter, Query

from pipeline.admin import events, lookup, pages, trace
from pipeline.admin.events import EventFilter
from pipeline.admin.quarantine import Quarantine, QuarantineAction, QuarantineFilter
from pipeline.api.access import Caller, Operator, Publisher, Viewer
from pipeline.api.preconditions import IdempotentRoute
from pipeline.api.v1.models import (
    ChangedView,
    EventBatchBody,
    EventDetailView,
    EventView,
    NewEventBody,
    OptionalReasonBody,
    PageView,
    PublishedView,
    QuarantineView,
    ReasonBody,
    ReceiptView,
    TraceView,
)
from pipeline.api.v1.parameters import (
    After,
    EventIdPath,
    Fields,
    Found,
    Limit,
    Listed,
    Name,
    NameFilter,
    PrivateField,
    page_view,
    private_fields,
    require_in_scope,
)
from pipeline.client import EventInput, Receipt, publish
from pipeline.domain.errors import InvalidInputError
from pipeline.domain.states import DeliveryStatus

router = APIRouter(tags=["events"], route_class=IdempotentRoute)


@router.get("/events")
def list_events(
    found: Found,
    caller: Viewer,
    asked: Listed,
    topic: NameFilter = None,
    status: Annotated[DeliveryStatus | None, Query(description="Only those with a delivery of this status.")] = None,
    key: NameFilter = None,
    message_id: NameFilter = None,
) -> PageView[EventView]:
    """List events, newest first."""
    only = EventFilter(**asked.filter(caller), topic=topic, status=status, key=key, message_id=message_id)
    return page_view(EventView, pages.event_page(found.db, only, **asked.page))


@router.get("/events/{event_id}")
def show_event(found: Found, caller: Viewer, event_id: EventIdPath, fields: Fields = None) -> EventDetailView:
    """Show an event: its deliveries, the runs that took it, and what they published."""
    private = private_fields(caller, fields)
    detail = events.detail(found.db, event_id, with_payload=PrivateField.PAYLOAD in private)
    require_in_scope(caller, detail.event.workflow, "event", event_id)
    return EventDetailView.model_validate(detail)


@router.get("/events/{event_id}/trace")
def trace_event(found: Found, caller: Viewer, event_id: EventIdPath) -> TraceView:
    """Show what caused an event and what it caused, as a tree."""
    require_in_scope(caller, events.detail(found.db, event_id).event.workflow, "event", event_id)
    return TraceView.model_validate(trace.trace(found.db, f"event:{event_id}"))


@router.get("/quarantine")
def list_quarantine(
    found: Found,
    caller: Viewer,
    workflow: NameFilter = None,
    handler: NameFilter = None,
    after: After = None,
    limit: Limit = 50,
) -> PageView[QuarantineView]:
    """List quarantined events, once for each consumer that could not use them."""
    only = QuarantineFilter(workflow=workflow, handler=handler, within=caller.workflows)
    return page_view(QuarantineView, pages.quarantine_page(found.db, only, after=after, limit=limit))


@router.post("/workflows/{workflow}/deliveries/{event_id}/{handler}/skip")
def skip_delivery(
    found: Found, caller: Operator, workflow: Name, event_id: EventIdPath, handler: Name, body: ReasonBody
) -> ChangedView:
    """Never offer an event to a consumer again."""
    return _act(found, caller, QuarantineAction.SKIP, (workflow, event_id, handler), body.reason)


@router.post("/workflows/{workflow}/deliveries/{event_id}/{handler}/quarantine")
def quarantine_delivery(
    found: Found, caller: Operator, workflow: Name, event_id: EventIdPath, handler: Name, body: ReasonBody
) -> ChangedView:
    """Quarantine an event that waits for a consumer."""
    return _act(found, caller, QuarantineAction.ADD, (workflow, event_id, handler), body.reason)


@router.post("/workflows/{workflow}/deliveries/{event_id}/{handler}/release")
def release_delivery(
    found: Found, caller: Operator, workflow: Name, event_id: EventIdPath, handler: Name, body: OptionalReasonBody
) -> ChangedView:
    """Offer a quarantined event to its consumer again."""
    return _act(found, caller, QuarantineAction.RELEASE, (workflow, event_id, handler), body.reason)


def _act(
    found: Found, caller: Caller, action: QuarantineAction, delivery: tuple[str, str, str], reason: str
) -> ChangedView:
    workflow, event_id, handler = delivery
    caller.check_workflow(workflow)
    quarantine, ids = Quarantine(found.db, found.wake_workflow), (lookup.parse_event_id(event_id),)
    either = (True, False) if action is QuarantineAction.SKIP else (action is QuarantineAction.ADD,)
    selections = [
        QuarantineFilter(workflow=workflow, handler=handler, event_ids=ids, is_waiting=is_waiting)
        for is_waiting in either
    ]
    entries = [entry for only in selections for entry in quarantine.entries(only)]
    if not entries:
        state = {QuarantineAction.ADD: "waits", QuarantineAction.RELEASE: "is quarantined"}.get(action, "is open")
        raise InvalidInputError(
            f"Event {event_id} has no delivery to {handler!r} that {state}; expected one. Nothing was changed."
        )
    done = quarantine.act(action, entries, caller.actor(reason))
    if done.refused:
        raise InvalidInputError("; ".join(done.refused.values()))
    return ChangedView(act=str(action), subject=f"event {event_id} for {handler}")


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
