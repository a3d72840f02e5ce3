"""The background duties of a process: one table, and a slot per duty in the database.

A duty is one bounded pass that reports what it did: no loop, no sleep, no leader. Beat calls the duties, the slot
lets one of several callers through, and every change is a guarded transition. One bad row never stops the others.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from pipeline.background import backfiller, doctor, notifier, pruner, reconciler, redispatcher, rescuer
from pipeline.background.messages import ReconcileMessage, SweepReport
from pipeline.background.notifier import LogNotifier, Notifier
from pipeline.background.reconciler import DispatchReconcile, Reconciler
from pipeline.background.rescuer import Rescuer
from pipeline.background.scheduler import Scheduler
from pipeline.domain.states import MutationId
from pipeline.store.database import Database
from pipeline.store.reads.invariants import NO_ORPHANED_RESERVATION
from pipeline.store.rows import SlotRow
from pipeline.telemetry import metrics
from pipeline.transitions import housekeeping
from pipeline.workflows.registry import Registry


def sample(db: Database) -> SweepReport:
    """Take one sample of every workflow in which something happened or waits."""
    with db.autocommit() as tx:
        return SweepReport({"workflows": number} if (number := housekeeping.take_sample(tx)) else {})


_POSTPONED = "postponed"
_MAX_POSTPONED = 2  #: rescues after an outage: about twice the time in which a heartbeat is due


@dataclass
class Sweeps:
    """The duties of one process, with what they need."""

    db: Database
    registry: Registry
    scheduler: Scheduler
    jitter: Callable[[], float]
    redispatch_after: timedelta  #: how long an active run may be held by no worker before its message is sent again
    dispatch_reconcile: DispatchReconcile  #: sends the wake-up message to reconcile some mutations
    #: sends a reconcile attempt to a worker that knows its workflow
    redispatch_reconcile: Callable[[ReconcileMessage], object] = lambda _: None
    notifier: Notifier = field(default_factory=LogNotifier)
    allowed_unsafe_settings: Collection[str] = ()  #: settings of Postgres that the doctor does not report
    #: a longer pause between two rescues may be an outage in which no worker could extend its leases
    outage: timedelta = timedelta.max
    periods: Mapping[str, timedelta] = field(default_factory=lambda: PERIODS)  #: how often each duty may run

    def run(self, name: str) -> SweepReport | None:
        """Run a duty if its slot is free. None: another caller has just run it.

        The report is saved if it differs from the last one: a duty that finds nothing, time after time, writes its
        slot only.
        """
        with self.db.autocommit() as tx:
            slot = housekeeping.take_slot(tx, name, self.periods[name])
        if slot is None:
            return None
        begun = time.monotonic()
        report = self._postponed(slot) if name == "rescue" else None
        report = report or DUTIES[name].run(self)
        if metrics.is_on():
            metrics.record("pipeline.sweep.duration", {"sweep": name}, time.monotonic() - begun)
        if report.counts != slot.report:
            with self.db.autocommit() as tx:
                housekeeping.save_report(tx, name, report.counts)
        return report

    def _postponed(self, slot: SlotRow) -> SweepReport | None:
        """Postpone the first rescues after an outage. None: rescue now.

        Living workers could not extend their leases meanwhile either. They come first, and keep their runs.
        """
        before = (slot.report or {}).get(_POSTPONED, 0)
        is_after_outage = slot.pause is not None and slot.pause > max(self.outage, 3 * self.periods["rescue"])
        if before >= _MAX_POSTPONED or not (before or is_after_outage):
            return None
        return SweepReport({_POSTPONED: before + 1})

    def rescue(self) -> SweepReport:
        return self._rescuer().rescue(jitter=self.jitter())

    def reconcile(self) -> SweepReport:
        return reconciler.dispatch_due(self.db, self.dispatch_reconcile)

    def maintenance(self) -> SweepReport:
        return rescuer.open_maintenance_tasks(self.db)

    def sessions(self) -> SweepReport:
        return rescuer.finish_sessions(self.db)

    def backfill(self) -> SweepReport:
        return backfiller.continue_backfills(self.db)

    def tick(self) -> SweepReport:
        return redispatcher.tick(self.db, self.scheduler, redispatch_after=self.redispatch_after)

    def notices(self) -> SweepReport:
        return notifier.deliver_notices(self.db, self.notifier)

    def retention(self) -> SweepReport:
        return pruner.prune(self.db)

    def samples(self) -> SweepReport:
        return sample(self.db)

    def chain(self) -> SweepReport:
        return doctor.chain(self.db)

    def doctor(self) -> SweepReport:
        return doctor.check(self.db, allowed_unsafe_settings=self.allowed_unsafe_settings)

    def recover_at_start(self) -> None:
        """Recover crashed runs, then report events whose reservation no run owns."""
        self.run("rescue")
        doctor.check(self.db, [NO_ORPHANED_RESERVATION], allowed_unsafe_settings=self.allowed_unsafe_settings)

    def recover_process(self, worker: str) -> SweepReport:
        """Recover at once the runs of a process that is known to be gone."""
        return self._rescuer().recover_process(worker, jitter=self.jitter())

    def reconcile_one(self, mutation_id: MutationId, deferred_until: datetime | None = None) -> SweepReport:
        """Reconcile one mutation, if an attempt is due or was deferred until this time."""
        return self._reconciler().reconcile_one(mutation_id, deferred_until)

    def reconcile_all(self, ids: Sequence[MutationId]) -> SweepReport:
        """Reconcile mutations whose attempt is due, some at the same time."""
        return self._reconciler().reconcile_all(ids)

    def _rescuer(self) -> Rescuer:
        return Rescuer(self.db, self.scheduler, self.dispatch_reconcile)

    def _reconciler(self) -> Reconciler:
        start = self.scheduler.schedule
        return Reconciler(self.db, self.registry, self.jitter, self.redispatch_reconcile, start)


@dataclass(frozen=True, slots=True)
class Duty:
    """A background duty: how often it runs at the usual pace, and its function."""

    period: timedelta
    run: Callable[[Sweeps], SweepReport]
    moves_runs: bool = True  #: work may follow from it; the others inform, prune or check


#: Every duty by its name. The tick comes after those that release work, so that one round starts what they released.
DUTIES: Mapping[str, Duty] = {
    "rescue": Duty(timedelta(seconds=2), Sweeps.rescue),
    "reconcile": Duty(timedelta(seconds=10), Sweeps.reconcile),
    "maintenance": Duty(timedelta(minutes=1), Sweeps.maintenance),
    "sessions": Duty(timedelta(minutes=1), Sweeps.sessions),
    "backfill": Duty(timedelta(seconds=10), Sweeps.backfill),
    "tick": Duty(timedelta(seconds=5), Sweeps.tick),
    "notices": Duty(timedelta(seconds=10), Sweeps.notices, moves_runs=False),
    "retention": Duty(timedelta(minutes=5), Sweeps.retention, moves_runs=False),
    "samples": Duty(timedelta(minutes=1), Sweeps.samples, moves_runs=False),
    "chain": Duty(timedelta(minutes=1), Sweeps.chain, moves_runs=False),
    "doctor": Duty(timedelta(minutes=15), Sweeps.doctor, moves_runs=False),
}
PERIODS: Mapping[str, timedelta] = {name: duty.period for name, duty in DUTIES.items()}


def periods(tick: timedelta) -> Mapping[str, timedelta]:
    """How often each duty runs when the tick comes this often: all of them at the same pace."""
    return {name: every * (tick / PERIODS["tick"]) for name, every in PERIODS.items()}
