"""Workflows to measure: the same consumer with one place and with many, and one whose mutation costs nothing."""

import os
import threading
from datetime import timedelta
from typing import Any

from pipeline import Applied, Call, Connector, Verdict, Workflow, mutation

#: As the shop's: long where it must not run out.
LIMIT = timedelta(seconds=float(os.environ.get("SHOP_TIMEOUT", "2")))


class Stone(Connector):
    """An outside system that only takes time."""

    name = "stone"

    @mutation(timeout=LIMIT)
    def grind(self, call: Call) -> None:
        """Twenty milliseconds of somebody else's time."""
        del call
        threading.Event().wait(0.02)

    @mutation(timeout=LIMIT)
    def touch(self, call: Call) -> None:
        """Nothing."""
        del call

    @touch.reconcile
    def touched(self, call: Call) -> Verdict:
        """It is harmless to say yes: nothing happens."""
        del call
        return Applied()


stone = Stone()
narrow = Workflow("narrow", concurrency=1)
narrow_orders = narrow.topic("orders")
wide = Workflow("wide", concurrency=64)
wide_orders = wide.topic("orders")
light = Workflow("light", concurrency=64)
light_orders = light.topic("orders")


@narrow.effect(narrow_orders)
def one_by_one(ctx: Any, order: Any) -> Any:
    """Twenty milliseconds each, one after the other."""
    del order
    return ctx.stone.grind()


@wide.effect(wide_orders)
def at_once(ctx: Any, order: Any) -> Any:
    """Twenty milliseconds each, many at once."""
    del order
    return ctx.stone.grind()


@light.effect(light_orders)
def nothing(ctx: Any, order: Any) -> Any:
    """A mutation that takes no time."""
    del order
    return ctx.stone.touch()
