"""Ways to load an installation, and the figures that each yields.

- orders at once or at a rate;
- tables that have grown, and a publish that is large;
- a loss: calls that hang, a pool process, a machine, a zone with all its workers;
- no work at all, and a command.
"""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from pipeline.background import redispatcher
from pipeline.background.scheduler import Scheduler
from pipeline.bench.counters import LogCounts
from pipeline.bench.figures import percentile
from pipeline.bench.installation import BenchError, Costs, Fleet, FleetOptions
from pipeline.bench.workflow import DONE, IDLE_VARIABLE
from pipeline.domain.states import MutationStatus
from pipeline.store.database import Database

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


_COPIED_AT_ONCE = 100_000


def drain_after(fleet: Fleet, runs: int, *, finished: int) -> dict[str, float]:
    """Drain a backlog in tables that hold so many finished runs."""
    warm_up(fleet, "many")
    for begun in range(0, finished, _COPIED_AT_ONCE):
        fleet.site.copy_finished_run("many", min(_COPIED_AT_ONCE, finished - begun))
    fleet.site.analyze()
    return drain(fleet, "many", runs)


def drain_before(fleet: Fleet, runs: int, *, pending: int) -> dict[str, float]:
    """Drain a part of a backlog of so many orders, then pause the workflow and let its runs finish."""
    warm_up(fleet, "many")
    fleet.preload("many", pending)
    fleet.site.analyze()
    first = fleet.done("many")
    before, begun = fleet.costs(), time.monotonic()
    fleet.release("many")
    fleet.wait(lambda: fleet.done("many") >= first + runs, f"{runs} orders")
    done, seconds, after = fleet.done("many") - first, time.monotonic() - begun, fleet.costs()
    fleet.pause("many")
    fleet.expected = fleet.done("many")
    return {"runs_per_second": done / seconds, **costs_per_run(before, after, done)}


def publish_at_once(fleet: Fleet, orders: int) -> dict[str, float]:
    """Publish so many orders in one transaction, to a workflow that is paused."""
    fleet.site.register()
    fleet.preload("many", 1)  # the connection is open, and what a publish needs is imported
    begun = time.monotonic()
    fleet.publish("many", orders)
    seconds = time.monotonic() - begun
    fleet.expected = 0
    return {"seconds": seconds, "events_per_second": orders / seconds}


_LONG_CALL = {"ms": 20_000}  #: so long that it is not answered before the kill
_ONE_OF_TWENTY = 20
_ZONE_PROCESSES = 5
#: A zone of one worker that holds as many runs as a zone of many would.
ZONE = FleetOptions(
    concurrency=_ZONE_PROCESSES,
    settings={"PIPELINE_MUTATION_CONCURRENCY": "1000", "PIPELINE_MAX_COHORT_SIZE": "1000"},
)
_ANSWERED = """
SELECT extract(epoch FROM d.created_at - m.sent_at)::float
FROM pipeline.mutations m
JOIN pipeline.events d ON d.workflow = m.workflow AND d.topic = %s AND d.message_id = m.params->'orders'->>0
WHERE m.workflow = 'wide' AND m.params->'hangs' = 'false' AND m.created_at >= %s
"""
_IN_FLIGHT = "SELECT count(*) FROM pipeline.mutations WHERE status = %s"


def drain_hanging(fleet: Fleet, orders: int, *, share: bool) -> dict[str, float]:
    """Drain a backlog of which one call in twenty hangs, or none. Orders with an answer count."""
    warm_up(fleet, "wide")
    calls: list[Any] = [{"hangs": share and n == 0} for n in range(_ONE_OF_TWENTY)]
    names = fleet.preload("wide", orders, *calls)
    answered = [name for n, name in enumerate(names) if not calls[n % _ONE_OF_TWENTY]["hangs"]]
    ((since,),), begun = fleet.site.query("SELECT clock_timestamp()"), time.monotonic()
    fleet.release("wide")
    fleet.wait_until_done()
    waited = [seconds for (seconds,) in fleet.site.query(_ANSWERED, DONE, since)]
    return {
        "runs_per_second": len(answered) / (max(fleet.committed_at(answered).values()) - begun),
        "answered_p90_s": percentile(waited, 90),
    }


def kill_process(fleet: Fleet) -> dict[str, float]:
    """Kill the pool process that makes a call, and wait until the run of its effect is done."""
    _start_call(fleet)
    _, pid = fleet.holder("many")
    begun = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    fleet.wait_until_done()
    return {"seconds": time.monotonic() - begun}


def kill_machine(fleet: Fleet) -> dict[str, float]:
    """Kill the worker that makes a call, with all its processes; another worker must go on."""
    _start_call(fleet)
    node, _ = fleet.holder("many")
    begun = time.monotonic()
    fleet.kill(node)
    fleet.wait_until_done()
    return {"seconds": time.monotonic() - begun}


def lose_zone(fleet: Fleet, orders: int) -> dict[str, float]:
    """Kill a worker that makes so many calls at once; a worker that starts then must rescue them all.

    A call is rescued when its run was stopped, and its mutation waits to be reconciled or is known. Then all orders
    must be done, which is not in the figure: it depends on how fast the outside system can be asked.
    """
    fleet.site.register()
    fleet.preload("zone", orders, {"ms": 300_000})
    fleet.release("zone")
    fleet.wait(lambda: fleet.effects() >= orders, f"{orders} calls at once")
    fleet.kill(fleet.workers[0])
    begun = time.monotonic()
    lost = _in_flight(fleet)
    if lost < orders:
        raise BenchError(f"{lost} calls were in flight at the kill; expected {orders}.")
    fleet.configure(FleetOptions())
    fleet.workers = [fleet.start_worker(1)]
    fleet.wait(lambda: _in_flight(fleet) == 0, f"{lost} calls to be rescued")
    seconds = time.monotonic() - begun
    fleet.wait_until_done(within=1200)
    return {"seconds": seconds}


def _in_flight(fleet: Fleet) -> int:
    return int(fleet.site.query(_IN_FLIGHT, MutationStatus.IN_FLIGHT.value)[0][0])


def _start_call(fleet: Fleet) -> None:
    """Start one long call, and wait until the witness has seen its effect."""
    warm_up(fleet, "many")
    before = fleet.effects()
    fleet.publish("many", 1, _LONG_CALL)
    fleet.wake("many")
    fleet.wait(lambda: fleet.effects() > before, "the call to begin")


_WATCHED_FOR = 20.0  #: seconds: four ticks
_TICKS = 3


def idle_fleet(workflows: int) -> FleetOptions:
    """Return a worker that knows so many workflows."""
    return FleetOptions(settings={IDLE_VARIABLE: str(workflows)})


def rest(fleet: Fleet, workflows: int) -> dict[str, float]:
    """Count the statements of workers without work, then measure a tick."""
    fleet.wait(lambda: _registered(fleet) >= workflows, f"{workflows} workflows to be registered")
    fleet.site.analyze()
    begun = time.monotonic()
    with fleet.site.counted() as counts:
        threading.Event().wait(_WATCHED_FOR)
        seconds = time.monotonic() - begun
    found = {"statements_per_second": counts.statements / seconds} if fleet.site.can_count else {}
    return {**found, "tick_seconds": _tick_seconds(fleet)}


def _registered(fleet: Fleet) -> int:
    return int(fleet.site.query("SELECT count(*) FROM pipeline.workflows")[0][0])


def _tick_seconds(fleet: Fleet) -> float:
    """Return the median of some ticks in this process, over a pool of connections as a worker has."""
    db = Database.connect(fleet.site.urls.database_url)
    scheduler = Scheduler(db, lambda _: None, cohort_time=timedelta(minutes=1))
    taken = []
    try:
        for _ in range(_TICKS):
            begun = time.monotonic()
            redispatcher.tick(db, scheduler, redispatch_after=timedelta(minutes=1))
            taken.append(time.monotonic() - begun)
    finally:
        db.dispose()
    return median(taken)


def help_cpu() -> dict[str, float]:
    """Return the processor time of ``pipeline --help``."""
    command = [str(Path(sys.executable).parent / "pipeline"), "--help"]
    before = _children_cpu()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return {"seconds": _children_cpu() - before}


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
