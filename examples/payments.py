"""Charge cards through a provider whose answers cannot always be trusted, and settle the rest by its nightly file.

The provider is a stand-in: a file with one line per charge. Test cards choose what it does, as those of real providers.
Its search shows a charge only when it is settled, so a reconcile cannot say that a charge did not happen.

    pipeline dev examples.payments
    python -m examples.payments > settlement.csv
"""

import csv
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from typing_extensions import TypedDict  # that of typing has no schema before Python 3.12

from pipeline import (
    Call,
    Connector,
    LogicError,
    NotFound,
    PrepareResult,
    ReconcilePolicy,
    Retry,
    Workflow,
    mutation,
)

PROVIDER = Path(os.environ.get("PAYMENTS_PROVIDER", "provider.jsonl"))


class Order(BaseModel):
    """The payload that the shop publishes."""

    order: str
    cents: int
    card: str


class Charge(TypedDict):
    """A charge, as the provider numbers it."""

    charge: str


def charges() -> list[dict[str, Any]]:
    """Return what the provider has booked."""
    return [json.loads(line) for line in PROVIDER.read_text().splitlines()] if PROVIDER.exists() else []


class Payments(Connector):
    """Stand in for a payment provider."""

    name = "payments"

    @mutation(
        timeout=timedelta(seconds=10),
        settle=timedelta(0),
        policy=ReconcilePolicy(max_attempts=2),
        shows="Charge {cents} cents for order {order}",
        redact=["card"],
    )
    def charge(self, call: Call, *, order: str, cents: int, card: str) -> Charge:
        """Book a charge, unless the test card says otherwise."""
        if card == "declined":
            raise LogicError("the card was declined")
        if card == "lost before":
            raise TimeoutError("the provider did not answer")
        number = f"ch_{order}"
        with PROVIDER.open("a") as file:
            file.write(json.dumps({"charge": number, "reference": call.idempotency_key, "cents": cents}) + "\n")
        if card == "lost after":
            raise TimeoutError("the provider did not answer")
        return {"charge": number}

    @charge.reconcile
    def find(self, call: Call, *, order: str, cents: int, card: str) -> Retry:
        """Never take an empty search for a charge that did not happen."""
        return Retry("the provider's search shows settled charges only")

    @charge.fetch
    def read_charge(self, call: Call, *, external_id: str) -> Charge | NotFound:
        """Read a charge of the settlement file by its number."""
        found = any(each["charge"] == external_id for each in charges())
        return {"charge": external_id} if found else NotFound(f"there is no charge {external_id}")


payments = Payments()
billing = Workflow("billing", concurrency=8, on_uncertain="contain", on_logic_error="quarantine")
placed = billing.topic("orders.placed", schema=Order)
paid = billing.topic("orders.paid")


@billing.consumer(subscribes=[placed], publishes=[paid])
class ChargeOrder:
    """Charge one order, then publish that it is paid."""

    def prepare(self, ctx: Any, state: Any) -> PrepareResult:
        """Take the oldest order."""
        pending = ctx.peek(placed, limit=1)
        return PrepareResult(reserve=pending, data=pending[0].payload.model_dump() if pending else None)

    def mutate(self, ctx: Any, prepared: Any) -> Any:
        """Ask for one charge."""
        return ctx.payments.charge(**prepared.data) if prepared.data else None

    def next(self, ctx: Any, prepared: Any, result: Any) -> None:
        """Publish the number of the charge."""
        if result.applied:
            ctx.publish(paid, message_id=f"paid:{prepared.data['order']}", payload=dict(result.value))


if __name__ == "__main__":  # the settlement file of the stand-in
    writer = csv.DictWriter(sys.stdout, ["reference", "charge", "cents"])
    writer.writeheader()
    writer.writerows(charges())
