"""Putting things back on the road after a crash. Every function is one bounded pass, safe to repeat.

Nothing here executes a handler: state is moved, and the scheduler starts what is due. Orphaned
reservations are not repaired: ``store.invariants`` reports them, because one would mean that a verb
is wrong, and releasing it silently would hide that.
"""

import logging
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy.exc import DBAPIError

from pipeline.domain.errors import PipelineError
from pipeline.store.database import SHORT_LOCK_TIMEOUT, Database, is_lock_timeout
from pipeline.store.reads import work
from pipeline.transitions import sessions, stops, workflows
from pipeline.transitions.stops import StoppedRun

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryReport:
    """What one pass found and mended."""

    runs: tuple[StoppedRun, ...] = ()
    sessions: int = 0
    maintenance_tasks: int = 0


def recover(db: Database, *, limit: int = 100, jitter: float = 0.0) -> RecoveryReport:
    """Crashed runs, then sessions, then maintenance: each row in a transaction of its own."""
    return RecoveryReport(
        runs=recover_crashed_runs(db, limit=limit, jitter=jitter),
        sessions=recover_unfinished_sessions(db, limit=limit),
        maintenance_tasks=recover_maintenance_mode(db),
    )


def recover_crashed_runs(db: Database, *, limit: int = 100, jitter: float = 0.0) -> tuple[StoppedRun, ...]:
    """Stop runs whose lease has lapsed; the mutation boundary says what becomes of their inputs.

    A run that cannot be stopped is said loudly and does not keep the others waiting.
    """
    with db.transaction() as tx:
        lapsed = work.lapsed_runs(tx, limit=limit)
    ended: list[StoppedRun] = []
    held_up = False
    for run_id in lapsed:
        try:
            with db.transaction() as tx:
                if held_up:
                    tx.set_lock_timeout(SHORT_LOCK_TIMEOUT)
                ended.extend(stops.rescue(tx, [run_id], jitter=jitter))
        except (PipelineError, DBAPIError) as error:
            held_up |= is_lock_timeout(error)
            log.exception("run %s cannot be rescued", run_id)
    return tuple(ended)


def recover_unclaimed_runs(db: Database, *, older_than: timedelta) -> int:
    """Take back runs that no worker takes, one workflow after the other; their places are free for others."""
    with db.transaction() as tx:
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
    """Finish sessions whose runs all committed and that nobody finished."""
    with db.transaction() as tx:
        return len(sessions.finish(tx, work.finishable_sessions(tx, limit=limit)))


def recover_maintenance_mode(db: Database) -> int:
    """Open the task of every workflow that is in maintenance without one."""
    with db.transaction() as tx:
        return sum(workflows.open_maintenance_task(tx, name) for name in work.unattended_maintenance(tx))
