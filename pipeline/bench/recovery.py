"""Loads that lose something: calls that hang, a pool process, a machine, a zone with all its workers."""

import os
import signal
import time
from typing import Any

from pipeline.bench.figures import percentile
from pipeline.bench.installation import BenchError, Fleet, FleetOptions
from pipeline.bench.loads import warm_up
from pipeline.bench.workflow import DONE
from pipeline.domain.states import MutationStatus

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
