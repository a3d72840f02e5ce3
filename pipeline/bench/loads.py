"""Ways to load an installation, and the figures that each yields."""

import time
from typing import Any

from pipeline.bench.counters import LogCounts
from pipeline.bench.figures import percentile
from pipeline.bench.installation import Costs, Fleet

RATE = 20.0  #: orders a second under light load
_WARM_UP = 200  #: runs before anything is measured


def warm_up(fleet: Fleet, workflow: str, *, runs: int = _WARM_UP) -> None:
    """Let the workers do some orders, then give the planner its statistics."""
    fleet.publish(workflow, runs)
    fleet.wake(workflow)
    fleet.wait_until_done()
    fleet.site.analyze()


def drain(fleet: Fleet, workflow: str, orders: int, *payloads: Any, per_run: int = 1) -> dict[str, float]:
    """Publish a backlog to a paused workflow, and measure from its release to the answer to the last commit."""
    names = fleet.preload(workflow, orders, *payloads)
    before = fleet.costs()
    begun = time.monotonic()
    fleet.release(workflow)
    fleet.wait_until_done()
    after = fleet.costs()
    seconds = max(fleet.committed_at(names).values()) - begun
    runs = orders / per_run
    return {
        "runs_per_second": runs / seconds,
        "events_per_second": orders / seconds,
        **costs_per_run(before, after, runs),
        "row_bytes": (after.rows - before.rows) / runs,
        "worker_mb": fleet.memory_mb(),
    }


def pace(fleet: Fleet, workflow: str, orders: int, *payloads: Any, rate: float = RATE) -> dict[str, float]:
    """Publish at a rate, also if earlier orders are not done; measure from before the publish to after the commit."""
    before = fleet.costs()
    sent = fleet.pace(workflow, orders, rate, *payloads)
    fleet.wait_until_done()
    after = fleet.costs()
    waited = [done - sent[order] for order, done in fleet.committed_at(sent).items()]
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
