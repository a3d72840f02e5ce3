"""A workflow whose requests carry secrets and are never answered. No secret may be shown anywhere."""

from datetime import timedelta
from typing import Any

from pipeline import Call, Connector, PrepareResult, Workflow, mutation

CARD, TOKEN, NOTE, PASSWORD = "4242-PLANTED-CARD", "PLANTED-TOKEN", "PLANTED-NOTE", "PLANTED-PASSWORD"
SECRETS = ("PLANTED",)


class Pay(Connector):
    """A provider that takes requests and loses its answers."""

    name = "pay"

    @mutation(
        timeout=timedelta(seconds=1),
        settle=timedelta(0),
        redact=["note"],
        shows="Charge {cents} cents for order {order}, card {card}",
        look_up="https://pay.example/search?query={key}&order={order}",
    )
    def charge(self, call: Call, *, order: str, cents: int, card: str, options: dict[str, Any], note: str) -> None:
        """Charge a card; the error quotes everything that was sent."""
        del self, call, cents
        raise TimeoutError(f"no answer for {order}: {card}, {options}, {note}, password={PASSWORD}")

    @mutation(timeout=timedelta(seconds=1), settle=timedelta(0), value="cents", four_eyes_above=1_000)
    def payout(self, call: Call, *, order: str, cents: int, card: str) -> None:
        """Pay a customer; it has no template, so its plan names it."""
        del self, call, order, cents, card


pay = Pay()
shop = Workflow("shop", on_uncertain="contain", concurrency=8)
orders = shop.topic("orders")
refunds = shop.topic("refunds")


@shop.effect(orders)
def charge(ctx: Any, event: Any) -> Any:
    """Charge what the order says."""
    options = {"retry": {"api_token": TOKEN}}
    return ctx.pay.charge(order=event.message_id, cents=event.payload["cents"], card=CARD, options=options, note=NOTE)


@shop.consumer(subscribes=[refunds], requires_approval=True)
class Refund:
    """Pay back after an approval."""

    def prepare(self, ctx: Any, state: Any) -> PrepareResult:
        """Take one event."""
        del state
        pending = ctx.peek(refunds, limit=1)
        if not pending:
            return PrepareResult.nothing()
        ui = {"title": f"Refund {pending[0].payload['cents']} cents of {pending[0].message_id}"}
        return PrepareResult(reserve=pending, data=pending[0].payload, ui=ui)

    def mutate(self, ctx: Any, prepared: Any) -> Any:
        """Request the payout."""
        return ctx.pay.payout(order="r1", cents=prepared.data["cents"], card=CARD)

    def next(self, ctx: Any, prepared: Any, result: Any) -> None:
        """Nothing follows."""
