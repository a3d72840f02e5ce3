"""A workflow whose provider does not always answer: its questions are for an operator.

The provider cannot be asked about a refund afterwards. An operator finds it in the provider's records, or does not, and
states what happened.
"""

from datetime import timedelta
from typing import Any

from pydantic import BaseModel
from typing_extensions import TypedDict  # that of typing has no schema before Python 3.12

from pipeline import Call, Connector, PrepareResult, Workflow, mutation


class RefundWanted(BaseModel):
    """The payload that the shop publishes."""

    order: str
    amount: str
    is_answered: bool = True


class BookedRefund(TypedDict):
    """The result of a refund, as the provider numbers it."""

    refund: str


class Bank(Connector):
    """Stand in for a provider that cannot be asked about a refund."""

    name = "bank"

    @mutation(
        timeout=timedelta(seconds=10),
        settle=timedelta(0),
        shows="Refund {amount} EUR for order {order}",
        look_up="https://bank.example.org/refunds?reference={key}",
    )
    def refund(self, call: Call, *, order: str, amount: str, is_answered: bool) -> BookedRefund:
        """Book a refund, unless the answer is to be lost."""
        if not is_answered:
            raise TimeoutError(f"the bank did not answer about order {order}")
        del amount
        return {"refund": call.idempotency_key}


bank = Bank()
refunds = Workflow("refunds", concurrency=4, on_uncertain="contain")
wanted = refunds.topic("refunds.wanted", schema=RefundWanted)


@refunds.consumer(subscribes=[wanted])
class RefundOrder:
    """Refund one order."""

    def prepare(self, ctx: Any, state: Any) -> PrepareResult:
        """Take the oldest order to refund."""
        pending = ctx.peek(wanted, limit=1)
        if not pending:
            return PrepareResult.nothing()
        return PrepareResult(reserve=pending, data=pending[0].payload.model_dump())

    def mutate(self, ctx: Any, prepared: Any) -> Any:
        """Ask for one refund."""
        return ctx.bank.refund(**prepared.data)

    def next(self, ctx: Any, prepared: Any, result: Any) -> None:
        """Publish nothing."""
