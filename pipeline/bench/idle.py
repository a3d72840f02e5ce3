"""What an installation without work costs, and what a command costs."""

import resource
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from statistics import median

from pipeline.background import redispatcher
from pipeline.background.scheduler import Scheduler
from pipeline.bench.idle_workflows import COUNT_VARIABLE
from pipeline.bench.installation import Fleet, FleetOptions
from pipeline.store.database import Database

_WATCHED_FOR = 20.0  #: seconds: four ticks
_TICKS = 3


def idle_fleet(workflows: int) -> FleetOptions:
    """Return a worker that knows so many workflows."""
    return FleetOptions(modules="pipeline.bench.idle_workflows", settings={COUNT_VARIABLE: str(workflows)})


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
