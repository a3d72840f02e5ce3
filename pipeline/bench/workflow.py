"""The workflows that are measured: orders, one call per run, one event for each order that is done.

The call appends its orders to a file, which is the outside witness of the effects. A worker appends each order and the
instant after its commit to another file, by the machine's monotonic clock, which all processes share.
"""

import os
import threading
import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from pipeline import Applied, Call, Connector, NotFound, PrepareResult, Verdict, Workflow, mutation
from pipeline.worker import crash_points
from pipeline.worker.crash_points import CrashPoint

WITNESS_VARIABLE = "BENCH_WITNESS"  #: names the file of the witness
COMMITTED_SUFFIX = ".committed"  #: of the file beside it, with the instants of commits
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
    _append(_witness(), orders)


def _append(path: Path, lines: Iterable[str]) -> None:
    """Append all lines by one write, which other processes cannot divide."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(file, "".join(f"{line}\n" for line in lines).encode())
    finally:
        os.close(file)


_uncommitted: list[str] = []  #: orders whose next phase ran in this process, and whose commit has not been answered


def _stamp_commits(point: CrashPoint) -> None:
    """Append the orders that this process has committed, with the instant at which Postgres had answered."""
    if point is CrashPoint.NEXT_CLAIMED:
        _uncommitted.clear()
    if point is CrashPoint.COMMITTED and _uncommitted:
        now = time.monotonic()
        _append(Path(f"{_witness()}{COMMITTED_SUFFIX}"), [f"{order} {now}" for order in _uncommitted])
        _uncommitted.clear()


if WITNESS_VARIABLE in os.environ:  # in a worker of a measurement
    crash_points.on_reach = _stamp_commits


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
                _uncommitted.extend(prepared.data["orders"])
                for order in prepared.data["orders"]:
                    ctx.publish(done, message_id=order, payload={})

    return workflow


#: The measured workflows with their options, by name.
_MEASURED: Mapping[str, Mapping[str, Any]] = {
    "many": {"concurrency": 400},
    "one": {},
    "wide": {"concurrency": 1000},  # 1,500 orders a second of which one in twenty takes 4 s: 300 calls hang at any time
    "batched": {"batch": 100, "concurrency": 400},
    "zone": {"concurrency": 10_000},
}
NAMES = tuple(_MEASURED)
IDLE = "idle"  #: the names of workflows without work begin with it, and end with a number
IDLE_VARIABLE = "BENCH_IDLE_WORKFLOWS"  #: a worker with this variable knows so many of them, and no others
_idle: Mapping[str, Mapping[str, Any]] = {f"{IDLE}{n}": {} for n in range(int(os.environ.get(IDLE_VARIABLE, "0")))}
globals().update({name: measured_workflow(name, **options) for name, options in (_idle or _MEASURED).items()})
