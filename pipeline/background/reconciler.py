"""Reconcile mutations in the background: ask the outside system what became of them, one attempt at a time.

An attempt may resolve a mutation in doubt. For a mutation that was resolved on weak evidence it only monitors: a late
effect is not undone, operators are notified. The next attempt is booked before this one begins, so an attempt that
takes its worker down has been counted and cannot repeat for ever.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy.exc import SQLAlchemyError

from pipeline.background.messages import ReconcileMessage, SweepReport
from pipeline.connectors.sdk import Call, Operation
from pipeline.domain.codec import opened
from pipeline.domain.errors import PipelineError, QuietPeriodError
from pipeline.domain.failures import classify
from pipeline.domain.reconciliation import (
    Applied,
    CallDecision,
    DoubtFacts,
    NextAction,
    NotFound,
    NoVerdict,
    Verdict,
    decide,
    monitor_delay,
    reconcile_delay,
)
from pipeline.domain.states import Evidence, MutationId, MutationStatus, Resolver
from pipeline.domain.values import DEFAULT_LIMITS, Actor, AppliedMutation, FailedMutation, Limits
from pipeline.store.database import Database, Transaction
from pipeline.store.reads import ledger, work
from pipeline.store.rows import BookedMutationRow, RunMutationRow
from pipeline.store.schema import MutationRow
from pipeline.telemetry import metrics, spans
from pipeline.transitions import late_effects, mutations, reconciliation
from pipeline.worker import sealing
from pipeline.worker.calls import call_within
from pipeline.worker.outcomes import reconcile_end, reported_cost, storable_result, verdict_label
from pipeline.workflows.registry import Registry

log = logging.getLogger(__name__)

_MONITOR_RETRY = timedelta(minutes=10)  #: at most, after a check that gave no verdict or did not end
_ZERO = timedelta(0)
MONITOR = Actor(name="monitor", reason="a monitor check found it after it was resolved as failed")


#: Sends the wake-up message to reconcile some mutations. False: the broker is away, and the sweep sends it again.
DispatchReconcile = Callable[[Sequence[str]], object]
_SET = 20  #: first attempts that travel in one message
_BUDGET_SECONDS = 10  #: in which a message begins attempts
_AT_ONCE = 4  #: attempts that one message makes at the same time; a process has few database connections


def dispatch_due(db: Database, dispatch: DispatchReconcile) -> SweepReport:
    """Send messages for the mutations whose next reconcile attempt is due: in doubt, or monitored."""
    with db.autocommit() as tx:
        due = ledger.due_mutations(tx)
    sent = dispatch_in_sets([row.id for row in due if row.is_first], dispatch)
    sent += dispatch_in_sets([row.id for row in due if not row.is_first], dispatch, size=1)
    report = SweepReport()
    report.add("dispatched", sent)
    return report


def dispatch_in_sets(ids: Sequence[UUID | None], dispatch: DispatchReconcile, *, size: int = _SET) -> int:
    """Send messages for reconcile attempts, several in each. Return how many attempts were sent.

    First attempts travel together. A later one travels alone: the one before may have taken its worker down, and with
    it each attempt that was under way beside it.
    """
    for at in range(0, len(ids), size):
        if dispatch([str(id_) for id_ in ids[at : at + size]]) is False:
            return at
    return len(ids)


@dataclass
class Reconciler:
    """Reconciles mutations of the workflows that this process knows."""

    db: Database
    registry: Registry
    jitter: Callable[[], float]
    #: sends an attempt to a worker that knows its workflow
    redispatch: Callable[[ReconcileMessage], object] = lambda _: None
    #: starts what is due in workflows, since a verdict may have released it
    schedule: Callable[[Sequence[str]], object] = lambda _: None
    limits: Limits = DEFAULT_LIMITS
    _resolved: set[str] = field(default_factory=set)  #: workflows of verdicts after which nothing was started yet

    def reconcile_all(self, ids: Sequence[MutationId], deferred_until: datetime | None = None) -> SweepReport:
        """Reconcile each once, some at the same time. After each verdict, start what follows from it.

        An attempt that raises keeps no other from being made. What the time does not suffice for stays due.
        """
        report, errors = SweepReport(), list[BaseException]()
        ends_at = time.monotonic() + _BUDGET_SECONDS
        with ThreadPoolExecutor(max_workers=_AT_ONCE, thread_name_prefix="pipeline-reconcile") as threads:
            waiting = {threads.submit(self.reconcile, each, deferred_until) for each in ids}
            while waiting:
                done, waiting = wait(waiting, timeout=_BUDGET_SECONDS, return_when=FIRST_COMPLETED)
                if time.monotonic() > ends_at:  # a process that waits for a provider which hangs does nothing else
                    waiting = {each for each in waiting if not each.cancel()}
                self._start_resolved()
                errors += [error for ended in done if (error := ended.exception()) is not None]
                for ended in done:
                    for name, count in {} if ended.exception() else ended.result().counts.items():
                        report.add(name, count)
        for error in errors:
            raise error
        return report

    def reconcile_one(self, mutation_id: MutationId, deferred_until: datetime | None = None) -> SweepReport:
        """Reconcile one mutation once. After a verdict, start what follows from it."""
        report = self.reconcile(mutation_id, deferred_until)
        self._start_resolved()
        return report

    def _start_resolved(self) -> None:
        workflows = set[str]()
        while self._resolved:
            workflows.add(self._resolved.pop())
        if workflows:
            self.schedule(sorted(workflows))

    def reconcile(self, mutation_id: MutationId, deferred_until: datetime | None = None) -> SweepReport:
        """Reconcile once, if an attempt is due and this process has the code. Defer an attempt that breaks off.

        Without the code the attempt is deferred, and a worker that has it may make it at once: ``deferred_until`` is
        the time of that deferral.
        """
        try:
            return self._reconcile_if_due(mutation_id, deferred_until)
        except Exception as error:
            with contextlib.suppress(SQLAlchemyError), self.db.transaction() as tx:
                for row in work.mutations(tx, [mutation_id]):
                    self._defer(tx, row, f"the reconcile attempt broke off: {classify(error).message}")
            raise

    def _reconcile_if_due(self, mutation_id: MutationId, deferred_until: datetime | None) -> SweepReport:
        report, message = SweepReport(), None
        with self.db.transaction() as tx:
            rows = work.mutations(tx, [mutation_id])
            if not rows:
                return report
            row, is_unknown = rows[0], self._is_unknown(rows[0])
            if is_unknown:
                message = self._defer_unknown(tx, row, deferred_until)
        if is_unknown:
            report.add("unknown workflow")
            if message is not None:
                self.redispatch(message)
            return report
        operation = self.registry.operation(row.connector, row.operation)
        if row.status == MutationStatus.NEEDS_RECONCILE:
            report.add("reconciled", self._reconcile_in_doubt(row, operation, deferred_until))
        elif row.next_monitor_at is not None:
            report.add("monitored", self._monitor(row, operation, deferred_until))
        return report

    def _defer_unknown(
        self, tx: Transaction, row: RunMutationRow, deferred_until: datetime | None
    ) -> ReconcileMessage | None:
        """Defer an attempt that is due and that this process does not know. Return the message for a worker that does.

        An attempt that is not due was deferred or made meanwhile. To defer it again would void the message about it.
        """
        if not _is_due(row, tx.clock(), deferred_until):
            return None
        until = self._defer(tx, row, f"no worker that knows the workflow {row.workflow!r} has reconciled it")
        if until is None:
            return None
        return ReconcileMessage(
            mutation_id=str(row.id), workflow=row.workflow, version=row.workflow_version, deferred_until=until
        )

    def _is_unknown(self, row: RunMutationRow) -> bool:
        """Whether this process has no code of the mutation's workflow, or older code than is registered."""
        ours = self.registry.workflows.get(row.workflow)
        return ours is None or row.workflow_version > ours.version

    def _defer(self, tx: Transaction, row: MutationRow, why: str) -> datetime | None:
        """Leave the attempt to another worker, after those of other workflows. After too long, escalate.

        Return until when it is deferred, or None if there is no attempt to make.
        """
        if row.status == MutationStatus.NEEDS_RECONCILE:
            return reconciliation.defer(tx, row, why)
        operation = self.registry.operation(row.connector, row.operation)
        pause = _monitor_retry(operation.policy.monitor_after if operation is not None else ())
        deferred = late_effects.begin_monitor_check(tx, MutationId(row.id), pause, is_counted=False)
        return deferred.next_monitor_at if deferred is not None else None

    def _reconcile_in_doubt(
        self, row: RunMutationRow, operation: Operation[Any] | None, deferred_until: datetime | None
    ) -> int:
        mutation_id = MutationId(row.id)
        if operation is None or operation.reconcile_function is None:
            self._escalate(mutation_id, "the connector that could reconcile it is gone from the code")
            return 0
        if row.reconcile_attempts >= operation.policy.max_attempts:
            self._escalate_if_overdue(row, deferred_until)
            return 0
        delay = reconcile_delay(operation.policy, row.reconcile_attempts + 1, jitter=self.jitter())
        with self.db.transaction() as tx:
            booked = reconciliation.book(
                tx, [(mutation_id, row.reconcile_attempts, delay)], deferred_until=deferred_until
            )
        for each in booked:
            with self._span(row, each.reconcile_attempts) as note:
                verdict = self._call_reconcile(each, operation)
                _observe_verdict(note, each, verdict)
                facts = DoubtFacts(
                    reconcile_attempts=each.reconcile_attempts,
                    max_attempts=operation.policy.max_attempts,
                    earlier_absences=self._earlier_absences(each, verdict),
                )
                self._record_decision(each, decide(verdict, facts))
        return len(booked)

    def _earlier_absences(self, row: MutationRow, verdict: Verdict | NoVerdict) -> int:
        """How often requests with this key were not found before; read only where it matters."""
        if not row.keyed or not isinstance(verdict, NotFound):
            return 0
        with self.db.transaction() as tx:
            return ledger.absence_count(tx, row.effect_id, row.idempotency_key)

    def _escalate_if_overdue(self, row: MutationRow, deferred_until: datetime | None) -> None:
        """Escalate when the last attempt of the budget should have ended long ago."""
        with self.db.transaction() as tx:
            if not _is_due(row, tx.clock(), deferred_until):
                return  # it may still be under way
        asked = f"asked {row.reconcile_attempts} times without an answer"
        self._escalate(MutationId(row.id), f"{asked}; the last attempt may have taken its worker down")

    def _monitor(self, row: RunMutationRow, operation: Operation[Any] | None, deferred_until: datetime | None) -> int:
        """Check for a late effect. A check without a verdict is repeated until its time is over."""
        mutation_id = MutationId(row.id)
        spans_after = operation.policy.monitor_after if operation is not None else ()
        with self.db.transaction() as tx:
            booked = late_effects.begin_monitor_check(
                tx, mutation_id, _monitor_retry(spans_after), deferred_until=deferred_until
            )
            if booked is None:
                return 0
            if operation is None or operation.reconcile_function is None:
                late_effects.stop_monitoring(
                    tx, row, f"{row.connector}.{row.operation} is gone from the code, or cannot reconcile any more"
                )
                return 0
            if row.monitor_attempts >= len(spans_after) + operation.policy.max_attempts:
                late_effects.stop_monitoring(
                    tx, row, f"{row.monitor_attempts} checks were begun, and the last of them did not end"
                )
                return 0
            assert row.resolved_at is not None
            is_over = tx.clock() - row.resolved_at > max(spans_after, default=_ZERO) * 2
        with self._span(row, row.monitor_attempts + 1) as note:
            verdict = self._call_reconcile(booked, operation)
            _observe_verdict(note, row, verdict)
        if isinstance(verdict, Applied):
            self._record_late_effect(row, operation, verdict)
            return 1
        with self.db.transaction() as tx:
            if isinstance(verdict, NotFound) or is_over:
                self._schedule_check(tx, row, operation)
            else:
                late_effects.discount_monitor_check(tx, mutation_id)
        return 1

    def _record_late_effect(self, row: MutationRow, operation: Operation[Any], verdict: Applied) -> None:
        """Record a late effect, unless what was found is the effect of the replacement run.

        A replacement that shares the key shares the effect. If it has another key, an attempt with a
        key that was never sent shows whether this connector takes one request for another.
        """
        mutation_id = MutationId(row.id)
        found = storable_result(verdict.result, self.limits, f"{row.connector}.{row.operation}")
        with self.db.transaction() as tx:
            again = late_effects.replacement_effect(tx, row)
            if again is not None and late_effects.is_one_effect(row, again):
                late_effects.record_late_effect(tx, mutation_id, found, MONITOR)
                return
        unsent = None if again is None else self._call_reconcile(row, operation, key=f"{row.workflow}:{uuid4()}")
        with self.db.transaction() as tx:
            if again is not None and isinstance(unsent, Applied) and late_effects.is_replacement_effect(again, found):
                late_effects.record_replacement_effect(tx, row, again, found, MONITOR)
                self._schedule_check(tx, row, operation)
            else:
                late_effects.record_late_effect(tx, mutation_id, found, MONITOR, is_own=isinstance(unsent, NotFound))

    def _schedule_check(self, tx: Transaction, row: MutationRow, operation: Operation[Any]) -> None:
        assert row.resolved_at is not None
        delay = monitor_delay(operation.policy.monitor_after, row.resolved_at, row.monitor_attempts, tx.clock())
        late_effects.schedule_monitor_check(tx, MutationId(row.id), delay)

    def _span(self, row: RunMutationRow, number: int) -> AbstractContextManager[Callable[[str, Any], None]]:
        """A span of a reconcile attempt, in the trace of the run that asked for the mutation."""
        about = {spans.CONNECTOR: row.connector, spans.OPERATION: row.operation, spans.RECONCILE_ATTEMPT: number}
        return spans.resolution_span(spans.RECONCILE, row, about)

    def _call_reconcile(
        self, row: MutationRow, operation: Operation[Any], key: str | None = None
    ) -> Verdict | NoVerdict:
        """Ask the connector what became of a mutation, or of a request with another key."""
        connector, function = self.registry.connectors[row.connector], operation.reconcile_function
        assert function is not None
        limit = operation.policy.immediate_timeout
        call, params = Call.within(key or row.idempotency_key, limit), opened(row.params)
        finished = call_within(
            lambda: function(connector, call, **operation.arguments(params)),
            call,
            limit,
            what=f"{row.connector}.{row.operation}.reconcile",
        )
        cost = reported_cost(call, f"{row.connector}.{row.operation}.reconcile")
        if cost is not None:
            with self.db.transaction() as tx:
                reconciliation.add_cost(tx, MutationId(row.id), cost)
        is_private = sealing.is_private(self.db, row.workflow)
        return reconcile_end(connector, operation, params, finished, is_private=is_private)

    def _record_decision(self, row: BookedMutationRow, decision: CallDecision) -> None:
        """Write down what a reconcile attempt found out. A mutation that was resolved meanwhile stays as it is."""
        mutation_id = MutationId(row.id)
        refused = None
        with self.db.transaction() as tx:
            match decision.action:
                case NextAction.APPLIED:
                    result = storable_result(decision.result, self.limits, f"{row.connector}.{row.operation}")
                    item = AppliedMutation(
                        mutation_id=mutation_id,
                        workflow=row.workflow,
                        result=result,
                        resolved_by=Resolver.RECONCILE,
                    )
                    refused = mutations.apply(tx, [item], limits=self.limits).refused
                case NextAction.ABSENT:
                    refused = self._fail_as_absent(tx, row, decision.reason)
                case NextAction.ESCALATE:
                    asked = f"asked {row.reconcile_attempts} times without an answer"
                    reconciliation.escalate(tx, [mutation_id], asked, detail=decision.reason)
                case _ if decision.pause is not None:
                    reconciliation.postpone(tx, mutation_id, after=decision.pause)
        if decision.action in (NextAction.APPLIED, NextAction.ABSENT) and not refused:
            self._resolved.add(row.workflow)
        if refused:
            log.info("mutation %s was resolved while it was reconciled: %s", mutation_id, refused[mutation_id])

    def _fail_as_absent(self, tx: Transaction, row: BookedMutationRow, reason: str) -> Mapping[UUID, PipelineError]:
        """Record that it did not happen. In the quiet period absence proves nothing: reconcile after it instead.

        Such an attempt came too early, so it does not count against the budget either.
        """
        mutation_id = MutationId(row.id)
        item = FailedMutation(
            mutation_id=mutation_id,
            error=reason,
            evidence=Evidence.ABSENCE,
            reconcile_started_at=row.reconcile_started_at,
            resolved_by=Resolver.RECONCILE,
        )
        refused = mutations.fail(tx, [item]).refused
        if isinstance(refused.get(mutation_id), QuietPeriodError):
            reconciliation.postpone(tx, mutation_id, until_quiet=True)
            return {}
        return refused

    def _escalate(self, mutation_id: MutationId, reason: str, last_reason: str = "") -> None:
        with self.db.transaction() as tx:
            reconciliation.escalate(tx, [mutation_id], reason, detail=last_reason)


def _monitor_retry(spans_after: Sequence[timedelta]) -> timedelta:
    """Return when a check is repeated that gave no verdict or did not end."""
    return min((_MONITOR_RETRY, *spans_after))


def _is_due(row: MutationRow, now: datetime, deferred_until: datetime | None) -> bool:
    """Whether the next attempt of a mutation is due, or is the one that was deferred until this time."""
    at = row.next_reconcile_at if row.status == MutationStatus.NEEDS_RECONCILE else row.next_monitor_at
    return at is not None and (at <= now or at == deferred_until)


def _observe_verdict(note: Callable[[str, Any], None], row: MutationRow, verdict: Any) -> None:
    """Record the verdict of an attempt in span and metrics."""
    label = verdict_label(verdict)
    note(spans.VERDICT, label)
    if metrics.is_on():
        about = {"connector": row.connector, "operation": row.operation, "verdict": label}
        metrics.record("pipeline.reconcile.attempts", about)
