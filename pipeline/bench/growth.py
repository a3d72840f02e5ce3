"""Loads on tables that have grown, and publishes that are large."""

import time

from pipeline.bench import loads
from pipeline.bench.installation import Fleet

_COPIED_AT_ONCE = 100_000


def drain_after(fleet: Fleet, runs: int, *, finished: int) -> dict[str, float]:
    """Drain a backlog in tables that hold so many finished runs."""
    loads.warm_up(fleet, "many")
    for begun in range(0, finished, _COPIED_AT_ONCE):
        fleet.site.copy_finished_run("many", min(_COPIED_AT_ONCE, finished - begun))
    fleet.site.analyze()
    return loads.drain(fleet, "many", runs)


def drain_before(fleet: Fleet, runs: int, *, pending: int) -> dict[str, float]:
    """Drain a part of a backlog of so many orders, then pause the workflow and let its runs finish."""
    loads.warm_up(fleet, "many")
    fleet.preload("many", pending)
    fleet.site.analyze()
    first = fleet.done("many")
    before, begun = fleet.costs(), time.monotonic()
    fleet.release("many")
    fleet.wait(lambda: fleet.done("many") >= first + runs, f"{runs} orders")
    done, seconds, after = fleet.done("many") - first, time.monotonic() - begun, fleet.costs()
    fleet.pause("many")
    fleet.expected = fleet.done("many")
    return {"runs_per_second": done / seconds, **loads.costs_per_run(before, after, done)}


def publish_at_once(fleet: Fleet, orders: int) -> dict[str, float]:
    """Publish so many orders in one transaction, to a workflow that is paused."""
    fleet.site.register()
    fleet.preload("many", 1)  # the process of the publisher has imported what it needs
    begun = time.monotonic()
    fleet.publish("many", orders)
    seconds = time.monotonic() - begun
    fleet.expected = 0
    return {"seconds": seconds, "events_per_second": orders / seconds}
