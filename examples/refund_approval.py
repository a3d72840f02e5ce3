"""Refund orders: small amounts at once, larger ones when an operator has approved exactly that request.

The bank is a stand-in: a file with one line per refund. Above 1,000 EUR two people must approve.

    pipeline dev examples.refund_approval
    pipeline publish returns returns.accepted '{"order": "4711", "euros": "250.00"}' --message-id return:4711
    pipeline attention
"""

import os
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pipeline import Applied, Call, Connector, NotFound, PrepareResult, Verdict, Workflow, mutation

BANK = Path(os.environ.get("REFUNDS_BANK", "bank.txt"))
FREE = Decimal(50)  #: euros that need no approval


class Return(BaseModel):
    """The payload that the warehouse publishes."""

    order: str
    euros: Decimal


class Bank(Connector):
    """Stand in for a bank."""

    name = "bank"

    @mutation(
        timeout=timedelta(seconds=10),
        settle=timedelta(0),
        shows="Refund {euros} EUR for order {order}",
        value="euros",
        four_eyes_above=1000,
    )
    def refund(self, call: Call, *, order: str, euros: Decimal) -> None:
        """Book a refund."""
        with BANK.open("a") as file:
            file.write(f"{call.idempotency_key} {order} {euros}\n")

    @refund.reconcile
    def find(self, call: Call, *, order: str, euros: Decimal) -> Verdict:
        """Find out whether the refund was booked."""
        return Applied() if BANK.exists() and call.idempotency_key in BANK.read_text() else NotFound()


bank = Bank()
returns = Workflow("returns", concurrency=8, on_uncertain="contain")
accepted = returns.topic("returns.accepted", schema=Return)
refunded = returns.topic("orders.refunded")


@returns.consumer(subscribes=[accepted], publishes=[refunded])
class RefundReturn:
    """Refund one return, with an approval if it is large."""

    def prepare(self, ctx: Any, state: Any) -> PrepareResult:
        """Take the oldest return. ``approval`` decides for this run alone."""
        pending = ctx.peek(accepted, limit=1)
        if not pending:
            return PrepareResult.nothing()
        item = pending[0].payload
        data = {"order": item.order, "euros": str(item.euros)}
        return PrepareResult(reserve=pending, data=data, approval=item.euros > FREE)

    def mutate(self, ctx: Any, prepared: Any) -> Any:
        """Ask for one refund."""
        return ctx.bank.refund(**prepared.data)

    def next(self, ctx: Any, prepared: Any, result: Any) -> None:
        """Publish that the order was refunded; a rejected refund ends before."""
        if result.applied:
            ctx.publish(refunded, message_id=f"refunded:{prepared.data['order']}", payload=prepared.data)
