"""Recover after a crash: runs, sessions, maintenance. Every function is one bounded pass, safe to repeat.

No handler is called here: state is moved, and the scheduler starts what is due. Orphaned reservations are not
repaired but reported by ``store.reads.invariants``: one would mean that a transition is wrong, and releasing it
silently would hide that.
"""

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy.exc import DBAPIError

from pipeline.background.messages import SweepReport
from pipeline.background.reconciler import DispatchReconcile, dispatch_in_sets
from pipeline.background.scheduler import Scheduler
from pipeline.domain.errors import PipelineError
from pipeline.domain.states import MutationStatus, RunId
from pipeline.store.database import SHORT_LOCK_TIMEOUT, Database, is_disconnected, is_lock_timeout
from pipeline.store.reads import work
from pipeline.store.rows import RunOfWorkflowRow
from pipeline.telemetry import metrics, spans
from pipeline.transitions import runs, stops, workflows
from pipeline.transitions.stops import LEASE_LAPSED, StoppedRun

log = logging.getLogger(__name__)

_SET = 200  #: runs that one transaction stops, at most: it holds the lock of their workflow for some tenths of a second
_BUDGET = timedelta(seconds=2)  #: for the stops of one pass; the next pass continues


@dataclass(frozen=True, slots=True)
class Rescuer:
    """Stops runs that lost their worker, and lets what follows begin at once."""

    db: Database
    scheduler: Scheduler
    dispatch_reconcile: DispatchReconcile  #: sends the wake-up message to reconcile some mutations

    def rescue(self, *, jitter: float) -> SweepReport:
        """Stop runs whose lease has lapsed, then reconcile and start what follows from it."""
        return self._continue(recover_crashed_runs(self.db, jitter=jitter))

    def recover_process(self, worker: str, *, jitter: float) -> SweepReport:
        """Recover at once the runs of a process that is known to be gone."""
        with self.db.transaction() as tx:
            expired = runs.expire_leases_of_process(tx, worker)
        # in transactions of their own: they lock workflows, which come before runs
        message = f"its process {worker} ended while it held the run"
        return self._continue(_rescue_in_sets(self.db, expired, jitter=jitter, message=message))

    def _continue(self, ended: Sequence[StoppedRun]) -> SweepReport:
        """Dispatch the reconcile attempts of new doubts, and start what the stops released."""
        spans.record_rescued(ended)
        for item in ended if metrics.is_on() else ():
            metrics.record("pipeline.rescues", {"workflow": item.run.workflow})
        doubted = [item.run.mutation_id for item in ended if item.decision.doubt is MutationStatus.NEEDS_RECONCILE]
        dispatch_in_sets(doubted, self.dispatch_reconcile)
        self.scheduler.schedule(sorted({item.run.workflow for item in ended}))
        report = SweepReport()
        report.add("rescued", len(ended))
        report.add("reconciles dispatched", len(doubted))
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


def recover_crashed_runs(
    db: Database, *, limit: int = 10_000, jitter: float = 0.0, budget: timedelta = _BUDGET
) -> tuple[StoppedRun, ...]:
    """Stop runs whose lease has lapsed. The mutation boundary decides what happens to their inputs.

    First, leases from before the clock was set back are shortened, so that they lapse in time.
    """
    with db.autocommit() as tx:
        lapsed = work.lapsed_runs(tx, limit=limit)
        shortened = runs.shorten_leases(tx) if any(row.is_in_future for row in lapsed) else ()
    if shortened:
        log.warning(
            "Postgres's clock was set back: %d leases ended later than they can, and are shortened", len(shortened)
        )
    return _rescue_in_sets(db, [row for row in lapsed if not row.is_in_future], jitter=jitter, budget=budget)


def _rescue_in_sets(
    db: Database,
    rows: Sequence[RunOfWorkflowRow],
    *,
    jitter: float,
    message: str = LEASE_LAPSED,
    budget: timedelta = _BUDGET,
) -> tuple[StoppedRun, ...]:
    """Stop runs workflow by workflow, a set in each transaction. Workflows take turns.

    A workflow that another transaction holds locked is left for the next pass after one wait. So is what the time
    does not suffice for.
    """
    ids: dict[str, deque[RunId]] = {}
    for row in rows:
        ids.setdefault(row.workflow, deque()).append(row.id)
    turns, ended = deque(ids), list[StoppedRun]()
    is_hurried, ends_at = False, time.monotonic() + budget.total_seconds()
    while turns and time.monotonic() < ends_at:
        left = ids[turns[0]]
        part = [left.popleft() for _ in range(min(len(left), _SET))]
        stopped, is_locked = _rescue_set(db, part, jitter=jitter, message=message, is_hurried=is_hurried)
        ended += stopped
        is_hurried |= is_locked
        if is_locked or not left:
            turns.popleft()
        turns.rotate(-1)
    return tuple(ended)


def _rescue_set(
    db: Database, ids: Sequence[RunId], *, jitter: float, message: str, is_hurried: bool
) -> tuple[Sequence[StoppedRun], bool]:
    """Stop runs of one workflow in one transaction, or one by one if one of them cannot be stopped.

    Return those that were stopped, and whether the workflow is locked.
    """
    try:
        with db.transaction() as tx:
            if is_hurried:
                tx.set_lock_timeout(SHORT_LOCK_TIMEOUT)
            return stops.rescue(tx, ids, jitter=jitter, message=message), False
    except (PipelineError, DBAPIError) as error:
        is_locked = is_lock_timeout(error)
        is_away = isinstance(error, DBAPIError) and is_disconnected(error)
        if is_locked or is_away or len(ids) == 1:
            log.exception("%s cannot be rescued", f"run {ids[0]}" if len(ids) == 1 else f"{len(ids)} runs")
            return (), is_locked
        log.warning("%d runs cannot be rescued together, so they are rescued one by one: %s", len(ids), error)
    ended = list[StoppedRun]()
    for run_id in ids:
        stopped, is_locked = _rescue_set(db, [run_id], jitter=jitter, message=message, is_hurried=is_hurried)
        ended += stopped
        if is_locked:
            return ended, True
    return ended, False


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
        return len(workflows.finish_sessions(tx, work.finishable_sessions(tx, limit=limit)))


def recover_maintenance_mode(db: Database) -> int:
    """Open the maintenance task of every workflow that is in maintenance without one."""
    with db.transaction() as tx:
        return sum(workflows.open_maintenance_task(tx, name) for name in work.unattended_maintenance(tx))
