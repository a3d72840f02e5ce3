"""Asking the outside system what became of a mutation, in the background, one look at a time.

A look at a mutation in doubt may settle it. A look at one that was settled on weak evidence only
keeps watch: what surfaces late is not undone, people are told. The next look is booked before this
one begins, so a look that takes its worker down has already been counted, and cannot be taken for ever.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

from sqlalchemy import Row
from sqlalchemy.exc import SQLAlchemyError

from pipeline.background.messages import SweepReport
from pipeline.connectors import event_loop
from pipeline.connectors.error_table import bounded_pause
from pipeline.connectors.sdk import Applied as Found
from pipeline.connectors.sdk import Call, NotFound, Operation, Retry
from pipeline.consumer_engine.bounded import StepRunner
from pipeline.domain.errors import QuietPeriodError
from pipeline.domain.failures import classify
from pipeline.domain.ids import MutationId
from pipeline.domain.states import Evidence, MutationStatus, Resolver
from pipeline.domain.values import DEFAULT_LIMITS, Actor, AppliedMutation, FailedMutation, Limits
from pipeline.store.database import Database, Transaction
from pipeline.store.reads import work
from pipeline.telemetry import metrics
from pipeline.telemetry.tracing import spans
from pipeline.transitions import late_effects, mutations, reconciliation
from pipeline.worker.outcomes import redact, storable_result, verdict_label
from pipeline.workflows.registry import Registry

log = logging.getLogger(__name__)

_MONITOR_RETRY = timedelta(minutes=10)  #: at most, after a look of the watch that told nothing or did not end
_ZERO = timedelta(0)
MONITOR = Actor(name="watch", reason="it was looked for again after it had been settled")


@dataclass
class Reconciler:
    """Looks at mutations of the workflows this process knows."""

    db: Database
    registry: Registry
    jitter: Callable[[], float]
    limits: Limits = DEFAULT_LIMITS

    def reconcile(self, mutation_id: MutationId) -> SweepReport:
        """Look once, if a look is due and the code to look with is here. One that breaks makes way for the others."""
        try:
            return self._reconcile_if_due(mutation_id)
        except Exception as error:
            with contextlib.suppress(SQLAlchemyError), self.db.transaction() as tx:
                for row in work.mutations(tx, [mutation_id]):
                    self._defer(tx, row, f"a look could not be taken: {classify(error).message}")
            raise

    def _reconcile_if_due(self, mutation_id: MutationId) -> SweepReport:
        report = SweepReport()
        with self.db.transaction() as tx:
            rows = work.mutations(tx, [mutation_id])
            if not rows:
                return report
            row = rows[0]
            if self._is_unknown_workflow(tx, row):
                report.add("strange")
                self._defer(tx, row, f"no worker that knows the workflow {row.workflow!r} has looked")
                return report
        operation = self.registry.operation(row.connector, row.operation)
        if row.status == MutationStatus.NEEDS_RECONCILE:
            report.add("looked", self._reconcile_in_doubt(row, operation))
        elif row.next_monitor_at is not None:
            report.add("watched", self._monitor(row, operation))
        return report

    def _is_unknown_workflow(self, tx: Transaction, row: Row[Any]) -> bool:
        """Whether this process has no code of the mutation's workflow, or code of an older version."""
        ours = self.registry.workflows.get(row.workflow)
        registered = work.workflow(tx, row.workflow)
        return ours is None or (registered is not None and registered.version > ours.version)

    def _defer(self, tx: Transaction, row: Row[Any], why: str) -> None:
        """Let another worker look, and others of other workflows first; when none does for long, ask a person."""
        if row.status == MutationStatus.NEEDS_RECONCILE:
            reconciliation.defer(tx, row, why)
        else:
            late_effects.begin_monitor_check(tx, MutationId(row.id), _MONITOR_RETRY, is_counted=False)

    def _reconcile_in_doubt(self, row: Row[Any], operation: Operation[Any] | None) -> int:
        mutation_id = MutationId(row.id)
        if operation is None or operation.reconcile_function is None:
            self._escalate(mutation_id, "the connector that could tell is gone from the code")
            return 0
        if row.reconcile_attempts >= operation.policy.max_attempts:
            self._escalate_if_overdue(row)
            return 0
        with self.db.transaction() as tx:
            booked = reconciliation.book(tx, [(mutation_id, row.reconcile_attempts, self._delay(row, operation))])
        for each in booked:
            with self._span(row, each.reconcile_attempts) as note:
                verdict = self._call_reconcile(each, operation)
                _observe_verdict(note, each, verdict)
                self._record_verdict(each, operation, verdict)
        return len(booked)

    def _delay(self, row: Row[Any], operation: Operation[Any]) -> timedelta:
        """How long until the look after this one. The last of the budget has time to end before it is missed."""
        policy, number = operation.policy, row.reconcile_attempts + 1
        delay = policy.backoff.delay(number, jitter=self.jitter())
        return delay if number < policy.max_attempts else max(delay, policy.immediate_timeout * 2)

    def _escalate_if_overdue(self, row: Row[Any]) -> None:
        """Ask a person, when the last look of the budget should have ended long ago."""
        with self.db.transaction() as tx:
            if row.next_reconcile_at > tx.clock():
                return  # it may still be under way
        words = f"asked {row.reconcile_attempts} times without an answer; the last look may have taken its worker down"
        self._escalate(MutationId(row.id), words)

    def _monitor(self, row: Row[Any], operation: Operation[Any] | None) -> int:
        """Look for what should not be there. A look that tells nothing is taken again, until its time is over."""
        mutation_id = MutationId(row.id)
        watch = operation.policy.monitor_after if operation is not None else ()
        with self.db.transaction() as tx:
            booked = late_effects.begin_monitor_check(tx, mutation_id, min((_MONITOR_RETRY, *watch)))
            if booked is None:
                return 0
            if operation is None or operation.reconcile_function is None:
                late_effects.stop_monitoring(
                    tx, row, f"{row.connector}.{row.operation} is gone from the code, or can look no more"
                )
                return 0
            if row.monitor_attempts >= len(watch) + operation.policy.max_attempts:
                late_effects.stop_monitoring(
                    tx, row, f"{row.monitor_attempts} looks were begun, and the last of them did not come back"
                )
                return 0
            is_over = tx.clock() - row.resolved_at > max(watch, default=_ZERO) * 2
        with self._span(row, row.monitor_attempts + 1) as note:
            verdict = self._call_reconcile(booked, operation)
            _observe_verdict(note, row, verdict)
        if isinstance(verdict, Found):
            self._record_late_effect(row, operation, verdict)
            return 1
        with self.db.transaction() as tx:
            if isinstance(verdict, NotFound) or is_over:
                late_effects.schedule_monitor_check(tx, mutation_id, _next_monitor_delay(watch, row, tx.clock()))
            else:
                late_effects.discount_monitor_check(tx, mutation_id)
        return 1

    def _record_late_effect(self, row: Row[Any], operation: Operation[Any], verdict: Found) -> None:
        """Tell people of what was found, unless it is what was rightly done again.

        A look with a key that nobody ever sent tells whether this connector finds one request for another.
        """
        mutation_id = MutationId(row.id)
        found = storable_result(verdict.result, self.limits, f"{row.connector}.{row.operation}")
        with self.db.transaction() as tx:
            again = late_effects.replacement_effect(tx, row)
        unsent = None if again is None else self._call_reconcile(row, operation, key=f"{row.workflow}:{uuid4()}")
        with self.db.transaction() as tx:
            if again is not None and isinstance(unsent, Found) and late_effects.is_replacement_effect(again, found):
                late_effects.record_replacement_effect(tx, row, again, found, MONITOR)
                late_effects.schedule_monitor_check(
                    tx, mutation_id, _next_monitor_delay(operation.policy.monitor_after, row, tx.clock())
                )
            else:
                late_effects.record_late_effect(tx, mutation_id, found, MONITOR, is_own=isinstance(unsent, NotFound))

    def _span(self, row: Row[Any], number: int) -> AbstractContextManager[Callable[[str, Any], None]]:
        """A look as a span in the trace of the run that asked for the mutation."""
        about = {spans.CONNECTOR: row.connector, spans.OPERATION: row.operation, spans.RECONCILE_ATTEMPT: number}
        return spans.resolution_span(spans.RECONCILE, row, about)

    def _call_reconcile(self, row: Row[Any], operation: Operation[Any], key: str | None = None) -> Any:
        """The verdict, or why there is none: the look failed, hung or said something else."""
        connector = self.registry.connectors[row.connector]
        limit = operation.policy.immediate_timeout
        call = Call.within(key or row.idempotency_key, limit)
        what = f"{row.connector}.{row.operation}.reconcile"
        steps = StepRunner()
        try:
            look = operation.reconcile_function
            assert look is not None
            given = operation.arguments(row.params)
            verdict = steps.run(
                lambda: event_loop.await_result(look(connector, call, **given), limit), limit=limit, what=what
            )
        except BaseException as error:  # noqa: BLE001 - a look that fails has told us nothing
            words = redact(connector, operation, row.params, classify(error).message)
            log.warning("%s failed: %s", what, words)
            return _NoVerdict(words)
        finally:
            steps.close()
        if isinstance(verdict, Found | NotFound | Retry):
            return verdict
        words = f"it returned a {type(verdict).__name__}; expected Applied, NotFound or Retry"
        log.warning("%s told nothing: %s", what, words)
        return _NoVerdict(words)

    def _record_verdict(self, row: Row[Any], operation: Operation[Any], verdict: Any) -> None:
        """Write the verdict down; without one, give up once the budget is spent."""
        mutation_id = MutationId(row.id)
        try:
            with self.db.transaction() as tx:
                if isinstance(verdict, Found):
                    result = storable_result(verdict.result, self.limits, f"{row.connector}.{row.operation}")
                    found = AppliedMutation(mutation_id=mutation_id, result=result)
                    mutations.apply(tx, [found], by=Resolver.RECONCILE, limits=self.limits).only()
                    return
                if isinstance(verdict, NotFound):
                    if self._fail_as_absent(tx, row, verdict):
                        return
                    reconciliation.postpone(tx, mutation_id, until_quiet=True)
                    return  # too early to prove anything, so it does not count against the budget either
                if isinstance(verdict, Retry) and (wait := bounded_pause(verdict.after)) is not None:
                    reconciliation.postpone(tx, mutation_id, after=wait)
        except Exception as error:  # noqa: BLE001 - whatever it is, the budget ends it
            log.info("mutation %s is not settled yet: %s", mutation_id, error)
        if row.reconcile_attempts >= operation.policy.max_attempts:
            words = f"asked {row.reconcile_attempts} times without an answer"
            self._escalate(mutation_id, words, last_reason=self._last_reason(row, operation, verdict))

    def _last_reason(self, row: Row[Any], operation: Operation[Any], verdict: Any) -> str:
        """Why the last look did not settle it, as far as it says so."""
        if isinstance(verdict, Retry):
            return redact(self.registry.connectors[row.connector], operation, row.params, str(verdict.reason))
        return verdict.reason if isinstance(verdict, _NoVerdict) else ""

    def _fail_as_absent(self, tx: Transaction, row: Row[Any], verdict: NotFound) -> bool:
        """Settle it as failed, unless the look began when the request could still be travelling."""
        reason = str(verdict.reason)
        operation = self.registry.operation(row.connector, row.operation)
        if operation is not None:
            reason = redact(self.registry.connectors[row.connector], operation, row.params, reason)
        item = FailedMutation(
            mutation_id=MutationId(row.id),
            error=reason,
            evidence=Evidence.ABSENCE,
            reconcile_started_at=row.reconcile_started_at,
        )
        refused = mutations.fail(tx, [item], by=Resolver.RECONCILE).refused.get(row.id)
        if refused is not None and not isinstance(refused, QuietPeriodError):
            raise refused
        return refused is None

    def _escalate(self, mutation_id: MutationId, reason: str, last_reason: str = "") -> None:
        with self.db.transaction() as tx:
            reconciliation.escalate(tx, [mutation_id], reason, detail=last_reason)


@dataclass(frozen=True)
class _NoVerdict:
    """In the place of a verdict."""

    reason: str


def _observe_verdict(note: Callable[[str, Any], None], row: Row[Any], verdict: Any) -> None:
    """Show what a look told."""
    word = verdict_label(verdict)
    note(spans.VERDICT, word)
    if metrics.is_on():
        about = {"connector": row.connector, "operation": row.operation, "verdict": word}
        metrics.record("pipeline.reconcile.looks", about)


def _next_monitor_delay(spans: Sequence[timedelta], row: Row[Any], now: datetime) -> timedelta | None:
    """How long until the look after this one; None when its spans are over. Looks that died do not use spans up."""
    passed = sum(row.resolved_at + span <= now for span in spans)
    place = min(row.monitor_attempts, max(passed - 1, 0))
    return spans[place + 1] - spans[place] if place + 1 < len(spans) else None
