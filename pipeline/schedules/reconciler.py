"""Asking the outside system what became of a mutation, in the background, one look at a time.

A look at a mutation in doubt may settle it. A look at one that was settled on weak evidence only
keeps watch: what surfaces late is not undone, people are told. The next look is booked before this
one begins, so a look that takes its worker down has already been counted.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row
from sqlalchemy.exc import SQLAlchemyError

from pipeline.connectors.sdk import Applied as Found
from pipeline.connectors.sdk import Call, NotFound, Operation, Retry
from pipeline.domain.errors import PipelineError
from pipeline.domain.failures import classify
from pipeline.domain.ids import MutationId
from pipeline.domain.mutations import Evidence, MutationStatus, Resolver
from pipeline.domain.values import Applied, Failed, Person
from pipeline.engine.steps import Steps
from pipeline.execution import mutations
from pipeline.runtime.registry import Registry
from pipeline.schedules.report import Report
from pipeline.store import views
from pipeline.store.database import Database

log = logging.getLogger(__name__)

WATCH = Person(name="watch", reason="it was looked for again after it had been settled")


@dataclass
class Reconciler:
    """Looks at mutations of the workflows this process knows."""

    db: Database
    registry: Registry
    chance: Callable[[], float]

    def look(self, mutation_id: MutationId) -> Report:
        """Look once, if a look is due and the code to look with is here."""
        report = Report()
        with self.db.transaction() as tx:
            rows = views.mutations(tx, [mutation_id])
        if not rows or rows[0].workflow not in self.registry.workflows:
            return report  # a worker that knows the workflow will be asked when the next look is due
        row = rows[0]
        operation = self.registry.operation(row.connector, row.operation)
        if row.status == MutationStatus.NEEDS_RECONCILE:
            report.add("looked", self._reconcile(row, operation))
        elif row.watch_at is not None:
            report.add("watched", self._watch(row, operation))
        return report

    def _reconcile(self, row: Row[Any], operation: Operation[Any] | None) -> int:
        mutation_id = MutationId(row.id)
        if operation is None or operation.look is None:
            self._escalate(mutation_id, "the connector that could tell is gone from the code")
            return 0
        delay = operation.policy.backoff.delay(row.reconcile_attempts + 1, chance=self.chance())
        with self.db.transaction() as tx:
            booked = mutations.book(tx, [(mutation_id, row.reconcile_attempts, delay)])
        for each in booked:
            self._settle(each, operation, self._ask(each, operation))
        return len(booked)

    def _watch(self, row: Row[Any], operation: Operation[Any] | None) -> int:
        spans = operation.policy.watch if operation is not None else ()
        later = spans[row.watched + 1 :]
        following = later[0] - spans[row.watched] if later else None
        with self.db.transaction() as tx:
            booked = mutations.watched(tx, row, following)
        if booked is None or operation is None or operation.look is None:
            return 0
        verdict = self._ask(booked, operation)
        if isinstance(verdict, Found):
            with self.db.transaction() as tx:
                mutations.surface(tx, MutationId(row.id), verdict.result, WATCH)
        return 1

    def _ask(self, row: Row[Any], operation: Operation[Any]) -> Any:
        """The verdict, or None from a look that failed, hung or said something else."""
        connector = self.registry.connectors[row.connector]
        limit = operation.policy.immediate_timeout
        call = Call.within(row.idempotency_key, limit)
        what = f"{row.connector}.{row.operation}.reconcile"
        steps = Steps()
        try:
            look = operation.look
            assert look is not None
            verdict = steps.run(lambda: look(connector, call, **operation.given(row.params)), limit=limit, what=what)
        except BaseException as error:  # noqa: BLE001 - a look that fails has told us nothing
            log.warning("%s failed: %s", what, connector.scrubbed(classify(error).message))
            return None
        finally:
            steps.close()
        if not isinstance(verdict, Found | NotFound | Retry):
            log.warning("%s returned a %s; expected Applied, NotFound or Retry", what, type(verdict).__name__)
        return verdict

    def _settle(self, row: Row[Any], operation: Operation[Any], verdict: Any) -> None:
        """Write the verdict down; without one, give up once the budget is spent."""
        mutation_id = MutationId(row.id)
        try:
            with self.db.transaction() as tx:
                if isinstance(verdict, Found):
                    found = Applied(mutation_id=mutation_id, result=verdict.result)
                    mutations.apply(tx, [found], by=Resolver.RECONCILE).only()
                    return
                if isinstance(verdict, NotFound):
                    item = Failed(mutation_id=mutation_id, error=verdict.reason, evidence=Evidence.ABSENCE)
                    mutations.fail(tx, [item], by=Resolver.RECONCILE).only()
                    return
                if isinstance(verdict, Retry) and verdict.after is not None:
                    mutations.postpone(tx, mutation_id, verdict.after)
        except (PipelineError, SQLAlchemyError) as error:
            log.info("mutation %s is not settled yet: %s", mutation_id, error)
        if row.reconcile_attempts >= operation.policy.max_attempts:
            self._escalate(mutation_id, f"asked {row.reconcile_attempts} times without an answer")

    def _escalate(self, mutation_id: MutationId, reason: str) -> None:
        with self.db.transaction() as tx:
            mutations.escalate(tx, [mutation_id], reason)
