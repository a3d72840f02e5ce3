"""The workflows that are measured: orders, one call per run, one event for each order that is done.

The call appends its orders to a file, which is the outside witness of the effects.
"""

import os
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

from pipeline import Applied, Call, Connector, NotFound, PrepareResult, Verdict, Workflow, mutation

WITNESS_VARIABLE = "BENCH_WITNESS"  #: names the file of the witness
HANG = timedelta(seconds=4)  #: how long a call that hangs may take
CALL = timedelta(seconds=30)
ORDERS, DONE = "orders", "done"


class World(Connector):
    """An outside system that records what was asked of it, and takes its time."""

    name = "world"

    @mutation(timeout=CALL)
    def act(self, call: Call, *, orders: list[str], ms: int) -> None:
        """Record the orders, then take so many milliseconds."""
        _record(orders)
        if ms:
            threading.Event().wait(min(ms / 1000, call.remaining.total_seconds()))

    @act.reconcile
    def find(self, call: Call, *, orders: list[str], ms: int) -> Verdict:
        """Search the orders in the record."""
        del call, ms
        return _verdict(orders)

    @mutation(timeout=HANG)
    def act_or_hang(self, call: Call, *, orders: list[str], hangs: bool) -> None:
        """Record the orders, then answer, or hang until the timeout."""
        _record(orders)
        if hangs:
            threading.Event().wait(call.remaining.total_seconds() + 1)

    @act_or_hang.reconcile
    def find_hung(self, call: Call, *, orders: list[str], hangs: bool) -> Verdict:
        """Search the orders in the record."""
        del call, hangs
        return _verdict(orders)


def _witness() -> Path:
    return Path(os.environ[WITNESS_VARIABLE])


def _record(orders: list[str]) -> None:
    """Append all orders by one write, which other processes cannot divide."""
    file = os.open(_witness(), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(file, "".join(f"{order}\n" for order in orders).encode())
    finally:
        os.close(file)


def _verdict(orders: list[str]) -> Verdict:
    lines = set(_witness().read_text().splitlines()) if _witness().exists() else set()
    return Applied() if set(orders) <= lines else NotFound()


world = World()


def measured_workflow(name: str, *, batch: int = 1, **options: Any) -> Workflow:
    """Declare a workflow: a run takes ``batch`` orders, makes one call, and publishes each order as done."""
    workflow = Workflow(name, on_uncertain="contain", **options)
    orders, done = workflow.topic(ORDERS), workflow.topic(DONE)

    @workflow.consumer(subscribes=[orders], publishes=[done], batch=batch)
    class Fulfil:
        """Do what an order asks for."""

        def prepare(self, ctx: Any, state: Any) -> PrepareResult:
            """Take the oldest orders."""
            del state
            pending = ctx.peek(orders, limit=batch)
            if not pending:
                return PrepareResult.nothing()
            data = {"orders": [event.message_id for event in pending], "call": pending[0].payload}
            return PrepareResult(reserve=pending, data=data)

        def mutate(self, ctx: Any, prepared: Any) -> Any:
            """Ask for one effect."""
            wanted, call = prepared.data["orders"], prepared.data["call"]
            if "hangs" in call:
                return ctx.world.act_or_hang(orders=wanted, hangs=call["hangs"])
            return ctx.world.act(orders=wanted, ms=call.get("ms", 0))

        def next(self, ctx: Any, prepared: Any, result: Any) -> None:
            """Publish each order as done."""
            if result.applied:
                for order in prepared.data["orders"]:
                    ctx.publish(done, message_id=order, payload={})

    return workflow


many = measured_workflow("many", concurrency=400)
one = measured_workflow("one")
batched = measured_workflow("batched", batch=100, concurrency=400)
zone = measured_workflow("zone", concurrency=10_000)
