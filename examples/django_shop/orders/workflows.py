"""One receipt by mail for every paid order. The worker finds this module because the app is installed."""

from datetime import timedelta
from typing import Any

from django.core.mail import EmailMessage
from pydantic import BaseModel

from pipeline import Call, Connector, Workflow, mutation


class OrderPaid(BaseModel):
    """The payload that the view publishes."""

    order: str
    email: str


class Receipts(Connector):
    """Send receipts by Django's mail backend."""

    name = "receipts"

    @mutation(timeout=timedelta(seconds=10))
    def send(self, call: Call, *, to: str, order: str) -> None:
        """Send one mail, with the idempotency key as its Message-ID."""
        mail = EmailMessage(f"Your receipt for {order}", "Thank you.", to=[to])
        mail.extra_headers["Message-ID"] = f"<{call.idempotency_key}@shop>"
        mail.send()


receipts = Receipts()
shop = Workflow("shop", concurrency=8, on_uncertain="contain")
paid = shop.topic("orders.paid", schema=OrderPaid)


@shop.effect(paid)
def send_receipt(ctx: Any, event: Any) -> Any:
    """Send one receipt for one order."""
    return ctx.receipts.send(to=event.payload.email, order=event.payload.order)
