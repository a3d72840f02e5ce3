"""The background duties, each one bounded pass that reports what it did.

No loop, no sleep, no leader: beat is the clock, a slot in the database lets one of several callers
through, and every change is a guarded verb. One bad row never stops the rest.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from sqlalchemy import Row
from sqlalchemy.exc import SQLAlchemyError

from pipeline.connectors.sdk import Applied as Found
from pipeline.connectors.sdk import Call, NotFound, Operation
from pipeline.domain.errors import PipelineError
from pipeline.domain.failures import classify
from pipeline.domain.ids import MutationId
from pipeline.domain.mutations import Evidence, Resolver
from pipeline.domain.values import Applied, Failed
from pipeline.engine.steps import Steps
from pipeline.execution import mutations, recovery, runs, slots, stops, workflows
from pipeline.execution import notices as told
from pipeline.runtime.notifier import LogNotifier, Notice, Notifier
from pipeline.runtime.registry import Registry
from pipeline.schedules.report import Report
from pipeline.schedules.scheduler import Scheduler, messages_for
from pipeline.store import invariants, views
from pipeline.store.database import Database

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


def periods(tick: timedelta) -> Mapping[str, timedelta]:
    """How often each sweep runs when the tick comes this often: all of them at the same pace."""
    return {name: every * (tick / PERIODS["tick"]) for name, every in PERIODS.items()}


@dataclass
class Sweeps:
    """Every sweep of one process."""

    db: Database
    registry: Registry
    scheduler: Scheduler
    chance: Callable[[], float]
    silence: timedelta  #: how long an active run may be held by nobody before its message is sent again
    reconcile_one: Callable[[str], None]  #: rings for the reconciliation of one mutation
    notifier: Notifier = field(default_factory=LogNotifier)
    periods: Mapping[str, timedelta] = field(default_factory=lambda: PERIODS)  #: how often each sweep may run

    def run(self, name: str) -> Report | None:
        """Run a sweep if its slot is free; None when somebody else has just run it."""
        with self.db.transaction() as tx:
            if not slots.take(tx, name, self.periods[name]):
                return None
        report: Report = getattr(self, name)()
        with self.db.transaction() as tx:
            slots.report(tx, name, report.counts)
        return report

    def tick(self) -> Report:
        """Start what is due, and ring again for runs whose message was lost."""
        with self.db.transaction() as tx:
            every = views.workflow_names(tx)  # known here or not: starting a run needs none of its code
        report = self.scheduler.schedule(every)
        with self.db.transaction() as tx:
            silent = views.unheld_runs(tx, silence=self.silence)
            runs.dispatched(tx, [row.id for row in silent])
        for message in messages_for(silent, self.db) if silent else ():
            self.scheduler.send(message)
        report.add("rung again", len(silent))
        return report

    def rescue(self) -> Report:
        """Stop runs whose lease has lapsed, then start what that released."""
        report = Report()
        ended = recovery.recover_crashed_runs(self.db, chance=self.chance())
        report.add("rescued", len(ended))
        self.scheduler.schedule({item.run.workflow for item in ended})
        return report

    def reconcile(self) -> Report:
        """Ring for every mutation in doubt whose next look is due."""
        report = Report()
        with self.db.transaction() as tx:
            due = views.due_mutations(tx)
        for mutation in due:
            self.reconcile_one(str(mutation.id))
        report.add("asked", len(due))
        return report

    def maintenance(self) -> Report:
        """Open the task of workflows in maintenance that nobody was asked to mend."""
        report = Report()
        report.add("tasks opened", recovery.recover_maintenance_mode(self.db))
        return report

    def notices(self) -> Report:
        """Tell people what waits for them, outside any transaction. What cannot be delivered is tried again."""
        report = Report()
        with self.db.transaction() as tx:
            waiting = views.unannounced(tx)
        for row in waiting:
            notice = Notice(
                kind=row.kind,
                workflow=row.workflow,
                subject=row.subject,
                reason=row.reason,
                since=row.since.isoformat(),
            )
            try:
                self.notifier.notify(notice)
            except Exception as error:  # noqa: BLE001 - somebody else's server: it is tried again
                log.warning("a notice could not be delivered: %s", error)
                report.add("undelivered")
                continue
            with self.db.transaction() as tx:
                told.announced(tx, notice.kind, notice.subject)
            report.add("announced")
        return report

    def sessions(self) -> Report:
        """Finish sessions in which nothing is left to do."""
        report = Report()
        report.add("finished", recovery.recover_unfinished_sessions(self.db))
        return report

    def retention(self) -> Report:
        """Raise the watermarks behind what is done, so that claims start where the work is."""
        with self.db.transaction() as tx:
            workflows.raise_watermarks(tx)
        return Report()

    def doctor(self) -> Report:
        """Check every invariant and say loudly what is broken. Repairs nothing."""
        report = Report()
        with self.db.transaction() as tx:
            found = invariants.findings(tx)
        for finding in found:
            log.error("doctor.%s: %s: %s", finding.severity, finding.subject, finding.detail)
        report.add("findings", len(found))
        return report

    def forsake(self, worker: str) -> Report:
        """Recover at once what a process held that is known to be gone."""
        report = Report()
        words = f"its process {worker} ended while it held the run"
        with self.db.transaction() as tx:
            ids = runs.forsake(tx, worker)
            ended = stops.rescue(tx, ids, chance=self.chance(), words=words) if ids else ()
        report.add("rescued", len(ended))
        self.scheduler.schedule({item.run.workflow for item in ended})
        return report

    def look(self, mutation_id: MutationId) -> Report:
        """Ask the outside system about one mutation, the next look booked before this one begins."""
        report = Report()
        with self.db.transaction() as tx:
            rows = views.mutations(tx, [mutation_id])
        if not rows or rows[0].workflow not in self.registry.workflows:
            return report  # a worker that knows the workflow will be asked when the next look is due
        operation = self._operation(rows[0])
        if operation is None or operation.look is None:
            self._escalate(mutation_id, "the connector that could tell is gone from the code")
            return report
        with self.db.transaction() as tx:
            attempts = rows[0].reconcile_attempts
            delay = operation.policy.backoff.delay(attempts + 1, chance=self.chance())
            booked = mutations.book(tx, [(mutation_id, attempts, delay)])
        for row in booked:
            self._settle(row, operation, self._ask(row, operation))
            report.add("looked")
        return report

    def _ask(self, row: Row[Any], operation: Operation[Any]) -> Any:
        connector = self.registry.connectors[row.connector]
        limit = operation.policy.immediate_timeout
        call = Call.within(row.idempotency_key, limit)
        what = f"{row.connector}.{row.operation}.reconcile"
        steps = Steps()
        try:
            return steps.run(
                lambda: operation.look and operation.look(connector, call, **row.params), limit=limit, what=what
            )
        except BaseException as error:  # noqa: BLE001 - a look that fails has told us nothing
            log.warning("%s failed: %s", what, classify(error).message)
            return None
        finally:
            steps.close()

    def _settle(self, row: Row[Any], operation: Operation[Any], verdict: Any) -> None:
        """Write the verdict down; without one, give up once the budget is spent."""
        mutation_id = MutationId(row.id)
        try:
            with self.db.transaction() as tx:
                if isinstance(verdict, Found):
                    mutations.apply(
                        tx, [Applied(mutation_id=mutation_id, result=verdict.result)], by=Resolver.RECONCILE
                    ).only()
                    return
                if isinstance(verdict, NotFound):
                    item = Failed(mutation_id=mutation_id, error=verdict.reason, evidence=Evidence.ABSENCE)
                    mutations.fail(tx, [item], by=Resolver.RECONCILE).only()
                    return
        except (PipelineError, SQLAlchemyError) as error:
            log.info("mutation %s is not settled yet: %s", mutation_id, error)
        if row.reconcile_attempts >= operation.policy.max_attempts:
            self._escalate(mutation_id, f"asked {row.reconcile_attempts} times without an answer")

    def _escalate(self, mutation_id: MutationId, reason: str) -> None:
        with self.db.transaction() as tx:
            mutations.escalate(tx, [mutation_id], reason)

    def _operation(self, row: Row[Any]) -> Operation[Any] | None:
        connector = self.registry.connectors.get(row.connector)
        return type(connector).operations().get(row.operation) if connector else None
