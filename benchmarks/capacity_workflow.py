"""Workflows to plan capacity with: the same effect, with a call that takes no time, 20 ms and 200 ms."""

import threading
from datetime import timedelta
from typing import Any

from pipeline import Applied, Call, Connector, Verdict, Workflow, mutation

LIMIT = timedelta(seconds=5)


class World(Connector):
    """An outside system that only takes time."""

    name = "world"

    @mutation(timeout=LIMIT)
    def wait(self, call: Call, *, ms: int) -> None:
        """So many milliseconds of somebody else's time."""
        del call
        if ms:
            threading.Event().wait(ms / 1000)

    @wait.reconcile
    def waited(self, call: Call, *, ms: int) -> Verdict:
        """It is harmless to say yes: nothing happens."""
        del call, ms
        return Applied()


world = World()


def effect(name: str, ms: int) -> Workflow:
    """A workflow with one effect."""
    workflow = Workflow(name, concurrency=400)
    orders = workflow.topic("orders")

    @workflow.effect(orders)
    def call(ctx: Any, order: Any) -> Any:
        """One event, one call."""
        del order
        return ctx.world.wait(ms=ms)

    return workflow


instant, quick, slow = effect("instant", 0), effect("quick", 20), effect("slow", 200)
