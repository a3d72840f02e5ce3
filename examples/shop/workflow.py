"""The workflow: which event causes which message."""

from pipeline import Event, MutateContext, Workflow
from pydantic import BaseModel

from .connector import Messages


class Order(BaseModel):
    """The payload of an event."""

    order: str
    to: str


messages = Messages()
workflow = Workflow("shop", concurrency=8, on_uncertain="contain")
paid = workflow.topic("orders.paid", schema=Order)
shipped = workflow.topic("orders.shipped", schema=Order)


@workflow.effect(paid)
def send_receipt(ctx: MutateContext, event: Event) -> object:
    """Send one mail for one paid order."""
    order: Order = event.payload
    return ctx.messages.mail(to=order.to, text=f"Order {order.order} is paid")


@workflow.effect(shipped)
def send_notice(ctx: MutateContext, event: Event) -> object:
    """Send one text message for one shipped order."""
    order: Order = event.payload
    return ctx.messages.sms(to=order.to, text=f"Order {order.order} is sent")
