"""Loads on tables that have grown, and publishes that are large."""

import time

from pipeline.admin.controls import WorkflowControls
from pipeline.bench import loads
from pipeline.bench.installation import Fleet
from pipeline.domain.states import RunStatus
from pipeline.domain.values import Actor

_OPEN_RUNS = "SELECT count(*) FROM pipeline.runs WHERE status = %s"
_COPIED_AT_ONCE = 100_000
_PUBLISHED_AT_ONCE = 50_000


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
    controls, actor = WorkflowControls(fleet.site.db), Actor(name="bench")
    controls.pause("many", actor)
    for begun in range(0, pending, _PUBLISHED_AT_ONCE):
        fleet.publish("many", min(_PUBLISHED_AT_ONCE, pending - begun))
    fleet.site.analyze()
    first = fleet.done("many")
    before, begun_at = fleet.costs(), time.monotonic()
    controls.resume("many", actor)
    fleet.wake("many")
    fleet.wait(lambda: fleet.done("many") >= first + runs, f"{runs} orders")
    done, seconds, after = fleet.done("many") - first, time.monotonic() - begun_at, fleet.costs()
    controls.pause("many", actor)
    fleet.wait(lambda: fleet.site.query(_OPEN_RUNS, RunStatus.ACTIVE.value)[0][0] == 0, "the runs to finish")
    fleet.expected = fleet.done("many")
    return {"runs_per_second": done / seconds, **loads.costs_per_run(before, after, done)}


def publish_at_once(fleet: Fleet, orders: int) -> dict[str, float]:
    """Publish so many orders in one transaction, to a workflow that is paused."""
    fleet.site.register()
    WorkflowControls(fleet.site.db).pause("many", Actor(name="bench"))
    fleet.publish("many", 1)  # the process of the publisher has imported what it needs
    begun = time.monotonic()
    fleet.publish("many", orders)
    seconds = time.monotonic() - begun
    fleet.expected = 0
    return {"seconds": seconds, "events_per_second": orders / seconds}
