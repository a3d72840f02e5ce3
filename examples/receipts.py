"""A workflow that sends one receipt for every paid order.

The outside system is a directory: a mail is a file that is named by its idempotency key. A worker can be killed while
it sends, and the reconcile finds out afterwards what happened.
"""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from typing_extensions import TypedDict  # that of typing has no schema before Python 3.12

from pipeline import Applied, Call, Connector, NotFound, PrepareResult, Verdict, Workflow, mutation

OUTBOX = Path(os.environ.get("RECEIPTS_OUTBOX", "outbox"))


class OrderPaid(BaseModel):
    """The payload that the shop publishes."""

    order: str
    email: str


class SentReceipt(TypedDict):
    """The result of a mail, which `next` gets."""

    message_id: str


class Mail(Connector):
    """Send mails into a directory."""

    name = "mail"

    @mutation(timeout=timedelta(seconds=10), settle=timedelta(0))
    def send(self, call: Call, *, to: str, subject: str) -> SentReceipt:
        """Write the mail. A second mail with the same key would be a second line of the file."""
        OUTBOX.mkdir(parents=True, exist_ok=True)
        with (OUTBOX / call.idempotency_key.replace(":", "_")).open("a") as file:
            file.write(f"{to}: {subject}\n")
        return {"message_id": call.idempotency_key}

    @send.reconcile
    def find(self, call: Call, *, to: str, subject: str) -> Verdict:
        """Find out whether the mail was written."""
        del to, subject
        file = OUTBOX / call.idempotency_key.replace(":", "_")
        found = (
            file.exists() and file.stat().st_size > 0
        )  # a worker that was killed before it wrote leaves an empty file
        return Applied({"message_id": call.idempotency_key}) if found else NotFound()

    @send.fetch
    def read_mail(self, call: Call, *, external_id: str) -> SentReceipt | NotFound:
        """Read a mail that an operator found, by the name of its file."""
        del call
        file = OUTBOX / Path(external_id).name
        return {"message_id": file.name.replace("_", ":")} if file.is_file() else NotFound(f"there is no file {file}")


mail = Mail()
receipts = Workflow("receipts", concurrency=64, on_uncertain="contain")
paid = receipts.topic("orders.paid", schema=OrderPaid)
sent = receipts.topic("receipts.sent")


@receipts.consumer(subscribes=[paid], publishes=[sent])
class SendReceipt:
    """Send one mail for one order, then publish that it was sent."""

    def prepare(self, ctx: Any, state: Any) -> PrepareResult:
        """Take the oldest paid order."""
        pending = ctx.peek(paid, limit=1)
        if not pending:
            return PrepareResult.nothing()
        order = pending[0].payload
        return PrepareResult(
            reserve=pending,
            data={"to": order.email, "order": order.order},
            ui={"title": f"Receipt for order {order.order}"},
        )

    def mutate(self, ctx: Any, prepared: Any) -> Any:
        """Ask for one mail."""
        return ctx.mail.send(to=prepared.data["to"], subject=f"Your receipt for {prepared.data['order']}")

    def next(self, ctx: Any, prepared: Any, result: Any) -> None:
        """Publish that the mail was sent."""
        if result.applied:
            order = prepared.data["order"]
            ctx.publish(sent, message_id=f"receipt:{order}", payload={"mail": result.value["message_id"]})
