"""The background duties, each one bounded pass that reports what it did.

No loop, no sleep, no leader: beat is the clock, a slot in the database lets one of several callers
through, and every change is a guarded verb. One bad row never stops the rest.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from sqlalchemy import Row

from pipeline.background import rescuer
from pipeline.background.messages import SweepReport
from pipeline.background.notifier import LogNotifier, Notice, Notifier
from pipeline.background.reconciler import Reconciler
from pipeline.background.scheduler import Scheduler, dispatch_messages
from pipeline.domain.ids import MutationId
from pipeline.store.database import Database
from pipeline.store.reads import invariants, ledger, work
from pipeline.telemetry import metrics
from pipeline.telemetry.tracing import spans
from pipeline.transitions import notices as told
from pipeline.transitions import retention, runs, stops, sweeps, workflows
from pipeline.transitions.stops import StoppedRun
from pipeline.workflows.registry import Registry

log = logging.getLogger(__name__)

#: How often each sweep runs at the usual pace.
PERIODS: Mapping[str, timedelta] = {
    "tick": timedelta(seconds=5),
    "rescue": timedelta(seconds=10),
    "reconcile": timedelta(seconds=10),
    "maintenance": timedelta(minutes=1),
    "notices": timedelta(seconds=10),
    "sessions": timedelta(minutes=1),
    "retention": timedelta(minutes=5),
    "doctor": timedelta(minutes=15),
}


_UNCLAIMED_AFTER = timedelta(minutes=1)  #: how long workers may hand a run back before it is taken back from them
_NOTICE_SECONDS = 60  #: a receiver that never answers must not hold up the sweep
_PRUNE_SECONDS = 10  #: for each table, so that a long past is let go of over several sweeps


def periods(tick: timedelta) -> Mapping[str, timedelta]:
    """How often each sweep runs when the tick comes this often: all of them at the same pace."""
    return {name: every * (tick / PERIODS["tick"]) for name, every in PERIODS.items()}


@dataclass
class Sweeps:
    """Every sweep of one process."""

    db: Database
    registry: Registry
    scheduler: Scheduler
    jitter: Callable[[], float]
    redispatch_after: timedelta  #: how long an active run may be held by nobody before its message is sent again
    dispatch_reconcile: Callable[[str], None]  #: rings for the reconciliation of one mutation
    notifier: Notifier = field(default_factory=LogNotifier)
    periods: Mapping[str, timedelta] = field(default_factory=lambda: PERIODS)  #: how often each sweep may run

    def run(self, name: str) -> SweepReport | None:
        """Run a sweep if its slot is free; None when somebody else has just run it."""
        with self.db.transaction() as tx:
            if not sweeps.take_slot(tx, name, self.periods[name]):
                return None
        begun = time.monotonic()
        report: SweepReport = getattr(self, name)()
        if metrics.is_on():
            metrics.record("pipeline.sweep.duration", {"sweep": name}, time.monotonic() - begun)
        with self.db.transaction() as tx:
            sweeps.save_report(tx, name, report.counts)
        return report

    def tick(self) -> SweepReport:
        """Take back what no worker took, start what is due, and ring again for runs whose message was lost."""
        unheard = rescuer.recover_unclaimed_runs(self.db, older_than=max(self.redispatch_after, _UNCLAIMED_AFTER))
        with self.db.transaction() as tx:
            every = work.workflow_names(tx)  # known here or not: starting a run needs none of its code
        report = self.scheduler.schedule(every)
        with self.db.transaction() as tx:
            silent = work.stale_dispatches(tx, redispatch_after=self.redispatch_after)
            runs.mark_dispatched(tx, [row.id for row in silent])
            suspects = work.suspect_runs(tx, [row.id for row in silent]) if silent else ()
        for message in dispatch_messages(silent, self.db, suspects=suspects) if silent else ():
            self.scheduler.dispatch(message)
        report.add("redispatched", len(silent))
        report.add("withdrawn", unheard)
        return report

    def rescue(self) -> SweepReport:
        """Stop runs whose lease has lapsed, then start what that released."""
        report = SweepReport()
        ended = rescuer.recover_crashed_runs(self.db, jitter=self.jitter())
        _observe_rescues(ended)
        report.add("rescued", len(ended))
        self.scheduler.schedule({item.run.workflow for item in ended})
        return report

    def reconcile(self) -> SweepReport:
        """Ring for every mutation whose next look is due: in doubt, or still watched."""
        report = SweepReport()
        with self.db.transaction() as tx:
            due = ledger.due_mutation_ids(tx)
        for mutation_id in due:
            self.dispatch_reconcile(str(mutation_id))
        report.add("dispatched", len(due))
        return report

    def maintenance(self) -> SweepReport:
        """Open the task of workflows in maintenance that nobody was asked to mend."""
        report = SweepReport()
        report.add("tasks opened", rescuer.recover_maintenance_mode(self.db))
        return report

    def notices(self) -> SweepReport:
        """Tell people what waits for them, outside any transaction. What cannot be delivered is tried again."""
        report, ends_at = SweepReport(), time.monotonic() + _NOTICE_SECONDS
        with self.db.transaction() as tx:
            page = told.next_page(tx)
        for row in page.rows:
            report.add("delivered" if self._deliver(row) else "undelivered")
            if time.monotonic() > ends_at:
                break
        done, left = (report.counts.get(name, 0) for name in ("delivered", "undelivered"))
        with self.db.transaction() as tx:
            told.save_position(tx, page, delivered=done, undelivered=left)
        return report

    def _deliver(self, row: Row[Any]) -> bool:
        """Deliver one notice and remember it; False when its receiver did not take it."""
        notice = Notice(
            kind=row.kind, workflow=row.workflow, subject=row.subject, reason=row.reason, since=row.since.isoformat()
        )
        try:
            self.notifier.notify(notice)
        except Exception as error:  # noqa: BLE001 - somebody else's server: it is tried again
            log.warning("a notice could not be delivered: %s", error)
            return False
        with self.db.transaction() as tx:
            told.mark_delivered(tx, notice.kind, notice.subject)
        return True

    def sessions(self) -> SweepReport:
        """Finish sessions in which nothing is left to do."""
        report = SweepReport()
        report.add("finished", rescuer.recover_unfinished_sessions(self.db))
        return report

    def retention(self) -> SweepReport:
        """Raise the watermarks behind what is done, and let go of what no workflow keeps any longer."""
        with self.db.transaction() as tx:
            workflows.raise_watermarks(tx)
        report = SweepReport()
        for name in retention.PRUNED_TABLES:
            ends_at, page = time.monotonic() + _PRUNE_SECONDS, None
            while page is None or not (page.is_last or time.monotonic() > ends_at):
                with self.db.transaction() as tx:
                    page = retention.prune_page(tx, name)
                report.add(name, page.dropped)
        return report

    def doctor(self) -> SweepReport:
        """Check every invariant and say loudly what is broken. Repairs nothing."""
        report = SweepReport()
        with self.db.transaction() as tx:
            found = invariants.findings(tx)
        for finding in found:
            log.error("doctor.%s: %s: %s", finding.severity, finding.subject, finding.detail)
            report.add(f"{finding.severity}: {finding.invariant}")
        report.add("findings", len(found))
        return report

    def recover_process(self, worker: str) -> SweepReport:
        """Recover at once what a process held that is known to be gone."""
        report = SweepReport()
        words = f"its process {worker} ended while it held the run"
        with self.db.transaction() as tx:
            ids = runs.expire_leases_of_process(tx, worker)
            ended = stops.rescue(tx, ids, jitter=self.jitter(), message=words) if ids else ()
        _observe_rescues(ended)
        report.add("rescued", len(ended))
        self.scheduler.schedule({item.run.workflow for item in ended})
        return report

    def reconcile_one(self, mutation_id: MutationId) -> SweepReport:
        """Ask the outside system about one mutation."""
        return Reconciler(self.db, self.registry, self.jitter).reconcile(mutation_id)


def _observe_rescues(ended: Sequence[StoppedRun]) -> None:
    """Show that runs lost their worker."""
    spans.record_rescued(ended)
    for item in ended if metrics.is_on() else ():
        metrics.record("pipeline.rescues", {"workflow": item.run.workflow})
