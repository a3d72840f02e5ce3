"""Ways to load an installation, and the figures that each yields."""

from collections.abc import Sequence
from typing import Any

from pipeline.bench.counters import LogCounts
from pipeline.bench.figures import percentile
from pipeline.bench.installation import Costs, Fleet
from pipeline.bench.workflow import DONE, ORDERS

RATE = 20.0  #: orders a second under light load
_WARM_UP = 200  #: runs before anything is measured
_SECONDS = """
SELECT extract(epoch FROM d.created_at - e.created_at)::float FROM pipeline.events e
JOIN pipeline.events d ON d.workflow = e.workflow AND d.topic = %s AND d.message_id = e.message_id
WHERE e.workflow = %s AND e.topic = %s AND e.message_id BETWEEN %s AND %s
"""
_SPAN = """
SELECT extract(epoch FROM max(created_at) - %s)::float FROM pipeline.events
WHERE workflow = %s AND topic = %s AND message_id BETWEEN %s AND %s
"""
_CLOCK = "SELECT clock_timestamp()"


def warm_up(fleet: Fleet, workflow: str, *, runs: int = _WARM_UP) -> None:
    """Let the workers do some orders, then give the planner its statistics."""
    fleet.publish(workflow, runs)
    fleet.wake(workflow)
    fleet.wait_until_done()
    fleet.site.analyze()


def drain(fleet: Fleet, workflow: str, orders: int, *payloads: Any, per_run: int = 1) -> dict[str, float]:
    """Publish a backlog to a paused workflow, and measure from its release to the last commit."""
    names = fleet.preload(workflow, orders, *payloads)
    before = fleet.costs()
    ((begun,),) = fleet.site.query(_CLOCK)
    fleet.release(workflow)
    fleet.wait_until_done()
    after = fleet.costs()
    ((seconds,),) = fleet.site.query(_SPAN, begun, workflow, DONE, names[0], names[-1])
    runs = orders / per_run
    return {
        "runs_per_second": runs / seconds,
        "events_per_second": orders / seconds,
        **costs_per_run(before, after, runs),
        "row_bytes": (after.rows - before.rows) / runs,
        "worker_mb": fleet.memory_mb(),
    }


def pace(fleet: Fleet, workflow: str, orders: int, *payloads: Any, rate: float = RATE) -> dict[str, float]:
    """Publish at a rate, whether or not earlier orders are done, and measure from publish to commit."""
    before = fleet.costs()
    names = fleet.pace(workflow, orders, rate, *payloads)
    fleet.wait_until_done()
    after = fleet.costs()
    waited = seconds_to_done(fleet, workflow, names)
    found = {f"p{percent}_ms": percentile(waited, percent) * 1000 for percent in (50, 95, 99)}
    return {**found, **costs_per_run(before, after, orders)}


def count_drained(fleet: Fleet, workflow: str, orders: int, *payloads: Any) -> dict[str, float]:
    """Count what each run of a backlog asks of Postgres."""
    fleet.preload(workflow, orders, *payloads)
    with fleet.site.counted() as counts:
        fleet.release(workflow)
        fleet.wait_until_done()
    return counts_per_run(fleet, counts, orders)


def count_paced(fleet: Fleet, workflow: str, orders: int, *payloads: Any, rate: float = RATE) -> dict[str, float]:
    """Count what each run of a light load asks of Postgres."""
    with fleet.site.counted() as counts:
        fleet.pace(workflow, orders, rate, *payloads)
        fleet.wait_until_done()
    return counts_per_run(fleet, counts, orders)


def seconds_to_done(fleet: Fleet, workflow: str, names: Sequence[str]) -> list[float]:
    """Return for each order how long it took from its publish to its commit."""
    rows = fleet.site.query(_SECONDS, DONE, workflow, ORDERS, names[0], names[-1])
    return [seconds for (seconds,) in rows]


def costs_per_run(before: Costs, after: Costs, runs: float) -> dict[str, float]:
    """Divide what was spent between two instants by the number of runs."""
    found = {
        "worker_cpu_ms": (after.workers - before.workers) * 1000 / runs,
        "wal_bytes": (after.wal - before.wal) / runs,
    }
    if before.postgres is not None and after.postgres is not None:
        found["postgres_cpu_ms"] = (after.postgres - before.postgres) * 1000 / runs
    return found


def counts_per_run(fleet: Fleet, counts: LogCounts, runs: float) -> dict[str, float]:
    """Divide counts of the log by the number of runs; nothing where the log is out of reach."""
    if not fleet.site.can_count:
        return {}
    return {
        "statements": counts.statements / runs,
        "commits": counts.commits / runs,
        "plans": counts.plans / runs,
    }
