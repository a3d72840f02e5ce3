"""Tell every subscriber about every change of an order: one webhook each, in the order of the changes.

One event fans out into one event per subscriber, in one transaction. So a subscriber that is down delays only itself.
The subscribers are a stand-in: a table in this file. In the test they are real HTTP servers.

    SUBSCRIBERS='{"erp": "http://localhost:9000/hook"}' pipeline dev examples.webhooks
    pipeline publish shipping orders.changed '{"order": "7", "status": "packed"}' --key 7 --message-id 7:packed
"""

import json
import os
from datetime import timedelta
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from pydantic import BaseModel

from pipeline import Call, Connector, LogicError, PrepareResult, TransientError, Workflow, mutation

SUBSCRIBERS: dict[str, str] = json.loads(os.environ.get("SUBSCRIBERS", "{}"))


class Change(BaseModel):
    """The payload that the warehouse publishes, with the order as the key of the event."""

    order: str
    status: str


class Webhook(BaseModel):
    """One webhook for one subscriber."""

    subscriber: str
    order: str
    status: str


class Hooks(Connector):
    """Send webhooks. A subscriber ignores a Webhook-Id that it has seen, so a repeat is safe."""

    name = "hooks"

    @mutation(keyed=True, timeout=timedelta(seconds=10), shows="Tell {subscriber}: order {order} is {status}")
    def send(self, call: Call, *, subscriber: str, order: str, status: str) -> None:
        """Send one webhook, and read its answer."""
        if subscriber not in SUBSCRIBERS:
            raise LogicError(f"there is no subscriber {subscriber}")
        headers = {"Content-Type": "application/json", "Webhook-Id": call.idempotency_key}
        body = json.dumps({"order": order, "status": status}).encode()
        try:
            with urlopen(Request(SUBSCRIBERS[subscriber], body, headers), timeout=call.remaining.total_seconds()):  # noqa: S310
                pass
        except HTTPError as error:
            if error.code in (429, 503):
                raise TransientError(f"{subscriber} is busy") from error
            raise LogicError(f"{subscriber} refused it with {error.code}") from error


hooks = Hooks()
shipping = Workflow("shipping", concurrency=16, on_uncertain="contain", on_exhausted="quarantine")
changed = shipping.topic("orders.changed", schema=Change)
webhooks = shipping.topic("webhooks", schema=Webhook)


@shipping.consumer(subscribes=[changed], publishes=[webhooks], ordered=True)
class FanOut:
    """Make one event per subscriber. It asks for no mutation."""

    def prepare(self, ctx: Any, state: Any) -> PrepareResult:
        """Take the oldest change, and the subscribers of this moment."""
        pending = ctx.peek(changed, limit=1)
        if not pending:
            return PrepareResult.nothing()
        return PrepareResult(reserve=pending, data={**pending[0].raw_payload, "subscribers": sorted(SUBSCRIBERS)})

    def mutate(self, ctx: Any, prepared: Any) -> None:
        """Ask for nothing."""

    def next(self, ctx: Any, prepared: Any, result: Any) -> None:
        """Publish the webhooks. Those of one order to one subscriber have one key, and so stay in order."""
        order, status = prepared.data["order"], prepared.data["status"]
        for name in prepared.data["subscribers"]:
            webhook = Webhook(subscriber=name, order=order, status=status)
            ctx.publish(webhooks, message_id=f"{name}:{order}:{status}", key=f"{name}:{order}", payload=webhook)


@shipping.effect(webhooks, ordered=True)
def send_webhook(ctx: Any, event: Any) -> Any:
    """Send one webhook."""
    return ctx.hooks.send(**event.raw_payload)
