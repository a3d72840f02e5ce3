"""Orders that are taken twenty at a time, for the tests with real processes.

One of them is poison, or the provider is away.

A lookup of each order stands for a provider. What it does is decided by the payload of the order, and by a file that
is there while the provider is away.
"""

import os
import signal
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

from pipeline import Backoff, FailurePolicy, PrepareResult, Workflow
from tests.support.order_workflow import world

__all__ = ["world"]

_AWAY = Path(os.environ.get("POISON_AWAY", "away"))
_SOON = Backoff(base=timedelta(milliseconds=200), cap=timedelta(milliseconds=500))

poison = Workflow("poison", concurrency=4, on_uncertain="contain", on_logic_error="quarantine")
orders = poison.topic("orders")
done = poison.topic("done")


def look_up(payload: dict[str, Any]) -> None:
    """Ask the provider about an order."""
    if _AWAY.exists():
        raise RuntimeError("the provider is away")
    match payload.get("lookup"):
        case "raises":
            raise RuntimeError("no answer for this customer")
        case "never returns":
            threading.Event().wait()
        case "kills":
            os.kill(os.getpid(), signal.SIGKILL)


@poison.consumer(subscribes=[orders], publishes=[done], batch=20, failures=FailurePolicy(backoff=_SOON))
class Fulfil:
    """All orders of a slice with one effect."""

    def prepare(self, ctx: Any, state: Any) -> PrepareResult:
        """Take what is offered."""
        del state
        pending = ctx.peek(orders, limit=20)
        names = [event.message_id for event in pending]
        return PrepareResult(reserve=pending, data={"names": names, "payloads": [event.payload for event in pending]})

    def mutate(self, ctx: Any, prepared: Any) -> Any:
        """Look up every order, then ask for the effect."""
        for payload in prepared.data["payloads"]:
            look_up(payload)
        return ctx.world.apply(event=",".join(prepared.data["names"]))

    def next(self, ctx: Any, prepared: Any, result: Any) -> None:
        """Publish that the orders are done."""
        if result.applied:
            for name in prepared.data["names"]:
                ctx.publish(done, message_id=name, payload={})
