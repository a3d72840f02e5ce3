"""A shop whose provider loses answers, for the tests of the console.

What the provider does with an order is decided by files of a folder: ``ORDER.answers`` lets it answer, ``ORDER.found``
lets a reconcile attempt find the charge. Every request that arrives is a line of ``sent``.
"""

import os
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from pydantic import SecretStr
from typing_extensions import TypedDict

from pipeline import (
    Applied,
    Backoff,
    Call,
    Connector,
    EventError,
    FailurePolicy,
    NotFound,
    PrepareResult,
    ReconcilePolicy,
    Retry,
    Verdict,
    Workflow,
    mutation,
)
from pipeline.domain.policies import BreakerPolicy

PROVIDER = Path(os.environ.get("CONSOLE_PROVIDER", "provider"))
#: In the settings of the connector, and in a parameter that is redacted: no page may show it.
SECRET = "sk_live_planted_51Hq"
CARD = "4242424242424242"
_SOON = Backoff(base=timedelta(milliseconds=100), cap=timedelta(milliseconds=300))
_QUIET = timedelta(seconds=float(os.environ.get("CONSOLE_SETTLE", "0")))
_NEVER = BreakerPolicy(min_unknown=1000, last_calls=1000)


class Charge(TypedDict):
    """A charge, as the provider answers it."""

    id: str
    amount: str
    captured: bool


class Refund(TypedDict):
    """A refund, as the provider answers it."""

    id: str


class Payments(Connector):
    """A provider that loses its answers."""

    name = "pay"
    api_key = SecretStr(SECRET)

    @mutation(
        timeout=timedelta(seconds=2),
        settle=timedelta(0),
        policy=ReconcilePolicy(max_attempts=1, backoff=_SOON),
        redact=["card"],
        shows="Charge {amount} {currency} for order {order}",
        look_up="https://dashboard.payments.example/search?query={key}",
        breaker=_NEVER,
    )
    def charge(self, call: Call, *, order: str, amount: str, currency: str, card: str) -> Charge:
        """Charge a card."""
        del currency
        _arrived(f"charge {order} {call.idempotency_key}")
        if (PROVIDER / f"{order}.answers").exists():
            return {"id": f"ch_{order}", "amount": amount, "captured": True}
        raise TimeoutError(f"no answer within 2 s to {self.api_key.get_secret_value()} about {card}")

    @charge.reconcile
    def find(self, call: Call, *, order: str, amount: str, currency: str, card: str) -> Verdict:
        """Search the charge."""
        del call, currency, card
        if (PROVIDER / f"{order}.found").exists():
            return Applied({"id": f"ch_{order}", "amount": amount, "captured": True})
        return Retry("the provider's search is down")

    @charge.fetch
    def get_charge(self, call: Call, *, external_id: str) -> Charge | NotFound:
        """Read a charge by the provider's id."""
        del call
        if not external_id.startswith("ch_"):
            return NotFound(f"there is no charge {external_id}")
        return {"id": external_id, "amount": "99.01", "captured": True}

    @mutation(
        timeout=timedelta(seconds=2),
        settle=timedelta(0),
        shows="Refund {amount} {currency} for order {order}",
        value="amount",
        four_eyes_above=Decimal(5000),
        breaker=_NEVER,
    )
    def refund(self, call: Call, *, order: str, amount: Decimal, currency: str) -> Refund:
        """Refund a charge. An operator approves it first."""
        del amount, currency
        _arrived(f"refund {order} {call.idempotency_key}")
        return {"id": f"re_{order}"}

    @mutation(
        timeout=timedelta(seconds=2), settle=_QUIET, shows="Pay out {amount} {currency} to {seller}", breaker=_NEVER
    )
    def pay_out(self, call: Call, *, seller: str, amount: str, currency: str) -> None:
        """Pay a seller out. It honours no keys and cannot be asked, and a transfer takes its time."""
        del amount, currency
        _arrived(f"pay_out {seller} {call.idempotency_key}")
        raise TimeoutError("no answer within 2 s")


def _arrived(line: str) -> None:
    PROVIDER.mkdir(parents=True, exist_ok=True)
    with (PROVIDER / "sent").open("a") as file:
        file.write(line + "\n")


pay = Payments()
shop = Workflow("shop", concurrency=64, on_uncertain="contain", on_logic_error="quarantine")
placed = shop.topic("orders.placed")
returned = shop.topic("orders.returned")
settled = shop.topic("orders.settled")
closed = shop.topic("months.closed")


@shop.consumer(subscribes=[placed], publishes=[settled], failures=FailurePolicy(backoff=_SOON))
class ChargeOrder:
    """Charge each order once."""

    def prepare(self, ctx: Any, state: Any) -> PrepareResult:
        """Take one order."""
        del state
        pending = ctx.peek(placed, limit=1)
        if not pending:
            return PrepareResult.nothing()
        if "amount" not in pending[0].payload:
            raise EventError(pending[0].id, "the order has no field 'amount'")
        return PrepareResult(reserve=pending, data=pending[0].payload, ui={"title": pending[0].message_id})

    def mutate(self, ctx: Any, prepared: Any) -> Any:
        """Request the charge."""
        order = prepared.data
        return ctx.pay.charge(order=order["order"], amount=order["amount"], currency="EUR", card=CARD)

    def next(self, ctx: Any, prepared: Any, result: Any) -> None:
        """Publish that the order is settled."""
        if result.applied:
            ctx.publish(settled, message_id=f"settled-{prepared.data['order']}", payload={"charge": result.value["id"]})


@shop.effect(returned, requires_approval=True)
def refund_order(ctx: Any, order: Any) -> Any:
    """Refund a returned order, once an operator has approved it."""
    return ctx.pay.refund(order=order.payload["order"], amount=Decimal(order.payload["amount"]), currency="EUR")


@shop.effect(closed)
def pay_sellers(ctx: Any, month: Any) -> Any:
    """Pay a seller out."""
    return ctx.pay.pay_out(seller=month.payload["seller"], amount=month.payload["amount"], currency="EUR")


news = Workflow("newsletter", concurrency=1, on_logic_error="maintenance")
issues = news.topic("issues.ready")


@news.effect(issues)
def send_issue(ctx: Any, issue: Any) -> Any:
    """Fail on a name that is not there."""
    return ctx.pay.refund(order=issue.payload["template"], amount=Decimal(0), currency="EUR")
