"""Recover after a crash: runs, sessions, maintenance. Every function is one bounded pass, safe to repeat.

No handler is called here: state is moved, and the scheduler starts what is due. Orphaned reservations are not
repaired but reported by ``store.reads.invariants``: one would mean that a transition is wrong, and releasing it
silently would hide that.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy.exc import DBAPIError

from pipeline.background.messages import SweepReport
from pipeline.background.scheduler import Scheduler
from pipeline.domain.errors import PipelineError
from pipeline.store.database import SHORT_LOCK_TIMEOUT, Database, is_lock_timeout
from pipeline.store.reads import work
from pipeline.telemetry import metrics
from pipeline.telemetry.tracing import spans
from pipeline.transitions import runs, sessions, stops, workflows
from pipeline.transitions.stops import StoppedRun

log = logging.getLogger(__name__)


def rescue(db: Database, scheduler: Scheduler, *, jitter: float) -> SweepReport:
    """Stop runs whose lease has lapsed, then start what that released."""
    return _report_rescued(recover_crashed_runs(db, jitter=jitter), scheduler)


def recover_process(db: Database, scheduler: Scheduler, worker: str, *, jitter: float) -> SweepReport:
    """Recover at once the runs of a process that is known to be gone."""
    message = f"its process {worker} ended while it held the run"
    with db.transaction() as tx:
        ids = runs.expire_leases_of_process(tx, worker)
    if not ids:
        return _report_rescued((), scheduler)
    with db.transaction() as tx:  # one of its own: it locks workflows, which come before runs
        ended = stops.rescue(tx, ids, jitter=jitter, message=message)
    return _report_rescued(ended, scheduler)


def _report_rescued(ended: Sequence[StoppedRun], scheduler: Scheduler) -> SweepReport:
    """Count and trace runs that lost their worker, and start what their stop released."""
    spans.record_rescued(ended)
    for item in ended if metrics.is_on() else ():
        metrics.record("pipeline.rescues", {"workflow": item.run.workflow})
    scheduler.schedule({item.run.workflow for item in ended})
    report = SweepReport()
    report.add("rescued", len(ended))
    return report


def finish_sessions(db: Database) -> SweepReport:
    """Finish sessions in which nothing is left to do."""
    report = SweepReport()
    report.add("finished", recover_unfinished_sessions(db))
    return report


def open_maintenance_tasks(db: Database) -> SweepReport:
    """Ask an operator to repair each workflow in maintenance that has no task yet."""
    report = SweepReport()
    report.add("tasks opened", recover_maintenance_mode(db))
    return report


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryReport:
    """What one pass recovered."""

    runs: tuple[StoppedRun, ...] = ()
    sessions: int = 0
    maintenance_tasks: int = 0


def recover(db: Database, *, limit: int = 100, jitter: float = 0.0) -> RecoveryReport:
    """Recover crashed runs, then sessions, then maintenance."""
    return RecoveryReport(
        runs=recover_crashed_runs(db, limit=limit, jitter=jitter),
        sessions=recover_unfinished_sessions(db, limit=limit),
        maintenance_tasks=recover_maintenance_mode(db),
    )


def recover_crashed_runs(db: Database, *, limit: int = 100, jitter: float = 0.0) -> tuple[StoppedRun, ...]:
    """Stop runs whose lease has lapsed. The mutation boundary decides what happens to their inputs.

    First, leases from before the clock was set back are shortened, so that they lapse in time.
    Workflows take turns, and each run has a transaction of its own: one that cannot be stopped is logged and does not
    delay the others. A workflow that another transaction holds locked is left for the next pass after one wait.
    """
    with db.transaction() as tx:
        shortened = runs.shorten_leases(tx)
        lapsed = work.lapsed_runs(tx, limit=limit)
    if shortened:
        log.warning(
            "Postgres's clock was set back: %d leases ended later than they can, and are shortened", len(shortened)
        )
    ended: list[StoppedRun] = []
    locked: set[str] = set()
    for row in lapsed:
        if row.workflow in locked:
            continue
        try:
            with db.transaction() as tx:
                if locked:
                    tx.set_lock_timeout(SHORT_LOCK_TIMEOUT)
                ended.extend(stops.rescue(tx, [row.id], jitter=jitter))
        except (PipelineError, DBAPIError) as error:
            if is_lock_timeout(error):
                locked.add(row.workflow)
            log.exception("run %s cannot be rescued", row.id)
    return tuple(ended)


def recover_unclaimed_runs(db: Database, *, older_than: timedelta) -> int:
    """Withdraw runs that no worker claims, one workflow after the other. Other runs may take their places."""
    with db.autocommit() as tx:
        found = work.unclaimed_runs(tx, older_than=older_than)
    taken = 0
    for workflow in sorted({row.workflow for row in found}):
        ids = [row.id for row in found if row.workflow == workflow]
        try:
            with db.transaction() as tx:
                taken += len(stops.withdraw_unclaimed(tx, ids))
        except (PipelineError, DBAPIError):
            log.exception("runs of workflow %r cannot be taken back", workflow)
    return taken


def recover_unfinished_sessions(db: Database, *, limit: int = 100) -> int:
    """Finish sessions whose runs have all committed."""
    with db.transaction() as tx:
        return len(sessions.finish(tx, work.finishable_sessions(tx, limit=limit)))


def recover_maintenance_mode(db: Database) -> int:
    """Open the maintenance task of every workflow that is in maintenance without one."""
    with db.transaction() as tx:
        return sum(workflows.open_maintenance_task(tx, name) for name in work.unattended_maintenance(tx))
